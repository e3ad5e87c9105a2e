"""The stages of a gradient as events that a viewer opens."""

from __future__ import annotations

from typing import Any

import pytest

from autotune_offload.reports.alternatives import alternatives, best_of_each
from autotune_offload.reports.steps import StepRow, best_steps
from autotune_offload.reports.timeline import step_timeline, timeline
from autotune_offload.reports.trace import trace
from tests.factories import make_profile


def test_every_stage_is_an_event_in_the_row_of_its_lane() -> None:
    """One process a way, named after it; the last event of each ends when the gradient is there."""
    profile = make_profile()
    found = trace([("here", profile)])["traceEvents"]
    rows: list[Any] = [*best_of_each(alternatives(profile)), *best_steps(profile)]
    names = {each["pid"]: each["args"]["name"] for each in found if each["name"] == "process_name"}
    assert len(names) == len(rows) and sum("(chosen)" in name for name in names.values()) == 2
    assert all(name.startswith("here ") and name.endswith(" elements") for name in names.values())
    lanes = {(each["pid"], each["tid"]) for each in found if each["name"] == "thread_name"}
    for process, row in zip(names, rows, strict=True):
        line = step_timeline(profile, row.way) if isinstance(row, StepRow) else timeline(profile, row.way)
        events = [each for each in found if each["pid"] == process and each["ph"] == "X"]
        assert [each["name"] for each in events] == [stage.what for stage in line.stages]
        assert {(process, each["tid"]) for each in events} <= lanes
        assert max(each["ts"] + each["dur"] for each in events) == pytest.approx(line.seconds * 1e6)
