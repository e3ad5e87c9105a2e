"""Which way a step is made: both give the same bits, so that real steps are the trials."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from autotune_offload.records import Record
from autotune_offload.spread import interquartile_range

OWN = 0
"""The way of DeepSpeed's own step; every other way is a number of host threads."""

ROUNDS = 5
_HOPELESS = 1.5
"""A number of threads that took so many times the best's time in the first round is not timed again."""


class StepChoice(Record, frozen=True, kw_only=True):
    """What came of the trials. Seconds are medians of the step's own work, without norms and overflow check."""

    threads: int
    """0 where DeepSpeed's own step stays."""
    seconds: dict[int, float]
    """By way, of those that were timed in every round."""
    reason: str


class Trials:
    """Steps in turn by each way, each round in another order."""

    def __init__(self, ways: Sequence[int], rounds: int = ROUNDS) -> None:
        """`ways` begins with `OWN`, and has another."""
        self._ways = list(ways)
        self._rounds = rounds
        self._round = 0
        self._left = list(ways)
        self._seconds: dict[int, list[float]] = {way: [] for way in ways}

    @property
    def way(self) -> int | None:
        """Of the next step; None when all have been timed."""
        return self._left[0] if self._left else None

    def timed(self, seconds: float) -> None:
        """The step was made in that way, and took so long."""
        self._seconds[self._left.pop(0)].append(seconds)
        if self._left:
            return
        self._round += 1
        if self._round == 1:
            best = min(self._seconds[way][0] for way in self._ways if way != OWN)
            self._ways = [w for w in self._ways if w == OWN or self._seconds[w][0] <= _HOPELESS * best]
        if self._round < self._rounds:
            turn = self._round % len(self._ways)
            self._left = self._ways[turn:] + self._ways[:turn]

    def choice(self, *, own_may_stay: bool) -> StepChoice:
        """The fewest threads among those within the noise of the best; DeepSpeed's own step unless that is slower."""
        timed = {way: self._seconds[way] for way in self._ways}
        medians = {way: statistics.median(times) for way, times in timed.items()}
        fused = [way for way in self._ways if way != OWN]
        best = min(fused, key=medians.__getitem__)
        bound = medians[best] + interquartile_range(timed[best])
        threads = min(way for way in fused if medians[way] <= bound)
        noise = max(interquartile_range(timed[OWN]), interquartile_range(timed[threads]))
        if own_may_stay and medians[threads] + noise >= medians[OWN]:
            return StepChoice(threads=OWN, seconds=medians, reason=_no_faster(medians, threads, noise))
        return StepChoice(threads=threads, seconds=medians, reason=_kept(medians, threads))


def _no_faster(medians: dict[int, float], threads: int, noise: float) -> str:
    return (
        f"the pass is not faster beyond the noise: {_ms(medians[threads])} with {_threads(threads)} against "
        f"{_ms(medians[OWN])} of DeepSpeed's own, and steps scatter by {_ms(noise)}"
    )


def _kept(medians: dict[int, float], threads: int) -> str:
    return f"{_ms(medians[threads])} with {_threads(threads)} against {_ms(medians[OWN])} of DeepSpeed's own"


def _threads(count: int) -> str:
    return f"{count} host thread{'s' * (count > 1)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
