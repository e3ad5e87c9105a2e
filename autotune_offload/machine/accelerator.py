"""Whatever device DeepSpeed drives, behind `Device`."""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autotune_offload.errors import DeviceError, PinError
from autotune_offload.machine.device import Completed, Device, Event, Stream
from autotune_offload.machine.identity import identify

SYNCHRONOUS_KINDS = frozenset({"cpu"})
"""Kinds whose operations have finished when the call returns: there a no-op synchronize is right."""


_PIN_FAILURES = (RuntimeError, ValueError, OSError, AssertionError, MemoryError)
"""What a failed pin raises; AssertionError is a torch that was built without this device."""


class AcceleratorDevice(Device):
    """The accelerator that DeepSpeed chose, through `deepspeed.accelerator.get_accelerator()`.

    Args:
        accelerator: a `DeepSpeedAccelerator`; None asks DeepSpeed, which honours DS_ACCELERATOR.
        index: device index; None takes LOCAL_RANK where a launcher set it, else the current device.
    """

    def __init__(self, accelerator: Any = None, index: int | None = None) -> None:
        """Raises DeviceError where DeepSpeed's choice of accelerator cannot be loaded."""
        self.deepspeeds_own = accelerator is None
        self._accelerator = accelerator if accelerator is not None else deepspeed_accelerator()
        kind = str(self._accelerator.device_name()).partition(":")[0]
        self.shares_host_memory = kind == "cpu"
        self.synchronous = kind in SYNCHRONOUS_KINDS
        self._mark_step = mark_step() if kind == "hpu" else _nothing
        self._index = local_index(self._accelerator, kind) if index is None else index
        self._place = str(self._accelerator.device_name(self._index))
        self.identity = identify(self._accelerator, kind, self._index)

    @contextlib.contextmanager
    def selected(self) -> Iterator[AcceleratorDevice]:
        """Make this the current device inside, and put the former one back."""
        if self.shares_host_memory:
            yield self
            return
        before = self._accelerator.current_device()
        self._accelerator.set_device(self._index)
        try:
            yield self
        finally:
            self._accelerator.set_device(before)

    def enter_thread(self) -> None:
        """Without it a thread's first call would set up a context on device 0, whatever the rank's own is."""
        if not self.shares_host_memory:
            self._accelerator.set_device(self._index)

    # -- memory --

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised device memory, shape (elements,)."""
        return torch.empty(elements, dtype=dtype, device=self._place)

    def lock_pages(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Page-locked host memory through the accelerator's own `pin_memory`, as DeepSpeed does it."""
        try:
            pageable = torch.empty(elements, dtype=dtype, device="cpu")
            pinned: Tensor = self._accelerator.pin_memory(pageable)
        except _PIN_FAILURES as error:
            raise PinError(f"page-locking {elements * dtype.itemsize:,} bytes failed: {error}") from error
        if pinned is pageable or not self.is_pinned(pinned):
            raise PinError(f"the {self.identity.kind} accelerator's pin_memory returned pageable memory")
        return pinned

    def is_pinned(self, tensor: Tensor) -> bool:
        """DeepSpeed's own answer: it knows its native backend too; older ones only have torch's."""
        ask = getattr(self._accelerator, "is_pinned", None)
        try:
            return bool(ask(tensor) if ask is not None else tensor.is_pinned())
        except RuntimeError:
            return False

    def why_not_pinned(self) -> str | None:
        """Tries one page, so that the answer is about this process and not about a name."""
        try:
            self.release_pinned(self.pinned_empty(mmap.PAGESIZE, torch.uint8))
        except PinError as error:
            return str(error)
        return None

    def unlock_pages(self, pinned: Tensor) -> None:
        """Unpin through the accelerator where it has a way to, and empty the cache of torch's allocator.

        The cache would keep the block page-locked, and hand it out again in no time while pinning is timed.
        """
        unpin = getattr(self._accelerator, "unpin_memory", None)
        if unpin is not None:
            unpin(pinned)
        pinned.set_()  # type: ignore[call-overload]  # the caller's reference, too, lets go of the block
        if not self.shares_host_memory:
            empty_host_cache()

    # -- work --

    def d2h(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """Copy device to host on the current stream."""
        destination.copy_(source, non_blocking=non_blocking)

    def h2d(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """Copy host to device on the current stream."""
        destination.copy_(source, non_blocking=non_blocking)

    def h2h(self, destination: Tensor, source: Tensor) -> None:
        """Copy host to host in the calling thread, casting where the dtypes differ."""
        destination.copy_(source)

    def cast(self, destination: Tensor, source: Tensor) -> None:
        """Copy within device memory on the current stream, casting where the dtypes differ."""
        destination.copy_(source)

    # -- order --

    def record_stream(self, tensor: Tensor) -> None:
        """Keep device memory from being used again before the current stream's work is done."""
        if not self.synchronous:
            tensor.record_stream(self._accelerator.current_stream())

    def push_range(self, name: str) -> None:
        """A range in the accelerator's own tool, such as NVTX; some accelerators have none."""
        self._accelerator.range_push(name)

    def pop_range(self) -> None:
        """End the last one."""
        self._accelerator.range_pop()

    def new_stream(self) -> Stream | None:
        """A new stream of the accelerator's; None on the CPU."""
        make = self._accelerator.Stream
        return None if make is None else make()

    def on(self, stream: Stream | None) -> contextlib.AbstractContextManager[Any]:
        """Work inside goes to `stream`; None is the current one."""
        return contextlib.nullcontext() if stream is None else self._on(stream)

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        self._mark_step()  # what was kept back so far belongs to the stream before
        with self._accelerator.stream(stream):
            yield
            self._mark_step()

    def record_event(self) -> Event:
        """An event behind all work that is queued on the current stream."""
        if self.synchronous:
            return Completed()
        make = self._accelerator.Event
        if make is None:
            raise DeviceError(f"the {self.identity.kind} accelerator offers no events; use path direct")
        self._mark_step()
        event: Event = make()
        event.record(self._accelerator.current_stream())
        return event

    def order_after(self, stream: Stream | None, event: Event) -> None:
        """Later work on `stream` waits for `event`, without blocking the host."""
        target = stream if stream is not None else self._accelerator.current_stream()
        if not self.synchronous and target is not None:
            target.wait_event(event)

    def synchronize(self) -> None:
        """Block the host until the whole device is idle."""
        self._mark_step()
        self._accelerator.synchronize()

    def synchronize_stream(self) -> None:
        """Block the host until the current stream is done."""
        self._mark_step()
        stream = self._accelerator.current_stream()
        if stream is not None:
            stream.synchronize()
        elif not self.synchronous:
            raise DeviceError(f"the {self.identity.kind} accelerator has no current stream to wait for")


def deepspeed_accelerator() -> Any:
    """The accelerator that DeepSpeed drives. Raises DeviceError where it has none."""
    try:
        from deepspeed.accelerator import get_accelerator

        return get_accelerator()
    except (ImportError, ValueError, RuntimeError) as error:
        raise DeviceError(f"DeepSpeed cannot load its accelerator: {error}") from error


def _nothing() -> None:
    return None


def empty_host_cache() -> None:
    """Give back the page-locked blocks that torch keeps for later; nothing where it keeps none."""
    newer = getattr(getattr(torch, "accelerator", None), "empty_host_cache", None)
    empty = newer or getattr(torch._C, "_host_emptyCache", None)  # torch 2.5 to 2.8 on CUDA
    if empty is not None:
        with contextlib.suppress(RuntimeError):  # no accelerator of torch's own
            empty()


def mark_step() -> Any:
    """Gaudi's lazy mode keeps operations back until mark_step; in eager mode it does nothing.

    Source: docs.habana.ai, PyTorch/Reference/mark_step.
    """
    try:
        return importlib.import_module("habana_frameworks.torch.core").mark_step
    except ImportError as error:
        raise DeviceError(f"an HPU needs habana_frameworks, which cannot be imported: {error}") from error


def local_index(accelerator: Any, kind: str) -> int:
    """The device of this rank."""
    local_rank = _local_rank()
    if kind == "cpu":
        return local_rank or 0
    # One visible device a process is how several launchers isolate ranks.
    if local_rank is None or local_rank >= int(accelerator.device_count()):
        return int(accelerator.current_device())
    return local_rank


def _local_rank() -> int | None:
    text = os.environ.get("LOCAL_RANK", "").strip()
    try:
        return int(text) if text and int(text) >= 0 else None
    except ValueError as error:
        raise DeviceError(
            f'LOCAL_RANK is "{text}"; expected the index of this process on its host, or no such variable'
        ) from error
