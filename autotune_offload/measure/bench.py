"""Timed trials of a gradient path on a sample of the workload.

A trial runs the very code that training runs, on partitions of the workload's real sizes. On a device
that computes beside the host, every gradient is preceded by a stand-in for the compute that makes it,
and what a trial returns is the time that offloading adds to that compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from autotune_offload.errors import MeasurementError, PinError
from autotune_offload.machine.device import Device
from autotune_offload.measure.compute import Compute, whole_numbers
from autotune_offload.paths.accumulation import Accumulation, Moment
from autotune_offload.records import Memory, Workload
from autotune_offload.workload import middle_elements

_AGAIN = 2
"""Times that the longer of two timings takes the sample once more before its gradients are waited for."""

PASSES_OF_A_SAMPLE = 1 + 1 + _AGAIN
"""In each micro-step of an accumulation that is timed on a sample."""

_CHECKED_ELEMENTS = 1 << 23
"""Of an accumulation that are compared bit for bit: more than the buffers hold that add on the host, so that each
is used again, and a small part of the trials' time for each of a dozen entrants."""


class Offload(Protocol):
    """What a trial times: one of our paths, or one of DeepSpeed's sequences."""

    def offload_with_norm(self, source: Tensor, destination: Tensor, low: Tensor | None = None) -> Tensor:
        """Queue one partition, kept in `low` as it is, and give its 2-norm."""

    def drain(self) -> None:
        """Return when all destinations hold their values."""

    def close(self) -> None:
        """Give back the buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Partitions that stand for a workload. `scale` takes a sample's seconds to the workload's."""

    sizes: tuple[int, ...]
    scale: float

    @property
    def elements(self) -> int:
        """Elements of all partitions in the sample."""
        return sum(self.sizes)


def sample(workload: Workload, most_elements: int, parts: int = 2) -> Sample:
    """A sample with the workload's mix of sizes, of `most_elements` within half of its largest partition.

    Each size keeps its share of the partitions; partitions over one of so many `parts` of the sample are cut
    in pieces. The order interleaves the sizes, as a backward pass meets them.
    """
    piece = max(most_elements // parts, 1)
    cut = [(-(-size // piece), size, count) for size, count in workload.partitions]
    share = min(most_elements / workload.elements, 1.0)
    # largest first, so that rounding is off by half of the largest piece at most, whatever the mix
    counts = whole_numbers([share * pieces * count for pieces, _, count in cut])
    sizes = {size // pieces: 0 for pieces, size, _ in cut}
    for (pieces, size, _), wanted in zip(cut, counts, strict=True):
        sizes[size // pieces] += wanted
    order = interleaved(sizes)
    return Sample(sizes=order, scale=workload.elements / sum(order))


def interleaved(counts: Mapping[int, int]) -> tuple[int, ...]:
    """Each size as often as its count says, evenly over the whole order, as a backward pass meets them."""
    placed = [((i + 0.5) / count, size) for size, count in counts.items() for i in range(count)]
    return tuple(size for _, size in sorted(placed))


class Bench:
    """Sources on the device, destinations on the host, and the clock. Close it after use.

    Args:
        device: where the trials run; it must be the current one.
        workload: gives sizes and dtype.
        most_elements: of the sample.
        parts: of the sample; no partition is larger than one.
    """

    def __init__(self, device: Device, workload: Workload, most_elements: int, parts: int = 2) -> None:
        """Allocates sources and pageable destinations; accumulation buffers, and what is pinned, on first use."""
        self.device = device
        self.dtype: torch.dtype = getattr(torch, workload.dtype)
        self.sample = sample(workload, most_elements, parts)
        self._typical_elements = middle_elements(workload.partitions)
        checked = min(self.sample.elements, device.checked_elements)
        values = _gradient_values(checked, self.dtype)
        source = device.empty(self.sample.elements, self.dtype)
        device.h2d(source[:checked], values)
        self._sources = source.split_with_sizes(list(self.sample.sizes))
        self._expected = values.to(torch.float32)
        self._blocks: dict[Memory, Tensor] = {
            "pageable": device.host_empty(self.sample.elements, torch.float32)
        }
        self._sums: dict[Memory, Tensor] = {}
        self._totals: dict[int, Tensor] = {}
        self._compute = Compute(device, self.sample.sizes, workload) if device.computes() else None
        self._side = device.new_stream()

    @property
    def largest_elements(self) -> int:
        """The largest partition in the sample."""
        return max(self.sample.sizes)

    @property
    def cuts(self) -> bool:
        """Whether those that most gradients are in had to be cut for the sample."""
        return self._typical_elements > self.largest_elements

    @property
    def compute_seconds(self) -> float:
        """The stand-in's compute, for the whole workload; 0 on a synchronous device."""
        return 0.0 if self._compute is None else self._compute.alone() * self.sample.scale

    def close(self) -> None:
        """Give back pinned memory."""
        for blocks in (self._blocks, self._sums):
            pinned = blocks.pop("pinned", None)
            if pinned is not None:
                self.device.release_pinned(pinned)

    def check(self, path: Offload, memory: Memory) -> None:
        """One pass into overwritten destinations, compared bit for bit.

        A device that is slow at moving values checks the first of the sample (`Device.checked_elements`).

        Raises:
            MeasurementError: with the number of wrong values.
        """
        elements = self._expected.numel()
        block, low = self._block(memory)[:elements], self._sum(memory)[:elements]
        block.fill_(float("nan"))
        low.fill_(float("nan"))
        self._pass(path, block, low)
        _compared(block, self._expected)
        _compared(low.to(torch.float32), self._expected)

    def time(self, path: Offload, memory: Memory) -> float:
        """Seconds that one pass adds to the compute, for the whole workload."""
        with self.device.timed_only():
            return self._time(path, memory)

    def _time(self, path: Offload, memory: Memory) -> float:
        block, low = self._block(memory), self._sum(memory)
        return self._added(lambda: self._pass(path, block, low)) * self.sample.scale

    def _added(self, work: Callable[[], None], passes: int = 1) -> float:
        """Seconds that `work` takes beyond the compute of so many passes over the sample."""
        alone = 0.0 if self._compute is None else self._compute.alone()
        self.device.synchronize()
        before = self.device.now()
        work()
        if self._compute is not None:
            self.device.synchronize()
        return max(self.device.now() - before - passes * alone, 0.0)

    def _block(self, memory: Memory) -> Tensor:
        if memory not in self._blocks:
            self._blocks[memory] = self._host_memory(memory, torch.float32)
        return self._blocks[memory]

    def _sum(self, memory: Memory) -> Tensor:
        """DeepSpeed's accumulation buffer, which is page-locked where the fp32 gradients are."""
        if memory not in self._sums:
            self._sums[memory] = self._host_memory(memory, self.dtype)
        return self._sums[memory]

    def _host_memory(self, memory: Memory, dtype: torch.dtype) -> Tensor:
        if memory == "pageable":
            return self.device.host_empty(self.sample.elements, dtype)
        try:
            return self.device.pinned_empty(self.sample.elements, dtype)
        except PinError as error:
            raise PinError(f"no page-locked destination for the trials: {error}") from error

    def _pass(self, path: Offload, block: Tensor, low: Tensor) -> None:
        """All partitions, or those that a shorter block has room for."""
        for source, destination, kept in self._reduced(block, low):
            path.offload_with_norm(source, destination, kept)
        with self.device.on(self._side):
            path.drain()

    def _reduced(self, block: Tensor, low: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Each partition and its parts of `block` and `low`, behind the compute that makes it, on the side stream."""
        end = 0
        for index, source in enumerate(self._sources):
            begin, end = end, min(end + source.numel(), block.numel())
            if begin == end:
                return
            if self._compute is not None:
                self._compute.queue(index)
                self.device.order_after(self._side, self.device.record_event())
            with self.device.on(self._side):
                yield source[: end - begin], block[begin:end], low[begin:end]

    # -- with accumulation --

    def check_accumulation(self, window: Window, memory: Memory) -> None:
        """One accumulation into overwritten destinations, compared bit for bit with the sum of as many gradients.

        Raises:
            MeasurementError: with the number of wrong values.
        """
        expected = self._accumulated(window.micro_steps)
        elements = expected.numel()
        block, low = self._block(memory)[:elements], self._sum(memory)[:elements]
        block.fill_(float("nan"))
        for moment, count in window.moments:
            for _ in range(count):
                self._micro_step(window, moment, block, low)
        _compared(block, expected)

    def _accumulated(self, micro_steps: int) -> Tensor:
        """What the first of the sample add up to; worked out once, since a dozen entrants are compared with it."""
        if micro_steps not in self._totals:
            total = values = self._expected[:_CHECKED_ELEMENTS].to(self.dtype)
            for _ in range(micro_steps - 1):
                total = total + values
            self._totals[micro_steps] = total.to(torch.float32)
        return self._totals[micro_steps]

    def warm_up_accumulation(self, window: Window, memory: Memory) -> None:
        """The last micro-step, which uses everything."""
        *_, (last, _) = window.moments
        with self.device.timed_only():
            self._micro_step(window, last, self._block(memory), self._sum(memory))

    def time_micro_step(self, window: Window, moment: Moment, memory: Memory) -> float:
        """Seconds that one micro-step adds to its compute, for the whole workload.

        What is under way at the end of a micro-step is waited for once, however large the workload is, and is
        not small beside a sample. So a micro-step takes the sample once, then several times over, and only the
        difference counts for the rest of the workload.
        """
        block, low = self._block(memory), self._sum(memory)

        def seconds(passes: int) -> float:
            return self._added(lambda: self._micro_step(window, moment, block, low, passes), passes)

        with self.device.timed_only():
            once = seconds(1)
            if self.sample.scale <= 1:
                return once * self.sample.scale
            more = max(seconds(1 + _AGAIN) - once, 0.0) / _AGAIN
        return once + (self.sample.scale - 1) * more

    def _micro_step(
        self, window: Window, moment: Moment, block: Tensor, low: Tensor, passes: int = 1
    ) -> None:
        """All partitions, so many times, and the wait at the end of a backward pass."""
        for _ in range(passes):
            for key, (source, destination, kept) in enumerate(self._reduced(block, low)):
                window.carry(source, kept, destination, moment, key)
        with self.device.on(self._side):
            window.drain()
            self.device.synchronize_stream()  # the epilogue of every backward pass does


@dataclass(frozen=True, slots=True)
class Window:
    """A path with what adds up the gradients before it, over so many micro-steps: two or more."""

    path: Offload
    accumulation: Accumulation
    micro_steps: int

    @property
    def moments(self) -> Iterator[tuple[Moment, int]]:
        """The first micro-step, those in the middle, and the last, each with how many there are."""
        yield Moment(first=True, boundary=False), 1
        if self.micro_steps > 2:
            yield Moment(first=False, boundary=False), self.micro_steps - 2
        yield Moment(first=False, boundary=True), 1

    def carry(self, gradient: Tensor, low: Tensor, destination: Tensor, moment: Moment, key: int) -> None:
        """One partition in one micro-step, as an attached path does it."""
        if not self.accumulation.adds_on_host(moment):
            value = self.accumulation.value(gradient, low, moment)
            if moment.boundary:
                kept = None if self.accumulation.keeps_at_once else low
                self.path.offload_with_norm(value, destination, kept)
            else:
                self.accumulation.keep(value, low)
            return
        sums, sent = self.accumulation.on_host(gradient, low)
        if moment.boundary:
            sums.add(sent, low, destination, key)
        else:
            sums.add(sent, low)

    def drain(self) -> None:
        """Return when everything is where it belongs."""
        self.path.drain()
        self.accumulation.drain()

    def close(self) -> None:
        """Give back the buffers."""
        self.path.close()
        self.accumulation.close()


def _compared(block: Tensor, expected: Tensor) -> None:
    seen, wanted = block.view(torch.int32), expected.view(torch.int32)
    if not torch.equal(seen, wanted):
        wrong = int((seen != wanted).sum())
        raise MeasurementError(f"{wrong:,} of {wanted.numel():,} gradients arrived with wrong bits")


def _gradient_values(elements: int, dtype: torch.dtype) -> Tensor:
    """Finite values of both signs and many exponents, the same in every run; none is NaN."""
    period = 2003
    codes = torch.arange(period, dtype=torch.float32, device="cpu") - period // 2
    values = (codes * 2.0**-12).to(dtype)
    return values.repeat(-(-elements // period))[:elements]
