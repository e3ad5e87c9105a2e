"""Whatever the schedule, paths, sums, steps and changes between them leave what DeepSpeed's own code leaves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.race.moves import moves
from tests.race.training import gradients
from tests.race.weights import steps

DRAWN = {"training": (gradients, 30, 1500), "steps": (steps, 8, 250), "moves": (moves, 40, 3000)}
"""What is drawn, with how many schedules are run each time, and how many in the long run."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """A path that fails says so, in every third schedule."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def races(run: Callable[..., None], seeds: range, **fixed: Any) -> list[str]:
    """What goes wrong, with the seed that has it again."""
    found = []
    for seed in seeds:
        try:
            run(seed, **fixed)
        except Exception as error:
            found.append(f"seed {seed}: {type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("what", DRAWN)
def test_drawn_schedules_leave_what_deepspeed_leaves(what: str) -> None:
    """The same ones every time."""
    run, few, _ = DRAWN[what]
    assert races(run, range(few)) == []


@pytest.mark.long
@pytest.mark.parametrize("what", DRAWN)
def test_thousands_of_schedules_leave_what_deepspeed_leaves(what: str) -> None:
    """Others than those of the short run."""
    run, few, many = DRAWN[what]
    assert races(run, range(few, few + many)) == []


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("cast", ["device", "host"])
@pytest.mark.parametrize("path", ["direct", "pinned", "staged"])
def test_every_path_and_place_is_among_them(path: str, cast: str, place: str) -> None:
    """Whatever the draw leaves out of a few."""
    fixed = {"path": path, "cast": cast, "place": place, "accumulation": 2}
    assert races(gradients, range(2), **fixed) == []
