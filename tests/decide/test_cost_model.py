"""Predictions from synthetic curves whose latency and bandwidth are known."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from autotune_offload.decide.cost_model import CostModel
from autotune_offload.records import (
    Baseline,
    Candidate,
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


def ours_seconds(
    model: CostModel, path: Path, cast: Cast, size: int, count: int = 1, threads: int = 0
) -> float:
    """What one of our paths is predicted to cost, with `count` buffers of `size` bytes."""
    way = Candidate(path=path, cast=cast, buffer_bytes=size, buffer_count=count, host_threads=threads)
    return model.seconds(way)


def predictions(model: CostModel) -> list[float]:
    """Every path with every kind of buffer, and every stock sequence, in seconds."""
    paths: tuple[Path, ...] = ("direct", "pinned", "staged")
    casts: tuple[Cast, ...] = ("device", "host")
    memories: tuple[Memory, ...] = ("pageable", "pinned")
    ours = [
        ours_seconds(model, path, cast, size, count, threads)
        for path, cast, size, count, threads in itertools.product(
            paths, casts, (1 << 18, 1 << 25), (1, 3), (0, 1, 8)
        )
    ]
    return ours + [
        model.seconds(Baseline(name=sequence.name, versions="", memory=memory, installed=False))
        for sequence, memory in itertools.product(STOCK_SEQUENCES, memories)
    ]


rates = st.lists(st.floats(0.05, 500.0), min_size=len(CURVES) + 3, max_size=len(CURVES) + 3)
workloads = st.sampled_from(
    [
        WORKLOAD,
        structs.replace(WORKLOAD, dtype="float32"),
        structs.replace(WORKLOAD, partitions=((7, 3),)),
        structs.replace(WORKLOAD, partitions=((1 << 30, 1), (1, 100))),
    ]
)


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
    direct = ours_seconds(model, "direct", "device", 1 << 24)
    pinned = ours_seconds(model, "pinned", "device", 1 << 24)
    staged = ours_seconds(model, "staged", "device", 1 << 24, 3, 1)
    assert direct > 4 * WORKLOAD.elements / 10e9
    assert pinned < direct / 2
    assert staged < direct / 2


def test_small_pieces_pay_the_latency_each() -> None:
    """Each piece costs a cast and a copy to start."""
    model = CostModel(
        measurements([10.0] * 11, latency=1e-3), WORKLOAD, shares_host_memory=False, synchronous=False
    )
    small = ours_seconds(model, "direct", "device", 1 << 18)
    large = ours_seconds(model, "direct", "device", 1 << 25)
    pieces = 3 * (-(-10_000_000 // (1 << 16)) - -(-10_000_000 // (1 << 23)))
    assert small - large == pytest.approx(2e-3 * pieces, rel=1e-3)


def test_what_the_calling_thread_widens_counts_once() -> None:
    """At the drain it widens every gradient; only the last copy is left in front of that."""
    one = structs.replace(WORKLOAD, partitions=((10_000_000, 1),))
    model = CostModel(
        measurements([10.0] * 11), one, shares_host_memory=False, synchronous=False, compute_seconds=10.0
    )
    expected = 1e-5 + 2 * one.elements / 10e9 + 4 * one.elements / 10e9
    assert ours_seconds(model, "pinned", "host", 1 << 18) == pytest.approx(expected, rel=1e-6)
