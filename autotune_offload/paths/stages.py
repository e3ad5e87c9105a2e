"""What a gradient partition goes through on each path, and in each of DeepSpeed's own sequences.

Said once: the cost model adds it up over the workload, the timeline puts it on an axis of time, and the
explanation takes its shares from there. It has to follow what the classes beside it do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from autotune_offload import packaged
from autotune_offload.line import Line
from autotune_offload.paths.rates import Rates
from autotune_offload.records import Baseline, Candidate, Memory, Path

Lane = Literal["device", "link", "host"]

_KEEP = "copy into DeepSpeed's buffer"

_KEEPING = {low_bytes: (4 + low_bytes) / (4 + 2 * low_bytes) for low_bytes in (2, 4)}
"""What is left of the rate of a pass to fp32 that keeps the values, too: so many more bytes of memory move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One thing that is done to a gradient: where, what, and on which line its time lies.

    `element_bytes` of each element count on the line. The device and its link follow one stream; the host
    works beside them. `waits` says that the thread that trains cannot go on meanwhile.
    """

    lane: Lane
    what: str
    line: Line
    element_bytes: int
    waits: bool

    def seconds(self, elements: int, pieces: int = 1) -> float:
        """For so many elements in so many pieces."""
        return self.line.seconds(self.element_bytes * elements, pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """All that is done to a gradient, in order: `before` to the whole of it, then `work` to each piece.

    `waits_for` says in words what the thread that trains waits for, if it does. With a ring, `buffers` pieces
    are under way at once: one more crosses the link only when the host is done with the oldest.
    """

    work: tuple[Work, ...]
    waits_for: str
    before: tuple[Work, ...] = ()
    piece_elements: int = sys.maxsize
    buffers: int = 0


def stages(way: Candidate | Baseline, low_bytes: int, rates: Rates) -> Stages:
    """What a gradient that has `low_bytes` an element on the device goes through on this way.

    In a backward pass that is an accumulation of its own: the values go to DeepSpeed's buffer, too.
    """
    if isinstance(way, Baseline):
        return _stock(way, low_bytes, rates)
    if way.path in _PATHS:
        return _PATHS[way.path](way, low_bytes, rates)
    if packaged.why_missing(way.path) is not None:  # a profile of another host: nothing is known of it here
        return Stages(work=(), waits_for="")
    found: Stages = packaged.load(way.path).stages(way, low_bytes, rates)
    return found


def _destination(way: Candidate, low_bytes: int, rates: Rates) -> Stages:
    """`direct` holds the thread that trains for each copy, `pinned` does not."""
    memory: Memory = "pinned" if way.path == "pinned" else "pageable"
    link, into, threads = rates.line("d2h", memory), f"copy into {memory} memory", way.host_threads
    streamed = partial(Work, waits=way.path == "direct")
    copy = streamed(lane="link", what=into, line=link, element_bytes=4)
    keep = streamed(lane="link", what=_KEEP, line=link, element_bytes=low_bytes)
    casts_on_device = low_bytes < 4 and way.cast == "device"
    if rates.shares_host_memory and not casts_on_device:
        return Stages(work=(_one_pass(way, low_bytes, link, rates),), waits_for="for the copy")
    if low_bytes == 4:
        return Stages(before=(keep,), work=(copy,), waits_for="for the copy")
    if casts_on_device:
        line = Line.of(latency_seconds=link.latency_seconds, bytes_per_second=rates.cast_rate("device"))
        cast = streamed(lane="device", what="cast to fp32", line=line, element_bytes=4)
        most = max(way.buffer_bytes // 4, 1)
        return Stages(before=(keep,), work=(cast, copy), waits_for="for the copy", piece_elements=most)
    half = streamed(lane="link", what=_KEEP, line=link, element_bytes=low_bytes)
    line = Line.of(bytes_per_second=rates.cast_rate("host", threads))
    widen = Work(lane="host", what="widen to fp32", line=line, element_bytes=4, waits=not threads)
    return Stages(work=(half, widen), waits_for="for the copy" if half.waits else "for the widening")


def _one_pass(way: Candidate, low_bytes: int, link: Line, rates: Rates) -> Work:
    """Where the device is the host: each thread, the caller's or the path's own, does all at once."""
    rate = rates.cast_rate("host", max(way.host_threads, 1))
    if low_bytes == 4:
        rate = link.bytes_per_second
    line = Line.of(latency_seconds=link.latency_seconds, bytes_per_second=rate * _KEEPING[low_bytes])
    what = "copy, keep, widen and sum squares in one pass"
    return Work(lane="device", what=what, line=line, element_bytes=4, waits=way.path == "direct")


def _staged(way: Candidate, low_bytes: int, rates: Rates) -> Stages:
    """Without threads of its own, the thread that trains empties the buffers."""
    does, threads = partial(Work, waits=not way.host_threads), way.host_threads
    on_device = way.cast == "device" and low_bytes < 4
    width = 4 if on_device else low_bytes
    casts = rates.cast_rate("host", threads)
    rate = rates.copy_rate(threads) if width == 4 else casts
    line = Line.of(bytes_per_second=rates.cast_rate("device"))
    cast = does(lane="device", what="cast to fp32", line=line, element_bytes=4)
    link = rates.line("d2h", "pinned")
    copy = does(lane="link", what="copy into a page-locked buffer", line=link, element_bytes=width)
    if threads and not on_device:
        line = Line.of(latency_seconds=rates.sync.event_seconds, bytes_per_second=rate * _KEEPING[low_bytes])
        host = [does(lane="host", what="empty the buffer into both places", line=line, element_bytes=4)]
    else:
        line = Line.of(bytes_per_second=casts * low_bytes / 4 if on_device else rates.copy_rate(threads))
        host = [does(lane="host", what=_KEEP, line=line, element_bytes=low_bytes)]
        line = Line.of(latency_seconds=rates.sync.event_seconds, bytes_per_second=rate)
        host.append(does(lane="host", what="empty the buffer", line=line, element_bytes=4))
    return Stages(
        work=(cast, copy, *host) if on_device else (copy, *host),
        waits_for="for the buffers",
        piece_elements=max(way.buffer_bytes // width, 1),
        buffers=way.buffer_count,
    )


_PATHS: dict[Path, Callable[[Candidate, int, Rates], Stages]] = {
    "direct": _destination,
    "pinned": _destination,
    "staged": _staged,
}


def _stock(way: Baseline, low_bytes: int, rates: Rates) -> Stages:
    """DeepSpeed's own: to its buffer and back, the norm, the cast, the copy. All is waited for, or nothing."""
    blocks = way.memory == "pageable" or way.name != "explicit_upcast_non_blocking"
    does, link = partial(Work, waits=blocks), rates.line("d2h", way.memory)
    through = partial(does, lane="link", element_bytes=low_bytes, line=link)
    before = [through(what=_KEEP)]
    if not rates.shares_host_memory:
        before.append(through(what="and back from there", line=rates.line("h2d", way.memory)))
    stages_of = partial(Stages, before=tuple(before), waits_for="for all of it")
    fresh, work = rates.cast_rate("device"), []
    if rates.shares_host_memory:  # the pages of fresh temporaries are touched for the first time
        fresh = min(fresh, rates.line("h2h", "pageable", "cold").bytes_per_second)
        line = Line.of(bytes_per_second=fresh)  # on a device of its own next to nothing
        work.append(does(lane="device", what="norm in fp64", line=line, element_bytes=8))
    if low_bytes < 4 and way.name == "implicit_upcast":
        return stages_of(work=(*work, *_implicit(low_bytes, link, rates)))
    if low_bytes < 4:
        line = Line.of(bytes_per_second=fresh)
        work.append(does(lane="device", what="cast to a fresh fp32 copy", line=line, element_bytes=4))
    if way.name == "bounce_buffer":
        link, wait = rates.line("d2h", "pinned"), Line.of(latency_seconds=rates.sync.device_seconds)
        again = rates.line("h2h", "pageable")
        work += [
            does(lane="link", what="copy into the page-locked buffer", line=link, element_bytes=4),
            does(lane="host", what="synchronize the whole device", line=wait, element_bytes=0),
            does(lane="host", what="copy host to host", line=again, element_bytes=4),
        ]
    else:
        work.append(does(lane="link", what=f"copy into {way.memory} memory", line=link, element_bytes=4))
    return stages_of(work=tuple(work))


def _implicit(low_bytes: int, link: Line, rates: Rates) -> tuple[Work, ...]:
    """`copy_` between dtypes makes a fresh temporary on the host, unless all is host memory."""
    does, rate = partial(Work, lane="host", waits=True), rates.cast_rate("host")
    if rates.shares_host_memory:
        line = Line.of(latency_seconds=link.latency_seconds, bytes_per_second=rate)
        return (does(lane="device", what="copy and widen", line=line, element_bytes=4),)
    cold, what = rates.line("d2h", "pageable", "cold"), "copy into a fresh, cold temporary"
    return (
        does(lane="link", what=what, line=cold, element_bytes=low_bytes),
        does(what="widen to fp32", line=Line.of(bytes_per_second=rate), element_bytes=4),
    )
