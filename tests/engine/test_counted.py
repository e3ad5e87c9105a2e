"""The report tells of random training loops what spies have seen; see `tests.engine.counted`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import CHECKOUT


def counted(*arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """In a process of its own, on the CPU accelerator."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "DS_ACCELERATOR": "cpu"}
    environment.pop("RANK", None)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.engine.counted", *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=environment,
        check=False,
    )


@pytest.mark.slow
def test_the_report_tells_what_happened_in_a_handful_of_loops() -> None:
    """Copies, page-locked bytes, and who carried how many partitions and bytes; the same loops every time."""
    done = counted("--examples", "4", "--steps", "8", seconds=300)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"


@pytest.mark.long
def test_the_report_tells_what_happened_in_many_loops() -> None:
    """And in longer ones."""
    done = counted("--examples", "50", "--steps", "20", seconds=1500)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
