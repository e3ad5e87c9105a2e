"""What DeepSpeed will make of a ds_config: keys it refuses, and keys without effect."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from autotune_offload.config import texts
from autotune_offload.config.block import BLOCK
from autotune_offload.config.keys import KEYS
from autotune_offload.config.sections import as_flag, as_number, covers, device_of, relative, section, shown
from autotune_offload.records import Record
from autotune_offload.upstream import (
    KNOWN,
    KNOWN_IN_SECTIONS,
    LEGACY,
    NEWEST,
    OLDEST,
    SECTION_STAGES,
    TOP_LEVEL,
    ZERO,
)

_TEXTS = ("path", "dir", "file", "name", "folder", "team", "group", "project")
_TEXT_SECTIONS = ("tensorboard", "wandb", "csv_monitor", "monitor_config", "nebula", "checkpoint")
"""Where a key holds a text by its nature."""

_NOT_WHOLE = frozenset({"ratio", "cpuadam_cores_perc", "nvme_path"})
_INTEGER_TEXT = re.compile(r"\s*[+-]?\d+(_\d+)*(\.0+)?\s*")


# -- what DeepSpeed will make of the rest ---------------------------------------------------------


class Mistake(Record, frozen=True, kw_only=True):
    """A key or value that DeepSpeed refuses, or takes without any effect."""

    found: str
    fix: str
    refused: bool = True

    @property
    def sentence(self) -> str:
        """Both parts."""
        return f"{self.found}; {self.fix}"


def mistakes(config: Mapping[str, Any]) -> Iterator[Mistake]:
    """What is wrong in a ds_config around ``zero_optimization``, as far as its text shows.

    Args:
        config: A ds_config as `reading.read` gives it.
    """
    unfilled = list(_unfilled(config))
    yield from unfilled
    yield from _not_numbers(config)
    yield from misplaced(config)
    zero = config.get(ZERO)
    if isinstance(zero, Mapping):
        named = {_subject(mistake) for mistake in unfilled}
        yield from _doubled(zero)
        yield from (mistake for mistake in refused(zero) if _subject(mistake) not in named)
        yield from (mistake for mistake in unknown(zero) if _subject(mistake) not in named)
        yield from without_path(zero)
    elif ZERO in config and not isinstance(zero, bool):
        found = f"{ZERO} is {shown(zero)}, which DeepSpeed refuses"
        yield Mistake(found=found, fix='write an object such as {"stage": 3}')
    elif (near := near_section(config)) is not None:
        found = f'"{near}" at the top level has no effect, and there is no "{ZERO}"'
        yield Mistake(found=found, fix=f'rename it to "{ZERO}"', refused=False)


def _subject(mistake: Mistake) -> str:
    return mistake.found.partition(" is ")[0]


def _unfilled(config: Mapping[str, Any]) -> Iterator[Mistake]:
    """Places that a template was to fill."""
    for name, value, part in texts.placeholders(config):
        fills_in = f"{name} is {shown(value)}: nobody has put a value in the place of {part}"
        taken = "takes it as it stands" if _is_free_text(name) else "cannot use it"
        yield Mistake(
            found=f"{fills_in}, and DeepSpeed {taken}",
            fix="fill in the template first (envsubst, or the script that writes the file), or write the value",
            refused=not _is_free_text(name),
        )


def _is_free_text(name: str) -> bool:
    """Whether any text passes there: paths and names, and what DeepSpeed does not know at all."""
    top, last = name.partition(".")[0].partition("[")[0], name.rpartition(".")[2]
    return top not in TOP_LEVEL or any(word in last for word in _TEXTS) or top in _TEXT_SECTIONS


def _not_numbers(config: Mapping[str, Any]) -> Iterator[Mistake]:
    """Texts that DeepSpeed, or what it hands them to, fails at in arithmetic."""
    for name, value, wanted in texts.batch_values(config):
        yield Mistake(
            found=f"{name} is {shown(value)}, which DeepSpeed cannot compute with", fix=f"write {wanted}"
        )
    for name, text in texts.number_texts(config):
        yield Mistake(
            found=f"{name} is {shown(text)}, a text, which goes on as it is and fails in the first comparison or "
            "product",
            fix=f"write {texts.unquoted(text)}",
        )
    for name, text in texts.switch_texts(config):
        yield Mistake(
            found=f"{name} is {shown(text)}, a text, which counts as true whatever it says",
            fix=f"write {text.strip().lower()} without quotes",
            refused=False,
        )


def still_auto(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The dotted names of all that is "auto", outside our own block."""
    return tuple(name for name in autos(config) if not covers(BLOCK, name))


def both(*names: str, fix: str) -> Mistake:
    """Two spellings of one thing."""
    return Mistake(found=f"{ZERO} holds both {' and '.join(names)}, which DeepSpeed refuses", fix=fix)


def _doubled(zero: Mapping[str, Any]) -> Iterator[Mistake]:
    for key in KEYS:
        given = [name for name in key.spellings if zero.get(name, "auto") != "auto" and not key.nested]
        if len(given) > 1:
            yield both(*given, fix="keep one of them")
    for flag, name in LEGACY.items():
        if zero.get(flag, "auto") != "auto" and zero.get(name, "auto") != "auto":
            yield both(flag, name, fix=f"drop {flag}")


def near_section(config: Mapping[str, Any]) -> str | None:
    """The top-level key that was probably meant as ``zero_optimization``."""
    near = difflib.get_close_matches(ZERO, map(str, config), n=1, cutoff=0.8)
    return next((name for name in near if name != ZERO), None)


def misplaced(config: Mapping[str, Any]) -> Iterator[Mistake]:
    """Keys that belong one level deeper."""
    for name in config:
        if name in KNOWN:
            yield Mistake(
                found=f'"{name}" at the top level has no effect', fix=f'move it into "{ZERO}"', refused=False
            )


def refused(zero: Mapping[str, Any]) -> Iterator[Mistake]:
    """One for each value that DeepSpeed's parser will not take."""
    blocks = {"": zero, **{f"{name}.": section(zero, name) for name in SECTION_STAGES}}
    for prefix, block in blocks.items():
        for name, value in block.items():
            wanted = None if name in _NOT_WHOLE else _wanted(f"{prefix}{name}", value)
            if wanted:
                found = f"{ZERO}.{prefix}{name} is {shown(value)}, which DeepSpeed refuses"
                yield Mistake(found=found, fix=f"write {wanted}")


def _wanted(dotted: str, value: object) -> str | None:
    """What to write instead of a value that DeepSpeed refuses, or None for a value that passes."""
    key = next((key for key in KEYS if dotted in key.names()), None)
    whole = f"a whole number from {key.least if key else 0}"
    number = as_number(value)
    if value == "auto" or isinstance(value, bool):
        return None
    if key is not None and key.unit == "flag":
        return "true or false" if as_flag(value) is None else None
    if number is None or not math.isfinite(number) or abs(number) >= 2**63:
        return whole if key or number is not None else None
    if number != int(number) or (key is not None and number < key.least):
        return whole
    plain_text = isinstance(value, str) and not _INTEGER_TEXT.fullmatch(value)
    return f"{int(number)} without quotes" if plain_text else None


def unknown(zero: Mapping[str, Any]) -> Iterator[Mistake]:
    """Keys that DeepSpeed refuses, and offload sections and devices that it would not know."""
    yield from _unknown_names(ZERO, zero, KNOWN)
    for name, known in KNOWN_IN_SECTIONS.items():
        block = zero.get(name)
        where = f"{ZERO}.{name}"
        if isinstance(block, Mapping):
            yield from _unknown_names(where, block, known)
            if block.get("device", "cpu") not in ("none", "cpu", "nvme", "auto"):
                found = f"{where}.device is {shown(block['device'])}"
                yield Mistake(found=found, fix='DeepSpeed takes "none", "cpu" or "nvme"')
        elif block not in (None, "auto"):
            found = f"{where} is {shown(block)}"
            yield Mistake(found=found, fix='DeepSpeed takes an object such as {"device": "cpu"}')


def without_path(zero: Mapping[str, Any]) -> Iterator[Mistake]:
    """Sections on a disk of which nobody says where it is; DeepSpeed's parser takes them, and an assertion does not."""
    for name in SECTION_STAGES:
        if device_of(zero, name) == "nvme" and not section(zero, name).get("nvme_path"):
            yield Mistake(
                found=f"{ZERO}.{name} is on nvme and has no nvme_path, which DeepSpeed stops at",
                fix='write "nvme_path": the folder of a local NVMe drive',
            )


def _unknown_names(where: str, block: Mapping[str, Any], known: Collection[str]) -> Iterator[Mistake]:
    for name in block:
        if name not in known:
            dropped = block[name] == "auto"  # DeepSpeed takes out every "auto" before it looks at the names
            does = 'drops it with its "auto"' if dropped else "refuses such keys"
            found = f"{where}.{name} is no key of DeepSpeed {OLDEST} to {NEWEST}, which {does}"
            yield Mistake(found=found, fix=_home_of(str(name), known), refused=not dropped)


def _home_of(name: str, known: Collection[str]) -> str:
    """Where a key that is unknown in one place belongs, or which known one is the nearest."""
    if name == BLOCK or name in TOP_LEVEL:
        return "move it to the top level"
    near = difflib.get_close_matches(name, known, n=1)
    homes = [f'"{home}"' for home, keys in KNOWN_IN_SECTIONS.items() if name in keys]
    homes += [f'"{ZERO}"'] * (name in KNOWN)
    if homes:
        return f"take it out; it belongs in {' and '.join(homes)}"
    return f'did you mean "{near[0]}"?' if near else "take it out"


def protecting_nothing(keep: Collection[str]) -> Iterator[str]:
    """A sentence for each entry of `keep` that names no key which is ever written."""
    keep = relative(keep)
    names = [*(name for key in KEYS for name in key.names()), *LEGACY]
    for entry in keep:
        if not any(covers(entry, name) for name in names):
            near = difflib.get_close_matches(entry, names, n=1, cutoff=0.0)[0]
            yield f'keep "{entry}" protects nothing, since no such key is ever written; nearest: "{near}"'


def about_still_auto(config: Mapping[str, Any], explained: Collection[str]) -> list[str]:
    """One sentence on what nobody has filled in, but for what is explained elsewhere."""
    names = [name for name in autos(config) if name not in explained and not covers(BLOCK, name)]
    if not names:
        return []
    return [
        f'still "auto": {", ".join(names)}; the Hugging Face Trainer fills these in, DeepSpeed alone refuses '
        f"some and takes its defaults for those in {ZERO}"
    ]


def autos(value: object, prefix: str = "") -> Iterator[str]:
    """The dotted names of all that is "auto"."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from autos(item, f"{prefix}.{name}" if prefix else str(name))
    elif value == "auto":
        yield prefix
