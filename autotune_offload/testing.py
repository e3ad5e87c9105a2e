"""Stand-ins for accelerators that are not there, for tests of code that runs on them.

`FakeAccelerator` stands for a `DeepSpeedAccelerator` of any kind: its tensors are real and lie in host memory,
and each call is written down in order. `FakeAcceleratorDevice` is this package's own device on it. `habana`
puts a `habana_frameworks.torch` in place that has the documented calls only; DeepSpeed's own `HPU_Accelerator`
runs on it. What is not documented does not exist on any of them, and a wrong call raises::

    from autotune_offload.testing import FakeAccelerator, FakeAcceleratorDevice, habana

    accelerator = FakeAccelerator("hpu", count=8)
    with habana(accelerator.calls):
        device = FakeAcceleratorDevice(accelerator)
        device.synchronize()
    assert accelerator.calls[-2:] == [("mark_step",), ("synchronize",)]
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from autotune_offload.machine.accelerator import AcceleratorDevice

JUNK = 0x5A
"""Every byte of memory that was just allocated."""

Calls = list[tuple[Any, ...]]
"""What was called, in order: the call's name and what tells it from others."""


def junk(elements: int, dtype: torch.dtype) -> Tensor:
    """Host memory that holds nothing of use."""
    raw = torch.full((elements * dtype.itemsize,), JUNK, dtype=torch.uint8, device="cpu")
    return raw.view(dtype)


class FakeStream:
    """A stream that writes down what is asked of it."""

    def __init__(self, calls: Calls, name: str) -> None:
        self.calls, self.name = calls, name

    def synchronize(self) -> None:
        """Wait for everything in the stream."""
        self.calls.append(("stream.synchronize", self.name))

    def wait_event(self, event: FakeEvent) -> None:
        """Hold back later work until the event. Raises ValueError for one that was never recorded."""
        event.check()
        self.calls.append(("stream.wait_event", self.name))


class FakeEvent:
    """An event that writes down what is asked of it."""

    def __init__(self, calls: Calls) -> None:
        self.calls, self._recorded = calls, False

    def record(self, stream: FakeStream) -> None:
        """Put it behind all that the stream holds."""
        self.calls.append(("event.record", stream.name))
        self._recorded = True

    def synchronize(self) -> None:
        """Wait for it. Raises ValueError where it was never recorded."""
        self.check()
        self.calls.append(("event.synchronize",))

    def check(self) -> None:
        """Raises ValueError where it was never recorded: whoever waits for it waits for nothing."""
        if not self._recorded:
            raise ValueError("this event was never recorded, so waiting for it waits for nothing")


class FakeAccelerator:
    """The calls of a `DeepSpeedAccelerator` that offloading needs; any other attribute does not exist.

    Args:
        kind: what `device_name` says: "cuda", "hpu", "xpu", "npu", "cpu".
        count: devices.
        pinning: what `pin_memory` does: "pins", "same object", "pageable", or an exception to raise.

    `calls` holds every call in order, `current` the index of the current device.
    """

    def __init__(self, kind: str = "cuda", *, count: int = 4, pinning: Any = "pins") -> None:
        self.kind, self.count, self.pinning = kind, count, pinning
        self.calls: Calls = []
        self.current = 0
        self._streams = [FakeStream(self.calls, "default")]
        self._made = 0
        self._pinned: set[int] = set()

    def device_name(self, device_index: int | None = None) -> str:
        """The kind, with the index where the real accelerator of that kind gives one."""
        if device_index is None or self.kind in {"cpu", "hpu"}:
            return self.kind
        return f"{self.kind}:{device_index}"

    def device_count(self) -> int:
        """How many devices there are."""
        return self.count

    def current_device(self) -> int:
        """Index of the current one."""
        return self.current

    def set_device(self, device_index: int) -> None:
        """Make one current. Raises ValueError for one that is not there."""
        if not 0 <= device_index < self.count:
            raise ValueError(f"device {device_index} of {self.count}: expected an index below the count")
        self.calls.append(("set_device", device_index))
        self.current = device_index

    def total_memory(self, device_index: int | None = None) -> int:
        """64 GiB."""
        del device_index
        return 1 << 36

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for the device."""
        del device_index
        self.calls.append(("synchronize",))

    @property
    def Stream(self) -> Callable[[], FakeStream]:
        """Makes a stream."""
        return self._stream

    def _stream(self) -> FakeStream:
        self._made += 1
        self.calls.append(("Stream",))
        return FakeStream(self.calls, f"stream {self._made}")

    @property
    def Event(self) -> Callable[[], FakeEvent]:
        """Makes an event."""
        return lambda: FakeEvent(self.calls)

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """Make a stream the current one inside."""
        self.calls.append(("enter", stream.name))
        self._streams.append(stream)
        try:
            yield
        finally:
            self._streams.pop()
            self.calls.append(("leave", stream.name))

    def range_push(self, msg: str) -> None:
        """Begin a range."""
        self.calls.append(("range_push", msg))

    def range_pop(self) -> None:
        """End the last range."""
        self.calls.append(("range_pop",))

    def current_stream(self, device_index: int | None = None) -> FakeStream:
        """The stream that work goes to."""
        del device_index
        return self._streams[-1]

    def pin_memory(self, tensor: Tensor, /) -> Tensor:
        """A copy that counts as page-locked, or what `pinning` says."""
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
        """Whether `pin_memory` made it."""
        return tensor.data_ptr() in self._pinned

    def unpin_memory(self, tensor: Tensor) -> None:
        """Take the page-lock away."""
        self.calls.append(("unpin_memory", tensor.nbytes))
        self._pinned.discard(tensor.data_ptr())


class FakeAcceleratorDevice(AcceleratorDevice):
    """The real `AcceleratorDevice`, with its device memory on the host."""

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Memory that stands for the device's, full of junk."""
        return junk(elements, dtype)


# -- habana_frameworks ----------------------------------------------------------------------------


def habana_modules(calls: Calls) -> dict[str, types.ModuleType]:
    """`habana_frameworks.torch` with its `core` and `hpu`: the documented calls, written down in `calls`.

    Source: docs.habana.ai, PyTorch/Reference/Python_Packages (torch.hpu: devices, streams, events, memory) and
    PyTorch/Reference/mark_step. The memory and random calls are those that DeepSpeed's accelerator makes.
    """
    names = ("habana_frameworks", "habana_frameworks.torch", "habana_frameworks.torch.core")
    modules = {name: types.ModuleType(name) for name in names}
    hpu = _Hpu(calls)
    modules["habana_frameworks.torch.hpu"] = hpu
    core = modules["habana_frameworks.torch.core"]
    core.__dict__.update(mark_step=lambda: calls.append(("mark_step",)), hpu=hpu)
    modules["habana_frameworks.torch"].__dict__.update(core=core, hpu=hpu)
    modules["habana_frameworks"].__dict__.update(torch=modules["habana_frameworks.torch"])
    return modules


@contextlib.contextmanager
def habana(calls: Calls) -> Iterator[dict[str, types.ModuleType]]:
    """Those modules importable inside, whatever was there before back afterwards."""
    modules = habana_modules(calls)
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield modules
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


class _Hpu(types.ModuleType):
    """`habana_frameworks.torch.hpu` on one FakeAccelerator of kind hpu."""

    def __init__(self, calls: Calls) -> None:
        super().__init__("habana_frameworks.torch.hpu")
        accelerator = FakeAccelerator("hpu", count=8)
        accelerator.calls = calls
        default = FakeStream(calls, "default")
        accelerator._streams = [default]
        self.Stream, self.Event = accelerator.Stream, accelerator.Event
        self.__dict__.update(
            is_available=lambda: True,
            device_count=accelerator.device_count,
            current_device=accelerator.current_device,
            set_device=accelerator.set_device,
            get_device_name=lambda device=None: "GAUDI2",
            synchronize=lambda device=None: accelerator.synchronize(),
            stream=accelerator.stream,
            current_stream=lambda device=None: accelerator.current_stream(),
            default_stream=lambda device=None: default,
            memory_allocated=lambda device=None: 0,
            max_memory_allocated=lambda device=None: 0,
            memory_stats=lambda device=None: {"Limit": 96 << 30, "InUse": 0, "MaxInUse": 0},
            reset_peak_memory_stats=lambda device=None: None,
        )
