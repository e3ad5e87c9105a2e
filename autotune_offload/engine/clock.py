"""What gradients cost a training step: the one quantity that a report, `verify` and a confirmation go by.

From the first `partition_grads` of a micro-step to the return of the epilogue and of whatever it waits for, added up
over one accumulation. DeepSpeed's own asynchronous copies are waited for in its epilogue and a path's at its drain, so
that both are counted in full. What a backward pass computes meanwhile is counted as well, for everybody alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from autotune_offload.records import Record


class OffloadTime(Record, frozen=True, kw_only=True):
    """What the gradients of one accumulation took."""

    seconds: float
    passes: int
    """Times that an epilogue has returned: once a micro-step, more often with reentrant checkpoints."""
    whole: bool
    """Whether every pass that began has come to its epilogue, so that the time may be compared."""


class OffloadClock:
    """Reads the host's clock at the ends of a micro-step."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """`now` gives seconds."""
        self._now = now
        self._began: float | None = None
        self._seconds, self._passes = 0.0, 0

    def begin(self) -> None:
        """`partition_grads` is called; only the first of a micro-step counts."""
        if self._began is None:
            self._began = self._now()

    def end(self) -> None:
        """The epilogue returns, and everything is where it belongs."""
        if self._began is not None:
            self._seconds += self._now() - self._began
            self._began = None
        self._passes += 1

    def take(self) -> OffloadTime:
        """The accumulation is over, and the next one begins."""
        found = OffloadTime(
            seconds=self._seconds,
            passes=self._passes,
            whole=self._began is None and self._passes > 0 and self._seconds > 0,
        )
        self._began, self._seconds, self._passes = None, 0.0, 0
        return found
