"""A profiler's trace, read: bytes and times of the copies over the link, and how much of them hides behind other work.

The form is the Chrome trace that `torch.profiler` exports. Kineto writes a copy as category `gpu_memcpy`, named for
its direction ("Memcpy DtoH (Device -> Pinned)", on ROCm "CopyDeviceToHost"), with its bytes among the arguments, and a
kernel as category `kernel`; times are microseconds. Source: libkineto, `output_json.cpp`, read in torch 2.13.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Direction = Literal["d2h", "h2d"]
Span = tuple[float, float]

_DIRECTIONS: dict[Direction, re.Pattern[str]] = {
    "d2h": re.compile(r"DtoH|DeviceToHost|device -> (pinned|pageable|host)", re.IGNORECASE),
    "h2d": re.compile(r"HtoD|HostToDevice|(pinned|pageable|host) -> device", re.IGNORECASE),
}
_RANGE_CATEGORIES = frozenset({"user_annotation", "cpu_op"})
"""Of `record_function`, on the host's side; `gpu_user_annotation` is the device's shadow of the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One copy over the link, in seconds of the trace's clock."""

    direction: Direction
    bytes: int | None
    span: Span


class Trace:
    """One trace file."""

    def __init__(self, events: Sequence[dict[str, Any]]) -> None:
        """Complete events alone are looked at."""
        self._events = [each for each in events if each.get("ph") == "X" and "ts" in each]

    @classmethod
    def read(cls, file: Path) -> Trace:
        """Raises OSError or ValueError where it cannot be read."""
        document = json.loads(file.read_text(encoding="utf-8"))
        return cls(document["traceEvents"] if isinstance(document, dict) else document)

    def ranges(self, name: str) -> list[Span]:
        """Where the host was inside ranges whose name begins so."""
        return [
            _span(each)
            for each in self._events
            if each.get("cat") in _RANGE_CATEGORIES and str(each.get("name", "")).startswith(name)
        ]

    def copies(self, within: Span) -> list[Copy]:
        """Copies over the link that begin inside `within`."""
        found = []
        for each in self._events:
            if each.get("cat") != "gpu_memcpy" or not _inside(_span(each), within):
                continue
            for direction, pattern in _DIRECTIONS.items():
                if pattern.search(str(each.get("name", ""))):
                    size = each.get("args", {}).get("bytes")
                    found.append(Copy(direction=direction, bytes=size, span=_span(each)))
                    break
        return found

    def kernels(self, within: Span) -> list[Span]:
        """Where a kernel ran that began inside `within`."""
        return [
            _span(each)
            for each in self._events
            if each.get("cat") == "kernel" and _inside(_span(each), within)
        ]


def over_link(copies: Iterable[Copy], direction: Direction, beside: Iterable[Span]) -> dict[str, Any]:
    """Bytes and seconds of one direction's copies, and of those seconds how many lie beside other work.

    `bytes` is None where the profiler counts none; `hideable_seconds` is the most that could have been hidden.
    """
    ours = [each for each in copies if each.direction == direction]
    busy, other = union(each.span for each in ours), union(beside)
    seconds, other_seconds = length(busy), length(other)
    counted = [each.bytes for each in ours]
    return {
        "copies": len(ours),
        "bytes": sum(each for each in counted if each is not None) if None not in counted else None,
        "seconds": seconds,
        "hidden_seconds": length(common(busy, other)),
        "hideable_seconds": min(seconds, other_seconds),
        "beside_seconds": other_seconds,
    }


def union(spans: Iterable[Span]) -> list[Span]:
    """The same moments in spans that do not touch, in order."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def common(one: Sequence[Span], other: Sequence[Span]) -> list[Span]:
    """Moments in both, of two unions."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(spans: Iterable[Span]) -> float:
    """Seconds of a union."""
    return sum(end - begin for begin, end in spans)


def _span(event: dict[str, Any]) -> Span:
    begin = float(event["ts"]) / 1e6
    return begin, begin + float(event.get("dur", 0.0)) / 1e6


def _inside(span: Span, within: Span) -> bool:
    return within[0] <= span[0] < within[1]
