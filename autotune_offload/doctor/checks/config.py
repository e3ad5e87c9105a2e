"""What a ds_config says against itself, as findings: nothing here measures, and nothing is changed."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from autotune_offload.config import block as config_block
from autotune_offload.config import lost_gradients, mistakes, sections
from autotune_offload.config.sections import section
from autotune_offload.errors import ConfigError
from autotune_offload.records import Finding, Profile
from autotune_offload.upstream import (
    LEGACY,
    LEGACY_PIN,
    SECTION_STAGES,
    SUPER_OFFLOAD_WAITS_SINCE,
    ZERO,
    parse_version,
    pins_by_default,
)

_DOCUMENTATION = "https://www.deepspeed.ai/docs/config-json/"
_TUNED = "`autotune-offload apply` writes it; `autotune_offload.initialize` does so by itself"
_PLAIN_TEXT = ("true", "false")


def keys(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Misplaced, misspelt and doubled keys, and values that DeepSpeed refuses."""
    for mistake in mistakes.mistakes(config):
        yield Finding(
            id="config-keys",
            severity="will break" if mistake.refused else "costs",
            found=mistake.found,
            costs=None
            if mistake.refused
            else "DeepSpeed takes the file, and this part of it does not do what it says",
            fix=mistake.fix,
        )
    yield from _quoted(config)


def _quoted(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Booleans in quotes, which DeepSpeed's parser takes and others who read the file do not."""
    for names in ((), *((name,) for name in SECTION_STAGES)):
        prefix = "".join(f"{name}." for name in names)
        for name, value in section(config, ZERO, *names).items():
            if isinstance(value, str) and value.strip().lower() in _PLAIN_TEXT:
                yield Finding(
                    id="config-keys",
                    severity="notice",
                    found=f"{ZERO}.{prefix}{name} is the text {json.dumps(value)}, which DeepSpeed reads as a boolean",
                    fix=f"write {value.strip().lower()} without quotes",
                )


def refused(config: Mapping[str, Any], refusals: Iterable[str], version: str) -> Iterator[Finding]:
    """What the installed DeepSpeed's own parser refuses, and `keys` has not named yet."""
    named = [mistake.found for mistake in mistakes.mistakes(config) if mistake.refused]
    for refusal in refusals:
        if not _named(refusal, named):
            yield Finding(
                id="config-parser",
                severity="will break",
                found=f"DeepSpeed {version} refuses this file: {refusal}",
                fix=f"correct the value, or take the key out; {_DOCUMENTATION} describes each",
            )


def _named(refusal: str, named: Iterable[str]) -> bool:
    """Whether the same key is in one of the sentences; DeepSpeed may call it by its other name."""
    key, is_key, _ = refusal.partition(" is ")
    for found in named:
        subject = found.partition(" is ")[0]
        if subject == ZERO:
            return True  # the section itself is no object, so nothing in it was looked at
        if "holds both" in found and (
            not is_key or key.rpartition(".")[2] in subject.replace(",", "").split()
        ):
            return True
        if is_key and key.replace(".stage3_", ".") == subject.replace(".stage3_", "."):
            return True
    return False


def autos(config: Mapping[str, Any], version: str) -> Iterator[Finding]:
    """Values that are still "auto"."""
    names = mistakes.still_auto(config)
    inside = [name for name in names if name.startswith(f"{ZERO}.")]
    outside = [name for name in names if name not in inside]
    if inside:
        yield Finding(
            id="config-auto",
            severity="notice",
            found=f'still "auto": {", ".join(inside)}',
            costs=f"DeepSpeed {version} takes its defaults for them without a word{_pinned_by_auto(inside)}",
            fix="write values; `autotune-offload apply` and `autotune_offload.initialize` do so for those that follow "
            "from this host",
        )
    if outside:
        yield Finding(
            id="config-auto",
            severity="notice",
            found=f'still "auto": {", ".join(outside)}',
            costs="a framework such as the Hugging Face Trainer fills them in; DeepSpeed alone stops at most of them",
            fix="write values where no framework reads this file",
        )


def _pinned_by_auto(names: Iterable[str]) -> str:
    pins = [name for name in names if name.endswith(".pin_memory")]
    return '; "auto" for pin_memory means page-locked from 0.19.5 on' if pins else ""


def offload(config: Mapping[str, Any], version: str) -> Iterator[Finding]:
    """Whether anything is offloaded, and whether what is page-locked is left to a default that changed."""
    zero = section(config, ZERO)
    if not sections.offloads(config):
        yield Finding(
            id="config-offload",
            severity="notice",
            found=f"this file offloads nothing, so there is nothing to tune{_why_nothing(zero)}",
            fix=f'none needed, if so meant; else write "offload_optimizer": {{"device": "cpu"}} into "{ZERO}", at '
            "stage 1 to 3",
        )
    elif without := _without_effect(zero):
        yield Finding(
            id="config-offload",
            severity="costs",
            found=f"{ZERO}: {'; '.join(without)}",
            costs="what it names stays on the device",
            fix='use stage 3 for "offload_param", or take the section out',
        )
    for name, locks in sections.page_locks(config, version).items():
        if (given := section(zero, name)) and "pin_memory" not in given:
            yield Finding(
                id="config-offload",
                severity="notice",
                found=f"{ZERO}.{name}.pin_memory is absent, which DeepSpeed {version} takes as {json.dumps(locks)}",
                costs="DeepSpeed before 0.19.5 takes false, later ones true: an upgrade changes what is page-locked",
                fix=f"write true or false; {_TUNED}",
            )


def super_offload(config: Mapping[str, Any], version: str) -> Iterator[Finding]:
    """SuperOffload with gradient clipping: the overlap that it is used for does not happen."""
    optimizer = section(config, ZERO, "offload_optimizer")
    clipping = config.get("gradient_clipping", 0)
    if sections.as_flag(optimizer.get("super_offload")) is not True or clipping in (0, None):
        return
    if parse_version(version) >= SUPER_OFFLOAD_WAITS_SINCE:
        yield Finding(
            id="super-offload",
            severity="costs",
            found=f"super_offload with gradient_clipping {sections.shown(clipping)}: from DeepSpeed "
            f"{SUPER_OFFLOAD_WAITS_SINCE} on ({version} here) the step on the CPU starts after the backward pass, "
            "since it has to know the norm first",
            costs="the overlap with the backward pass, which SuperOffload is used for",
            fix='"gradient_clipping": 0 if the training allows it, with the framework\'s own (max_grad_norm) off too',
        )


def lost(config: Mapping[str, Any], version: str) -> Iterator[Finding]:
    """Stage 2 in a release that leaves accumulated gradients out: training goes on, and goes wrong."""
    mistake = lost_gradients.lost_by(config, version)
    if mistake is not None:
        yield Finding(
            id="lost-gradients",
            severity="will break" if mistake.refused else "notice",
            found=mistake.found,
            costs="the model is trained on a part of each batch",
            fix=mistake.fix,
        )


def strict_json(text: str) -> Iterator[Finding]:
    """What DeepSpeed's reader takes, and the strict JSON of frameworks does not."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        yield Finding(
            id="strict-json",
            severity="notice",
            found=f"this file is hjson and no strict JSON: line {error.lineno}, column {error.colno}: {error.msg}",
            costs="DeepSpeed reads it; the Hugging Face Trainer, accelerate and Lightning stop there",
            fix="take out comments, trailing commas and a byte order mark, and put quotes around keys; or hand them "
            "the dict from `autotune_offload.tune_config`, or what `autotune-offload apply` prints",
        )


def _why_nothing(zero: Mapping[str, Any]) -> str:
    """Why each section that is there offloads nothing."""
    reasons = [*_without_effect(zero), *_without_device(zero)]
    return f" ({'; '.join(reasons)})" if reasons else ""


def _without_effect(zero: Mapping[str, Any]) -> list[str]:
    """The sections and switches that name something to offload, at a stage where that does not act."""
    stage = sections.stage_of(zero)
    given = [
        *((name, name) for name in SECTION_STAGES if section(zero, name).get("device") in ("cpu", "nvme")),
        *((flag, name) for flag, name in LEGACY.items() if sections.as_flag(zero.get(flag)) is True),
    ]
    return [
        f"{name} has no effect at stage {stage}" for name, acts in given if stage not in SECTION_STAGES[acts]
    ]


def _without_device(zero: Mapping[str, Any]) -> Iterator[str]:
    for name in SECTION_STAGES:
        if name in zero and not isinstance(zero[name], Mapping):
            yield f"{name} is {sections.shown(zero[name])}"
        elif name in zero and "device" not in zero[name]:
            yield f"{name} names no device, which means none"
        elif name in zero and zero[name]["device"] not in ("cpu", "nvme"):
            yield f"{name}.device is {sections.shown(zero[name]['device'])}"


def legacy(config: Mapping[str, Any], version: str) -> Iterator[Finding]:
    """Deprecated switches, one of which DeepSpeed reads and does nothing with."""
    zero = section(config, ZERO)
    for flag, name in LEGACY.items():
        if flag in zero and name not in zero:
            yield Finding(
                id="config-legacy",
                severity="notice",
                found=f"{ZERO}.{flag} is deprecated: {name} stands for it",
                fix=f'write "{name}": {{"device": "cpu"}} instead; {_TUNED}',
            )
    if LEGACY_PIN in zero:
        yield Finding(
            id="config-legacy",
            severity="costs",
            found=f"{ZERO}.{LEGACY_PIN} is {json.dumps(zero[LEGACY_PIN])}, and DeepSpeed does nothing with it",
            costs=f"what is page-locked follows from pin_memory in the sections, which DeepSpeed {version} takes "
            f"as {json.dumps(pins_by_default(version))} where it is absent",
            fix=f"take it out, and write pin_memory into each section; {_TUNED}",
        )


def block(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Our own block: what is wrong in it, or a name that is nearly its own."""
    try:
        settings = config_block.settings(config)
    except ConfigError as error:
        strict = section(config, config_block.BLOCK).get("strict") is True
        yield Finding(
            id="config-block",
            severity="will break" if strict else "costs",
            found=str(error),
            costs='with "strict" the run stops there' if strict else "the run starts untuned, with a warning",
            fix="correct these keys",
        )
        return
    for sentence in mistakes.protecting_nothing(settings.keep):
        found, _, nearest = sentence.partition("; ")
        yield Finding(id="config-block", severity="notice", found=found, fix=f"take it out; {nearest}")
    if config_block.BLOCK not in config:
        yield from _nearly_ours(config)


def _nearly_ours(config: Mapping[str, Any]) -> Iterator[Finding]:
    for near in difflib.get_close_matches(config_block.BLOCK, map(str, config), n=1, cutoff=0.8):
        yield Finding(
            id="config-block",
            severity="costs",
            found=f'"{near}" at the top level is read by nobody',
            costs="what it fixes is not fixed",
            fix=f'rename it to "{config_block.BLOCK}"',
        )


def zero_init(config: Mapping[str, Any], version: str, profile: Profile | None) -> Iterator[Finding]:
    """What `zero.Init` would fix before `initialize` can: parameters are placed as this very file says.

    A file cannot show whether a script builds its model under `zero.Init`; Hugging Face's `from_pretrained`
    does so for ZeRO-3.
    """
    pins = sections.page_locks(config, version).get("offload_param")
    wanted = profile.choice.pin_parameters if profile is not None else None
    if pins is None or pins is wanted:
        return
    chosen = f"; {json.dumps(wanted)} was chosen here" if wanted is not None else ""
    yield Finding(
        id="zero-init",
        severity="notice",
        found=f"under `zero.Init` with this file, parameters get pin_memory {json.dumps(pins)} before `initialize` can "
        f"change it{chosen}. Whether a script does that, a file cannot show; Hugging Face's `from_pretrained` does",
        costs="parameters without gradients stay so; the others move into DeepSpeed's own flat buffer, which it "
        "page-locks in any case",
        fix="give `zero.Init`, or the framework, what `autotune_offload.tune_config` or `autotune-offload apply` makes "
        "of this file",
    )
