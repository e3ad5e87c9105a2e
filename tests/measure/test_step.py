"""Measuring a step: on described machines to the rate, on real memory within bounds, absent with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec import structs

from autotune_offload.described import machine as described_machine
from autotune_offload.described.simulated import SimulatedDevice
from autotune_offload.machine.device import Device
from autotune_offload.measure.measure import measure
from autotune_offload.measure.step import step_rates
from autotune_offload.paths.pieces import thread_counts
from autotune_offload.paths.step_stages import PIECE_ELEMENTS
from autotune_offload.records import StepRates
from tests.fakes import FakeAccelerator, FakeAcceleratorDevice
from tests.measure.test_measure import PLAN

PLENTY = 1 << 30


def rates(device: Device, *, memory_bytes: int = PLENTY, seconds: float = 1.0, **changed: Any) -> StepRates:
    """What is measured in so much time."""
    return step_rates(
        device,
        structs.replace(PLAN, **changed),
        torch.bfloat16,
        cache_bytes=0,
        memory_bytes=memory_bytes,
        deadline=device.now() + seconds,
    )


def simulated(name: str = "a100_pcie4", ranks: int = 1) -> SimulatedDevice:
    """One rank's device on a shipped machine."""
    return SimulatedDevice(described_machine.load(name), ranks=ranks)


def test_the_pass_is_timed_by_every_number_of_threads() -> None:
    """Each reaches what so many threads reach, and the most come first."""
    device = simulated()
    found = rates(device)
    assert [p.threads for p in found.passes] == list(reversed(thread_counts(device.most_threads())))
    for timed in found.passes:
        reached = 30 * timed.elements / timed.median_seconds
        expected = 2 * min(timed.threads * device.speeds.copy_one, device.speeds.copy_all)
        assert 0.7 * expected < reached <= expected, timed.threads
    assert found.why_no_pass is None and found.threads == device.most_threads() > 1


def test_several_ranks_of_a_host_have_the_threads_that_launchers_set() -> None:
    """One each; DeepSpeed's own step is held against the pass with these."""
    assert rates(simulated(ranks=4)).threads == 1


def test_the_casts_are_timed_where_they_are_done() -> None:
    """Into new pages the host's is slower; the device has its own unless it is the host."""
    found = {(n.where, n.state, n.threads): n.gbps for n in rates(simulated()).narrowings}
    assert set(found) == {
        ("host", "warm", 0),
        ("host", "cold", 0),
        ("host", "warm", 1),
        ("device", "warm", 0),
    }
    assert found["host", "cold", 0] < 0.7 * found["host", "warm", 0] < found["device", "warm", 0]
    assert {n.where for n in rates(simulated("cpu")).narrowings} == {"host"}


def test_what_there_is_no_time_for_is_left_out() -> None:
    """The pass with the most threads is timed once in any case."""
    device = simulated()
    found = rates(device, seconds=1e-3, warmup_seconds=0.0)
    assert [p.threads for p in found.passes] == [max(p.threads for p in found.passes)]
    assert len(found.passes[0].raw_seconds) >= 1


def test_too_little_memory_is_told() -> None:
    """Nothing is timed, and nothing fails."""
    found = rates(simulated(), memory_bytes=1 << 20)
    assert not found.passes and not found.narrowings
    assert found.why_no_pass is not None and "1,048,576 bytes of host memory" in found.why_no_pass


class WithoutCompiler(FakeAcceleratorDevice):
    """A host that cannot compile the pass."""

    def why_no_pass(self, rounded: torch.dtype | None) -> str | None:
        """No compiler."""
        del rounded
        return "no C compiler was found"


def test_without_a_compiler_the_casts_alone_are_timed() -> None:
    """The reason is kept."""
    found = rates(WithoutCompiler(FakeAccelerator("cpu", pinning="same object")), seconds=0.05)
    assert found.narrowings and not found.passes and found.why_no_pass == "no C compiler was found"


def test_a_pass_that_fails_costs_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no thread can be started."""

    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("autotune_offload.paths.pieces.Pieces.run", fails)
    found = rates(simulated())
    assert not found.passes and "can't start new thread" in str(found.why_no_pass)


def test_the_data_keeps_to_the_memory() -> None:
    """Twenty bytes a weight, and at least a piece."""
    found = rates(simulated(), memory_bytes=20 * 3 * PIECE_ELEMENTS)
    assert {p.elements for p in found.passes} == {3 * PIECE_ELEMENTS}
    assert [p.threads for p in found.passes] == [1]  # with more threads each would have but one piece


@pytest.mark.parametrize("step", [True, False])
def test_a_probe_measures_a_step_within_its_time(step: bool) -> None:
    """Only where it is asked for; the curves then have less time."""
    device = simulated()
    found = measure(
        device,
        structs.replace(PLAN, budget_seconds=5.0),
        dtype=torch.bfloat16,
        cache_bytes=0,
        memory_bytes=PLENTY,
        pinnable_bytes=PLENTY,
        step=step,
    )
    assert (found.step is not None) == step and found.seconds < 2.0
