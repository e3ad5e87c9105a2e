"""Texts where a ds_config has numbers or switches, and places that a template left unfilled.

DeepSpeed's parser judges ``zero_optimization`` and the sections for 16 bit. All else it takes as it stands: a text
among the batch sizes, or in the optimizer's parameters, fails later, in arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autotune_offload.config.block import BLOCK
from autotune_offload.config.sections import as_number, shown
from autotune_offload.upstream import BATCH_KEYS, NUMBERS, SWITCHES

_PLACEHOLDER = re.compile(
    r"""
    \$\{?[A-Za-z_][\w.:]*\}?            # $NAME, ${NAME}, ${oc.env:NAME}
    | \$\{\{.*?\}\}                     # ${{ name }}
    | \{\{.*?\}\} | \{%.*?%\}           # {{ name }}
    | \{[A-Za-z_]\w*\}                  # {name}
    | %[A-Za-z_]\w*% | %\([A-Za-z_]\w*\)[sd]
    | @[A-Za-z_]\w*@
    | <[A-Za-z_][\w .:/-]*>             # <name>
    | \?\?\?                            # OmegaConf's own mark
    """,
    re.VERBOSE,
)
_WORDS = re.compile(
    r"(TODO|FIXME|TBD|XXX+|CHANGE[_ -]?ME|FILL[_ -]?(ME|IN)|REPLACE[_ -]?(ME|THIS).*|PLACEHOLDER|YOUR[_ -].*)",
    re.I,
)
_SWALLOWED = re.compile(r"[A-Za-z_][\w-]*,")
"""A word without quotes and the comma behind it, which hjson takes for one text: a template's own variable."""

_TRUTH = ("true", "false")


def placeholder(value: object) -> str | None:
    """The part of a text that somebody was to replace; None where there is none."""
    if not isinstance(value, str):
        return None
    text = value.strip()
    found = _PLACEHOLDER.search(text) or _WORDS.fullmatch(text.rstrip(",")) or _SWALLOWED.fullmatch(text)
    return found[0].rstrip(",") if found else None


def placeholders(value: Any, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """The dotted name of each value with a placeholder, its text, and the part; outside our own block."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if prefix or name != BLOCK:
                yield from placeholders(item, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from placeholders(item, f"{prefix}[{index}]")
    elif (part := placeholder(value)) is not None:
        yield prefix, value, part


def batch_values(config: Mapping[str, Any]) -> Iterator[tuple[str, object, str]]:
    """Batch sizes that DeepSpeed cannot compute with: name, value, and what to write."""
    for name in BATCH_KEYS:
        value = config.get(name)
        if value is None or value == "auto" or placeholder(value):
            continue
        number = as_number(value)
        whole = number is not None and number >= 1 and number == number // 1
        if isinstance(value, str) or not whole:
            yield (
                name,
                value,
                f"{int(number)} without quotes" if number and whole else "a whole number from 1",
            )


def number_texts(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Texts where a number is needed and nobody makes one of them: dotted name and value."""
    for name in NUMBERS:
        value = config.get(name)
        if isinstance(value, str) and value != "auto" and not placeholder(value):
            yield name, value
    for section in ("optimizer", "scheduler"):
        holder = config.get(section)
        params = holder.get("params") if isinstance(holder, Mapping) else None
        for name, value in params.items() if isinstance(params, Mapping) else ():
            items = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
            for item in items:
                if _is_number_text(item):
                    yield f"{section}.params.{name}", item


def switch_texts(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Switches in quotes outside the sections: each counts as true, whatever it says."""
    for name in SWITCHES:
        value = config.get(name)
        if isinstance(value, str) and value.strip().lower() in _TRUTH:
            yield name, value


def _is_number_text(value: object) -> bool:
    return isinstance(value, str) and as_number(value) is not None


def unquoted(text: str) -> str:
    """How to write such a number, in words."""
    number = as_number(text)
    if number is None:
        return "a number"
    return f"{shown(number) if number.is_integer() else text.strip()} without quotes"
