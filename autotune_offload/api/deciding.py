"""One decision for one configuration; whatever fails leaves the user's own as it is.

Fail-open lives here: whatever goes wrong in ours costs one warning, and the run starts with the user's own
configuration. ``"strict": true`` in the ``autotune_offload`` block raises instead.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from autotune_offload import records, switch, upstream
from autotune_offload import workload as workloads
from autotune_offload.api.probe import load_plan, probe
from autotune_offload.api.report import Report, shown
from autotune_offload.config import block as config_block
from autotune_offload.config import equal_keys, reading, sections, tune
from autotune_offload.errors import AutotuneError, ConfigError, ProfileError, UndecidedError
from autotune_offload.interruption import cleaned_up
from autotune_offload.machine import host
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.profiles.lookup import lookup
from autotune_offload.profiles.store import Miss, Store
from autotune_offload.ranks import agree, turns
from autotune_offload.ranks import group as ranks_group
from autotune_offload.ranks.agreement import Agreement
from autotune_offload.ranks.group import WAIT_SECONDS
from autotune_offload.records import Change, Choice, Profile, Record, Workload, ZeroSizes

SWITCHED_OFF = "switched off"
DOCTOR = "`autotune-offload doctor` tells what stands in the way on this host"
FORESEEN = (AutotuneError, OSError, MemoryError)
"""Ours, and what a host may do to anybody: no traceback is shown for it."""

log = logging.getLogger("autotune_offload")


# -- one decision ---------------------------------------------------------------------------------


class Decided(Record, frozen=True, kw_only=True):
    """A tuned configuration, or None where the user's own is to be used, and how it came about."""

    config: dict[str, Any] | None
    report: Report
    carry_path: bool = False
    device: AcceleratorDevice | None = None
    strict: bool = False


class Asked(Record, frozen=True, kw_only=True):
    """What a decision is about, beside the configuration."""

    model: Any = None
    autotune: Mapping[str, Any] | bool | None = None
    workload: Workload | None = None
    attaches: bool = False
    says: bool = True
    """Off where the same will be said at another call."""
    group_is_made_by: Callable[[], object] | None = None
    """Makes the process group where there is none yet; None leaves that to others, later."""
    data_parallel_ranks: int | None = None
    """That share a parameter, where these are not all."""


def decided_or_not(given: object, asked: Asked) -> Decided:
    """Decide; whatever fails in that leaves the user's configuration as it is, on all ranks."""
    autotune = asked.autotune
    if autotune is False or _switched_off():
        _decline_unasked(given, asked)
        return Decided(config=None, report=Report(profile=None, notices=(SWITCHED_OFF,)))
    strict = isinstance(autotune, Mapping) and bool(autotune.get("strict"))
    agreement: Agreement | None = None
    try:
        agreement = _agreement(given, asked)
        config = reading.read(given)
        _refuse_what_the_switch_does_not_know()
        block = config.get(config_block.BLOCK)
        strict = strict or (isinstance(block, Mapping) and block.get("strict") is True)
        return decided(config, asked, agreement)
    except UndecidedError:
        raise
    except Exception as error:  # fail open: whatever it is, the user's run starts
        if agreement is not None:
            agreement.decline(f"rank {agreement.group.rank}: {cause(error)}")
        if strict:
            raise
        notice = f"not tuned, the run goes on with your own configuration: {cause(error)}; {DOCTOR}"
        warn(notice, error)
        return Decided(config=None, report=Report(profile=None, notices=(notice,)))


def _switched_off() -> bool:
    """What the environment says neither way is refused where the others can be told."""
    try:
        return switch.is_off()
    except ValueError:
        return False


def _refuse_what_the_switch_does_not_know() -> None:
    try:
        switch.is_off()
    except ValueError as error:
        raise ConfigError(str(error)) from None


def cause(error: Exception) -> str:
    """What a failure says of itself, in one clause."""
    return str(error) if isinstance(error, AutotuneError) else f"{type(error).__name__}: {error}"


def warn(notice: str, error: Exception | None = None) -> None:
    """On one rank; with a traceback only where a failure was not foreseen."""
    if ranks_group.present_rank() == 0:
        unforeseen = error is not None and not isinstance(error, FORESEEN)
        log.warning("autotune-offload: %s", notice, exc_info=unforeseen)


def decided(config: dict[str, Any], asked: Asked, agreement: Agreement | None) -> Decided:
    """The decision itself; whatever it raises is the caller's to survive."""
    settings = config_block.settings(_with_overrides(config, asked.autotune))
    why_not = _why_not(config, settings)
    if why_not is not None:
        if agreement is not None:
            agreement.decline(f"rank {agreement.group.rank}: {why_not}")
        if settings.enabled and asked.says:
            warn(f"not tuned: {why_not}")
        return Decided(config=None, report=Report(profile=None, notices=(why_not,)))
    device = AcceleratorDevice()
    found = _profile(config, _workload(config, asked), settings, device, agreement)
    profile = found.profile
    carry_path = (
        asked.attaches
        and sections.takes_a_path(config)
        and settings.path != "deepspeed"
        and profile.choice.beats_deepspeed
    )
    choice, too_late = _as_laid_out(profile.choice, config, asked.model, device)
    tuned = tune.tune(
        found.config,
        choice,
        version=host.software().deepspeed,
        keep=settings.keep,
        filled=filled_by_trainer(config),
        carried=carry_path,
    )
    report_ = Report(
        profile=profile,
        changes=tuned.changes,
        notices=(*found.loud, *found.notices, *too_late, *tuned.notices, *profile.warnings),
        source=found.source,
    )
    decided = Decided(
        config=tuned.config, report=report_, carry_path=carry_path, device=device, strict=settings.strict
    )
    if agreement is not None:  # the last thing that may fail: from here on the others use it
        agreement.confirm(equal_keys.sizes_digest(tuned.config))
    if asked.says:
        _say((*found.loud, *too_late, *tuned.notices), tuned.changes)
    return decided


def _say(notices: Iterable[str], changes: Iterable[Change]) -> None:
    for notice in notices:
        warn(notice)
    for change in changes:
        log.info("%s: %s -> %s (%s)", change.key, change.before, change.after, change.reason)


def _why_not(config: Mapping[str, Any], settings: records.Settings) -> str | None:
    """Why this configuration is none of our business, if so: nothing is measured for it."""
    if not settings.enabled:
        return SWITCHED_OFF
    if not sections.offloads(config):
        return "nothing is offloaded at ZeRO stage 1 to 3, so there is nothing to tune"
    return None


def _workload(config: Mapping[str, Any], asked: Asked) -> Workload | None:
    if asked.workload is not None or asked.model is None:
        return asked.workload
    return workloads.from_module(
        asked.model,
        world_size=asked.data_parallel_ranks or ranks_group.announced_ranks(),
        accumulation_steps=_accumulation(config),
        dtype=_dtype(config),
    )


class _Found(Record, frozen=True, kw_only=True):
    """A profile, where it comes from, and the configuration that it is for."""

    profile: Profile
    config: Mapping[str, Any]
    source: str
    notices: tuple[str, ...] = ()
    loud: tuple[str, ...] = ()


def _profile(
    config: dict[str, Any],
    workload: Workload | None,
    settings: records.Settings,
    device: AcceleratorDevice,
    agreement: Agreement | None,
) -> _Found:
    """The stored profile of this environment, or a new one that is stored if it can be; agreed by all ranks."""
    store = Store()
    budget = None if isinstance(settings.budget_seconds, str) else settings.budget_seconds

    missed: list[Miss] = []

    def look() -> Profile | None:
        found = lookup(store, workload, device, settings)
        if not isinstance(found, Miss):
            return found
        missed.append(found)
        return None

    def measured(ranks_per_host: int) -> Profile:
        why_not = store.why_not_writable()
        if why_not is not None:
            warn(f"measuring this host without a cache: {why_not}")
        elif missed:
            log.info("measuring this host: %s", missed[-1].reason)
        with cleaned_up():
            return probe(
                workload=workload,
                budget_seconds=budget,
                settings=settings,
                device=device,
                missed=missed[-1] if missed else None,
                ranks_per_host=ranks_per_host,
            )

    if agreement is None and ranks_group.announced_ranks() == 1:
        found = look()
        if found is not None:
            return _Found(profile=found, config=config, source=_from_store(found))
        profile = measured(1)
        return _Found(profile=profile, config=config, **_kept(store, profile))
    seconds = budget or load_plan("standard").budget_seconds
    if agreement is not None:
        return _agreed(config, look(), measured, agreement, device, store, seconds)
    return _for_this_host(config, look, measured, store, seconds)


def _agreed(
    config: dict[str, Any],
    found: Profile | None,
    measured: Callable[[int], Profile],
    agreement: Agreement,
    device: AcceleratorDevice,
    store: Store,
    measure_seconds: float,
) -> _Found:
    agreed = agree.agree(
        agreement,
        found,
        measured,
        config=config,
        device=device.identity,
        measure_seconds=measure_seconds,
    )
    where: dict[str, Any] = {"source": "measured now by all ranks"}
    if not agreed.measured:
        where = {"source": _from_store(agreed.profile)}
    elif agreed.keeper:
        where = _kept(store, agreed.own)
    return _Found(profile=agreed.profile, config=agreed.config, loud=agreed.notices, **where)


def _for_this_host(
    config: dict[str, Any],
    look: Callable[[], Profile | None],
    measured: Callable[[int], Profile],
    store: Store,
    measure_seconds: float,
) -> _Found:
    """One profile for all ranks of this host, through the store; without sizes, which other hosts must share."""
    found, where = look(), None
    if found is None:
        with turns.turn_on_host(store.folder, turns.turn_seconds(measure_seconds)):
            found = look()
            if found is None:
                found = measured(1)
                where = _kept(store, found)
    kept = "left as it is, since the ranks cannot agree on it before there is a process group"
    sizes = ZeroSizes(reasons=dict.fromkeys(found.choice.sizes.reasons, kept))
    profile = replace(found, choice=replace(found.choice, sizes=sizes))
    return _Found(profile=profile, config=config, **(where or {"source": _from_store(found)}))


def _from_store(profile: Profile) -> str:
    return f"stored profile of {profile.created}"


def _kept(store: Store, profile: Profile) -> dict[str, Any]:
    """Store a profile; where it is now, or why it is not."""
    why_not = store.why_not_writable()
    if why_not is None:
        try:
            with cleaned_up():
                return {"source": f"measured now, stored in {store.save(profile)}"}
        except ProfileError as error:  # a disk that has filled up since
            why_not = str(error)
            warn(f"the profile was not stored: {why_not}")
    return {"source": "measured now", "notices": (f"the profile was not stored: {why_not}",)}


def _with_overrides(config: Mapping[str, Any], autotune: Mapping[str, Any] | bool | None) -> dict[str, Any]:
    block = config.get(config_block.BLOCK)
    if not isinstance(autotune, Mapping):
        return dict(config)
    if isinstance(block, Mapping):
        return {**config, config_block.BLOCK: {**block, **autotune}}
    return {**config, config_block.BLOCK: dict(autotune)}


def _dtype(config: Mapping[str, Any]) -> str | None:
    """The gradients' dtype by the configuration; None leaves it to the module's own parameters."""
    for section, dtype in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        enabled = config.get(section, {})
        if isinstance(enabled, Mapping):
            if enabled.get("enabled") is True:
                return dtype
            if enabled.get("enabled") == "auto":
                return None
    return "float32"


def _accumulation(config: Mapping[str, Any]) -> int:
    steps = config.get("gradient_accumulation_steps", 1)
    return steps if isinstance(steps, int) and steps > 0 else 1


# -- several ranks --------------------------------------------------------------------------------


def _agreement(given: object, asked: Asked) -> Agreement | None:
    """Begun where this job has several ranks and a process group; None where one rank decides alone.

    Raises:
        AgreementError: several ranks without a way to agree.
    """
    if ranks_group.announced_ranks() == 1:
        return None
    if asked.group_is_made_by is not None:
        asked.group_is_made_by()
    group = ranks_group.present_group()
    if group is None:
        return None
    return Agreement(group, "initialize" if asked.attaches else "tune_config", _wait_seconds(given, asked))


def _decline_unasked(given: object, asked: Asked) -> None:
    """Let the others know at once, where that takes no more than what is there already."""
    with contextlib.suppress(AutotuneError):
        agreement = _agreement(given, replace(asked, group_is_made_by=None))
        if agreement is not None:
            agreement.decline(f"rank {agreement.group.rank}: {SWITCHED_OFF}")


def _wait_seconds(given: object, asked: Asked) -> float:
    """What the user set, where that can be read so early; what cannot is somebody else's to refuse."""
    with contextlib.suppress(Exception):
        wait = config_block.settings(_with_overrides(reading.read(given), asked.autotune)).wait_seconds
        if not isinstance(wait, str):
            return wait
    return WAIT_SECONDS


def filled_by_trainer(config: Mapping[str, Any]) -> frozenset[str]:
    """Keys of ``zero_optimization`` that the user left "auto" and the Hugging Face Trainer made numbers.

    The configuration that transformers holds for `from_pretrained` still says "auto" then
    (`transformers.integrations.deepspeed.deepspeed_config`). It counts only where all else is the same.
    """
    integration = sys.modules.get("transformers.integrations.deepspeed")
    held: Mapping[str, Any] | None = getattr(integration, "deepspeed_config", dict)()
    written, filled = (held or {}).get(upstream.ZERO), config.get(upstream.ZERO)
    if not isinstance(written, Mapping) or not isinstance(filled, Mapping):
        return frozenset()
    autos = {name for name, value in written.items() if value == "auto"}
    same = all(filled.get(name) == value for name, value in written.items() if name not in autos)
    return frozenset(autos) if same else frozenset()


_LOOKED_AT = 16
"""Partitions that are asked whether they are page-locked: `zero.Init` treats all alike."""


def _as_laid_out(
    choice: Choice, config: Mapping[str, Any], model: Any, device: AcceleratorDevice
) -> tuple[Choice, tuple[str, ...]]:
    """The choice as far as it can still be had for parameters that `zero.Init` has partitioned already.

    Returns it with a notice where they lie otherwise than was chosen.
    """
    pinned = _partitions_pinned(model, device) if sections.offloads_parameters(config) else None
    if pinned is None or pinned is choice.pin_parameters:
        return choice, ()
    memory = "page-locked" if pinned else "pageable"
    notice = (
        f"the parameters were partitioned before this, by zero.Init, in {memory} memory and stay there: "
        f"offload_param.pin_memory {shown(choice.pin_parameters)} comes too late for them. Build the model "
        "under autotune_offload.zero_init(...), or give zero.Init what autotune_offload.tune_config returns"
    )
    reasons = (f"offload_param lies in {memory} memory since zero.Init", *choice.reasons)
    unsettled = tuple(name for name in choice.unsettled_pins if name != "pin_parameters")
    return replace(choice, pin_parameters=pinned, unsettled_pins=unsettled, reasons=reasons), (notice,)


def _partitions_pinned(model: Any, device: AcceleratorDevice) -> bool | None:
    """Whether partitions on the host are page-locked; None where `zero.Init` has not made any."""
    parameters: Iterable[Any] = getattr(model, "parameters", tuple)()
    partitions = (getattr(parameter, "ds_tensor", None) for parameter in parameters)
    on_host = (each for each in partitions if each is not None and each.device.type == "cpu" and each.numel())
    looked_at = [device.is_pinned(each) for each in itertools.islice(on_host, _LOOKED_AT)]
    return any(looked_at) if looked_at else None
