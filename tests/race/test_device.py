"""The race device is as unkind as an accelerator is, and no more: what may go wrong does, in some schedule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.race.device import RaceDevice
from tests.race.host_threads import DrawnThreads

SEEDS = range(60)


def outcomes(run: Callable[[RaceDevice], object]) -> set[object]:
    """Over all schedules."""
    return {run(RaceDevice(seed)) for seed in SEEDS}


def pinned(device: RaceDevice, value: float) -> Tensor:
    """Page-locked memory."""
    memory = device.pinned_empty(8, torch.float32)
    return memory.fill_(value)


def on_device(device: RaceDevice, value: float) -> Tensor:
    """Device memory."""
    memory = device.empty(8, torch.float32)
    device.h2d(memory, torch.full((8,), value), non_blocking=False)
    return memory


def test_a_copy_from_page_locked_memory_reads_when_it_runs() -> None:
    """Overwritten without a wait, either value arrives; from pageable memory the values are taken at once."""

    def run(device: RaceDevice, make: Callable[[RaceDevice, float], Tensor]) -> float:
        there, source = device.empty(8, torch.float32), make(device, 1.0)
        device.h2d(there, source, non_blocking=True)
        source.fill_(2.0)
        device.synchronize()
        return float(there[0])

    assert outcomes(lambda device: run(device, pinned)) == {1.0, 2.0}
    assert outcomes(lambda device: run(device, lambda _, value: torch.full((8,), value))) == {1.0}


def test_a_copy_to_page_locked_memory_arrives_some_time() -> None:
    """To pageable memory it has arrived when the call returns."""

    def run(device: RaceDevice, target: Tensor) -> float:
        device.d2h(target, on_device(device, 3.0), non_blocking=True)
        return float(target[0])

    assert outcomes(lambda device: run(device, pinned(device, 0.0))) == {0.0, 3.0}
    assert outcomes(lambda device: run(device, torch.zeros(8))) == {3.0}


@pytest.mark.parametrize("told", [True, False])
def test_freed_memory_is_used_again_on_its_own_stream(told: bool) -> None:
    """What another stream still reads is lost, unless `record_stream` has told of it."""

    def run(device: RaceDevice) -> float:
        side, target = device.new_stream(), pinned(device, 0.0)
        source = on_device(device, 3.0)
        with device.on(side):
            device.d2h(target, source, non_blocking=True)
            if told:
                device.record_stream(source)
        del source
        device.synchronize()
        return float(target[0])

    found = outcomes(run)
    assert (found == {3.0}) is told and 3.0 in found


def test_one_stream_may_free_what_it_still_reads() -> None:
    """The next owner's work comes behind."""

    def run(device: RaceDevice) -> float:
        target, source = pinned(device, 0.0), on_device(device, 3.0)
        device.d2h(target, source, non_blocking=True)
        del source
        on_device(device, 4.0)
        device.synchronize()
        return float(target[0])

    assert outcomes(run) == {3.0}


def test_streams_have_no_order_but_by_events() -> None:
    """Without one the other stream may be first."""

    def run(device: RaceDevice, *, ordered: bool) -> float:
        side, memory, target = device.new_stream(), on_device(device, 1.0), pinned(device, 0.0)
        device.add(memory, memory)
        if ordered:
            device.order_after(side, device.record_event())
        with device.on(side):
            device.d2h(target, memory, non_blocking=True)
        device.synchronize()
        return float(target[0])

    assert outcomes(lambda device: run(device, ordered=False)) == {1.0, 2.0}
    assert outcomes(lambda device: run(device, ordered=True)) == {2.0}


def test_page_locked_memory_given_back_too_early_is_a_fault() -> None:
    """Where the copy is still under way, and only there."""

    def run(device: RaceDevice, *, waits: bool) -> bool:
        target = pinned(device, 0.0)
        device.d2h(target, on_device(device, 3.0), non_blocking=True)
        if waits:
            device.record_event().synchronize()
        device.release_pinned(target)
        return bool(device.faults)

    assert outcomes(lambda device: run(device, waits=False)) == {True, False}
    assert outcomes(lambda device: run(device, waits=True)) == {False}


def test_a_host_thread_may_be_left_in_the_middle() -> None:
    """Who does not wait for it finds nothing, half or all of its work."""

    def run(device: RaceDevice) -> float:
        target, threads = torch.zeros(8), device.own_threads(2)
        future = threads.submit(device.h2h, target, torch.ones(8))
        device.tick()
        found = float(target.sum())
        assert future.result() is None and float(target.sum()) == 8.0
        return found

    assert outcomes(run) == {0.0, 4.0, 8.0}


def test_so_many_threads_begin_in_order_and_end_in_any() -> None:
    """A task begins only once a thread is free."""
    orders = set()
    for seed in SEEDS:
        device, order = RaceDevice(seed), list[int]()
        threads = device.own_threads(2)
        assert isinstance(threads, DrawnThreads)
        tasks = [threads.submit(order.append, number) for number in range(4)]
        tasks[3].result()
        assert order.index(3) >= 2
        threads.shutdown()
        orders.add(tuple(order))
    assert len(orders) > 1 and all(sorted(order) == [0, 1, 2, 3] for order in orders)


def test_torch_on_device_memory_goes_in_stream_order() -> None:
    """Results come later; what is read back waits; views cost nothing."""
    late = 0
    for seed in SEEDS:
        device = RaceDevice(seed)
        target = pinned(device, 0.0)
        with device.in_stream_order():
            memory = on_device(device, 2.0)
            doubled = (memory[:4] * 2).add_(1)
            target[:4].copy_(doubled, non_blocking=True)
            late += target[0].item() == 0.0
            assert float(doubled.sum()) == 20.0
            assert target[0].item() == 5.0
    assert 0 < late < len(SEEDS)


def test_a_schedule_is_had_again_by_its_seed() -> None:
    """The log is the same to the last call."""

    def log(seed: int) -> list[tuple[object, ...]]:
        device = RaceDevice(seed)
        target, threads = pinned(device, 0.0), device.own_threads(2)
        device.d2h(target, on_device(device, 3.0), non_blocking=True)
        threads.submit(device.h2h, torch.zeros(8), torch.ones(8))
        device.tick()
        seen = float(target[0])
        threads.shutdown()
        return [*device.log, ("seen", seen)]

    assert [log(seed) for seed in range(20)] == [log(seed) for seed in range(20)]
