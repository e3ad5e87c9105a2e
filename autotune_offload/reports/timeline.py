"""Where the time of one gradient goes: the stages of a path in the order and overlap that it gives them.

Computed from the measured curves, not traced; alone on the machine, with no compute to hide behind. Of one
gradient the last stage ends where the cost model says it does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from autotune_offload.paths import stages
from autotune_offload.paths.rates import Rates
from autotune_offload.paths.step_stages import PIECE_ELEMENTS, step_costs
from autotune_offload.records import Baseline, Candidate, Profile, StepCandidate
from autotune_offload.workload import DTYPE_BYTES, middle_elements

Lane = stages.Lane | Literal["training waits"]

_STEP_ELEMENTS = 64 * PIECE_ELEMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One thing that happens to the gradient: where, what, from when on and for how long."""

    lane: Lane
    what: str
    start_seconds: float
    seconds: float

    @property
    def end_seconds(self) -> float:
        """When it is over."""
        return self.start_seconds + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The stages of one gradient of `elements` elements on one path."""

    elements: int
    stages: tuple[Stage, ...]

    @property
    def seconds(self) -> float:
        """When the gradient is where the optimizer reads it."""
        return max((stage.end_seconds for stage in self.stages), default=0.0)

    @property
    def shares(self) -> dict[str, float]:
        """Seconds of each kind of work, in the order in which they begin; waiting is none."""
        found: dict[str, float] = {}
        for stage in self.stages:
            if stage.lane != "training waits":
                found[stage.what] = found.get(stage.what, 0.0) + stage.seconds
        return found

    @property
    def waits_seconds(self) -> float:
        """How long the thread that trains cannot go on."""
        return sum(stage.seconds for stage in self.stages if stage.lane == "training waits")


def timeline(profile: Profile, way: Candidate | Baseline) -> Timeline:
    """The stages of one gradient of the size that most of the profile's bytes have."""
    on_host = profile.device.kind == "cpu"
    rates = Rates(profile.measurements, shares_host_memory=on_host)
    through = stages.stages(way, DTYPE_BYTES[profile.workload.dtype], rates)
    elements = middle_elements(profile.workload.partitions)
    return Timeline(elements=elements, stages=tuple(_placed(through, elements, on_host=on_host)))


def step_timeline(profile: Profile, way: StepCandidate) -> Timeline:
    """The stages of an optimizer step over the first of this rank's weights, so many that its pieces can be told apart.

    Raises:
        ValueError: nothing of a step was measured.
    """
    on_host = profile.device.kind == "cpu"
    costs = step_costs(profile.measurements, profile.workload, shares_host_memory=on_host)
    elements = min(costs.elements, _STEP_ELEMENTS)
    return Timeline(elements=elements, stages=tuple(_placed(costs.stages(way), elements, on_host=on_host)))


def _placed(through: stages.Stages, elements: int, *, on_host: bool) -> Iterator[Stage]:
    """Each stage as soon as what it needs is free; then how long the thread that trains waits.

    `on_host`: the device is the host, its memory is no way off, and nothing runs beside the calling thread.
    """
    free: dict[str, float] = defaultdict(float)
    done: list[float] = []
    waits: list[float] = []
    whole = [(through.before, elements)] if through.before else []
    pieces = [
        (through.work, min(through.piece_elements, elements - first))
        for first in range(0, elements, through.piece_elements)
    ]
    for index, (works, size) in enumerate(whole + pieces, start=-len(whole)):
        end = 0.0
        for work in works:
            lane: stages.Lane = "host" if on_host else work.lane
            by = "host" if lane == "host" else "stream"
            start = max(free[by], end)
            if lane == "link" and index >= through.buffers > 0:
                start = max(start, done[index - through.buffers])
            seconds = work.seconds(size)
            free[by] = end = start + seconds
            if seconds > 0:
                yield Stage(lane=lane, what=work.what, start_seconds=start, seconds=seconds)
            if work.waits or on_host:
                waits += [start, end]
        if index >= 0:
            done.append(end)
    if waits:
        start, seconds = min(waits), max(waits) - min(waits)
        yield Stage(lane="training waits", what=through.waits_for, start_seconds=start, seconds=seconds)
