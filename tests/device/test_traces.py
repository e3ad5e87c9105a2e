"""A profiler's trace, read: bytes by direction, and how much of the copies lies beside other work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.device.profiled import BACKWARD, STEP, UPDATE, read
from benchmarks.device.traces import Trace, common, length, over_link, union


def event(category: str, name: str, begin: float, seconds: float, **arguments: Any) -> dict[str, Any]:
    """A complete event as Kineto writes it; times are given in milliseconds."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": begin * 1e3,
        "dur": seconds * 1e3,
        "args": arguments,
    }


EVENTS = [
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    event("user_annotation", BACKWARD, 0, 10),
    event("gpu_user_annotation", BACKWARD, 0.5, 12),
    event("kernel", "gemm", 1, 4),
    event("kernel", "gemm", 4, 2),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 5, 4, bytes=4000),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 1, 1, bytes=77),
    event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 2, 1, bytes=500),
    event("user_annotation", STEP, 10, 10),
    event("user_annotation", UPDATE, 11, 3),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 12, 4, bytes=2000),
    event("kernel", "after", 15, 1),
]


def test_a_backward_pass_and_a_step_are_told_apart() -> None:
    """Bytes each way, and the time that copies and kernels, or copies and the update, have in common."""
    found = read(Trace(EVENTS))
    assert found["backward_seconds"] == pytest.approx(0.01) and found["kernels"] == 2
    gradients = found["gradients_to_host"]
    assert gradients["bytes"] == 4000 and gradients["copies"] == 1
    assert gradients["seconds"] == pytest.approx(0.004)
    assert gradients["hidden_seconds"] == pytest.approx(0.001)
    assert gradients["hideable_seconds"] == pytest.approx(0.004)
    assert gradients["beside_seconds"] == pytest.approx(0.005)
    assert found["sums_to_device"]["bytes"] == 500
    assert found["sums_to_device"]["hidden_seconds"] == pytest.approx(0.001)
    weights = found["weights_to_device"]
    assert weights["bytes"] == 2000 and weights["hidden_seconds"] == pytest.approx(0.002)
    assert found["to_host_in_step"]["copies"] == 0


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("Memcpy DtoH (Device -> Pageable)", "d2h"),
        ("CopyDeviceToHost", "d2h"),
        ("Memcpy HtoD (Pinned -> Device)", "h2d"),
        ("CopyHostToDevice", "h2d"),
    ],
)
def test_copies_are_known_by_the_names_of_both_vendors(name: str, direction: str) -> None:
    """Kineto names them otherwise on ROCm."""
    trace = Trace([event("gpu_memcpy", name, 1, 1, bytes=8)])
    assert [copy.direction for copy in trace.copies((0.0, 1.0))] == [direction]


def test_a_copy_without_its_bytes_is_not_counted_as_none() -> None:
    """The sum is unknown then."""
    trace = Trace(
        [event("gpu_memcpy", "Memcpy DtoH", 1, 1), event("gpu_memcpy", "Memcpy DtoH", 3, 1, bytes=8)]
    )
    found = over_link(trace.copies((0.0, 1.0)), "d2h", [])
    assert found["copies"] == 2 and found["bytes"] is None and found["hidden_seconds"] == 0


def test_moments_are_joined_and_cut() -> None:
    """Spans that touch count once."""
    assert union([(3, 4), (0, 1), (1, 2), (0.5, 0.7)]) == [(0, 2), (3, 4)]
    assert common([(0, 2), (3, 5)], [(1, 4)]) == [(1, 2), (3, 4)]
    assert length([(0, 2), (3, 5)]) == 4


def test_the_profilers_own_file_is_read(tmp_path: Path) -> None:
    """What `torch.profiler` writes here has our ranges, and no copies, since there is no device."""
    with torch.profiler.profile() as profiler:
        for name in (BACKWARD, STEP):
            with torch.profiler.record_function(name):
                torch.ones(8).sum()
    file = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(file))
    assert json.loads(file.read_text())["traceEvents"]
    found = read(Trace.read(file))
    assert found["backward_seconds"] > 0 and found["gradients_to_host"]["copies"] == 0
