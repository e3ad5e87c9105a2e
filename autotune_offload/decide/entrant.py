"""One contestant with its times."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from msgspec import structs

from autotune_offload.errors import AutotuneError
from autotune_offload.paths.path import destination_memory
from autotune_offload.records import Accumulate, Baseline, Candidate, Memory
from autotune_offload.spread import spread

R = TypeVar("R", Candidate, Baseline)

FAILURES = (AutotuneError, RuntimeError, MemoryError, OSError)
"""What a path may end in that is its own fault: wrong bytes, no pinned memory, out of memory, a lost device."""


@dataclass(slots=True, kw_only=True)
class Entrant(Generic[R]):
    """One contestant: a candidate of ours, or a sequence of DeepSpeed's.

    `place` is where it adds up micro-steps, if there are several. `seconds` holds its times, each for the
    whole workload, and `rounds` in which round of all each was taken; `failed` says why it was put aside,
    `checked` that its bytes were compared once, `behind` that it left a race early because it was clearly slower.
    """

    record: R
    place: Accumulate = "device"
    seconds: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    checked: bool = False
    behind: bool = False
    failed: str | None = None

    @property
    def memory(self) -> Memory:
        """Where its fp32 gradients land."""
        if isinstance(self.record, Baseline):
            return self.record.memory
        return destination_memory(self.record.path)

    @property
    def median(self) -> float:
        """Of its rounds; endless without one."""
        return statistics.median(self.seconds) if self.seconds else math.inf

    @property
    def timed(self) -> bool:
        """Whether it has a time that counts."""
        return bool(self.seconds) and self.failed is None

    def beside(self, other: Entrant[Any]) -> list[tuple[float, float]]:
        """Both times of every round in which the two ran."""
        theirs = dict(zip(other.rounds, other.seconds, strict=True))
        own = zip(self.rounds, self.seconds, strict=True)
        return [(seconds, theirs[number]) for number, seconds in own if number in theirs]

    def anew(self) -> Entrant[R]:
        """The same without its times."""
        return replace(self, seconds=[], rounds=[], behind=False)

    def reported(self) -> R:
        """The record with what was measured."""
        if not self.timed:
            return self.record
        return structs.replace(
            self.record,
            measured_seconds=self.median,
            spread=spread(self.seconds),
            samples=len(self.seconds),
            raw_seconds=tuple(self.seconds),
        )


@contextlib.contextmanager
def put_aside_on_failure(entrant: Entrant[Any]) -> Iterator[None]:
    """Whatever the entrant fails with is its own fault, and ends its part alone."""
    try:
        yield
    except FAILURES as error:
        named = str(error) if isinstance(error, AutotuneError) else f"{type(error).__name__}: {error}"
        entrant.failed = f"failed in a trial: {named}"
