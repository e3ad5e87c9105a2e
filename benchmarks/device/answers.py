"""Answers to claims: the words, and what every rule asks of what the parts have found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

Found = dict[str, dict[str, Any]]
"""What each part has found, by its name."""

Word = Literal["holds", "does not hold", "not measurable here"]
HOLDS: Word = "holds"
FAILS: Word = "does not hold"
UNKNOWN: Word = "not measurable here"
Answer = tuple[Word, str]

SMALL_BYTES = 4 << 20
"""Blocks that a runtime makes once and keeps."""


def word(*, holds: bool) -> Word:
    """Of a claim that could be judged."""
    return HOLDS if holds else FAILS


def part(found: Found, name: str, key: str) -> Any:
    """What a part has found under a name; None for nothing."""
    return found.get(name, {}).get(key) or None


def on_host(found: Found) -> str | None:
    """Why there is nothing to say about a link; None where there is one."""
    kind = found.get("here", {}).get("training_kind")
    if kind is None:
        return "the part that looks at the device found nothing"
    return "the device is the host: there is no link, and no stream of its own" if kind == "cpu" else None


def largest(found: Found) -> Iterator[dict[str, Any]]:
    """Copies of the largest size that was timed in each direction and memory."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for copy in part(found, "copies", "copies") or []:
        key = copy["kind"], copy["memory"]
        if key not in best or copy["bytes"] > best[key]["bytes"]:
            best[key] = copy
    yield from best.values()


def profiled(found: Found) -> list[dict[str, Any]]:
    """The ways that were traced."""
    return part(found, "profiled", "ways") or []


def uncounted(found: Found) -> str | None:
    """Why no copy can be found in a trace; None where some can."""
    if (why := on_host(found)) is not None:
        return why
    ways = profiled(found)
    if not ways:
        return "no step was traced to its end"
    seen = any(way[what]["copies"] for way in ways for what in ("gradients_to_host", "weights_to_device"))
    return None if seen else "torch's profiler sees no copies of this device"
