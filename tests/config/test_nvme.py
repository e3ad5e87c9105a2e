"""The keys for NVMe: what follows from a drive, a model and memory, and what DeepSpeed will not take."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from autotune_offload.config.nvme import (
    as_keys,
    buffers_needed,
    fitted,
    left_elements,
    mistakes,
    most_block_bytes,
    threads_key,
)
from autotune_offload.records import AioSetting, Drive, Limits
from autotune_offload.workload import from_parameter_count

MODEL = from_parameter_count(1_000_000_000, world_size=1, accumulation_steps=1, dtype="bfloat16")
ROOM = Limits(available_bytes=1 << 40, pinnable_bytes=1 << 40)
FAST = AioSetting(block_bytes=1 << 23, queue_depth=32, threads=4)
DRIVE = Drive(
    folder="/nvme",
    device="259:1",
    host="host",
    created="2026-12-01T00:00:00+00:00",
    ranks=1,
    files=4,
    file_bytes=1 << 24,
    written_bytes=1 << 30,
    elapsed_seconds=30.0,
    deepspeed="0.19.8",
    times=(),
    chosen=FAST,
    gain=2.0,
    noise=0.02,
    reasons=("2.00 times as fast",),
)


def swapping(**sections: Any) -> dict[str, Any]:
    """A configuration with both sections on NVMe."""
    zero: dict[str, Any] = {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", **sections.pop("optimizer", {})},
        "offload_param": {"device": "nvme", "nvme_path": "/nvme", **sections.pop("param", {})},
        **sections.pop("zero", {}),
    }
    return {"zero_optimization": zero, **sections}


def tuned(config: dict[str, Any], drive: Drive | None = DRIVE, limits: Limits = ROOM, **given: Any) -> Any:
    """What becomes of it; the input is unchanged."""
    before = json.dumps(config)
    found = fitted(
        config, drive, given.pop("workload", MODEL), limits, version=given.pop("version", "0.19.8"), **given
    )
    assert json.dumps(config) == before
    return found


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("0.15.4", "thread_count"),
        ("0.16.3", "thread_count"),
        ("0.16.4", "intra_op_parallelism"),
        ("0.19.8", "intra_op_parallelism"),
    ],
)
def test_keys_are_the_versions_own_and_numbers(version: str, name: str) -> None:
    """Nothing that JSON would put in quotes."""
    assert threads_key(version) == name
    keys = as_keys(FAST, version)
    assert keys[name] == 4 and set(map(type, keys.values())) == {int, bool}
    assert not list(mistakes({"aio": keys}, version))


def test_a_drives_setting_is_written_with_its_reason() -> None:
    """And not over the user's own."""
    found = tuned(swapping())
    assert found.config["aio"] == as_keys(FAST, "0.19.8")
    assert all("2.00 times" in change.reason for change in found.changes if change.key.startswith("aio."))
    kept = tuned(swapping(aio={"queue_depth": 4, "thread_count": 2}))
    assert kept.config["aio"]["queue_depth"] == 4
    assert any("aio.queue_depth stays 4" in notice for notice in kept.notices)


def test_without_a_measured_drive_the_section_is_left_alone() -> None:
    """With the command that measures it."""
    found = tuned(swapping(), drive=None)
    assert "aio" not in found.config and "probe --nvme /nvme" in found.notices[0]


def test_a_block_is_capped_by_the_gradients_that_it_would_leave_on_the_device() -> None:
    """A model of small partitions, most of whose gradients would stay there in fp32."""
    small = structs.replace(MODEL, partitions=((500_000, 1000), (1000, 500)))
    assert most_block_bytes(small) == 1 << 20
    assert left_elements(small, 1 << 21) == small.elements and left_elements(small, 1 << 20) == 500_000
    found = tuned(swapping(), workload=small)
    assert found.config["aio"]["block_size"] == 1 << 20
    assert any("would stay on the device" in change.reason for change in found.changes)


@given(
    partitions=st.lists(
        st.tuples(st.integers(1, 10**8), st.integers(1, 50)), min_size=1, max_size=6, unique_by=lambda p: p[0]
    )
)
def test_the_cap_leaves_a_twentieth_at_most(partitions: list[tuple[int, int]]) -> None:
    """Or DeepSpeed's own smallest size, below which nothing changes."""
    workload = structs.replace(MODEL, partitions=tuple(sorted(partitions, reverse=True)))
    block = most_block_bytes(workload)
    assert block == 1 << 20 or left_elements(workload, block) <= 0.05 * workload.elements


@pytest.mark.parametrize(
    ("flags", "count"), [((), 4), (("pipeline_read",), 8), (("pipeline_read", "pipeline_write"), 12)]
)
def test_buffers_follow_the_pipeline_flags(flags: tuple[str, ...], count: int) -> None:
    """Four for each sub-group that is resident."""
    section = dict.fromkeys(flags, True)
    assert buffers_needed(section) == count
    few = mistakes(swapping(optimizer={**section, "buffer_count": count - 1}), "0.19.8")
    assert [stops for _, _, stops in few] == [True]
    assert not list(mistakes(swapping(optimizer={**section, "buffer_count": count}), "0.19.8"))


def test_pipeline_flags_are_set_where_their_buffers_fit() -> None:
    """Else sub-groups are cut, so that the plain ones do."""
    roomy = tuned(swapping()).config["zero_optimization"]["offload_optimizer"]
    assert roomy["pipeline_read"] is True and roomy["pipeline_write"] is True and roomy["buffer_count"] == 12
    tight = tuned(swapping(), limits=Limits(available_bytes=8 << 30, pinnable_bytes=8 << 30))
    zero = tight.config["zero_optimization"]
    assert "pipeline_read" not in zero["offload_optimizer"] and zero["offload_optimizer"]["buffer_count"] == 4
    assert zero["sub_group_size"] == 200_000_000
    assert 4 * 4 * zero["sub_group_size"] <= 4 << 30


def test_what_the_user_wrote_stays_and_is_told_where_it_cannot_work() -> None:
    """Sizes that stop a run."""
    own = swapping(
        optimizer={"buffer_count": 5, "pipeline_read": True, "pipeline_write": True},
        param={"buffer_size": 1000},
    )
    found = tuned(own)
    assert found.config["zero_optimization"]["offload_optimizer"]["buffer_count"] == 5
    assert sum("will stop" in notice for notice in found.notices) == 2


def test_a_buffer_holds_the_largest_partition() -> None:
    """DeepSpeed's own holds 1e8 elements."""
    large = structs.replace(MODEL, partitions=((150_000_001, 2),))
    size = tuned(swapping(), workload=large).config["zero_optimization"]["offload_param"]["buffer_size"]
    assert size >= 150_000_001 and size % 1024 == 0
    assert "buffer_size" not in tuned(swapping()).config["zero_optimization"]["offload_param"]


def test_kept_keys_and_other_configurations_are_left() -> None:
    """`keep` protects a section or a key; what offloads to the CPU is none of this."""
    kept = tuned(swapping(), keep=("zero_optimization.offload_optimizer",))
    assert (
        kept.config["zero_optimization"]["offload_optimizer"]
        == swapping()["zero_optimization"]["offload_optimizer"]
    )
    cpu = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    assert tuned(cpu).config == cpu and tuned(cpu).changes == () and tuned(cpu).notices == ()


@pytest.mark.parametrize(
    ("aio", "version", "stops"),
    [
        ({"num_threads": 8}, "0.19.8", [False]),
        ({"thread_count": 8}, "0.19.8", [False]),
        ({"thread_count": 8}, "0.15.4", []),
        ({"intra_op_parallelism": 8}, "0.15.4", [False]),
        ({"overlap_events": "false"}, "0.19.8", [True]),
        ({"queue_depth": "32"}, "0.19.8", [True]),
        ({"block_size": "auto"}, "0.19.8", [True]),
        ({"single_submit": False, "queue_depth": 32}, "0.19.8", []),
    ],
)
def test_what_ds_nvme_tune_prints_and_old_examples_have_is_told(
    aio: dict[str, Any], version: str, stops: list[bool]
) -> None:
    """Each with what to write."""
    assert [each[2] for each in mistakes({"aio": aio}, version)] == stops
