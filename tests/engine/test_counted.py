"""The report tells of random training loops what spies have seen; see `tests.engine.counted`."""

from __future__ import annotations

import pytest

from tests.engine.apart import apart


@pytest.mark.slow
def test_the_report_tells_what_happened_in_a_handful_of_loops() -> None:
    """Copies, page-locked bytes, and who carried how many partitions and bytes; the same loops every time."""
    done = apart("counted", "--examples", "4", "--steps", "8", seconds=300)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"


@pytest.mark.long
def test_the_report_tells_what_happened_in_many_loops() -> None:
    """And in longer ones."""
    done = apart("counted", "--examples", "50", "--steps", "20", seconds=1500)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
