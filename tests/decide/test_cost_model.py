"""Predictions from synthetic curves whose latency and bandwidth are known."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune_offload.decide.cost_model import CostModel
from autotune_offload.line import Line, fit
from autotune_offload.records import (
    Cast,
    CastRate,
    Kind,
    Measurements,
    Memory,
    Path,
    PinCost,
    State,
    SyncCost,
    Transfer,
    Workload,
)
from autotune_offload.upstream import STOCK_SEQUENCES

SIZES = tuple(1 << power for power in range(12, 29, 4))
CURVES: tuple[tuple[Kind, Memory, State, int], ...] = (
    ("d2h", "pageable", "warm", 0),
    ("d2h", "pageable", "cold", 0),
    ("d2h", "pinned", "warm", 0),
    ("h2d", "pageable", "warm", 0),
    ("h2d", "pinned", "warm", 0),
    ("h2h", "pageable", "warm", 0),
    ("h2h", "pageable", "warm", 1),
    ("h2h", "pageable", "cold", 0),
)
CASTS: tuple[tuple[Cast, int], ...] = (("device", 0), ("host", 0), ("host", 1))
WORKLOAD = Workload(
    partitions=((10_000_000, 3), (4096, 20)),
    parameters=((10_000_000, 3), (4096, 20)),
    dtype="bfloat16",
    world_size=1,
    accumulation_steps=1,
    source="test",
)


def measurements(gbps: list[float], latency: float = 1e-5) -> Measurements:
    """Curves and casts, in the order of CURVES and CASTS, that follow the latency and these bandwidths."""
    transfers = [
        Transfer(
            kind=kind,
            memory=memory,
            state=state,
            threads=threads,
            bytes=size,
            median_seconds=latency + size / (rate * 1e9),
            iqr_seconds=0.0,
            samples=5,
            gbps=rate,
        )
        for (kind, memory, state, threads), rate in zip(CURVES, gbps, strict=False)
        for size in SIZES
    ]
    casts = [
        CastRate(
            where=where,
            threads=threads,
            dtype="bfloat16",
            bytes=1 << 24,
            median_seconds=(1 << 24) / (rate * 1e9),
            iqr_seconds=0.0,
            samples=5,
            gbps=rate,
        )
        for (where, threads), rate in zip(CASTS, gbps[len(CURVES) :], strict=True)
    ]
    return Measurements(
        transfers=tuple(transfers),
        casts=tuple(casts),
        sync=SyncCost(device_seconds=1e-5, stream_seconds=1e-5, event_seconds=5e-6),
        pin=PinCost(seconds_per_gib=0.3, largest_bytes=1 << 30, capped=True),
        stability=(),
        seconds=1.0,
    )


def predictions(model: CostModel) -> list[float]:
    """Every path with every kind of buffer, and every stock sequence, in seconds."""
    paths: tuple[Path, ...] = ("direct", "pinned", "staged")
    casts: tuple[Cast, ...] = ("device", "host")
    memories: tuple[Memory, ...] = ("pageable", "pinned")
    ours = [
        model.path_seconds(path, cast, size, count, threads)
        for path, cast, size, count, threads in itertools.product(
            paths, casts, (1 << 18, 1 << 25), (1, 3), (0, 1, 8)
        )
    ]
    stock = [
        model.stock_seconds(sequence.name, memory)
        for sequence, memory in itertools.product(STOCK_SEQUENCES, memories)
    ]
    return ours + stock


rates = st.lists(st.floats(0.05, 500.0), min_size=len(CURVES) + 3, max_size=len(CURVES) + 3)
workloads = st.sampled_from(
    [
        WORKLOAD,
        replace(WORKLOAD, dtype="float32"),
        replace(WORKLOAD, partitions=((7, 3),)),
        replace(WORKLOAD, partitions=((1 << 30, 1), (1, 100))),
    ]
)


@given(st.floats(0, 1e-2), st.floats(1e7, 1e12))
def test_fit_recovers_latency_and_bandwidth(latency: float, rate: float) -> None:
    """From exact points, both come back; a curve without latency included."""
    line = fit([(size, latency + size / rate) for size in SIZES])
    assert line.seconds(SIZES[-1]) == pytest.approx(latency + SIZES[-1] / rate, rel=1e-6)
    assert line.seconds(SIZES[0]) == pytest.approx(latency + SIZES[0] / rate, rel=1e-6)
    assert line.bytes_per_second == pytest.approx(rate, rel=1e-2) or latency > 1e3 * SIZES[-1] / rate


@given(st.lists(st.tuples(st.integers(1, 1 << 30), st.floats(1e-8, 1e3)), min_size=1, max_size=12))
def test_fit_is_positive_and_grows_with_the_size(points: list[tuple[int, float]]) -> None:
    """Whatever was measured: no negative latency, a positive bandwidth, and more bytes take longer."""
    line = fit(points)
    assert line.latency_seconds >= 0 and line.bytes_per_second > 0
    assert 0 <= line.seconds(1) <= line.seconds(1 << 20) <= line.seconds(1 << 30)
    assert line.seconds(1 << 20) < line.seconds(1 << 20, transfers=2) or line.latency_seconds < 1e-12


def test_fit_through_one_point_takes_all_for_bandwidth() -> None:
    """There is no second point to tell latency from bandwidth."""
    line = fit([(1000, 1e-3)])
    assert line.latency_seconds == pytest.approx(0.0, abs=1e-12)
    assert line.bytes_per_second == pytest.approx(1e6)


def test_fit_without_a_point_is_an_error() -> None:
    """Points without a duration do not count either."""
    with pytest.raises(ValueError, match="no points"):
        fit([(4096, 0.0)])


def test_efficiency_is_reached_at_the_size_that_a_line_says() -> None:
    """Half of the bandwidth is reached where latency and transfer take equally long."""
    line = Line(latency_seconds=1e-5, bytes_per_second=1e10)
    assert line.bytes_at_efficiency(0.5) == pytest.approx(1e5)
    size = line.bytes_at_efficiency(0.95)
    assert size / line.seconds(size) == pytest.approx(0.95e10)


@pytest.mark.parametrize(("shares", "synchronous"), [(True, True), (False, False), (True, False)])
@given(slow=rates, faster=st.lists(st.floats(1, 100), min_size=11, max_size=11), workload=workloads)
def test_more_bandwidth_never_makes_anything_longer(
    shares: bool, synchronous: bool, slow: list[float], faster: list[float], workload: Workload
) -> None:
    """Whichever curves get faster, by whatever factors: no path and no sequence of DeepSpeed's loses."""
    fast = [rate * factor for rate, factor in zip(slow, faster, strict=True)]
    before, after = (
        predictions(
            CostModel(
                measurements(gbps),
                workload,
                shares_host_memory=shares,
                synchronous=synchronous,
                compute_seconds=0.0 if synchronous else 0.01,
            )
        )
        for gbps in (slow, fast)
    )
    for longer, shorter in zip(before, after, strict=True):
        assert 0 <= shorter <= longer * (1 + 1e-5) + 1e-9


@given(slow=rates, workload=workloads)
def test_compute_only_hides_time(slow: list[float], workload: Workload) -> None:
    """Compute beside the copies never adds to what offloading costs."""

    def with_compute(seconds: float) -> list[float]:
        model = CostModel(
            measurements(slow), workload, shares_host_memory=False, synchronous=False, compute_seconds=seconds
        )
        return predictions(model)

    for alone, beside in zip(with_compute(0.0), with_compute(1.0), strict=True):
        assert beside <= alone


def test_pinned_and_staged_hide_behind_compute_and_direct_does_not() -> None:
    """A copy into pageable memory holds the calling thread."""
    model = CostModel(
        measurements([10.0] * 11), WORKLOAD, shares_host_memory=False, synchronous=False, compute_seconds=10.0
    )
    direct = model.path_seconds("direct", "device", 1 << 24, 1, 0)
    pinned = model.path_seconds("pinned", "device", 1 << 24, 1, 0)
    staged = model.path_seconds("staged", "device", 1 << 24, 3, 1)
    assert direct > 4 * WORKLOAD.elements / 10e9
    assert pinned < direct / 2
    assert staged < direct / 2


def test_small_pieces_pay_the_latency_each() -> None:
    """Each piece costs a cast and a copy to start."""
    model = CostModel(
        measurements([10.0] * 11, latency=1e-3), WORKLOAD, shares_host_memory=False, synchronous=False
    )
    small = model.path_seconds("direct", "device", 1 << 18, 1, 0)
    large = model.path_seconds("direct", "device", 1 << 25, 1, 0)
    pieces = 3 * (-(-10_000_000 // (1 << 16)) - -(-10_000_000 // (1 << 23)))
    assert small - large == pytest.approx(2e-3 * pieces, rel=1e-3)


def test_a_curve_that_was_not_measured_is_replaced_by_its_relative() -> None:
    """Without pinned copies the pageable ones stand in, and `measured` says so."""
    gbps = [10.0] * 11
    whole = measurements(gbps)
    known = replace(
        whole, transfers=tuple(t for t in whole.transfers if t.kind == "d2h" and t.memory == "pageable")
    )
    model = CostModel(known, WORKLOAD, shares_host_memory=False, synchronous=False)
    assert model.line("h2d", "pinned") == model.line("d2h", "pageable")
    assert not model.measured("h2d", "pinned")
    assert model.measured("d2h", "pageable")


def test_threads_add_up_to_what_torchs_own_pool_reaches() -> None:
    """And never to more."""
    gbps = [10.0, 1.0, 10.0, 10.0, 10.0, 20.0, 6.0, 1.0, 50.0, 20.0, 6.0]
    model = CostModel(measurements(gbps), WORKLOAD, shares_host_memory=True, synchronous=True)
    assert [round(model.copy_rate(n) / 1e9) for n in (0, 1, 2, 8)] == [20, 6, 12, 20]
    assert [round(model.cast_rate("host", n) / 1e9) for n in (0, 1, 2, 8)] == [20, 6, 12, 20]
    assert round(model.cast_rate("device", 8) / 1e9) == 50
