"""Training loops are the same with a path and without, and a difference is found where there is one.

`tests.engine.loops` says what is drawn at random, `tests.engine.known` which loops once differed.
"""

from __future__ import annotations

import pytest

from tests.engine.apart import apart


@pytest.mark.slow
def test_a_handful_of_loops_is_the_same_to_the_bit() -> None:
    """The same ones every time."""
    done = apart("loops", "--examples", "4", "--steps", "12", seconds=300)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"


@pytest.mark.slow
def test_loops_that_once_differed_are_the_same_and_differ_without_what_holds_them() -> None:
    """Each part is taken out in turn; the kind of value that must then be another one is."""
    done = apart("known", seconds=300)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"


@pytest.mark.long
def test_hundreds_of_loops_are_the_same_to_the_bit() -> None:
    """And longer ones."""
    done = apart("loops", "--examples", "200", "--steps", "20", seconds=1500)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"


@pytest.mark.long
@pytest.mark.parametrize("fault", ["drain", "keep"])
def test_random_loops_find_what_is_taken_out(fault: str) -> None:
    """Otherwise they would prove nothing. What goes wrong without other parts is drawn rarely; known loops show it."""
    done = apart("loops", "--examples", "400", "--steps", "20", "--without", fault, seconds=1500)
    assert done.returncode == 1, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    assert "differ" in done.stdout


@pytest.mark.long
def test_loops_on_drawn_schedules_are_the_same_to_the_bit() -> None:
    """DeepSpeed's own optimizer, with paths whose copies and host threads go as a seed says."""
    done = apart("loops", "--examples", "120", "--steps", "15", "--spec", "drawn", seconds=1500)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"


@pytest.mark.long
@pytest.mark.parametrize("fault", ["drain", "wait"])
def test_drawn_schedules_find_what_is_taken_out(fault: str) -> None:
    """Otherwise they would prove nothing, too."""
    done = apart(
        "loops", "--examples", "150", "--steps", "15", "--spec", "drawn", "--without", fault, seconds=1500
    )
    assert done.returncode == 1, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    assert "differ" in done.stdout
