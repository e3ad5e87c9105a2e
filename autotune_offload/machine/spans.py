"""What of a running job's ranges is kept, to be looked at later."""

from __future__ import annotations

from collections import deque

from autotune_offload.records import Record

KEPT = 10_000
"""Ranges that are kept: some megabytes, and a few accumulations of a large model."""


class Span(Record, frozen=True):
    """One range that has ended. Seconds on the host's clock."""

    name: str
    thread: int
    begin: float
    seconds: float


class Ranges(Record, frozen=True, kw_only=True):
    """What was kept at one moment."""

    spans: tuple[Span, ...] = ()
    """The oldest first."""
    count: int = 0
    """Of all since the start."""


class Kept:
    """The latest ranges of one device, the oldest first."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.spans: deque[Span] = deque(maxlen=KEPT)
        self.count = 0
        """Of all since the start."""

    def add(self, span: Span) -> None:
        """From any thread."""
        self.spans.append(span)
        self.count += 1

    def now(self) -> Ranges:
        """All that is kept; from any thread."""
        return Ranges(spans=tuple(self.spans.copy()), count=self.count)
