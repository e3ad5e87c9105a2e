"""Clocks that only simulated work moves: streams, events and host threads of a described machine."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from autotune_offload.described.clocked import ClockedDevice

P = ParamSpec("P")
R = TypeVar("R")


# -- who works ------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Clock:
    """A host thread: its time, its current stream, and how many threads it shares the host with."""

    now: float
    stream: SimulatedStream
    beside: int = 1
    own: bool = False


@dataclass(slots=True, eq=False)
class SimulatedStream:
    """An order of device work: when it is free, and what was queued but has not landed yet."""

    device: ClockedDevice
    free: float = 0.0
    queue: deque[Callable[[], object]] = field(default_factory=deque)
    put: int = 0
    done: int = 0

    def add(self, work: Callable[[], object]) -> None:
        """Have values land behind all that is queued."""
        self.queue.append(work)
        self.put += 1

    def run_to(self, position: int) -> None:
        """Let values land up to there."""
        while self.done < position:
            work = self.queue.popleft()
            self.done += 1
            work()

    def synchronize(self) -> None:
        """Block the calling thread until everything in the stream is done."""
        self.device.wait(self.free, self.device.machine.sync.stream_us)
        self.run_to(self.put)

    def wait_event(self, event: Any) -> None:
        """Hold back later work of this stream until the event is reached."""
        self.free = max(self.free, event.at)
        if event.stream.done < event.position:
            self.add(event.reach)


class SimulatedEvent:
    """A point in a stream's order."""

    __slots__ = ("at", "position", "stream")

    def __init__(self, stream: SimulatedStream) -> None:
        self.record(stream)

    def record(self, stream: SimulatedStream) -> None:
        """Put the event behind all that `stream` holds now."""
        self.stream, self.position = stream, stream.put
        self.at = max(stream.free, stream.device.now())

    def reach(self) -> None:
        """Let values land up to the event."""
        self.stream.run_to(self.position)

    def synchronize(self) -> None:
        """Block the calling thread until everything before the event is done."""
        device = self.stream.device
        device.wait(self.at, device.machine.sync.event_us)
        self.reach()


class SimulatedThreads(Executor):
    """Host threads in virtual time: each work runs at once, and ends when its thread would end it."""

    def __init__(self, device: ClockedDevice, count: int) -> None:
        self._device = device
        start, stream = device.now(), device.default
        self._threads = [Clock(start, stream, beside=count, own=True) for _ in range(count)]

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run it in the thread that is free first."""
        thread = min(self._threads, key=lambda each: each.now)
        thread.now = max(thread.now, self._device.now())
        future = InTime[R](self._device)
        with self._device.running_in(thread):
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)
        future.at = thread.now
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for the last of them."""
        if wait:
            self._device.wait(max(thread.now for thread in self._threads), 0.0)


class InTime(Future[R]):
    """A result that is there at a time."""

    def __init__(self, device: ClockedDevice) -> None:
        super().__init__()
        self._device, self.at = device, 0.0

    def result(self, timeout: float | None = None) -> R:
        """The result, once the waiting thread's clock has come to its end."""
        self._device.wait(self.at, 0.0)
        return super().result(timeout)


class Busy:
    """When a shared resource is used, and at which rate: (start, end, bytes a second)."""

    __slots__ = ("spans",)

    def __init__(self) -> None:
        self.spans: list[tuple[float, float, float]] = []

    def take(self, start: float, end: float, rate: float) -> None:
        """Note a use of the resource."""
        if end > start:
            self.spans.append((start, end, rate))

    def forget_before(self, moment: float) -> None:
        """Drop what is over."""
        if self.spans and self.spans[0][1] <= moment:
            self.spans = [span for span in self.spans if span[1] > moment]

    def used(self, moment: float) -> float:
        """The rate in use at a moment."""
        return sum(rate for start, end, rate in self.spans if start <= moment < end)

    def next_change(self, moment: float) -> float:
        """When the use changes next."""
        later = [edge for start, end, _ in self.spans for edge in (start, end) if edge > moment]
        return min(later, default=math.inf)
