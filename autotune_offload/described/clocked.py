"""The order of work on a virtual clock: threads, streams, events, and how long what takes so long really lasts.

Nothing sleeps. What the work itself is and takes is in `simulated`.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from autotune_offload.described.machine import Machine
from autotune_offload.described.virtual_time import Clock, SimulatedEvent, SimulatedStream, SimulatedThreads
from autotune_offload.errors import ConfigError, DeviceError
from autotune_offload.machine.device import Device

_NOISE_SECONDS = 2e-3
"""For so long a disturbance lasts: what else a host does comes in bursts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong on a simulated device; nothing by default."""

    pin_fails_above_bytes: int | None = None
    """Larger blocks cannot be page-locked; 0 fails always."""
    pinned_copy_hangs_above_bytes: int | None = None
    """Larger copies to or from page-locked memory never complete; whoever waits gets a DeviceError."""
    slow_rank: int | None = None
    """This rank of all takes `slow_factor` times as long for everything."""
    slow_factor: float = 4.0
    slow_start_seconds: float = 0.0
    """For so long from the start everything takes `slow_start_factor` times as long."""
    slow_start_factor: float = 5.0


class ClockedDevice(Device):
    """A device whose time passes only by what is done on it; see `SimulatedDevice` for the arguments."""

    keeps_time = True

    def __init__(
        self,
        machine: Machine,
        *,
        noise: float = 0.0,
        seed: int = 0,
        ranks: int = 1,
        rank: int = 0,
        faults: Faults | None = None,
    ) -> None:
        if not 0 <= noise < math.inf or ranks < 1 or not 0 <= rank < ranks:
            raise ConfigError(
                f"noise {noise}, rank {rank} of {ranks}: expected noise of at least 0 and a rank that there is"
            )
        self.machine, self.ranks, self.faults = machine, ranks, faults or Faults()
        self._rank = rank
        self.shares_host_memory = self.synchronous = machine.kind == "cpu"
        self._slow = self.faults.slow_factor if self.faults.slow_rank == rank else 1.0
        self._noise, self._random = noise, random.Random(seed)
        self._burst, self._burst_ends = 1.0, 0.0
        self._streams: list[SimulatedStream] = []
        self.default = self.new_stream()
        self._thread = Clock(0.0, self.default)
        self._intraop = machine.host.intraop_threads
        self._timed_only = False

    # -- the clock --

    def now(self) -> float:
        """Virtual seconds of the calling thread."""
        return self._thread.now

    def wait(self, until: float, cost_us: float) -> None:
        """The calling thread waits until a moment, at a cost.

        Raises:
            DeviceError: that moment never comes.
        """
        if until == math.inf:
            raise DeviceError("waited for a copy that never completes; this fault was asked for")
        self._thread.now = max(self._thread.now, until) + self._lasting(cost_us * 1e-6)

    def _lasting(self, seconds: float) -> float:
        """What takes so long by the description, with noise and faults."""
        if self._thread.now < self.faults.slow_start_seconds:
            seconds *= self.faults.slow_start_factor
        return seconds * self._slow * (self._disturbance() if self._noise else 1.0)

    def _disturbance(self) -> float:
        """Half of the noise's variance comes in bursts, half with each operation alone."""
        each = self._noise / math.sqrt(2)
        if self._thread.now >= self._burst_ends:
            self._burst = math.exp(self._random.gauss(0.0, each))
            self._burst_ends = self._thread.now + _NOISE_SECONDS
        return self._burst * math.exp(self._random.gauss(0.0, each))

    @contextlib.contextmanager
    def running_in(self, thread: Clock) -> Iterator[None]:
        """Work inside is that of another host thread."""
        before = self._thread
        self._thread = thread
        try:
            yield
        finally:
            self._thread = before

    def own_threads(self, count: int) -> Executor:
        """Host threads on the same clock."""
        return SimulatedThreads(self, count)

    @contextlib.contextmanager
    def intraop(self, count: int) -> Iterator[None]:
        """Host operations inside use so many threads; 0 leaves them as they are."""
        before = self._intraop
        self._intraop = count or before
        try:
            yield
        finally:
            self._intraop = before

    def intraop_threads(self) -> int:
        """Threads that a host operation in the calling thread uses."""
        return 1 if self._thread.own else self._intraop

    @contextlib.contextmanager
    def timed_only(self) -> Iterator[None]:
        """Values stay where they are inside, so that a long sample costs no real time."""
        before = self._timed_only
        self._timed_only = True
        try:
            yield
        finally:
            self._timed_only = before

    # -- order --

    def new_stream(self) -> SimulatedStream:
        """A stream beside the others."""
        stream = SimulatedStream(self)
        self._streams.append(stream)
        return stream

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Work of the calling thread inside goes to `stream`; None is the current one."""
        thread, before = self._thread, self._thread.stream
        thread.stream = before if stream is None else stream
        try:
            yield
        finally:
            thread.stream = before

    def record_event(self) -> SimulatedEvent:
        """An event behind all work that is queued on the current stream."""
        return SimulatedEvent(self._thread.stream)

    def order_after(self, stream: Any, event: Any) -> None:
        """Later work on `stream` waits for `event`."""
        (stream or self._thread.stream).wait_event(event)

    def synchronize(self) -> None:
        """Block the calling thread until the whole device is idle."""
        self.wait(max(stream.free for stream in self._streams), self.machine.sync.device_us)
        for stream in self._streams:
            stream.run_to(stream.put)

    def synchronize_stream(self) -> None:
        """Block the calling thread until the current stream is done."""
        self._thread.stream.synchronize()
