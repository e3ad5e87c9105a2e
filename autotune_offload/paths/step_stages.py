"""What one optimizer step goes through, by DeepSpeed's own code and by the compiled pass, and what that takes.

Said once: the decision adds it up, and what is told of a profile takes its parts from there. Norms and overflow check
are the same on every way and left out. DeepSpeed's step is the same from 0.14.5 to 0.19.8; its Adam is counted as fast
as the pass moves bytes, which it is at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from autotune_offload import units
from autotune_offload.line import Line
from autotune_offload.paths.rates import Rates
from autotune_offload.paths.stages import Stages, Work
from autotune_offload.records import (
    Measurements,
    Memory,
    PassRate,
    State,
    StepCandidate,
    StepRates,
    Workload,
)
from autotune_offload.upstream import SUB_GROUP_ELEMENTS
from autotune_offload.workload import DTYPE_BYTES

PIECE_ELEMENTS = 1 << 18
"""8 MB of traffic, a fraction of a millisecond: long against handing it out, short against a sub-group."""

QUEUED, _ON_THEIR_WAY = 1, 2
"""Buffers of the ring beside those that threads are filling: so that no thread waits for the next piece to be handed
out, nor for a copy that has just begun."""


PASS_BYTES, SCALE_BYTES, ADAM_BYTES = 30, 8, 28
"""Through memory for a weight: the pass without a scaling; DeepSpeed's scaling; its Adam."""

_STAGING_BYTES = 4
"""The driver's, where it copies from pageable memory through page-locked memory of its own: 2 read, 2 written."""


def ring_buffers(threads: int) -> int:
    """Buffers of the ring that so many threads fill."""
    return threads + QUEUED + _ON_THEIR_WAY


class StepCosts:
    """Predicts the seconds of one step over so many weights of a rank.

    Args:
        rates: copies.
        step: casts, and the pass by threads.
        low_bytes: of a weight where the next forward pass finds it.
        elements: this rank's weights.
        sub_groups: into which DeepSpeed divides them.
    """

    def __init__(
        self, rates: Rates, step: StepRates, *, low_bytes: int, elements: int, sub_groups: int = 1
    ) -> None:
        """Adds nothing up yet."""
        self.rates, self.step = rates, step
        self.low_bytes, self.elements, self.sub_groups = low_bytes, elements, sub_groups

    def seconds(self, way: StepCandidate) -> float:
        """What the step takes this way."""
        through = self.stages(way)
        if not way.threads:
            return sum(work.seconds(self.elements, self.sub_groups) for work in through.work)
        pieces = -(-self.elements // through.piece_elements)
        host = sum(w.seconds(self.elements) for w in through.work if w.lane == "host")
        # at the end threads have nothing left to do while others compute
        host *= max(-(-pieces // way.threads) * way.threads * through.piece_elements / self.elements, 1.0)
        link = sum(w.seconds(self.elements, pieces) for w in through.work if w.lane == "link")
        if not link:
            return host
        piece = min(through.piece_elements, self.elements)
        # the first piece, which one thread computes, and the last, which is sent, hide behind nothing
        alone = sum(w.seconds(piece) for w in through.work if w.lane == "link")
        return max(host, link) + (alone + way.threads * host / pieces) * self.sub_groups

    def parts(self, way: StepCandidate) -> Iterator[tuple[Work, float]]:
        """Each part of the step with its own seconds, whatever it hides behind."""
        through = self.stages(way)
        pieces = -(-self.elements // through.piece_elements) if way.threads else self.sub_groups
        for work in through.work:
            yield work, work.seconds(self.elements, pieces if work.lane == "link" else 1)

    def stages(self, way: StepCandidate) -> Stages:
        """What a weight goes through."""
        return self._fused(way) if way.threads else self._own(way)

    def _own(self, way: StepCandidate) -> Stages:
        """DeepSpeed's own: three passes over memory, and all of it is waited for."""
        does, stream = partial(Work, lane="host", waits=True), self._stream(self.step.threads)
        work = [
            does(what="scale gradients", line=stream, element_bytes=SCALE_BYTES),
            does(what="Adam", line=stream, element_bytes=ADAM_BYTES),
        ]
        if way.back == "in place":
            if self.low_bytes < 4:
                work.append(does(what="cast to 16 bits", line=self._narrowing("warm"), element_bytes=4))
            else:
                copy = self.rates.line("h2h", "pageable")
                work.append(does(what="copy the weights", line=copy, element_bytes=4))
            return Stages(work=tuple(work), waits_for="for all of it")
        if self.low_bytes < 4:
            cold = self._narrowing("cold")
            work.append(does(what="cast into a fresh, cold temporary", line=cold, element_bytes=4))
        link = self.rates.line("h2d", "pageable")
        copy_back = Work(
            lane="link",
            what="copy from pageable memory",
            line=link,
            element_bytes=self.low_bytes,
            waits=True,
        )
        return Stages(work=(*work, copy_back), waits_for="for all of it")

    def _fused(self, way: StepCandidate) -> Stages:
        """One pass over memory in pieces, each of which is sent while the next are computed."""
        does, stream = partial(Work, lane="host", waits=True), self._stream(way.threads)
        one_pass = does(what="scale, Adam and cast in one pass", line=stream, element_bytes=PASS_BYTES)
        piece = way.piece_elements or PIECE_ELEMENTS
        if way.back == "in place":
            return Stages(work=(one_pass,), waits_for="for the pass", piece_elements=piece)
        memory: Memory = "pinned" if way.back == "staged" else "pageable"
        copy = Work(
            lane="link",
            what=f"copy from {'page-locked' if memory == 'pinned' else 'pageable'} buffers",
            line=self.rates.line("h2d", memory),
            element_bytes=self.low_bytes,
            waits=False,
        )
        staging = does(what="the driver's own copy", line=stream, element_bytes=_STAGING_BYTES)
        work = (one_pass, copy) if memory == "pinned" else (one_pass, staging, copy)
        buffers = ring_buffers(way.threads)
        return Stages(work=work, waits_for="for the pass", piece_elements=piece, buffers=buffers)

    def _stream(self, threads: int) -> Line:
        """Bytes through the host's memory by so many threads, as the pass moves them, else as copies do."""
        timed = _nearest(self.step.passes, threads)
        if timed is None:
            return Line.of(bytes_per_second=2 * self.rates.copy_rate(threads))
        each = timed.median_seconds / timed.elements
        slower = max(timed.threads / threads, 1.0)
        return Line.of(bytes_per_second=PASS_BYTES / (each * slower))

    def _narrowing(self, state: State) -> Line:
        """fp32 read, by torch's own threads; where it was not timed, as fast as widening."""
        timed = [n for n in self.step.narrowings if (n.where, n.state, n.threads) == ("host", state, 0)]
        rate = timed[0].gbps * 1e9 if timed else self.rates.cast_rate("host")
        return Line.of(bytes_per_second=rate)


def _nearest(passes: tuple[PassRate, ...], threads: int) -> PassRate | None:
    """With the most threads up to so many, else with the fewest that there are."""
    below = [p for p in passes if p.threads <= threads]
    if below:
        return max(below, key=lambda p: p.threads)
    return min(passes, key=lambda p: p.threads, default=None)


def step_costs(
    measurements: Measurements,
    workload: Workload,
    *,
    shares_host_memory: bool,
    sub_group_elements: int = SUB_GROUP_ELEMENTS,
) -> StepCosts:
    """What steps of this workload should take.

    Raises:
        ValueError: nothing of a step was measured.
    """
    if measurements.step is None:
        raise ValueError("no step was measured; expected measurements with `step`")
    return StepCosts(
        Rates(measurements, shares_host_memory=shares_host_memory),
        measurements.step,
        low_bytes=DTYPE_BYTES[workload.dtype],
        elements=workload.elements,
        sub_groups=-(-workload.elements // sub_group_elements),
    )


def words(candidate: StepCandidate) -> str:
    """A candidate in words."""
    if not candidate.threads:
        return "DeepSpeed's own step"
    said = f"one compiled pass with {units.threads(candidate.threads)}"
    if candidate.back == "staged":
        return f"{said}, weights through {units.size(candidate.pinned_bytes)} of page-locked buffers"
    if candidate.back == "direct":
        return f"{said}, weights through pageable buffers"
    return said
