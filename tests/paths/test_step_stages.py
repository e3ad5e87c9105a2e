"""What a step should take: against the virtual clock, and in its parts."""

from __future__ import annotations

import functools

import pytest
import torch

from autotune_offload.api.probe import load_plan
from autotune_offload.described.simulated import SimulatedDevice
from autotune_offload.measure.measure import measure
from autotune_offload.paths.rates import Rates
from autotune_offload.paths.step_stages import PIECE_ELEMENTS, StepCosts
from autotune_offload.records import Back, Measurements, StepCandidate, StepRates
from benchmarks.described_step import own_seconds, simulated
from tests.described.test_simulated import machine
from tests.paths.test_pieces import ELEMENTS, seconds

OWN = StepCandidate(threads=0, back="direct")


@functools.cache
def measurements(name: str) -> Measurements:
    """Of a shipped machine with a step looked at."""
    return measure(
        SimulatedDevice(machine(name)),
        load_plan("standard"),
        dtype=torch.bfloat16,
        cache_bytes=0,
        memory_bytes=1 << 34,
        pinnable_bytes=1 << 34,
        step=True,
    )


def costs(name: str, step: StepRates | None = None, *, low_bytes: int = 2) -> StepCosts:
    """For as many weights as the clock is asked for."""
    found = measurements(name)
    rates = Rates(found, shares_host_memory=name == "cpu")
    step = step or found.step
    assert step is not None
    return StepCosts(rates, step, low_bytes=low_bytes, elements=ELEMENTS)


@pytest.mark.parametrize("back", ["in place", "staged"])
@pytest.mark.parametrize("name", ["gh200", "t4_pcie3", "rtx4090_desktop"])
def test_the_pass_takes_what_the_clock_says(name: str, back: Back) -> None:
    """Within a few percent: what is not predicted is what each piece's calls take."""
    device = simulated(name, 1)
    for threads in {1, device.most_threads()}:
        way = StepCandidate(threads=threads, back=back, piece_elements=PIECE_ELEMENTS)
        took = seconds(simulated(name, 1), threads, on_host=back == "in place")
        assert costs(name).seconds(way) == pytest.approx(took, rel=0.08)


def test_deepspeeds_own_is_its_three_passes_and_the_copy() -> None:
    """All waited for; the cast goes into new pages, and the copy is of half the bytes."""
    parts = {work.what: took for work, took in costs("t4_pcie3").parts(OWN)}
    assert list(parts) == [
        "scale gradients",
        "Adam",
        "cast into a fresh, cold temporary",
        "copy from pageable memory",
    ]
    assert costs("t4_pcie3").seconds(OWN) == pytest.approx(sum(parts.values()))
    assert parts["Adam"] / parts["scale gradients"] == pytest.approx(28 / 8)
    link = SimulatedDevice(machine("t4_pcie3")).speeds.link["h2d", "pageable"]
    assert parts["copy from pageable memory"] == pytest.approx(2 * ELEMENTS / link, rel=0.05)


def test_weights_that_stay_on_the_host_cross_no_link() -> None:
    """With offload_param, and on the CPU: then the copy is the cast."""
    parts = [work for work, _ in costs("cpu").parts(StepCandidate(threads=0, back="in place"))]
    assert [work.lane for work in parts] == ["host"] * 3 and parts[-1].what == "cast to 16 bits"
    whole = [w.what for w, _ in costs("cpu", low_bytes=4).parts(StepCandidate(threads=0, back="in place"))]
    assert whole[-1] == "copy the weights"


def test_without_a_pass_the_copies_stand_for_it() -> None:
    """DeepSpeed's own step can be told nevertheless."""
    found = costs("t4_pcie3", StepRates(threads=1, why_no_pass="no compiler"))
    took = own_seconds(simulated("t4_pcie3", 1), ELEMENTS, threads=1, in_place=False)
    assert found.seconds(OWN) == pytest.approx(took, rel=0.3)


@pytest.mark.parametrize("back", ["in place", "direct"])
@pytest.mark.parametrize("name", ["gh200", "t4_pcie3", "rtx4090_desktop"])
def test_deepspeeds_own_takes_what_the_clock_says(name: str, back: Back) -> None:
    """With all threads of the host, as one rank alone has it: every part of it is what its bytes take."""
    threads = SimulatedDevice(machine(name)).threads_of_deepspeeds_step()
    took = own_seconds(simulated(name, 1), ELEMENTS, threads=threads, in_place=back == "in place")
    assert costs(name).seconds(StepCandidate(threads=0, back=back)) == pytest.approx(took, rel=0.05)


def test_threads_that_were_not_timed_are_counted_by_those_that_were() -> None:
    """The next lower number; below all of them, slower in proportion."""
    whole = measurements("t4_pcie3").step
    assert whole is not None
    most = max(whole.passes, key=lambda p: p.threads)
    found = costs("t4_pcie3", StepRates(passes=(most,), threads=1))
    way = StepCandidate(threads=most.threads, back="in place")
    single = found.seconds(StepCandidate(threads=1, back="in place"))
    assert single == pytest.approx(most.threads * found.seconds(way), rel=0.05)
    more = StepCandidate(threads=most.threads + 9, back="in place")
    assert found.seconds(more) == pytest.approx(found.seconds(way), rel=0.05)
