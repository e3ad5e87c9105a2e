"""Ranges: who sees them, and what is kept of them."""

from __future__ import annotations

import json
import threading

import pytest
import torch

from autotune_offload.machine import spans
from autotune_offload.machine.ranges import PREFIX, as_trace, keep_ranges, named
from tests.fakes import DeferredDevice


class Traced(DeferredDevice):
    """A device with a tool of its own that shows ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.tool: list[str] = []

    def push_range(self, name: str) -> None:
        """Shown."""
        self.tool.append(name)

    def pop_range(self) -> None:
        """The last one has ended."""
        self.tool.append("end")


def test_a_range_ends_whatever_happens_in_it() -> None:
    """In the accelerator's tool, in torch's, and among those that are kept."""
    device = Traced()
    kept = keep_ranges(device)
    with pytest.raises(ZeroDivisionError), named(device, "outer"), named(device, "inner"):
        raise ZeroDivisionError
    assert device.tool == [f"{PREFIX}outer", f"{PREFIX}inner", "end", "end"]
    assert [span.name for span in kept.spans] == ["inner", "outer"]


def test_torchs_profiler_has_it_where_it_is_at_work() -> None:
    """One inside the other."""
    device = DeferredDevice()
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profiler, named(device, "outer"), named(device, "inner"):
        torch.zeros(4)
    events = {event.name: event for event in profiler.events()}  # type: ignore[no-untyped-call]
    inner = events[f"{PREFIX}inner"]
    assert inner.cpu_parent is not None and inner.cpu_parent.name == f"{PREFIX}outer"


def test_nothing_is_kept_unless_it_is_asked_for() -> None:
    """Measuring keeps nothing."""
    device = DeferredDevice()
    with named(device, "one"):
        pass
    assert device.kept_ranges is None
    kept = keep_ranges(device)
    assert keep_ranges(device) is kept and not kept.spans


def test_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of any length takes bounded memory, and the trace says what it does not have."""
    monkeypatch.setattr(spans, "KEPT", 3)
    device = DeferredDevice()
    kept = keep_ranges(device)
    for number in range(5):
        with named(device, str(number)):
            pass
    assert [span.name for span in kept.spans] == ["2", "3", "4"]
    assert as_trace([kept])["otherData"]["kept"] == "the latest 3 of 5 ranges"


def test_a_trace_has_a_row_for_each_thread_and_times_from_the_first_range_on() -> None:
    """As Chrome and Perfetto read it: complete events in microseconds, names as metadata."""
    device = DeferredDevice()
    kept = keep_ranges(device)

    def other() -> None:
        with named(device, "beside"):
            pass

    with named(device, "outer"):
        thread = threading.Thread(target=other, name="helper")
        thread.start()
        thread.join()
    document = json.loads(json.dumps(as_trace([kept])))
    rows = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"]
    complete = {e["name"]: e for e in document["traceEvents"] if e["ph"] == "X"}
    assert len(rows) == 2 and threading.current_thread().name in rows
    outer, beside = complete["outer"], complete["beside"]
    assert outer["ts"] == 0 and outer["tid"] != beside["tid"] and outer["pid"] == beside["pid"]
    assert outer["ts"] <= beside["ts"] <= beside["ts"] + beside["dur"] <= outer["ts"] + outer["dur"] + 1e-3


def test_two_devices_make_one_trace() -> None:
    """Path and step may have one each."""
    both = [DeferredDevice(), DeferredDevice()]
    kept = [keep_ranges(device) for device in both]
    for device in reversed(both):
        with named(device, "here"):
            pass
    times = [e["ts"] for e in as_trace(kept)["traceEvents"] if e["ph"] == "X"]
    assert len(times) == 2 and times == sorted(times)
