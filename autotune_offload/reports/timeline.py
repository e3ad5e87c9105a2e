"""Where the time of one gradient goes: the stages of a path in the order and overlap that it gives them.

Computed from the measured curves with the cost model's lines and rates, not traced; alone on the machine,
with no compute to hide behind. Of one gradient the last stage ends where the cost model says it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from autotune_offload.decide.cost_model import CostModel
from autotune_offload.records import Baseline, Candidate, Memory, Profile
from autotune_offload.workload import middle_elements

Lane = Literal["device", "link", "host", "training waits"]


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
    model = _model(profile)
    elements = middle_elements(profile.workload.partitions)
    work = _Schedule(model)
    if isinstance(way, Baseline):
        _stock(work, way.name, way.memory, elements)
    elif way.path == "staged":
        _staged(work, way, elements)
    else:
        _destination(work, way, elements)
    return Timeline(elements=elements, stages=tuple(work.stages))


def _model(profile: Profile) -> CostModel:
    on_host = profile.device.kind == "cpu"
    return CostModel(profile.measurements, profile.workload, shares_host_memory=on_host, synchronous=on_host)


class _Schedule:
    """Stages put one after another in each lane."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self.stages: list[Stage] = []
        self._free: dict[Lane, float] = {}

    def add(self, lane: Lane, what: str, seconds: float, *, after: float = 0.0) -> float:
        """A stage that starts when its lane is free and `after` has passed; its end."""
        if self.model.shares_host_memory:
            lane = "host"  # the device is the host, and its memory no way off
        start = max(self._free.get(lane, 0.0), after)
        if seconds > 0:
            self.stages.append(Stage(lane=lane, what=what, start_seconds=start, seconds=seconds))
        self._free[lane] = start + seconds
        return start + seconds

    def waits(self, what: str, start: float, end: float) -> None:
        """The thread that trains cannot go on meanwhile."""
        if end > start:
            stage = Stage(lane="training waits", what=what, start_seconds=start, seconds=end - start)
            self.stages.append(stage)


def _pieces(elements: int, most: int) -> Iterator[int]:
    for first in range(0, elements, most):
        yield min(most, elements - first)


def _destination(work: _Schedule, way: Candidate, elements: int) -> None:
    model = work.model
    memory: Memory = "pinned" if way.path == "pinned" else "pageable"
    link, low = model.line("d2h", memory), model.low_bytes
    into = f"copy into {memory} memory"
    if low == 4:
        end = work.add("link", into, link.seconds(4 * elements))
    elif way.cast == "device":
        end = 0.0
        for piece in _pieces(elements, max(way.buffer_bytes // 4, 1)):
            cast = link.latency_seconds + 4 * piece / model.cast_rate("device")
            end = work.add("device", "cast to fp32", cast, after=end)
            end = work.add("link", into, link.seconds(4 * piece), after=end)
    elif model.shares_host_memory:
        rate = model.cast_rate("host", max(way.host_threads, 1))
        end = work.add(
            "host", "copy, widen and sum squares in one pass", link.latency_seconds + 4 * elements / rate
        )
    else:
        copied = work.add("link", f"{into}, 16 bits", link.seconds(low * elements))
        end = work.add(
            "host",
            "widen to fp32",
            4 * elements / model.cast_rate("host", way.host_threads),
            after=copied,
        )
        if way.path == "pinned" and not way.host_threads:
            work.waits("for the widening", copied, end)
        elif way.path == "direct":
            work.waits("for the copy", 0.0, copied if way.host_threads else end)
        return
    if way.path == "direct" or model.synchronous:
        work.waits("for the copy", 0.0, end)


def _staged(work: _Schedule, way: Candidate, elements: int) -> None:
    model = work.model
    link, low = model.line("d2h", "pinned"), model.low_bytes
    on_device = way.cast == "device" and low < 4
    width = 4 if on_device else low
    rate = (
        model.copy_rate(way.host_threads)
        if on_device or low == 4
        else model.cast_rate("host", way.host_threads)
    )
    emptied: list[float] = []
    sent = 0.0
    for index, piece in enumerate(_pieces(elements, max(way.buffer_bytes // width, 1))):
        if on_device:
            sent = work.add("device", "cast to fp32", 4 * piece / model.cast_rate("device"), after=sent)
        free = emptied[index - way.buffer_count] if index >= way.buffer_count else 0.0
        sent = work.add(
            "link", "copy into a page-locked buffer", link.seconds(width * piece), after=max(sent, free)
        )
        empty = 4 * piece / rate + model.measurements.sync.event_seconds
        emptied.append(work.add("host", "empty the buffer", empty, after=sent))
    if not way.host_threads:
        work.waits("for the buffers", 0.0, emptied[-1])


def _stock(work: _Schedule, name: str, memory: Memory, elements: int) -> None:
    """DeepSpeed's own: the norm on the way, then the cast, then the copy (see `cost_model`)."""
    model, fp32 = work.model, 4 * elements
    fresh = model.cast_rate("device")
    if model.shares_host_memory:
        fresh = min(fresh, model.line("h2h", "pageable", "cold").bytes_per_second)
    upcasts = model.low_bytes < 4 and name != "implicit_upcast"
    end = 0.0
    if model.shares_host_memory:
        end = work.add("host", "norm in fp64", 2 * fp32 / fresh)
    if upcasts or (name == "bounce_buffer" and model.low_bytes < 4):
        end = work.add("device", "cast to a fresh fp32 copy", fp32 / fresh, after=end)
    if name == "implicit_upcast" and model.low_bytes < 4:
        end = _implicit(work, elements, end)
    elif name == "bounce_buffer":
        end = work.add(
            "link", "copy into the page-locked buffer", model.line("d2h", "pinned").seconds(fp32), after=end
        )
        end = work.add(
            "host", "synchronize the whole device", model.measurements.sync.device_seconds, after=end
        )
        end = work.add("host", "copy host to host", model.line("h2h", "pageable").seconds(fp32), after=end)
    else:
        end = work.add(
            "link", f"copy into {memory} memory", model.line("d2h", memory).seconds(fp32), after=end
        )
    if memory == "pageable" or name != "explicit_upcast_non_blocking" or model.synchronous:
        work.waits("for all of it", 0.0, end)


def _implicit(work: _Schedule, elements: int, start: float) -> float:
    model, fp32 = work.model, 4 * elements
    if model.shares_host_memory:
        seconds = model.line("d2h", "pageable").latency_seconds + fp32 / model.cast_rate("host")
        return work.add("host", "copy and widen", seconds, after=start)
    cold = model.line("d2h", "pageable", "cold").seconds(model.low_bytes * elements)
    copied = work.add("link", "copy into a fresh, cold temporary", cold, after=start)
    return work.add("host", "widen to fp32", fp32 / model.cast_rate("host"), after=copied)
