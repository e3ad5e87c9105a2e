"""A device for tests beside those of `autotune_offload.testing`, and those in the form that tests use.

`DeferredDevice` is an asynchronous `Device`: queued work runs only when something waits for it.
"""

# ruff: noqa: D102  # the methods are those of what each class stands in for
from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune_offload.errors import PinError
from autotune_offload.machine.device import Device
from autotune_offload.records import DeviceIdentity
from autotune_offload.testing import Calls, FakeAccelerator, FakeAcceleratorDevice, habana_modules, junk

__all__ = ["DeferredDevice", "FakeAccelerator", "FakeAcceleratorDevice", "install_habana", "junk"]


def install_habana(patch: pytest.MonkeyPatch, calls: Calls) -> None:
    """The stand-in for habana_frameworks until the test ends."""
    for name, module in habana_modules(calls).items():
        patch.setitem(sys.modules, name, module)


# -- a device whose work waits to be waited for ---------------------------------------------------


@dataclass(eq=False)
class DeferredStream:
    """A queue of work, and how much of it was ever put in and done."""

    device: DeferredDevice
    name: str
    queue: deque[Callable[[], object]] = field(default_factory=deque)
    put: int = 0
    done: int = 0

    def add(self, work: Callable[[], object]) -> None:
        with self.device.lock:
            self.queue.append(work)
            self.put += 1

    def run_to(self, position: int) -> None:
        with self.device.lock:
            while self.done < position:
                work = self.queue.popleft()
                self.done += 1
                work()

    def synchronize(self) -> None:
        self.device.log.append(("stream.synchronize", self.name))
        self.run_to(self.put)

    def wait_event(self, event: DeferredEvent) -> None:
        self.device.log.append(("wait_event", self.name, event.stream.name))
        self.add(event.reach)


class DeferredEvent:
    """A position in one stream."""

    def __init__(self, stream: DeferredStream) -> None:
        self.stream, self.position = stream, stream.put

    def record(self, stream: DeferredStream) -> None:
        self.stream, self.position = stream, stream.put

    def reach(self) -> None:
        self.stream.run_to(self.position)

    def synchronize(self) -> None:
        self.stream.device.log.append(("event.synchronize", self.stream.name))
        self.reach()


class DeferredDevice(Device):
    """Runs what was queued as late as its streams' orders and events allow, and no sooner.

    A wait runs only what it asks for, so a path that forgets one meets memory without its values.
    `log` holds the calls in order.
    """

    synchronous = False
    shares_host_memory = False

    def __init__(self) -> None:
        self.identity = DeviceIdentity(
            kind="deferred", name="deferred", count=1, index=0, pin_backend="torch"
        )
        self.lock = threading.RLock()
        self.log: Calls = []
        self.default = DeferredStream(self, "default")
        self.streams = [self.default]
        self.pinned: dict[int, int] = {}
        self.most_pinned_bytes = 0
        self.largest_pin_bytes: int | None = None
        self._current = threading.local()

    @property
    def current(self) -> DeferredStream:
        stream: DeferredStream = getattr(self._current, "stream", self.default)
        return stream

    def count(self, call: str) -> int:
        """How often a call is in the log."""
        return sum(entry[0] == call for entry in self.log)

    # -- memory --

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        self.log.append(("empty", elements))
        return junk(elements, dtype)

    def pinned_empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        self.log.append(("pinned_empty", elements))
        tensor = junk(elements, dtype)
        if self.largest_pin_bytes is not None and tensor.nbytes > self.largest_pin_bytes:
            raise PinError(f"page-locking {tensor.nbytes:,} bytes failed: invalid argument")
        self.pinned[tensor.data_ptr()] = tensor.nbytes
        self.most_pinned_bytes = max(self.most_pinned_bytes, sum(self.pinned.values()))
        return tensor

    def why_not_pinned(self) -> str | None:
        return None

    def release_pinned(self, pinned: Tensor) -> None:
        self.log.append(("release_pinned", pinned.numel()))
        del self.pinned[pinned.data_ptr()]

    def is_pinned(self, tensor: Tensor) -> bool:
        begin = tensor.data_ptr()
        return any(b <= begin and begin + tensor.nbytes <= b + size for b, size in self.pinned.items())

    # -- work --

    def _queue(self, call: str, work: Callable[[], object], *, blocking: bool = False) -> None:
        stream = self.current
        self.log.append((call, stream.name, "blocking" if blocking else "queued"))
        stream.add(work)
        if blocking:
            stream.run_to(stream.put)

    def operand(self, tensor: Tensor) -> Tensor:
        """What queued work refers to it by."""
        return tensor

    def _queue_copy(self, call: str, destination: Tensor, source: Tensor, *, blocking: bool = False) -> None:
        to, of = self.operand(destination), self.operand(source)
        self._queue(call, lambda: to.copy_(of), blocking=blocking)

    def d2h(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        blocking = not (non_blocking and self.is_pinned(destination))
        self._queue_copy("d2h", destination, source, blocking=blocking)

    def h2d(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        blocking = not (non_blocking and self.is_pinned(source))
        self._queue_copy("h2d", destination, source, blocking=blocking)

    def h2h(self, destination: Tensor, source: Tensor) -> None:
        self.log.append(("h2h", threading.current_thread().name))
        destination.copy_(source)

    def cast(self, destination: Tensor, source: Tensor) -> None:
        self._queue_copy("cast", destination, source)

    def add(self, total: Tensor, addend: Tensor) -> None:
        to, of = self.operand(total), self.operand(addend)
        self._queue("add", lambda: to.add_(of))

    def host_add(self, total: Tensor, addend: Tensor) -> None:
        self.log.append(("host_add", threading.current_thread().name))
        total.add_(addend)

    def matmul(self, out: Tensor, left: Tensor, right: Tensor) -> None:
        self._queue("matmul", lambda: None)

    def norm(self, source: Tensor) -> Tensor:
        norm = self.norm_memory()
        to, of = self.operand(norm), self.operand(source)
        self._queue("norm", lambda: to.copy_(torch.linalg.vector_norm(of, dtype=torch.float64)))
        return norm

    def norm_memory(self) -> Tensor:
        """Device memory of one fp64 value, shape ()."""
        return junk(1, torch.float64).view(())

    # -- order --

    def new_stream(self) -> DeferredStream:
        self.streams.append(DeferredStream(self, f"stream {len(self.streams)}"))
        return self.streams[-1]

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before = self.current
        self._current.stream = stream if stream is not None else before
        try:
            yield
        finally:
            self._current.stream = before

    def record_event(self) -> DeferredEvent:
        self.log.append(("record_event", self.current.name))
        return DeferredEvent(self.current)

    def order_after(self, stream: Any, event: Any) -> None:
        (stream or self.current).wait_event(event)

    def synchronize(self) -> None:
        self.log.append(("synchronize",))
        for stream in self.streams:
            stream.run_to(stream.put)

    def synchronize_stream(self) -> None:
        self.current.synchronize()
