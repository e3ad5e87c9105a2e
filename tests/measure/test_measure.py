"""Measuring: every curve, honest numbers, bytes checked, time and memory kept, a verdict in words."""

from __future__ import annotations

import math
import statistics
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

from autotune_offload.errors import BudgetError, MeasurementError, PinError
from autotune_offload.machine.device import Device
from autotune_offload.measure.arenas import mapped_bytes
from autotune_offload.measure.costs import check_synchronize, pin_cost, sync_cost
from autotune_offload.measure.measure import curve, measure, stability
from autotune_offload.measure.sampling import Sampled, sample
from autotune_offload.records import Measurements, Plan, Transfer
from autotune_offload.spread import interquartile_range
from tests.fakes import DeferredDevice, FakeAccelerator, FakeAcceleratorDevice

PLAN = Plan(
    name="tiny",
    budget_seconds=0.75,
    measure_share=0.4,
    smallest_bytes=4096,
    largest_bytes=1 << 20,
    growth=4,
    warmup_seconds=0.001,
    min_samples=3,
    max_samples=10,
    target_spread=0.1,
    pin_cap_bytes=1 << 20,
    trial_bytes=1 << 20,
    finalists=2,
)
MIB = 1 << 20


def cpu() -> FakeAcceleratorDevice:
    """A synchronous device that pins nothing."""
    return FakeAcceleratorDevice(FakeAccelerator("cpu", pinning="same object"))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """A parallel region waits for its last thread, which takes long where another process has a core."""
    with cpu().intraop(1):
        yield


def measured(device: Device, plan: Plan = PLAN, **changed: Any) -> Measurements:
    """What `measure` gives with small bounds."""
    arguments: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "cache_bytes": MIB,
        "memory_bytes": 64 * MIB,
        "pinnable_bytes": 64 * MIB,
    }
    return measure(device, plan, **(arguments | changed))


def curves(result: Measurements) -> dict[tuple[Any, ...], list[Transfer]]:
    """Points by curve."""
    found: dict[tuple[Any, ...], list[Transfer]] = {}
    for point in result.transfers:
        key = (point.kind, point.memory, point.state, point.threads, point.duplex)
        found.setdefault(key, []).append(point)
    return found


PAGEABLE_CURVES = {
    ("d2h", "pageable", "warm", 0, False),
    ("d2h", "pageable", "cold", 0, False),
    ("h2d", "pageable", "warm", 0, False),
    ("h2h", "pageable", "warm", 0, False),
    ("h2h", "pageable", "warm", 1, False),
    ("h2h", "pageable", "cold", 0, False),
}
PINNED_CURVES = {
    ("d2h", "pinned", "warm", 0, False),
    ("h2d", "pinned", "warm", 0, False),
    ("h2h", "pinned", "warm", 0, False),
}


@pytest.mark.parametrize("pins", [False, True])
def test_every_curve_is_there(pins: bool) -> None:
    """Each transfer, memory and state of the contract, both directions at once, and pinned where it is on offer."""
    result = measured(DeferredDevice() if pins else cpu())
    memory = "pinned" if pins else "pageable"
    both = {("d2h", memory, "warm", 0, True), ("h2d", memory, "warm", 0, True)}
    assert set(curves(result)) == PAGEABLE_CURVES | both | (PINNED_CURVES if pins else set())


def test_points_hold_what_they_say() -> None:
    """Sizes ascend by the plan's growth; medians, quartiles, counts and rates follow from the kept samples."""
    result = measured(cpu())
    for key, points in curves(result).items():
        sizes = [point.bytes for point in points]
        if not key[-1]:
            assert sizes == [PLAN.smallest_bytes * PLAN.growth**i for i in range(len(sizes))]
        assert sizes[-1] <= PLAN.largest_bytes
        for point in points:
            assert 1 <= point.samples == len(point.raw_seconds) <= PLAN.max_samples
            assert point.median_seconds == statistics.median(point.raw_seconds) > 0
            assert point.iqr_seconds == interquartile_range(point.raw_seconds)
            assert point.gbps == pytest.approx(point.bytes / point.median_seconds / 1e9)
    for rate in result.casts:
        assert rate.gbps == pytest.approx(rate.bytes / statistics.median(rate.raw_seconds) / 1e9)
        assert rate.dtype == "bfloat16"
    assert [(rate.where, rate.threads) for rate in result.casts] == [("device", 0), ("host", 0), ("host", 1)]
    assert result.stability and result.seconds > 0


def test_fp32_has_no_casts() -> None:
    """Where gradients are fp32 already there is nothing to time."""
    assert measured(cpu(), dtype=torch.float32).casts == ()


@pytest.mark.parametrize("mib_seconds", [1e-3, 4e-3])
def test_time_is_kept(mib_seconds: float) -> None:
    """Measuring ends close to its share of the budget, where samples never agree too."""
    plan = structs.replace(PLAN, budget_seconds=1.0, max_samples=100, target_spread=-1.0)
    device = Counting(mib_seconds)
    result = measured(device, plan)
    assert result.seconds == device.now()
    assert 0.1 < result.seconds < 0.5  # the share is 0.4 s


def test_the_callers_threads_are_as_before() -> None:
    """The single-threaded curve sets torch's number and puts it back."""
    with cpu().intraop(2):
        measured(cpu())
        assert torch.get_num_threads() == 2


def test_progress_grows_from_nothing_to_the_end() -> None:
    """What is being measured is told in words, with a fraction that never falls."""
    told: list[tuple[str, float]] = []
    measured(cpu(), progress=lambda words, fraction: told.append((words, fraction)))
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions) and fractions[0] >= 0 and fractions[-1] < 1
    assert told[0][0] == "d2h pageable warm"


# -- wrong bytes ----------------------------------------------------------------------------------


class Corrupting(DeferredDevice):
    """Flips one byte at the end of one kind of copy, in one kind of memory."""

    def __init__(self, call: str, *, pinned: bool, at_bytes: int) -> None:
        super().__init__()
        self.call, self.on_pinned, self.at_bytes = call, pinned, at_bytes

    def _spoil(self, call: str, host: Tensor, destination: Tensor) -> None:
        if (
            call == self.call
            and destination.nbytes == self.at_bytes
            and self.is_pinned(host) == self.on_pinned
        ):
            self.synchronize()
            destination.view(torch.uint8)[-1] ^= 1

    def d2h(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """Copies, and spoils it."""
        super().d2h(destination, source, non_blocking=non_blocking)
        self._spoil("d2h", destination, destination)

    def h2d(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """Copies, and spoils it."""
        super().h2d(destination, source, non_blocking=non_blocking)
        self._spoil("h2d", source, destination)

    def h2h(self, destination: Tensor, source: Tensor) -> None:
        """Copies, and spoils it."""
        super().h2h(destination, source)
        self._spoil("h2h", source, destination)


@pytest.mark.parametrize("memory", ["pageable", "pinned"])
@pytest.mark.parametrize("kind", ["d2h", "h2d", "h2h"])
def test_one_flipped_byte_is_found(kind: str, memory: str) -> None:
    """Each kind of copy is compared byte for byte, and the error names it."""
    device = Corrupting(kind, pinned=memory == "pinned", at_bytes=4096)
    with pytest.raises(MeasurementError, match=rf"{kind} {memory} warm of 4,096 bytes: 1 bytes differ"):
        measured(device)


class Idle(DeferredDevice):
    """One kind of copy does nothing but for the very first, which fills the buffers."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.idle_call, self.first = call, True

    def _queue(self, call: str, work: Callable[[], object], *, blocking: bool = False) -> None:
        idle = call == self.idle_call and not self.first
        self.first = self.first and call != "h2d"
        super()._queue(call, (lambda: None) if idle else work, blocking=blocking)

    def h2h(self, destination: Tensor, source: Tensor) -> None:
        """Copies, or not."""
        if self.idle_call != "h2h":
            super().h2h(destination, source)


@pytest.mark.parametrize("kind", ["d2h", "h2d", "h2h"])
def test_a_copy_that_does_nothing_is_found(kind: str) -> None:
    """The check overwrites the destination first, so that old values do not pass for new ones."""
    with pytest.raises(MeasurementError, match=rf"{kind} \w+ warm of 4,096 bytes"):
        measured(Idle(kind))


def test_growth_by_three_checks_the_right_bytes() -> None:
    """Sizes that do not divide the arenas put every slot's own pattern back."""
    device = DeferredDevice()
    points = measured(
        device, structs.replace(PLAN, growth=3, pin_cap_bytes=1 << 18, budget_seconds=2.5, max_samples=3)
    ).transfers
    assert any(point.bytes == 4096 * 9 for point in points)


def test_a_curve_alone_is_the_one_of_the_whole_measurement() -> None:
    """The same sizes, threads and memory, without the others; pinned memory is given back."""
    device = DeferredDevice()
    plan = structs.replace(PLAN, budget_seconds=2.0, max_samples=3)
    points = curve(device, plan, kind="d2h", memory="pinned", cache_bytes=MIB, memory_bytes=64 * MIB)
    assert {(p.kind, p.memory, p.state, p.threads) for p in points} == {("d2h", "pinned", "warm", 0)}
    assert points[0].bytes == PLAN.smallest_bytes
    assert not device.pinned
    [single] = curve(
        cpu(),
        structs.replace(plan, largest_bytes=4096),
        kind="h2h",
        state="cold",
        threads=1,
        cache_bytes=MIB,
        memory_bytes=64 * MIB,
    )
    assert (single.state, single.threads, single.bytes) == ("cold", 1, 4096)


# -- memory ---------------------------------------------------------------------------------------


class Counting(FakeAcceleratorDevice):
    """Counts the bytes of host memory that are alive at once; its device memory is host memory.

    On its clock a copy takes `mib_seconds` a MiB, and nothing else takes any time.
    """

    def __init__(self, mib_seconds: float = 1e-3) -> None:
        super().__init__(FakeAccelerator("cpu"))
        self.seconds, self.mib_seconds = 0.0, mib_seconds
        self.alive = self.most = 0
        self.fresh_pages: list[int] = []

    def now(self) -> float:
        """The time that the copies took."""
        return self.seconds

    def h2h(self, destination: Tensor, source: Tensor) -> None:
        """Copies, and takes its time."""
        super().h2h(destination, source)
        self.seconds += self.mib_seconds * destination.nbytes / MIB

    def h2d(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """Copies, and takes its time."""
        super().h2d(destination, source, non_blocking=non_blocking)
        self.seconds += self.mib_seconds * destination.nbytes / MIB

    def d2h(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """Copies, and takes its time."""
        super().d2h(destination, source, non_blocking=non_blocking)
        self.seconds += self.mib_seconds * destination.nbytes / MIB

    def cast(self, destination: Tensor, source: Tensor) -> None:
        """Casts, and takes its time."""
        super().cast(destination, source)
        self.seconds += self.mib_seconds * destination.nbytes / MIB

    def _count(self, tensor: Tensor, size: int) -> Tensor:
        self.alive += size
        self.most = max(self.most, self.alive)
        weakref.finalize(tensor.untyped_storage(), self._freed, size)
        return tensor

    def _freed(self, size: int) -> None:
        self.alive -= size

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Counted."""
        return self._count(super().empty(elements, dtype), elements * dtype.itemsize)

    def pinned_empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Counted, with the second copy that exists while it is pinned."""
        self.most = max(self.most, self.alive + 2 * elements * dtype.itemsize)
        return self._count(super().pinned_empty(elements, dtype), elements * dtype.itemsize)

    def host_empty(self, elements: int, dtype: torch.dtype, *, touched: bool = True) -> Tensor:
        """Counted; pages that were never used are whole ones."""
        size = elements * dtype.itemsize
        if not touched:
            self.fresh_pages.append(size)
            size = mapped_bytes(size)
        return self._count(super().host_empty(elements, dtype, touched=touched), size)


CACHES = [0, MIB, 32 * MIB, 480 * MIB, 1 << 30]


@pytest.mark.parametrize("cache_bytes", CACHES)
@pytest.mark.parametrize("memory_bytes", [1 << 19, 3 << 19])
def test_memory_is_kept(memory_bytes: int, cache_bytes: int) -> None:
    """Little memory makes smaller buffers and shorter curves, and nothing is alive afterwards."""
    device = Counting(mib_seconds=1e-9)
    plan = structs.replace(PLAN, warmup_seconds=0.0, min_samples=1, max_samples=3)
    result = measured(device, plan, memory_bytes=memory_bytes, cache_bytes=cache_bytes)
    assert 0 < device.most <= memory_bytes
    assert device.alive == 0
    assert result.transfers[0].bytes == 4096
    assert max(point.bytes for point in result.transfers) <= memory_bytes // 5


@given(
    memory_bytes=st.integers(1, 4 * MIB),
    cache_bytes=st.sampled_from(CACHES) | st.integers(0, 1 << 30),
    page_bytes=st.sampled_from([4096, 16384, 65536]),
    smallest_bytes=st.sampled_from([4096, 5000, 8192, 12288]),
    sizes=st.integers(1, 8),
    growth=st.integers(2, 4),
    pin_cap_bytes=st.sampled_from([0, 1 << 16, MIB]),
    mib_seconds=st.sampled_from([1e-9, 1e-6, 1e-3]),
)
def test_memory_is_kept_whatever_machine_and_plan(
    memory_bytes: int,
    cache_bytes: int,
    page_bytes: int,
    smallest_bytes: int,
    sizes: int,
    growth: int,
    pin_cap_bytes: int,
    mib_seconds: float,
) -> None:
    """Of any cache, page and speed; too little memory is refused, and with just enough the first size is timed."""
    plan = structs.replace(
        PLAN,
        smallest_bytes=smallest_bytes,
        largest_bytes=min(smallest_bytes * growth ** (sizes - 1), MIB),
        growth=growth,
        warmup_seconds=0.0,
        max_samples=3,
        pin_cap_bytes=pin_cap_bytes,
    )
    device = Counting(mib_seconds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmap.PAGESIZE", page_bytes)
        try:
            result = measured(device, plan, memory_bytes=memory_bytes, cache_bytes=cache_bytes)
        except BudgetError:
            assert memory_bytes // 5 < 2 * max(smallest_bytes, page_bytes)
        else:
            assert result.transfers[0].bytes == smallest_bytes
    assert device.most <= memory_bytes
    assert device.alive == 0


def test_memory_for_nothing_is_a_budget_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than the smallest buffers need is refused with both numbers."""
    monkeypatch.setattr("mmap.PAGESIZE", 4096)
    with pytest.raises(BudgetError, match=r"10,000 bytes .* expected at least 5 buffers of 4,096"):
        measured(cpu(), memory_bytes=10_000)


def test_sizes_above_the_largest_are_a_budget_error() -> None:
    """A plan without a single size measures nothing, and says so."""
    with pytest.raises(BudgetError, match="no copy of 8,192 bytes"):
        measured(cpu(), structs.replace(PLAN, smallest_bytes=8192, largest_bytes=4096))


def test_every_cold_copy_has_pages_of_its_own() -> None:
    """Each sample of a cold curve asks for untouched memory again."""
    device = Counting()
    cold = curves(measured(device))["h2h", "pageable", "cold", 0, False]
    for point in cold:
        assert device.fresh_pages.count(point.bytes) >= point.samples


# -- pinning --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fails_above", "cap", "largest", "capped"),
    [
        (None, MIB, MIB, True),
        (None, MIB + 5000, MIB, True),
        (300_000, MIB, 1 << 18, False),
        (100, MIB, 0, False),
    ],
)
def test_the_pin_sweep_finds_the_largest_block(
    fails_above: int | None, cap: int, largest: int, capped: bool
) -> None:
    """Doubling until one block fails, or the cap; each is given back before the next."""
    device = DeferredDevice()
    device.largest_pin_bytes = fails_above
    cost = pin_cost(device, cap, None, device.now() + 60)
    assert (cost.largest_bytes, cost.capped) == (largest, capped)
    assert (cost.seconds_per_gib is None) == (largest == 0)
    assert (cost.reason is None) == capped
    assert device.most_pinned_bytes <= cap and not device.pinned


def test_the_pin_sweep_ends_in_time() -> None:
    """A block that would end after the deadline is not begun; that is no failure of pinning."""

    class Slow(DeferredDevice):
        seconds = 0.0

        def now(self) -> float:
            return self.seconds

        def pinned_empty(self, elements: int, dtype: torch.dtype) -> Tensor:
            self.seconds += elements * dtype.itemsize / MIB
            return super().pinned_empty(elements, dtype)

    device = Slow()
    cost = pin_cost(device, 64 * MIB, None, deadline=3.5)
    assert device.seconds <= 3.5
    assert (cost.largest_bytes, cost.capped) == (MIB, True)
    assert cost.seconds_per_gib == pytest.approx(1024)


@pytest.mark.parametrize("at", range(9))
def test_what_comes_in_between_does_not_make_locking_slow(at: int) -> None:
    """A second is lost while one block of nine is locked, whichever: a GiB takes a millisecond a MiB all the same."""

    class Interrupted(DeferredDevice):
        seconds, blocks = 0.0, 0

        def now(self) -> float:
            return self.seconds

        def pinned_empty(self, elements: int, dtype: torch.dtype) -> Tensor:
            self.seconds += 1e-3 * elements * dtype.itemsize / MIB + (self.blocks == at)
            self.blocks += 1
            return super().pinned_empty(elements, dtype)

    cost = pin_cost(Interrupted(), MIB, None, deadline=60.0)
    assert cost.seconds_per_gib == pytest.approx(1.024) and cost.largest_bytes == MIB


def test_what_does_not_pin_says_why() -> None:
    """The reason is kept, and nothing is tried."""
    cost = pin_cost(cpu(), MIB, "not on offer", 0.0)
    assert (cost.seconds_per_gib, cost.largest_bytes, cost.reason) == (None, 0, "not on offer")


def test_limits_come_before_the_first_pin() -> None:
    """Where the limits leave less than a page, pin_memory is not even called: a native backend would abort."""
    device = DeferredDevice()
    device.why_not_pinned = lambda: pytest.fail("tried to pin")  # type: ignore[method-assign]
    result = measured(device, pinnable_bytes=1000)
    assert "1,000 bytes" in (result.pin.reason or "")
    assert not any(entry[0] == "pinned_empty" for entry in device.log)


def test_no_more_is_pinned_than_the_cap() -> None:
    """Neither the sweep nor the buffers lock more at once than the plan and the limits allow, and all is given back."""
    for pinnable in (64 * MIB, 300_000):
        device = DeferredDevice()
        measured(device, pinnable_bytes=pinnable)
        assert 0 < device.most_pinned_bytes <= min(PLAN.pin_cap_bytes, pinnable)
        assert not device.pinned


def test_pinned_memory_is_given_back_after_an_error() -> None:
    """Also when a copy turns out to be wrong."""
    device = Corrupting("d2h", pinned=True, at_bytes=4096)
    with pytest.raises(MeasurementError):
        measured(device)
    assert not device.pinned


def test_an_arena_that_does_not_pin_leaves_the_pageable_curves() -> None:
    """A block that pinned in the sweep may fail later; the pageable curves are still measured."""

    class OnceOnly(DeferredDevice):
        def host_empty(self, elements: int, dtype: torch.dtype, *, touched: bool = True) -> Tensor:
            self.largest_pin_bytes = 0
            return super().host_empty(elements, dtype, touched=touched)

    assert {point.memory for point in measured(OnceOnly()).transfers} == {"pageable"}


# -- synchronize ----------------------------------------------------------------------------------


class Timed(DeferredDevice):
    """A virtual clock: a product takes a millisecond of the device's time, a call a microsecond."""

    waits = True
    product_seconds = 1e-3

    def __init__(self) -> None:
        super().__init__()
        self.host_seconds = self.device_seconds = 0.0

    def now(self) -> float:
        """The host's clock."""
        self.host_seconds += 1e-6
        return self.host_seconds

    def matmul(self, out: Tensor, left: Tensor, right: Tensor) -> None:
        """Queued: it costs the device time."""
        self.device_seconds = max(self.device_seconds, self.host_seconds) + self.product_seconds

    def d2h(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """Blocking: the host waits until the device is there."""
        self.host_seconds = max(self.host_seconds, self.device_seconds) + 1e-5

    def synchronize(self) -> None:
        """Waits, or does nothing."""
        if self.waits:
            self.host_seconds = max(self.host_seconds, self.device_seconds)


@pytest.mark.parametrize("product_seconds", [1e-7, 1e-5, 1e-3, 1e-1])
def test_an_honest_synchronize_passes(product_seconds: float) -> None:
    """On devices of any speed, one that is too fast to tell included."""
    device = Timed()
    device.product_seconds = product_seconds
    check_synchronize(device)


@pytest.mark.parametrize("product_seconds", [1e-5, 1e-3, 1e-1])
def test_a_synchronize_that_does_nothing_is_an_error(product_seconds: float) -> None:
    """It would make every timing a lie, so it is found on devices of any speed."""
    device = Timed()
    device.waits, device.product_seconds = False, product_seconds
    with pytest.raises(MeasurementError, match="synchronize on the deferred device does not wait"):
        check_synchronize(device)


def test_one_late_read_does_not_condemn_a_device() -> None:
    """A busy host can make a read late; the shortest of several counts."""

    class Hiccup(Timed):
        reads = 0

        def d2h(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
            self.reads += 1
            super().d2h(destination, source, non_blocking=non_blocking)
            self.host_seconds += 0.5 if self.reads % 3 == 0 else 0.0

    check_synchronize(Hiccup())


def test_a_device_that_works_while_it_is_called_is_not_kept_busy() -> None:
    """Nothing is queued however often it is asked: a fake, or an emulation, would multiply for minutes."""

    class AtOnce(Timed):
        products = 0

        def matmul(self, out: Tensor, left: Tensor, right: Tensor) -> None:
            self.products += 1
            self.host_seconds += 0.3

    device = AtOnce()
    check_synchronize(device)
    assert device.products < 20


def test_a_synchronous_device_need_not_wait() -> None:
    """On the CPU a synchronize that does nothing is right, and nothing is queued to find out."""
    device = Timed()
    device.waits, device.synchronous = False, True
    check_synchronize(device)
    assert device.device_seconds == 0


def test_waiting_is_timed_by_scope() -> None:
    """Device, stream and event are waited for with one operation queued before each."""
    device = DeferredDevice()
    cost = sync_cost(device, 7, math.inf)
    assert min(cost.device_seconds, cost.stream_seconds, cost.event_seconds) > 0
    assert [device.count(c) for c in ("synchronize", "stream.synchronize", "event.synchronize")] == [7] * 3
    assert device.count("cast") == 21


def test_waiting_is_timed_a_few_times_where_the_time_is_up() -> None:
    """A device whose synchronize takes long is not waited for as often as a plan would have it."""
    device = DeferredDevice()
    sync_cost(device, 1000, 0.0)
    assert device.count("cast") == 15


# -- sampling -------------------------------------------------------------------------------------


class Clock(FakeAcceleratorDevice):
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        super().__init__(FakeAccelerator("cpu"))
        self.seconds = 0.0

    def now(self) -> float:
        """The time it was told."""
        return self.seconds


def sampled(plan: Plan, each: Any, share_seconds: float) -> tuple[Sampled, float]:
    """Samples of an operation whose n-th call takes each(n) seconds, and the time all of it took."""
    clock, calls = Clock(), 0

    def run(count: int) -> float:
        nonlocal calls
        before = clock.seconds
        for _ in range(count):
            clock.seconds += each(calls)
            calls += 1
        return clock.seconds - before

    return sample(clock, plan, run, share_seconds, warm_up=False), clock.seconds


def test_sampling_stops_when_samples_agree() -> None:
    """Twice the least number is enough where the spread is within the target."""
    result, _ = sampled(PLAN, lambda n: 1e-3, share_seconds=100.0)
    assert len(result.seconds) == 2 * PLAN.min_samples
    assert result.median == pytest.approx(1e-3)


def test_sampling_stops_at_the_most_samples() -> None:
    """Samples that never agree end at the plan's number."""
    result, _ = sampled(PLAN, lambda n: 1e-3 * (1 + n % 2), share_seconds=100.0)
    assert len(result.seconds) == PLAN.max_samples


def test_sampling_stops_at_the_deadline() -> None:
    """Time is up before the samples agree."""
    plan = structs.replace(PLAN, max_samples=1000)
    result, seconds = sampled(plan, lambda n: 1e-2 * (1 + n % 2), share_seconds=0.2)
    assert PLAN.min_samples <= len(result.seconds) < 20
    assert seconds == pytest.approx(0.2, abs=0.02)


def test_one_sample_is_taken_when_time_is_up_already() -> None:
    """There is always a number, though it tells nothing about its spread."""
    result, _ = sampled(PLAN, lambda n: 1e-3, share_seconds=-1.0)
    assert len(result.seconds) == 1 and result.iqr == 0


def test_short_operations_are_repeated() -> None:
    """An operation near the timer's own cost is timed many at a time, and counted as one."""
    calls: list[int] = []

    def each(n: int) -> float:
        calls.append(n)
        return 1e-6

    result, _ = sampled(PLAN, each, share_seconds=10.0)
    assert result.median == pytest.approx(1e-6)
    assert len(calls) > 40 * len(result.seconds)


def test_a_busy_host_does_not_take_more_than_its_share() -> None:
    """An operation of 10 us that another process makes 7 ms long, as a parallel region on a busy core does:
    sampling ends within about its share, and the verdict says unsteady.
    """
    result, seconds = sampled(
        structs.replace(PLAN, max_samples=40), lambda n: 7e-3 if n > 5 and n % 3 else 1e-5, share_seconds=0.05
    )
    assert seconds < 0.05 * 2 + 5 * 7e-3
    point = transfer(result.seconds)
    assert stability([point] * 4)[0].startswith("unsteady")


def test_a_host_that_becomes_busy_is_sampled_with_fewer_repeats() -> None:
    """An operation of a microsecond that is 7 ms long from now on is no longer repeated 50 times a sample."""
    result, _ = sampled(PLAN, lambda n: 7e-3 if n else 1e-6, share_seconds=1.0)
    assert len(result.seconds) >= 2 * PLAN.min_samples


@given(
    each=st.lists(st.floats(1e-7, 1e-2), min_size=1, max_size=20),
    share=st.floats(1e-3, 1.0),
)
def test_sampling_keeps_its_share_whatever_operations_take(each: list[float], share: float) -> None:
    """It never lasts longer than twice its share and one sample more."""
    result, seconds = sampled(PLAN, lambda n: each[n % len(each)], share_seconds=share)
    assert 1 <= len(result.seconds) <= PLAN.max_samples
    longest_sample = 64 * max(each)
    assert seconds <= 2 * share + longest_sample + max(each)


def test_sizes_that_would_not_fit_the_time_are_left_out() -> None:
    """On a machine of a megabyte a second the curve ends early, and what it has is within its time."""

    class Slow(Clock):
        def h2h(self, destination: Tensor, source: Tensor) -> None:
            super().h2h(destination, source)
            self.seconds += destination.nbytes * 1e-6

    device = Slow()
    points = curve(device, PLAN, kind="h2h", cache_bytes=MIB, memory_bytes=64 * MIB)
    assert [point.bytes for point in points] == [4096, 16384]
    assert device.seconds <= PLAN.budget_seconds * PLAN.measure_share * 1.2


# -- verdict --------------------------------------------------------------------------------------


def transfer(seconds: tuple[float, ...], size: int = 4096) -> Transfer:
    """A point with these samples."""
    median = statistics.median(seconds)
    return Transfer(
        kind="d2h",
        memory="pageable",
        state="warm",
        bytes=size,
        median_seconds=median,
        iqr_seconds=interquartile_range(seconds),
        samples=len(seconds),
        gbps=size / max(median, 1e-12) / 1e9,
        raw_seconds=seconds,
    )


STEADY = transfer((1.0, 1.01, 1.0, 0.99))
LOOSE = transfer((1.0, 2.0, 1.0, 3.0), 65536)
SINGLE = transfer((1.0,))


def test_steady_curves_say_so() -> None:
    """One sentence with the counts and the typical spread."""
    [verdict] = stability([STEADY] * 3 + [LOOSE])
    assert verdict.startswith("steady: 3 of 4 points spread by at most 10% (IQR over median), typically ")


def test_unsteady_curves_name_the_worst_and_what_to_do() -> None:
    """The verdict, then the point that is worst, then the remedy."""
    verdict = stability([STEADY, LOOSE])
    assert verdict[0].startswith("unsteady: only 1 of 2 points")
    assert "d2h pageable warm of 65,536 bytes" in verdict[1] and "stop other work" in verdict[1]


def test_points_with_too_few_samples_are_not_called_steady() -> None:
    """A single sample has no spread, which is not the same as agreeing."""
    verdict = stability([SINGLE] * 4)
    assert verdict[0].startswith("unsteady: only 0 of 4")
    assert "4 points have fewer than 3 samples" in verdict[-1] and "--budget" in verdict[-1]


def test_a_clock_too_coarse_to_see_a_copy_divides_by_nothing() -> None:
    """Samples of zero seconds give a verdict, not a ZeroDivisionError."""
    assert stability([transfer((0.0, 0.0, 0.0))])


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50))
def test_the_interquartile_range_is_within_the_range(seconds: list[float]) -> None:
    """It is never negative and never wider than all samples."""
    assert 0 <= interquartile_range(seconds) <= max(seconds) - min(seconds) + 1e-9


def test_pin_errors_do_not_escape() -> None:
    """Pinning that fails in the middle is a fact to report, not an exception."""

    class Never(DeferredDevice):
        def why_not_pinned(self) -> str | None:
            return None

        def pinned_empty(self, elements: int, dtype: torch.dtype) -> Tensor:
            raise PinError("no")

    result = measured(Never())
    assert (result.pin.largest_bytes, result.pin.reason) == (0, "no")
    assert {point.memory for point in result.transfers} == {"pageable"}
