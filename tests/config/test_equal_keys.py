"""The keys that must be equal on all ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune_offload.config.equal_keys import SIZES, rest_digest, sizes, sizes_digest, with_sizes
from autotune_offload.config.keys import KEYS
from autotune_offload.upstream import KNOWN

SPELLINGS = [spelling for names in SIZES.values() for spelling in names]
VALUES = st.sampled_from(["auto", 0, 1, 5e8, 500_000_000, "500000000", 17])
SECTIONS = st.dictionaries(st.sampled_from(SPELLINGS), VALUES)


def config(**zero: Any) -> dict[str, Any]:
    """Stage 3 with both offloads."""
    both = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    return {"zero_optimization": {"stage": 3, **both, **zero}, "train_batch_size": 8}


@given(SECTIONS, SECTIONS)
def test_sizes_of_another_rank_are_taken_over(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Then both ranks have the same, nothing else has changed, and neither input has."""
    before, first = config(**mine), config(**theirs)
    kept = copy.deepcopy(before)
    after = with_sizes(before, sizes(first))
    assert sizes_digest(after) == sizes_digest(first)
    assert rest_digest(after) == rest_digest(before) == rest_digest(first)
    assert before == kept


@pytest.mark.parametrize("same", [5e8, 500_000_000, "500000000"])
def test_one_size_in_several_spellings_is_one(same: Any) -> None:
    """DeepSpeed reads them alike; "auto" is as good as absent."""
    assert sizes_digest(config(reduce_bucket_size=same)) == sizes_digest(config(reduce_bucket_size=5e8))
    assert sizes_digest(config(prefetch_bucket_size=same)) == sizes_digest(
        config(stage3_prefetch_bucket_size=same)
    )
    assert sizes_digest(config(sub_group_size="auto")) == sizes_digest(config())


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_another_size_is_seen(spelling: str) -> None:
    """Each key that hangs or aborts a job."""
    assert sizes_digest(config(**{spelling: 12})) != sizes_digest(config(**{spelling: 13}))


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"offload_param": {"device": "cpu", "pin_memory": True}}, True),
        ({"offload_optimizer": {"device": "cpu", "nvme_path": "/b"}}, True),
        ({"overlap_comm": False}, True),
        ({"offload_param": {"device": "none"}}, False),
        ({"stage": 2}, False),
        ({"contiguous_gradients": False}, False),
    ],
)
def test_what_may_differ_by_rank_is_told_from_what_may_not(change: dict[str, Any], same: bool) -> None:
    """Page-locking may; the stage may not."""
    assert (rest_digest(config(**change)) == rest_digest(config())) is same


def test_every_size_that_is_written_is_checked() -> None:
    """A key that is added to what `tune` writes is added here as well, and all of them are DeepSpeed's."""
    written = {name for key in KEYS if key.unit == "elements" for name in key.spellings}
    assert written <= set(SPELLINGS) <= KNOWN


def test_a_configuration_without_the_section_has_no_sizes() -> None:
    """It is not for us to refuse."""
    assert sizes({}) == sizes({"zero_optimization": 3}) == {}
