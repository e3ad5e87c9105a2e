"""Older versions of DeepSpeed, where `make matrix` has installed them."""

from __future__ import annotations

import pytest

from tests.matrix.__main__ import GROUPS, installed, run, verdict


@pytest.mark.matrix
@pytest.mark.parametrize("version", ["0.15.4", "0.16.9"])
def test_an_older_deepspeed_trains_the_same_to_the_bit(version: str) -> None:
    """One with the bounce buffer in its gradient path, and one without."""
    if not installed(version):
        pytest.skip(f"DeepSpeed {version} is not in .cache/matrix; `make matrix` installs it")
    results = run(version, GROUPS)
    assert [(result["case"], result["difference"]) for result in results if result["difference"]] == []
    assert {result["group"] for result in results if not result["stock_failed"]} == set(GROUPS)


@pytest.mark.parametrize(
    ("results", "cell"),
    [
        ([], "-"),
        ([{"difference": None, "stock_failed": None}] * 3, "ok 3"),
        (
            [{"difference": None, "stock_failed": None}, {"difference": None, "stock_failed": "x"}],
            "ok 1, n/a 1",
        ),
        ([{"difference": None, "stock_failed": None}, {"difference": "loss"}], "1 DIFFER"),
    ],
)
def test_a_cell_of_the_table_says_what_was_found(results: list[dict[str, object]], cell: str) -> None:
    """A difference is never hidden by what is the same."""
    assert verdict(results) == cell
