"""What DeepSpeed page-locks, against its own calls of `pin_memory` in real engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune_offload.config.layout import Layout, layout_of
from autotune_offload.machine import host
from autotune_offload.paths import pinned_blocks
from autotune_offload.records import histogram
from autotune_offload.upstream import NEWEST
from autotune_offload.workload import from_module
from tests import CHECKOUT
from tests.factories import make_workload
from tests.ports import free_port

CPU, PINNED, UNPINNED = (
    {"device": "cpu", **pin} for pin in ({}, {"pin_memory": True}, {"pin_memory": False})
)
ENGINES: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1, "offload_optimizer": PINNED},
    "stage 1, unpinned": {"stage": 1, "offload_optimizer": UNPINNED},
    "stage 1, 4 steps": {"stage": 1, "offload_optimizer": PINNED, "steps": 4},
    "stage 2": {"stage": 2, "offload_optimizer": PINNED},
    "stage 2, 4 steps": {"stage": 2, "offload_optimizer": PINNED, "steps": 4},
    "stage 2, sub-groups do nothing": {"stage": 2, "offload_optimizer": PINNED, "sub_group_size": 20000},
    "stage 3, optimizer": {"stage": 3, "offload_optimizer": PINNED},
    "stage 3, 4 steps": {"stage": 3, "offload_optimizer": PINNED, "steps": 4},
    "stage 3, in one": {"stage": 3, "offload_optimizer": PINNED, "sub_group_size": 10**12},
    "stage 3, by 20000": {"stage": 3, "offload_optimizer": PINNED, "sub_group_size": 20000},
    "stage 3, by 8000": {"stage": 3, "offload_optimizer": PINNED, "sub_group_size": 8000},
    "stage 3, by 1": {"stage": 3, "offload_optimizer": PINNED, "sub_group_size": 1},
    "stage 3, both": {"stage": 3, "offload_optimizer": PINNED, "offload_param": UNPINNED},
    "stage 3, both pinned": {"stage": 3, "offload_optimizer": PINNED, "offload_param": PINNED},
    "stage 3, parameters": {"stage": 3, "offload_optimizer": UNPINNED, "offload_param": UNPINNED},
}


@pytest.fixture(scope="module")
def spied() -> dict[str, list[int]]:
    """Each engine's blocks in bytes, as it asked for them."""
    port = free_port()
    cases = []
    for engine in ENGINES.values():
        zero = {name: value for name, value in engine.items() if name != "steps"}
        cases.append({"zero": zero, "steps": engine.get("steps", 1)})
    done = subprocess.run(
        [sys.executable, CHECKOUT / "tests" / "scripts" / "spied_pins.py"],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("blocks ")]
    return dict(zip(ENGINES, [json.loads(line.removeprefix("blocks ")) for line in lines], strict=True))


def counted(engine: dict[str, Any]) -> list[int]:
    """The same by the arithmetic."""
    import torch

    layers: list[torch.nn.Module] = []
    for _ in range(3):
        layers += [torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)]
    zero = {name: value for name, value in engine.items() if name != "steps"}
    steps = engine.get("steps", 1)
    workload = from_module(torch.nn.Sequential(*layers), dtype="bfloat16", accumulation_steps=steps)
    layout = layout_of({"zero_optimization": zero})
    blocks = pinned_blocks.own_blocks(workload, layout, host.software().deepspeed)
    if zero.get("offload_optimizer", {}).get("pin_memory"):
        blocks += pinned_blocks.optimizer_blocks(workload, layout, host.software().deepspeed)
    if zero.get("offload_param", {}).get("pin_memory"):
        blocks += pinned_blocks.parameter_blocks(workload)
    return sorted(blocks, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_the_blocks_are_those_that_deepspeed_asks_for(spied: dict[str, list[int]], name: str) -> None:
    """Every one of them; of sub-groups, whose cuts follow the model's order, the sum and no larger one."""
    engine, asked = ENGINES[name], spied[name]
    expected = counted(engine)
    if (
        engine["stage"] < 3
        or engine.get("sub_group_size", 10**12) >= 10**9
        or engine.get("sub_group_size") == 1
    ):
        assert expected == asked
        return
    assert sum(expected) == sum(asked)
    layout = layout_of({"zero_optimization": {k: v for k, v in engine.items() if k != "steps"}})
    workload = make_workload(
        partitions=histogram([64 * 128] * 6 + [128] * 3 + [64] * 3), world_size=1, dtype="bfloat16"
    )
    bound = pinned_blocks.largest_sub_group(workload, layout.sub_group_elements or 0)
    assert max(asked) <= max(2 * workload.elements, 4 * bound)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 5000))
def test_sub_groups_hold_every_element_once_and_none_is_too_large(sizes: list[int], size: int) -> None:
    """Whole partitions until the size is reached, whatever their number."""
    workload = make_workload(partitions=histogram(sizes))
    groups = pinned_blocks.sub_groups(workload, size)
    assert sum(groups) == sum(sizes)
    assert max(groups) <= pinned_blocks.largest_sub_group(workload, size)
    assert all(group >= size for group in groups[:-1]) or size >= sum(sizes)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(4, 10**6))
def test_a_fitting_sub_group_fits_in_any_order(sizes: list[int], most_bytes: int) -> None:
    """And the next larger one does not, where there is one that fits."""
    workload = make_workload(partitions=histogram(sizes))
    size = pinned_blocks.fitting_sub_group(workload, most_bytes)
    if size is None:
        assert 4 * workload.largest_elements > most_bytes
        return
    assert 4 * pinned_blocks.largest_sub_group(workload, size) <= most_bytes


@pytest.mark.parametrize(
    ("version", "stage", "always", "with_pin"),
    [("0.16.9", 2, 4, 4), ("0.18.0", 2, 4, 6), (NEWEST, 2, 0, 10), ("0.16.9", 3, 2, 6), (NEWEST, 3, 2, 6)],
)
def test_bytes_of_a_parameter_follow_stage_and_release(
    version: str, stage: int, always: int, with_pin: int
) -> None:
    """Stage 2 pins its weights in any case before 0.18.3, and 10 bytes a parameter by choice since."""
    workload = make_workload(partitions=((1 << 20, 64),), world_size=1)
    layout = Layout(stage=stage, parameters="cpu" if stage == 3 else None)
    one = 2 * workload.largest_elements if stage == 2 else 0
    assert sum(pinned_blocks.own_blocks(workload, layout, version)) == always * workload.elements
    asked = sum(pinned_blocks.optimizer_blocks(workload, layout, version))
    assert asked - one == with_pin * workload.elements


def test_on_nvme_only_what_stays_in_memory_counts() -> None:
    """The sums of the gradients, and as many parameters as `max_in_cpu` keeps."""
    workload = make_workload(partitions=((1 << 20, 64),))
    layout = layout_of(
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme"},
                "offload_param": {"device": "nvme", "max_in_cpu": 1000},
            }
        }
    )
    assert pinned_blocks.optimizer_blocks(workload, layout) == [2 << 26]
    assert pinned_blocks.own_blocks(workload, layout) == [2000]
    assert pinned_blocks.state_bytes(workload, layout) == 0
