"""The stages of a gradient and of a step as a trace for Chrome (about:tracing) and Perfetto (ui.perfetto.dev).

Computed from the curves, as `timeline` places them; nothing was traced. Each way is a process with a row for each lane.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from autotune_offload import trace_event
from autotune_offload.records import Profile
from autotune_offload.reports.alternatives import alternatives, best_of_each
from autotune_offload.reports.steps import best_steps
from autotune_offload.reports.timeline import Timeline, step_timeline, timeline

_LANES = ("training waits", "device", "link", "host")


def trace(named: Iterable[tuple[str, Profile]]) -> dict[str, Any]:
    """The best of each kind of way, of each profile under its name; an empty name says nothing.

    Behind the gradients come the ways of a step, where one was measured.
    """
    events: list[dict[str, Any]] = []
    for name, profile in named:
        for row in best_of_each(alternatives(profile)):
            words = [name, f"{row.name} {row.detail}".strip(), "(chosen)" if row.chosen else ""]
            line = timeline(profile, row.way)
            events += _of_line(line, " ".join(filter(None, words)), len(events) + 1)
        for step in best_steps(profile) if profile.measurements.step is not None else ():
            words = [name, f"optimizer step: {step.name}", "(chosen)" if step.chosen else ""]
            line = step_timeline(profile, step.way)
            events += _of_line(line, " ".join(filter(None, words)), len(events) + 1)
    return trace_event.document(events)


def _of_line(line: Timeline, name: str, process: int) -> Iterator[dict[str, Any]]:
    used = [lane for lane in _LANES if any(stage.lane == lane for stage in line.stages)]
    yield trace_event.named_process(process, f"{name}, {line.elements:,} elements")
    for lane in used:
        yield trace_event.named_thread(process, _LANES.index(lane), lane)
    for stage in line.stages:
        row = _LANES.index(stage.lane)
        yield trace_event.complete(stage.what, "computed", process, row, stage.start_seconds, stage.seconds)
