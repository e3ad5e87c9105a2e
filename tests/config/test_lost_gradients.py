"""Who is told that DeepSpeed leaves gradients out, and who is not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune_offload.config.lost_gradients import lost, lost_by
from autotune_offload.upstream import loses_gradients


def config(stage: int = 2, **keys: Any) -> dict[str, Any]:
    """A ds_config that offloads its optimizer."""
    return {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}, **keys}


@pytest.mark.parametrize(
    ("version", "loses"),
    [
        ("0.15.1", False),
        ("0.15.2", True),
        ("0.16.9", True),
        ("0.18.9", True),
        ("0.18.9+cu121", True),
        ("0.19.0", False),
        ("0.19.8", False),
    ],
)
def test_the_releases_between_lose_and_the_others_do_not(version: str, loses: bool) -> None:
    """`python -m tests.matrix --groups sums` runs both sides of each bound that it has."""
    assert loses_gradients(version, 2, 3) is loses
    assert (lost_by(config(gradient_accumulation_steps=3), version) is not None) is loses


@given(
    version=st.sampled_from(["0.14.5", "0.15.4", "0.18.9", "0.19.8"]),
    stage=st.integers(0, 3),
    steps=st.integers(1, 9),
)
def test_file_and_engine_are_told_the_same(version: str, stage: int, steps: int) -> None:
    """One sentence, with the number of what is left out; stage 2 from three micro-steps on."""
    told = lost_by(config(stage, gradient_accumulation_steps=steps), version)
    assert told == lost(version, stage, steps)
    assert (told is not None) is (stage == 2 and steps >= 3 and version in ("0.15.4", "0.18.9"))
    if told is not None:
        assert f"{steps - 2} in the middle" in told.found and "0.19.0 or newer" in told.fix


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"gradient_accumulation_steps": "auto"}, False),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, False),
        ({"gradient_accumulation_steps": "4"}, True),
        ({"train_batch_size": 64}, None),
        ({"gradient_accumulation_steps": 2}, None),
    ],
)
def test_what_a_file_leaves_open_is_told_as_open(keys: dict[str, Any], told: bool | None) -> None:
    """True: it will be so. False: it may. None: nothing to say, as accumulation is 1 or 2."""
    mistake = lost_by(config(**keys), "0.18.9")
    assert (None if mistake is None else mistake.refused) is told


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 2},
        {"stage": 2, "offload_optimizer": {"device": "none"}},
        {"stage": 2, "offload_param": {"device": "cpu"}},
        [],
    ],
)
def test_without_its_optimizer_on_the_host_nothing_is_lost(zero: Any) -> None:
    """Gradients then stay on the device."""
    assert lost_by({"zero_optimization": zero, "gradient_accumulation_steps": 8}, "0.18.9") is None


def test_the_deprecated_switch_offloads_too() -> None:
    """`cpu_offload` stands for the section."""
    zero = {"stage": 2, "cpu_offload": True}
    assert lost_by({"zero_optimization": zero, "gradient_accumulation_steps": 8}, "0.18.9") is not None
