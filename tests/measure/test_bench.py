"""Trials: samples that stand for a workload, checks bit for bit, and time beside a stand-in for compute."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autotune_offload.described import machine
from autotune_offload.described.simulated import SimulatedDevice
from autotune_offload.errors import MeasurementError, PinError
from autotune_offload.machine.device import Device
from autotune_offload.measure.bench import Bench, Window, sample
from autotune_offload.paths.accumulation import Accumulation
from autotune_offload.paths.build import build
from autotune_offload.paths.path import destination_memory
from autotune_offload.paths.stock import stock_path
from autotune_offload.records import Accumulate, Candidate, Cast, Path, Workload
from autotune_offload.upstream import STOCK_SEQUENCES
from tests.fakes import DeferredDevice, FakeAccelerator, FakeAcceleratorDevice


def workload(*partitions: tuple[int, int], dtype: str = "bfloat16", world_size: int = 1) -> Workload:
    """Partitions as (elements, count), largest first."""
    return Workload(
        partitions=partitions,
        parameters=partitions,
        dtype=dtype,
        world_size=world_size,
        accumulation_steps=1,
        source="test",
    )


def histograms() -> st.SearchStrategy[Workload]:
    """Workloads of a few distinct sizes, largest first, as `records.histogram` gives them."""
    sizes = st.dictionaries(st.integers(1, 100_000), st.integers(1, 200), min_size=1, max_size=6)
    return sizes.map(lambda counts: workload(*sorted(counts.items(), reverse=True)))


# -- samples --------------------------------------------------------------------------------------


@given(histograms(), st.integers(1000, 1_000_000))
def test_a_sample_is_as_large_as_asked(work: Workload, most: int) -> None:
    """Within a quarter of what was asked for, and never more than the workload."""
    drawn = sample(work, most)
    assert drawn.elements <= min(1.25 * most, work.elements)
    if work.elements >= most:
        assert drawn.elements >= 0.7 * most


@given(histograms(), st.integers(1, 1_000_000))
def test_the_scale_takes_a_sample_to_the_workload(work: Workload, most: int) -> None:
    """However small the sample, scale times its elements are the workload's."""
    drawn = sample(work, most)
    assert drawn.elements > 0
    assert drawn.scale * drawn.elements == pytest.approx(work.elements)
    assert drawn.scale >= 1 - 1e-9


@given(histograms(), st.integers(1, 1_000_000), st.integers(1, 3))
def test_every_size_is_a_piece_of_a_real_one(work: Workload, most: int, parts: int) -> None:
    """A size is a partition's own, or that of a partition cut into equal pieces of at most a part of the sample."""
    part = max(most // parts, 1)
    pieces = {size // -(-size // part) for size, _ in work.partitions}
    drawn = sample(work, most, parts)
    assert drawn.sizes and set(drawn.sizes) <= pieces
    assert max(drawn.sizes) <= part


@given(histograms(), st.integers(1, 1_000_000))
def test_each_size_keeps_its_share(work: Workload, most: int) -> None:
    """No size has more than its share of the partitions, to one: many small ones never crowd out the large."""
    share = min(most / work.elements, 1)
    half = max(most // 2, 1)
    wanted: defaultdict[int, float] = defaultdict(float)
    sources: Counter[int] = Counter()
    for size, count in work.partitions:
        parts = -(-size // half)
        wanted[size // parts] += share * count * parts
        sources[size // parts] += 1
    seen = Counter(sample(work, most).sizes)
    for size, share_of_it in wanted.items():
        assert abs(seen[size] - share_of_it) <= sources[size] + 1e-6


def test_a_workload_that_fits_is_taken_whole() -> None:
    """Nothing is left out, and a pass stands for itself."""
    drawn = sample(workload((1000, 2), (10, 5)), 1_000_000)
    assert Counter(drawn.sizes) == {1000: 2, 10: 5}
    assert drawn.scale == 1


def test_large_and_small_are_interleaved() -> None:
    """As a backward pass meets them: the sizes are spread over the order, not in blocks."""
    order = sample(workload((1000, 4), (10, 12)), 1_000_000).sizes
    for start in range(0, 16, 4):
        assert Counter(order[start : start + 4]) == {1000: 1, 10: 3}


def test_a_huge_partition_is_cut() -> None:
    """An embedding larger than the whole sample appears in equal pieces."""
    drawn = sample(workload((10_000_000, 1), (1000, 100)), 100_000)
    assert set(drawn.sizes) == {50_000, 1000}


# -- checks ---------------------------------------------------------------------------------------

WORK = workload((5000, 3), (70, 4))


def cpu() -> FakeAcceleratorDevice:
    """A synchronous device."""
    return FakeAcceleratorDevice(FakeAccelerator("cpu"))


def candidate(path: Path, cast: Cast = "host", threads: int = 0, *, buffer_bytes: int = 4096) -> Candidate:
    """A candidate with small buffers."""
    return Candidate(path=path, cast=cast, buffer_bytes=buffer_bytes, buffer_count=2, host_threads=threads)


class Spoiled:
    """A path that gives one wrong value, or leaves one out."""

    def __init__(self, device: Device, fault: str) -> None:
        self.device, self.fault, self.passes = device, fault, 0

    def offload_with_norm(self, source: Tensor, destination: Tensor, low: Tensor | None = None) -> Tensor:
        """One element short of right."""
        assert low is not None
        self.device.d2h(low, source)
        if self.fault == "drops one":
            self.device.d2h(destination[:-1], source[:-1])
            return self.device.norm(source)
        if self.fault == "keeps nothing":
            low.zero_()
        self.device.d2h(destination, source)
        if self.fault == "wrong sign of zero":
            destination[destination == 0] = -0.0
        if self.fault == "one bit":
            destination.view(torch.int32)[0] ^= 1
        return self.device.norm(source)

    def drain(self) -> None:
        """Nothing is in the air."""

    def close(self) -> None:
        """Nothing to give back."""


@pytest.mark.parametrize("fault", ["drops one", "wrong sign of zero", "one bit", "keeps nothing"])
def test_a_path_that_is_not_exact_is_found(fault: str) -> None:
    """One element too few, one bit, the sign of a zero, an empty buffer: the check counts the wrong values."""
    device = cpu()
    bench = Bench(device, WORK, 1_000_000)
    with pytest.raises(MeasurementError, match=r"\d+ of 15,280 gradients arrived with wrong bits"):
        bench.check(Spoiled(device, fault), "pageable")


@pytest.mark.parametrize("fault", ["drops one", "one bit"])
def test_an_earlier_right_pass_hides_nothing(fault: str) -> None:
    """Destinations are overwritten before each check."""
    device = cpu()
    bench = Bench(device, WORK, 1_000_000)
    bench.check(Spoiled(device, "none"), "pageable")
    with pytest.raises(MeasurementError):
        bench.check(Spoiled(device, fault), "pageable")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("make", [cpu, DeferredDevice])
def test_all_our_paths_and_deepspeeds_pass(make: Any, dtype: str) -> None:
    """The check accepts what is right, on a device that runs beside the host too."""
    device = make()
    bench = Bench(device, workload((5000, 3), (70, 4), dtype=dtype), 10_000)
    paths: list[Path] = ["direct", "pinned", "staged"]
    casts: list[Cast] = ["device", "host"]
    for path in paths:
        for cast in casts:
            for threads in (0, 2):
                offload = build(device, candidate(path, cast, threads), bench.dtype)
                bench.check(offload, "pinned" if path == "pinned" else "pageable")
                assert bench.time(offload, "pinned" if path == "pinned" else "pageable") >= 0
                offload.close()
    for sequence in STOCK_SEQUENCES:
        stock = stock_path(sequence, device, bench.dtype, bench.largest_elements)
        for memory in ("pageable", "pinned"):
            bench.check(stock, memory)
        stock.close()
    bench.close()


# -- time -----------------------------------------------------------------------------------------


class Clock(FakeAcceleratorDevice):
    """A synchronous device whose copies take a nanosecond an element on its own clock."""

    def __init__(self) -> None:
        super().__init__(FakeAccelerator("cpu"))
        self.seconds = 0.0

    def now(self) -> float:
        """The clock."""
        return self.seconds

    def widen(self, destination: Tensor, source: Tensor, kept: Tensor | None = None) -> float:
        """A pass that takes time."""
        self.seconds += destination.numel() * 1e-9
        return super().widen(destination, source, kept)


@pytest.mark.parametrize("most", [1_000, 20_000, 10_000_000])
def test_time_is_that_of_the_whole_workload(most: int) -> None:
    """A sample's seconds are scaled: at a fixed cost an element, any sample gives the same."""
    device = Clock()
    work = workload((50_000, 7), (1000, 20))
    bench = Bench(device, work, most)
    path = build(device, candidate("direct"), bench.dtype)
    assert bench.time(path, "pageable") == pytest.approx(work.elements * 1e-9)


def test_a_synchronous_device_has_no_stand_in() -> None:
    """On the CPU nothing runs beside the host, so all that a pass takes is added time."""
    assert Bench(cpu(), WORK, 10_000).compute_seconds == 0


class Overlapping(DeferredDevice):
    """A virtual clock on which the device's products and the host's copies run at the same time."""

    product_seconds = 1e-3
    copy_seconds = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.host_seconds = self.device_seconds = 0.0

    def now(self) -> float:
        """The host's clock."""
        return self.host_seconds

    def matmul(self, out: Tensor, left: Tensor, right: Tensor) -> None:
        """Adds to what the device has to do."""
        super().matmul(out, left, right)
        self.device_seconds = max(self.device_seconds, self.host_seconds) + self.product_seconds

    def d2h(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """Keeps the host busy, and not the device."""
        super().d2h(destination, source, non_blocking=non_blocking)
        self.host_seconds += self.copy_seconds

    def synchronize(self) -> None:
        """The host waits for the device."""
        super().synchronize()
        self.host_seconds = max(self.host_seconds, self.device_seconds)


@pytest.mark.parametrize(("copy_seconds", "added"), [(1e-4, 0.0), (5e-3, 16e-3)])
def test_only_what_compute_does_not_hide_counts(copy_seconds: float, added: float) -> None:
    """Copies that fit beside four products of a millisecond cost nothing; of longer ones, what sticks out does."""
    device = Overlapping()
    device.copy_seconds = copy_seconds
    bench = Bench(device, workload((131_072, 4)), 1_000_000)
    assert bench.compute_seconds == pytest.approx(4e-3)
    path = build(
        device,
        Candidate(path="direct", cast="host", buffer_bytes=1 << 20, buffer_count=1),
        bench.dtype,
    )
    # the first product starts with the first copy, so the device is done long before the host
    assert bench.time(path, "pageable") == pytest.approx(added)


def test_compute_goes_before_each_gradient_and_the_side_stream_waits_for_it() -> None:
    """Every partition is made by products on the default stream, and offloaded on another behind their event."""
    device = DeferredDevice()
    bench = Bench(device, workload((131_072, 3)), 1_000_000)
    path = build(
        device,
        Candidate(path="direct", cast="host", buffer_bytes=1 << 20, buffer_count=1),
        bench.dtype,
    )
    device.log.clear()
    bench.check(path, "pageable")
    one = [
        ("matmul", "default", "queued"),
        ("record_event", "default"),
        ("wait_event", "stream 1", "default"),
        ("norm", "stream 1", "queued"),
        ("d2h", "stream 1", "blocking"),
    ]
    assert [entry for entry in device.log if entry[0] != "h2h"] == one * 3


def test_more_ranks_mean_more_compute_for_each_partition() -> None:
    """A partition of one rank in four stands for four times the parameters."""
    seconds = []
    for ranks in (1, 4):
        device = Overlapping()
        seconds.append(Bench(device, workload((131_072, 3), world_size=ranks), 1_000_000).compute_seconds)
    assert seconds[1] == pytest.approx(4 * seconds[0])


# -- memory ---------------------------------------------------------------------------------------


def test_pinned_destinations_are_made_once_and_given_back() -> None:
    """On first use, for the sample only, and close unlocks them."""
    device = DeferredDevice()
    bench = Bench(device, WORK, 10_000)
    assert not device.pinned
    path = build(device, candidate("pinned"), bench.dtype)
    for _ in range(3):
        bench.check(path, "pinned")
    assert list(device.pinned.values()) == [bench.sample.elements * 4, bench.sample.elements * 2]
    bench.close()
    bench.close()
    assert not device.pinned


def test_pinned_destinations_that_cannot_be_had_are_a_pin_error() -> None:
    """The reason of the device is kept."""
    device = DeferredDevice()
    device.largest_pin_bytes = 10
    bench = Bench(device, WORK, 10_000)
    with pytest.raises(PinError, match="no page-locked destination for the trials: page-locking"):
        bench.time(build(device, candidate("pinned"), bench.dtype), "pinned")


# -- with accumulation ----------------------------------------------------------------------------


def window(
    device: Device, path: Path, place: Accumulate, micro_steps: int, *, buffer_bytes: int = 4096
) -> Window:
    """A path after an accumulation in one place."""
    spec = candidate(path, "device", buffer_bytes=buffer_bytes)
    accumulation = Accumulation(device, place, page_lock=path != "direct")
    return Window(build(device, spec, torch.bfloat16), accumulation, micro_steps)


@pytest.mark.parametrize("micro_steps", [2, 3, 4])
@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("path", ["direct", "pinned", "staged"])
def test_an_accumulation_is_checked_bit_for_bit(path: Path, place: Accumulate, micro_steps: int) -> None:
    """Also where every copy runs as late as it may; everything is given back."""
    device = DeferredDevice()
    bench = Bench(device, WORK, 1_000_000)
    carried = window(device, path, place, micro_steps)
    bench.check_accumulation(carried, destination_memory(path))
    for moment, _ in carried.moments:
        assert bench.time_micro_step(carried, moment, destination_memory(path)) >= 0
    carried.close()
    bench.close()
    assert device.pinned == {}


@pytest.mark.parametrize("place", ["device", "host"])
def test_a_sum_that_is_not_exact_is_found(place: Accumulate) -> None:
    """A micro-step that is not added shows in every value."""
    device = DeferredDevice()
    bench = Bench(device, WORK, 1_000_000)
    device.add = device.host_add = lambda total, addend: None  # type: ignore[method-assign]
    with pytest.raises(MeasurementError, match="wrong bits"):
        bench.check_accumulation(window(device, "direct", place, 3), "pageable")


MIXED = workload((3_000_000, 12), (700_000, 30), (4_000, 40))
"""57 million elements in the proportions of a model's layers."""


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("path", ["direct", "pinned", "staged"])
@pytest.mark.parametrize("name", ["a100_pcie4", "gh200", "t4_pcie3"])
def test_an_accumulation_of_the_workload_is_estimated_from_a_sample(
    name: str, path: Path, place: Accumulate
) -> None:
    """An eighth of the gradients tells within 8 % what all take: the wait at the end is not multiplied."""

    def seconds(elements: int) -> float:
        device = SimulatedDevice(machine.load(name))
        device.checked_elements = 64
        bench = Bench(device, MIXED, elements, parts=1)
        carried = window(device, path, place, 4, buffer_bytes=1 << 20)
        bench.check_accumulation(carried, destination_memory(path))  # allocates
        each = [n * bench.time_micro_step(carried, at, destination_memory(path)) for at, n in carried.moments]
        carried.close()
        bench.close()
        return sum(each)

    assert seconds(MIXED.elements // 8) == pytest.approx(seconds(MIXED.elements), rel=0.08)


def test_what_is_waited_for_at_the_end_counts_once() -> None:
    """A second at the end of each micro-step, and a nanosecond an element: however small the sample."""

    class Waiting(Clock):
        """The wait for a stream takes a second."""

        def synchronize_stream(self) -> None:
            """Takes it."""
            self.seconds += 1.0

    work = workload((50_000, 40))
    device = Waiting()
    bench = Bench(device, work, 100_000, parts=1)
    accumulation = Accumulation(device, "device", page_lock=False)
    carried = Window(build(device, candidate("direct"), bench.dtype), accumulation, 2)
    *_, (last, _) = carried.moments
    assert bench.time_micro_step(carried, last, "pageable") == pytest.approx(
        1.0 + work.elements * 1e-9, rel=0.02
    )
