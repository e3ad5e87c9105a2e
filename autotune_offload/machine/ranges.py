"""Ranges: what a trace shows of a path and of a step, in the tools of others and in one of our own.

A range is named for the accelerator's tools, such as NVTX, and for torch's profiler where that is at work. The latest
ones of a device that carries a path are kept, too, so that a running job can be looked at without any tool.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled

from autotune_offload import trace_event
from autotune_offload.machine.device import Device
from autotune_offload.machine.spans import Kept, Span

PREFIX = "autotune-offload: "
"""Of every range; what follows names who carries, a piece, or what is waited for."""


@contextlib.contextmanager
def named(device: Device, what: str) -> Iterator[None]:
    """A range of that name.

    Without torch's profiler nothing of it is entered, which would cost 7 us where nobody looks (`record_function`,
    2.13).
    """
    name = PREFIX + what
    kept, begin = device.kept_ranges, time.perf_counter()
    device.push_range(name)
    try:
        if _profiler_enabled():
            with torch.profiler.record_function(name):
                yield
        else:
            yield
    finally:
        device.pop_range()
        if kept is not None:
            kept.add(Span(what, threading.get_ident(), begin, time.perf_counter() - begin))


def keep_ranges(device: Device) -> Kept:
    """Keep the ranges of `device` from now on; those that are kept already go on."""
    if device.kept_ranges is None:
        device.kept_ranges = Kept()
    return device.kept_ranges


def as_trace(of: Iterable[Kept]) -> dict[str, Any]:
    """What is kept, as a document for Chrome and Perfetto: one row a thread, times from the first range on."""
    of, process = tuple(of), os.getpid()
    spans = sorted((span for kept in of for span in kept.spans.copy()), key=lambda span: span.begin)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    start = spans[0].begin if spans else 0.0
    events = [trace_event.named_process(process, "autotune-offload, as it ran on the host")]
    for thread in dict.fromkeys(span.thread for span in spans):
        events.append(trace_event.named_thread(process, thread, names.get(thread) or f"thread {thread}"))
    events += [
        trace_event.complete(span.name, "ran", process, span.thread, span.begin - start, span.seconds)
        for span in spans
    ]
    return trace_event.document(
        events,
        kept=f"the latest {len(spans):,} of {sum(kept.count for kept in of):,} ranges",
        left_out="what the device did, and what DeepSpeed did outside these ranges; a profiler shows that",
    )
