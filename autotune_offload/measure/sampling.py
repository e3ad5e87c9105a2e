"""How often one operation is timed: until its samples agree, are enough, or time is up."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune_offload.machine.device import Device
from autotune_offload.records import Plan
from autotune_offload.spread import interquartile_range

_SAMPLE_SECONDS = 50e-6
"""Short operations are repeated until one sample lasts this long: the timer itself costs about 0.1 us."""

_SLOW_SAMPLE = 20
"""A sample this many times too long had the host taken away; the next ones repeat less, to end in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Samples of one timed operation, in seconds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Middle of the samples."""
        return statistics.median(self.seconds)

    @property
    def iqr(self) -> float:
        """Distance between the quartiles; 0 for a single sample."""
        return interquartile_range(self.seconds)


def sample(
    device: Device, plan: Plan, run: Callable[[int], float], deadline: float, *, warm_up: bool
) -> Sampled:
    """Samples of `run(count)`, per operation, until they agree, are enough, or time is up.

    There is always one; for the least number the deadline may be passed by as long as it was away.
    Another process on a core can make an operation a thousand times longer (a parallel region waits
    for its last thread), so time is looked at after every sample.
    """
    with device.timed_only():
        return _sampled(device, plan, run, deadline, warm_up=warm_up)


def _sampled(
    device: Device, plan: Plan, run: Callable[[int], float], deadline: float, *, warm_up: bool
) -> Sampled:
    started = device.now()
    once = _warm(device, run, min(started + plan.warmup_seconds, deadline) if warm_up else started)
    count = max(min(int(_SAMPLE_SECONDS / max(once, 1e-9)), 64), 1)
    seconds: list[float] = []
    while True:
        taken = run(count)
        seconds.append(taken / count)
        late = device.now() - deadline
        enough = len(seconds) >= plan.min_samples or late >= deadline - started
        if len(seconds) >= plan.max_samples or (late >= 0 and enough) or _agree(plan, seconds):
            return Sampled(seconds=tuple(seconds))
        if taken > _SLOW_SAMPLE * _SAMPLE_SECONDS:
            count = max(count // 4, 1)


def _warm(device: Device, run: Callable[[int], float], until: float) -> float:
    """The shortest of the runs until then; there is always one."""
    once = run(1)
    while device.now() < until:
        once = min(once, run(1))
    return once


def _agree(plan: Plan, seconds: Sequence[float]) -> bool:
    if len(seconds) < 2 * plan.min_samples:
        return False
    return interquartile_range(seconds) <= plan.target_spread * statistics.median(seconds)
