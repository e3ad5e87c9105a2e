"""The form of a trace for Chrome (about:tracing) and Perfetto (ui.perfetto.dev).

Source: the Trace Event Format document, complete events ("X") and metadata ("M"), times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Event = dict[str, Any]


def document(events: Iterable[Event], **about: str) -> dict[str, Any]:
    """What a file holds; `about` is shown with it."""
    return {
        "traceEvents": list(events),
        "displayTimeUnit": "ms",
        **({"otherData": about} if about else {}),
    }


def named_process(process: int, name: str) -> Event:
    """A name for a group of rows."""
    return _named("process_name", process, 0, name)


def named_thread(process: int, thread: int, name: str) -> Event:
    """A name for a row."""
    return _named("thread_name", process, thread, name)


def complete(name: str, category: str, process: int, thread: int, begin: float, seconds: float) -> Event:
    """Something that began at `begin`, in seconds, and took so long."""
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": process,
        "tid": thread,
        "ts": begin * 1e6,
        "dur": seconds * 1e6,
    }


def _named(what: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
