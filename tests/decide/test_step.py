"""The decision about the step: what is weighed, what forbids it, who wins a tie, and the reasons."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from autotune_offload import workload
from autotune_offload.config.layout import PLAIN, Layout
from autotune_offload.decide.step import decide_step
from autotune_offload.described.simulated import SimulatedDevice
from autotune_offload.paths.pieces import thread_counts
from autotune_offload.paths.step_stages import PIECE_ELEMENTS, words
from autotune_offload.records import Limits, Measurements, PassRate, PinCost, StepDecision, StepRates
from tests.described.test_simulated import machine
from tests.factories import make_choice
from tests.paths.test_step_stages import measurements

ON_DEVICE = Layout(parameters=None)
GIB = 1 << 30


def decided(
    name: str = "a100_pcie4",
    *,
    layout: Layout = ON_DEVICE,
    pinnable_bytes: int = 64 * GIB,
    measured: Measurements | None = None,
    **choice: Any,
) -> StepDecision:
    """For a billion parameters on one rank, `direct` being chosen for gradients."""
    found = decide_step(
        SimulatedDevice(machine(name)),
        measured or measurements(name),
        workload.from_parameter_count(1_000_000_000),
        Limits(available_bytes=256 * GIB, pinnable_bytes=pinnable_bytes),
        make_choice(**{"path": "direct", **choice}),
        layout=layout,
    )
    assert found is not None
    return found


def with_passes(name: str, seconds: dict[int, float]) -> Measurements:
    """A machine on which the pass over a hundred million weights takes so long by threads."""
    passes = tuple(
        PassRate(
            threads=threads,
            dtype="bfloat16",
            elements=100_000_000,
            median_seconds=each,
            iqr_seconds=0.0,
            samples=3,
            raw_seconds=(each, each, each),
        )
        for threads, each in seconds.items()
    )
    found = measurements(name)
    assert found.step is not None
    return structs.replace(found, step=structs.replace(found.step, passes=passes))


def test_the_fused_pass_with_the_ring_wins_behind_a_link() -> None:
    """With every thread that helps, through page-locked buffers, each of half a megabyte."""
    found = decided()
    most = SimulatedDevice(machine("a100_pcie4")).most_threads()
    assert (found.way, found.threads, found.back) == ("fused", most, "staged")
    assert found.chosen.pinned_bytes == (most + 3) * 2 * PIECE_ELEMENTS
    assert found.gain is not None and found.gain > 1.9
    weighed = {(c.threads, c.back) for c in found.candidates}
    counts = thread_counts(most)
    assert weighed == {(0, "direct")} | {(n, back) for n in counts for back in ("staged", "direct")}
    slowest = max(found.candidates, key=lambda c: c.predicted_seconds or 0)
    assert (slowest.threads, slowest.back) == (1, "direct")


@pytest.mark.parametrize(("name", "layout"), [("cpu", ON_DEVICE), ("a100_pcie4", PLAIN)])
def test_where_weights_stay_on_the_host_the_copy_is_the_cast(name: str, layout: Layout) -> None:
    """On the CPU and with offload_param: nothing is page-locked, and nothing is sent."""
    found = decided(name, layout=layout)
    assert {c.back for c in found.candidates} == {"in place"}
    assert not any(c.pinned_bytes for c in found.candidates) and found.way == "fused"


def test_a_ring_that_does_not_fit_is_put_aside_with_the_number() -> None:
    """Then weights go through pageable buffers."""
    found = decided(pinnable_bytes=GIB >> 10)
    assert found.back == "direct" and found.way == "fused"
    barred = [c.rejected for c in found.candidates if c.back == "staged"]
    assert all(barred) and "page-lock" in str(barred[0])
    assert any("page-locked buffers were put aside" in reason for reason in found.reasons)


def test_what_the_gradient_path_locks_counts_beside_the_ring() -> None:
    """A ring of gradients that leaves no room."""
    room = 34 << 20
    alone = decided(pinnable_bytes=room)
    beside = decided(pinnable_bytes=room, path="staged", buffer_bytes=32 << 20, buffer_count=1)
    assert (alone.back, beside.back) == ("staged", "direct")


def test_where_nothing_page_locks_nothing_is_staged() -> None:
    """The probe's own reason is given."""
    none = PinCost(seconds_per_gib=None, largest_bytes=0, capped=False, reason="pin_memory gives pageable")
    found = decided(measured=structs.replace(measurements("a100_pcie4"), pin=none))
    assert found.back == "direct"
    assert any("pin_memory gives pageable" in reason for reason in found.reasons)


def test_a_near_tie_goes_to_fewer_threads() -> None:
    """Four threads are no faster beyond the noise than two."""
    found = decided("cpu", measured=with_passes("cpu", {4: 0.199, 2: 0.2, 1: 0.4}))
    assert found.threads == 2
    assert any("within the noise" in reason and "4 threads" in reason for reason in found.reasons)
    assert decided("cpu", measured=with_passes("cpu", {4: 0.15, 2: 0.2, 1: 0.4})).threads == 4


def test_without_a_pass_deepspeeds_own_step_is_kept_and_told() -> None:
    """Its time is told too."""
    step = StepRates(threads=2, why_no_pass="no C compiler was found")
    found = decided(measured=structs.replace(measurements("a100_pcie4"), step=step))
    assert (found.way, found.threads, found.candidates) == ("deepspeed", 0, (found.own,))
    assert "no C compiler was found" in found.reasons[0] and "with 2 threads" in found.reasons[0]
    assert found.own.predicted_seconds and found.gain == 1.0


def test_no_gain_beyond_the_noise_leaves_the_beginning_to_deepspeed() -> None:
    """Where passes scatter by more than what one pass saves."""
    noisy = with_passes("cpu", {1: 0.2})
    assert noisy.step is not None
    raw = (0.1, 0.2, 0.2, 0.4, 0.4)
    passes = tuple(structs.replace(p, raw_seconds=raw) for p in noisy.step.passes)
    found = decided("cpu", measured=structs.replace(noisy, step=structs.replace(noisy.step, passes=passes)))
    assert (found.way, found.threads) == ("deepspeed", 0)
    assert "no gain beyond the noise of 100 %" in found.reasons[0]
    assert decided("cpu", measured=noisy).way == "fused"


def test_nothing_is_decided_where_nothing_was_measured() -> None:
    """Stage 2, or a step on the device."""
    found = decide_step(
        SimulatedDevice(machine("cpu")),
        structs.replace(measurements("cpu"), step=None),
        workload.from_parameter_count(1_000_000),
        Limits(available_bytes=GIB, pinnable_bytes=GIB),
        make_choice(path="direct"),
    )
    assert found is None


def test_every_candidate_has_its_words() -> None:
    """Told apart."""
    said = {words(c) for c in decided().candidates}
    assert len(said) == len(decided().candidates)
    assert "DeepSpeed's own step" in said


def test_scatter_makes_no_tie_of_two_ways_home() -> None:
    """Both have the same pass: what the driver copies once more is seen however much passes scatter."""
    found = with_passes("t4_pcie3", {5: 0.05, 1: 0.25})
    assert found.step is not None
    passes = tuple(structs.replace(p, raw_seconds=(0.9, 1.0, 1.1, 1.2, 0.8)) for p in found.step.passes)
    noisy = structs.replace(found, step=structs.replace(found.step, passes=passes))
    assert (decided("t4_pcie3", measured=noisy).threads, decided("t4_pcie3", measured=noisy).back) == (
        5,
        "staged",
    )
