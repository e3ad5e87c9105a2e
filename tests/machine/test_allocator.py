"""Tests of `autotune_offload.machine.allocator`: what variables set of page-locking."""

from __future__ import annotations

import pytest

from autotune_offload.machine import allocator
from autotune_offload.machine import limits as machine_limits
from autotune_offload.records import Limits
from autotune_offload.testing import FakeAccelerator, FakeAcceleratorDevice


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({}, ""),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, ""),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "pinned_use_cuda_host_register:True, pinned_num_register_threads:8"},
            "pinned_num_register_threads:8, pinned_use_cuda_host_register:true",
        ),
        (
            {"PYTORCH_ALLOC_CONF": "pinned_free_catch_all:true", "PYTORCH_CUDA_ALLOC_CONF": "pinned_x:1"},
            "pinned_free_catch_all:true",
        ),
        ({"PYTORCH_HIP_ALLOC_CONF": "garbage,:,pinned_x:1"}, "pinned_x:1"),
        ({"CUDA_LAUNCH_BLOCKING": "1", "PT_HPU_LAZY_MODE": ""}, "CUDA_LAUNCH_BLOCKING:1"),
    ],
)
def test_only_what_changes_page_locking_or_copying_is_told(environ: dict[str, str], told: str) -> None:
    """In one order and one spelling, from the variable that torch reads."""
    assert allocator.settings(environ) == told


def test_no_block_above_the_threshold_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch does: the limits count what is really taken, and say so."""
    monkeypatch.setenv(
        "PYTORCH_CUDA_ALLOC_CONF", "pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:128"
    )
    assert machine_limits.pinned_block_bytes(64 << 20) == 64 << 20
    assert machine_limits.pinned_block_bytes((64 << 20) - 1) == 64 << 20
    assert machine_limits.pinned_block_bytes((64 << 20) + 1) == (64 << 20) + 1
    limits = Limits(available_bytes=1 << 40, pinnable_bytes=129 << 20, bounds=())
    assert machine_limits.check_pinned([129 << 20], limits) is None
    refused = machine_limits.check_pinned([130 << 20], limits)
    assert refused is not None and "rounded up to a power of two up to 64 MiB" in refused


@pytest.mark.parametrize("value", ["", "x", "-1", "1.5"])
def test_a_threshold_that_is_no_number_is_none(value: str) -> None:
    """Torch itself refuses it."""
    environ = {"PYTORCH_CUDA_ALLOC_CONF": f"pinned_max_round_threshold_mb:{value}"}
    assert allocator.rounded_up_to(environ) is None


@pytest.mark.parametrize(("kind", "told"), [("cuda", "pinned_use_cuda_host_register:true"), ("cpu", "")])
def test_a_device_carries_the_settings(monkeypatch: pytest.MonkeyPatch, kind: str, told: str) -> None:
    """They are part of what it is; on the CPU they change nothing."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "pinned_use_cuda_host_register:True")
    assert FakeAcceleratorDevice(FakeAccelerator(kind)).identity.settings == told
