"""Real training with DeepSpeed's CPU Adam: the same bits with the pass as without."""

from __future__ import annotations

import pytest

from tests.matrix.__main__ import STEP_GROUPS, Result, run


@pytest.fixture(scope="module")
def trained() -> list[Result]:
    """The matrix's cases on the DeepSpeed that is installed, whose CPU Adam is compiled first, in a minute."""
    return run(None, STEP_GROUPS)


@pytest.mark.long
@pytest.mark.parametrize("group", STEP_GROUPS)
def test_training_is_the_same_to_the_bit(trained: list[Result], group: str) -> None:
    """Weights, moments, gradients, norms, losses, counters and loss scales over 20 steps, on one rank and on two."""
    mine = [result for result in trained if result["group"] == group]
    assert len(mine) >= 4
    assert [(result["case"], result["difference"]) for result in mine if result["difference"]] == []
    assert [(result["case"], result["stock_failed"]) for result in mine if result["stock_failed"]] == []


@pytest.mark.long
def test_steps_overflowed_in_the_middle(trained: list[Result]) -> None:
    """In one rank and in two: the steps around them have the same bits."""
    forced = [result for result in trained if "overflow" in result["case"]]
    assert len(forced) == 6 and all(result["overflows"] > 0 for result in forced)
