"""Random training loops are the same with a path and without; see `tests.engine.loops`, which says what is drawn."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import CHECKOUT
from tests.engine.loops import FAULTS


def loops(*arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """In a process of its own, on the CPU accelerator."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "DS_ACCELERATOR": "cpu"}
    environment.pop("RANK", None)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.engine.loops", *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=environment,
        check=False,
    )


@pytest.mark.slow
def test_a_handful_of_loops_is_the_same_to_the_bit() -> None:
    """The same ones every time."""
    done = loops("--examples", "4", "--steps", "12", seconds=300)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"


@pytest.mark.long
def test_hundreds_of_loops_are_the_same_to_the_bit() -> None:
    """And longer ones."""
    done = loops("--examples", "200", "--steps", "20", seconds=1500)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"


@pytest.mark.long
@pytest.mark.parametrize("fault", sorted({*FAULTS} - {"settle"}))
def test_the_loops_find_what_is_taken_out(fault: str) -> None:
    """Otherwise they would prove nothing. Two copies to one destination are rare there: `test_attach` has `settle`."""
    done = loops("--examples", "400", "--steps", "20", "--without", fault, seconds=1500)
    assert done.returncode == 1, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    assert "differ" in done.stdout
