"""What of a running job's ranges is kept, to be looked at later."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterable

from autotune_offload.records import Record

KEPT = 10_000
"""Ranges that are kept: some megabytes, and a few accumulations of a large model."""


class Span(Record, frozen=True):
    """One range that has ended. Seconds on the host's clock."""

    name: str
    thread: int
    begin: float
    seconds: float


class Kept:
    """The latest ranges of one device, the oldest first."""

    def __init__(self) -> None:
        """Nothing yet; `number` finds it again (see `numbered`)."""
        self.spans: deque[Span] = deque(maxlen=KEPT)
        self.count = 0
        """Of all since the start."""
        self.number = next(_numbers)
        _by_number[self.number] = self

    def add(self, span: Span) -> None:
        """From any thread."""
        self.spans.append(span)
        self.count += 1


_numbers = itertools.count(1)
_by_number: weakref.WeakValueDictionary[int, Kept] = weakref.WeakValueDictionary()


def numbered(numbers: Iterable[int]) -> list[Kept]:
    """Those that are still there: a report names them, since a copy of ten thousand spans is nothing to carry along."""
    found = (_by_number.get(number) for number in numbers)
    return [kept for kept in found if kept is not None]
