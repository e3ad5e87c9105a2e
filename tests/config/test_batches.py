"""Accumulation steps as DeepSpeed itself derives them."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from hypothesis import given
from hypothesis import strategies as st

from autotune_offload.config.batches import accumulation_steps

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


class Mpu:
    """So many data-parallel ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def get_data_parallel_world_size(self) -> int:
        """How many."""
        return self.ranks


@pytest.mark.parametrize(
    ("keys", "ranks", "steps"),
    [
        ({MICRO: 4, STEPS: 16}, 1, 16),
        ({MICRO: 4, STEPS: 16.0}, 1, 16),
        ({TRAIN: 64, MICRO: 4}, 1, 16),
        ({TRAIN: 64, MICRO: 4}, 8, 2),
        ({TRAIN: 64.0, MICRO: 4}, 2, 8),
        ({TRAIN: 64}, 8, 1),
        ({MICRO: 4}, 8, 1),
        ({TRAIN: 64, STEPS: 4}, 2, 4),
        ({TRAIN: 64, MICRO: 4, STEPS: "auto"}, 2, 8),
        ({TRAIN: "auto", MICRO: "auto", STEPS: 4}, 2, 4),
    ],
)
def test_steps_are_what_deepspeed_derives(keys: dict[str, Any], ranks: int, steps: int) -> None:
    """Of any two of the three keys, floats of a YAML file among them; "auto" is not given."""
    assert accumulation_steps(keys, ranks) == steps


@given(
    st.dictionaries(
        st.sampled_from([TRAIN, MICRO, STEPS]), st.sampled_from([1, 2, 4, 16, 16.0, 64, 256]), min_size=1
    ),
    st.sampled_from([1, 2, 8]),
)
def test_a_configuration_that_deepspeed_takes_has_its_own_steps(keys: dict[str, Any], ranks: int) -> None:
    """Whole, through its own parser, for every combination that it accepts."""
    try:
        parsed = DeepSpeedConfig(dict(keys), mpu=Mpu(ranks))
        parsed.world_size = ranks  # its parser takes 1 where no process group is
        for key in (TRAIN, MICRO, STEPS):
            setattr(parsed, key, keys.get(key))
        parsed._configure_train_batch_size()
    except AssertionError:
        return
    assert accumulation_steps(keys, ranks) == parsed.gradient_accumulation_steps


@pytest.mark.parametrize(
    "keys", [{}, {MICRO: "4", TRAIN: 64}, {TRAIN: 2, MICRO: 4}, {STEPS: -3, MICRO: 1}, {STEPS: 1.5}]
)
def test_what_deepspeed_refuses_is_one_step_here(keys: dict[str, Any]) -> None:
    """It says so itself when it starts; until then nothing is raised."""
    assert accumulation_steps(keys, 1) == 1
