"""The optimizer's pass in pieces: on the virtual clock, where what hides behind what can be seen to the last bit."""

from __future__ import annotations

import pytest

from autotune_offload.described import machine as described_machine
from autotune_offload.described.simulated import SimulatedDevice
from autotune_offload.paths.pieces import thread_counts
from autotune_offload.records import Back
from benchmarks.described_step import fused_seconds, simulated
from tests.described.test_machine import SHIPPED
from tests.described.test_simulated import machine

ELEMENTS = 1 << 26
WITH_A_LINK = [name for name in SHIPPED if described_machine.load(name).kind != "cpu"]


def seconds(
    device: SimulatedDevice, threads: int, *, on_host: bool, page_lock: bool = True, scale: float = 1.0
) -> float:
    """Of the pass over `ELEMENTS` weights, the 16-bit ones into the device's memory or the host's."""
    back: Back = "in place" if on_host else "staged" if page_lock else "direct"
    return fused_seconds(device, ELEMENTS, threads=threads, back=back, scale=scale)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("name", WITH_A_LINK)
def test_the_link_hides_behind_the_pass(name: str, ranks: int) -> None:
    """With all threads, sending 16-bit weights adds no more than 5 % to the longer of the pass and the link."""
    device = simulated(name, ranks)
    threads = device.most_threads()
    alone = seconds(simulated(name, ranks), threads, on_host=True)
    link = 2 * ELEMENTS / device.speeds.link["h2d", "pinned"]
    both = seconds(device, threads, on_host=False)
    assert max(alone, link) <= both <= 1.05 * max(alone, link), (alone, link, both)


def test_behind_a_slow_link_the_pass_hides() -> None:
    """Then the link is the longer of the two, and nothing is added to it but the first piece."""
    slow = machine("t4_pcie3", h2d__pinned__bandwidth_gbps=1.0, h2d__pageable__bandwidth_gbps=1.0)
    device = SimulatedDevice(slow)
    device.checked_elements = 64
    link = 2 * ELEMENTS / 1e9
    took = seconds(device, device.most_threads(), on_host=False)
    assert link <= took <= 1.05 * link


def test_where_it_stays_on_the_host_the_pass_takes_its_bytes_through_memory() -> None:
    """30 a weight, and 34 where gradients are scaled; one thread reaches what one thread reaches."""
    device = simulated("t4_pcie3", 1)
    speeds, threads = device.speeds, device.most_threads()
    for count, rate in ((threads, speeds.copy_all), (1, speeds.copy_one)):
        for scale, traffic in ((1.0, 30), (0.5, 34)):
            expected = traffic * ELEMENTS / (2 * rate)
            took = seconds(simulated("t4_pcie3", 1), count, on_host=True, scale=scale)
            assert took == pytest.approx(expected, rel=0.03)


def test_without_page_locked_memory_the_ring_is_pageable() -> None:
    """The calling thread then waits for each copy, and the others compute meanwhile."""
    device = simulated("t4_pcie3", 1)
    threads = device.most_threads()
    locked = seconds(simulated("t4_pcie3", 1), threads, on_host=False)
    assert locked < seconds(device, threads, on_host=False, page_lock=False) < 1.3 * locked


def test_thread_counts_end_with_the_most() -> None:
    """Powers of two, and the most itself."""
    assert [thread_counts(n) for n in (0, 1, 2, 3, 8, 12)] == [
        (1,),
        (1,),
        (1, 2),
        (1, 2, 3),
        (1, 2, 4, 8),
        (1, 2, 4, 8, 12),
    ]
