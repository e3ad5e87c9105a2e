"""What a path keeps in device memory is stated, and counts against what it may take."""

from __future__ import annotations

from typing import Any

import pytest

from autotune_offload.paths.device_memory import (
    DEVICE_MEMORY_SHARE,
    against_device_memory,
    device_memory,
    stock_bytes,
)
from autotune_offload.records import Candidate, Workload
from tests.factories import make_choice

LARGEST = 1_000_000


def workload(**changes: Any) -> Workload:
    """One large partition beside small ones."""
    fields: dict[str, Any] = {
        "partitions": ((LARGEST, 1), (1000, 50)),
        "parameters": ((LARGEST, 1), (1000, 50)),
        "dtype": "bfloat16",
        "world_size": 1,
        "accumulation_steps": 4,
        "source": "a test",
    }
    return Workload(**{**fields, **changes})


@pytest.mark.parametrize(
    ("choice", "changes", "shares", "expected"),
    [
        ({"cast": "device", "accumulate": "device"}, {}, False, (1 << 20, 2 * LARGEST)),
        ({"cast": "device", "accumulate": "host"}, {}, False, (1 << 20, 0)),
        ({"cast": "host", "accumulate": "device"}, {}, False, (0, 2 * LARGEST)),
        ({"cast": "host", "accumulate": "device"}, {"accumulation_steps": 1}, False, (0, 0)),
        ({"cast": "device", "accumulate": "device"}, {"dtype": "float32"}, False, (0, 4 * LARGEST)),
        ({"cast": "device", "accumulate": "device"}, {}, True, (1 << 20, 0)),
    ],
)
def test_scratch_is_that_of_casts_and_of_sums(
    choice: dict[str, Any], changes: dict[str, Any], shares: bool, expected: tuple[int, int]
) -> None:
    """Each only where it is made on the device, and no sums where they are made in place."""
    kept = device_memory(
        make_choice(buffer_bytes=1 << 20, **choice), workload(**changes), shares_host_memory=shares
    )
    assert (kept.cast_bytes, kept.sums_bytes) == expected
    assert kept.bytes == sum(expected)


def test_scratch_may_take_its_share_of_the_device_or_what_deepspeed_takes() -> None:
    """Beyond both, the candidate is put aside with the number, the limit and what to change."""
    memory = 1 << 30
    share = int(memory * DEVICE_MEMORY_SHARE)
    for buffer_bytes, fits in ((share - 2 * LARGEST, True), (share + 4, False)):
        cast = Candidate(path="pinned", cast="device", buffer_bytes=buffer_bytes, buffer_count=1)
        why = against_device_memory(cast, workload(), memory, shares_host_memory=False)
        assert (why is None) is fits
        assert fits or ("0.0235 GB" in str(why) and "0.0215 GB" in str(why) and "buffer_bytes" in str(why))
        assert against_device_memory(cast, workload(), memory, shares_host_memory=True) is None
    tiny = Candidate(path="direct", cast="device", buffer_bytes=4 * LARGEST, buffer_count=1)
    assert stock_bytes(workload()) == 6 * LARGEST
    assert against_device_memory(tiny, workload(), 1, shares_host_memory=False) is None
