"""Where the time of one gradient goes, and that it adds up to what the cost model says."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from autotune_offload.decide.cost_model import CostModel
from autotune_offload.records import Baseline, Candidate, Profile
from autotune_offload.reports.timeline import Stage, timeline
from autotune_offload.upstream import STOCK_SEQUENCES
from tests.factories import make_profile, make_workload

candidates = st.builds(
    Candidate,
    path=st.sampled_from(["direct", "pinned"]),
    cast=st.sampled_from(["device", "host"]),
    buffer_bytes=st.sampled_from([1 << power for power in range(18, 26)]),
    buffer_count=st.just(1),
    host_threads=st.sampled_from([0, 1, 2]),
)
rings = st.builds(
    Candidate,
    path=st.just("staged"),
    cast=st.sampled_from(["device", "host"]),
    buffer_bytes=st.sampled_from([1 << power for power in range(18, 26)]),
    buffer_count=st.sampled_from([2, 3, 4]),
    host_threads=st.sampled_from([0, 1, 2]),
)
stock = st.builds(
    Baseline,
    name=st.sampled_from(list(STOCK_SEQUENCES)),
    versions=st.just(""),
    memory=st.sampled_from(["pageable", "pinned"]),
    installed=st.just(True),
)
sizes = st.integers(1, 1 << 24)
kinds = st.sampled_from(["cpu", "cuda"])
dtypes = st.sampled_from(["bfloat16", "float32"])


def _profile(elements: int, kind: str, dtype: str) -> Profile:
    """A profile whose workload is one gradient."""
    one = ((elements, 1),)
    profile = make_profile(workload=make_workload(partitions=one, parameters=one, dtype=dtype))
    return structs.replace(profile, device=structs.replace(profile.device, kind=kind))


def _model(profile: Profile) -> CostModel:
    on_host = profile.device.kind == "cpu"
    return CostModel(profile.measurements, profile.workload, shares_host_memory=on_host, synchronous=on_host)


@given(way=candidates, elements=sizes, kind=kinds, dtype=dtypes)
def test_one_copy_ends_when_the_cost_model_says(way: Candidate, elements: int, kind: str, dtype: str) -> None:
    """Of a workload of one gradient, the last stage ends at the predicted cost; each piece has two latencies."""
    profile = _profile(elements, kind, dtype)
    expected = _model(profile).seconds(way)
    assert timeline(profile, way).seconds == pytest.approx(expected, rel=1e-9)


@given(way=stock, elements=sizes, kind=kinds, dtype=dtypes)
def test_deepspeeds_own_ends_when_the_cost_model_says(
    way: Baseline, elements: int, kind: str, dtype: str
) -> None:
    """The same holds for every sequence of DeepSpeed's own."""
    profile = _profile(elements, kind, dtype)
    expected = _model(profile).seconds(way)
    assert timeline(profile, way).seconds == pytest.approx(expected, rel=1e-9)


@given(way=rings, elements=sizes)
def test_a_ring_takes_at_least_its_slowest_lane_and_at_most_all_of_them(
    way: Candidate, elements: int
) -> None:
    """Buffers overlap the link and the host: never faster than either alone, never slower than both in turn."""
    line = timeline(_profile(elements, "cuda", "bfloat16"), way)
    lanes: dict[str, float] = {}
    for stage in line.stages:
        if stage.lane != "training waits":
            lanes[stage.lane] = lanes.get(stage.lane, 0.0) + stage.seconds
    assert max(lanes.values()) - 1e-12 <= line.seconds <= sum(lanes.values()) + 1e-12


@given(way=st.one_of(candidates, rings, stock), elements=sizes, kind=kinds)
def test_a_lane_does_one_thing_at_a_time(way: Candidate | Baseline, elements: int, kind: str) -> None:
    """No two stages of one lane overlap."""
    by_lane: dict[str, list[Stage]] = {}
    for stage in timeline(_profile(elements, kind, "bfloat16"), way).stages:
        by_lane.setdefault(stage.lane, []).append(stage)
    for stages in by_lane.values():
        for one, other in itertools.pairwise(stages):
            assert other.start_seconds >= one.end_seconds - 1e-12


def test_training_waits_for_pageable_memory_and_not_for_pinned() -> None:
    """A blocking copy holds the thread that trains for its whole length, a copy into pinned memory not at all."""
    profile = _profile(1 << 20, "cuda", "bfloat16")
    base = Candidate(path="direct", cast="device", buffer_bytes=1 << 20, buffer_count=1)
    blocking, free = timeline(profile, base), timeline(profile, structs.replace(base, path="pinned"))
    assert blocking.waits_seconds == blocking.seconds and free.waits_seconds == 0
