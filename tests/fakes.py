"""Stand-ins for accelerators on a machine that has none; everything is kept in host memory.

`FakeAccelerator` has the calls of a `DeepSpeedAccelerator` that are used, and writes each one down.
`DeferredDevice` is an asynchronous `Device`: queued work runs only when something waits for it.
"""

# ruff: noqa: D102  # the methods are those of what each class stands in for
from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune_offload.device import AcceleratorDevice, Device
from autotune_offload.errors import PinError
from autotune_offload.records import DeviceIdentity

JUNK = 0x5A
"""Every byte of memory that was just allocated."""

Calls = list[tuple[Any, ...]]


def junk(elements: int, dtype: torch.dtype) -> Tensor:
    """Host memory that holds nothing of use."""
    raw = torch.full((elements * dtype.itemsize,), JUNK, dtype=torch.uint8, device="cpu")
    return raw.view(dtype)


# -- an accelerator as DeepSpeed has it -----------------------------------------------------------


class FakeStream:
    """A stream that only writes down what is asked of it."""

    def __init__(self, calls: Calls, name: str) -> None:
        self.calls, self.name = calls, name

    def synchronize(self) -> None:
        self.calls.append(("stream.synchronize", self.name))

    def wait_event(self, event: Any) -> None:
        self.calls.append(("stream.wait_event", self.name))


class FakeEvent:
    """An event that only writes down what is asked of it."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def record(self, stream: FakeStream) -> None:
        self.calls.append(("event.record", stream.name))

    def synchronize(self) -> None:
        self.calls.append(("event.synchronize",))


class FakeAccelerator:
    """The documented calls of a `DeepSpeedAccelerator`; any other attribute does not exist.

    `pinning` is what `pin_memory` does: "pins", "same object", "pageable", or an exception to raise.
    """

    def __init__(self, kind: str = "cuda", *, count: int = 4, pinning: Any = "pins") -> None:
        self.kind, self.count, self.pinning = kind, count, pinning
        self.calls: Calls = []
        self.current = 0
        self._streams = [FakeStream(self.calls, "default")]
        self._made = 0
        self._pinned: set[int] = set()

    def device_name(self, device_index: int | None = None) -> str:
        return (
            self.kind
            if device_index is None or self.kind in {"cpu", "hpu"}
            else f"{self.kind}:{device_index}"
        )

    def device_count(self) -> int:
        return self.count

    def current_device(self) -> int:
        return self.current

    def set_device(self, device_index: int) -> None:
        self.calls.append(("set_device", device_index))
        self.current = device_index

    def total_memory(self, device_index: int | None = None) -> int:
        return 1 << 36

    def synchronize(self, device_index: int | None = None) -> None:
        self.calls.append(("synchronize",))

    @property
    def Stream(self) -> Callable[[], FakeStream]:
        return self._stream

    def _stream(self) -> FakeStream:
        self._made += 1
        self.calls.append(("Stream",))
        return FakeStream(self.calls, f"stream {self._made}")

    @property
    def Event(self) -> Callable[[], FakeEvent]:
        return lambda: FakeEvent(self.calls)

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.calls.append(("enter", stream.name))
        self._streams.append(stream)
        try:
            yield
        finally:
            self._streams.pop()
            self.calls.append(("leave", stream.name))

    def current_stream(self, device_index: int | None = None) -> FakeStream:
        return self._streams[-1]

    def pin_memory(self, tensor: Tensor, /) -> Tensor:
        self.calls.append(("pin_memory", tensor.nbytes))
        if isinstance(self.pinning, BaseException):
            raise self.pinning
        if self.pinning == "same object":
            return tensor
        copy = tensor.clone()
        if self.pinning == "pins":
            self._pinned.add(copy.data_ptr())
        return copy

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.data_ptr() in self._pinned

    def unpin_memory(self, tensor: Tensor) -> None:
        self.calls.append(("unpin_memory", tensor.nbytes))
        self._pinned.discard(tensor.data_ptr())


class FakeAcceleratorDevice(AcceleratorDevice):
    """The real `AcceleratorDevice`, with its device memory on the host."""

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        return junk(elements, dtype)


def install_habana(patch: pytest.MonkeyPatch, calls: Calls) -> None:
    """A `habana_frameworks.torch.core` whose mark_step writes itself down."""
    parts = ["habana_frameworks", "habana_frameworks.torch", "habana_frameworks.torch.core"]
    modules = [types.ModuleType(name) for name in parts]
    modules[-1].mark_step = lambda: calls.append(("mark_step",))  # type: ignore[attr-defined]
    for name, module in zip(parts, modules, strict=True):
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

    def d2h(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        blocking = not (non_blocking and self.is_pinned(destination))
        self._queue("d2h", lambda: destination.copy_(source), blocking=blocking)

    def h2d(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        blocking = not (non_blocking and self.is_pinned(source))
        self._queue("h2d", lambda: destination.copy_(source), blocking=blocking)

    def h2h(self, destination: Tensor, source: Tensor) -> None:
        self.log.append(("h2h", threading.current_thread().name))
        destination.copy_(source)

    def cast(self, destination: Tensor, source: Tensor) -> None:
        self._queue("cast", lambda: destination.copy_(source))

    def matmul(self, out: Tensor, left: Tensor, right: Tensor) -> None:
        self._queue("matmul", lambda: None)

    def norm(self, source: Tensor) -> Tensor:
        norm = junk(1, torch.float64).view(())
        self._queue("norm", lambda: norm.copy_(torch.linalg.vector_norm(source, dtype=torch.float64)))
        return norm

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
