"""The step on described machines: the page's table is what the command prints, and a wrong choice is regretted."""

from __future__ import annotations

import pytest
from msgspec import structs

from autotune_offload import workload
from autotune_offload.api.probe import probe
from autotune_offload.config.layout import Layout
from autotune_offload.records import Profile
from benchmarks import described_step
from tests import CHECKOUT

PAGE = CHECKOUT / "docs" / "machines.md"


@pytest.fixture(scope="module")
def rows() -> list[described_step.Row]:
    """All rows of the table."""
    return list(described_step.rows())


def test_the_page_has_the_table_that_the_command_prints(rows: list[described_step.Row]) -> None:
    """`python -m benchmarks.described_step`."""
    assert described_step.table(rows) in PAGE.read_text(encoding="utf-8")


def test_the_pass_wins_everywhere_with_as_many_threads(rows: list[described_step.Row]) -> None:
    """By a third at least, and by more against one thread."""
    assert len(rows) >= 20
    for row in rows:
        assert row.own_one_thread_seconds > row.own_seconds > 1.5 * row.ours_seconds, row


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Of a machine whose device has memory of its own."""
    return probe(
        device=described_step.simulated("a100_pcie4", 1),
        workload=workload.from_parameter_count(1_000_000_000),
        plan="quick",
        layout=Layout(parameters=None),
    )


def test_the_decided_step_is_the_best_there_is(profile: Profile) -> None:
    """Within a few percent of everything that was weighed, on the noiseless clock."""
    device = described_step.simulated("a100_pcie4", 1)
    lost, chosen, _ = described_step.regret(profile, device, 1 << 24)
    assert 0 <= lost < 0.05 and "page-locked buffers" in chosen


def test_a_wrong_step_is_regretted(profile: Profile) -> None:
    """DeepSpeed's own, and one thread."""
    assert profile.step is not None
    device = described_step.simulated("a100_pcie4", 1)
    for threads, back in ((0, "direct"), (1, "staged")):
        wrong = structs.replace(profile.step, threads=threads, back=back)
        lost, _, best = described_step.regret(structs.replace(profile, step=wrong), device, 1 << 24)
        assert lost > 0.5 and "7 threads" in best
