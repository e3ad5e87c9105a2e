"""The device as the paths and the timing loops see it.

`Device` is the interface; `AcceleratorDevice` implements it on DeepSpeed's own accelerator, so that
memory is allocated, pinned and waited for exactly as DeepSpeed will do it. Importing this module touches
no device; creating an `AcceleratorDevice` asks the accelerator about itself, which starts its runtime.
Tensors are torch tensors of one dimension; counts are elements.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any, Protocol

import torch
from torch import Tensor

from autotune_offload.errors import PinError
from autotune_offload.machine import adam, host_pass
from autotune_offload.machine.procfs import affinity
from autotune_offload.machine.spans import Kept
from autotune_offload.records import DeviceIdentity, HostFacts, Limits


class Event(Protocol):
    """A point in a stream's order that the host can wait for."""

    def record(self, stream: Any) -> None:
        """Put the event behind all that `stream` holds now."""

    def synchronize(self) -> None:
        """Block the host until everything before the event is done."""


class Stream(Protocol):
    """An order of device work; created by `Device.new_stream`."""

    def synchronize(self) -> None:
        """Block the host until everything in the stream is done."""

    def wait_event(self, event: Any) -> None:
        """Hold back later work of this stream until the event is reached."""


class Completed:
    """The event of a synchronous device: everything before it is done already."""

    def record(self, stream: Any) -> None:
        """Nothing to mark."""
        del stream

    def synchronize(self) -> None:
        """Nothing to wait for."""
        return None


class _KeptBlocks:
    """Page-locked blocks that were given back and are handed out again: locking is slow (`pin_cost`).

    What is free is unlocked before a larger block is locked, so that no more is held than was in use at once.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        """The front of the smallest free block that is large enough, or of a new one."""
        size = elements * dtype.itemsize
        self._free.sort(key=lambda block: block.nbytes)
        at = next((i for i, block in enumerate(self._free) if block.nbytes >= size), None)
        if at is None:
            self.unlock()
            block = self._device.lock_pages(size, torch.uint8)
        else:
            self._device.synchronize()  # whoever had it may have failed with a copy under way
            block = self._free.pop(at)
        self._lent[block.data_ptr()] = block
        return block[:size].view(dtype)

    def give_back(self, pinned: Tensor) -> bool:
        """Keep the block, if it is one of these."""
        block = self._lent.pop(pinned.data_ptr(), None)
        if block is not None:
            self._free.append(block)
        return block is not None

    def unlock(self) -> None:
        """What is free."""
        while self._free:
            self._device.unlock_pages(self._free.pop())


class Device(ABC):
    """What can be done with one accelerator and the host memory beside it.

    `synchronous` devices have finished every operation when the call returns. `shares_host_memory`
    says that device memory is host memory (the CPU), so that a copy and a cast can be one pass.
    """

    identity: DeviceIdentity
    synchronous: bool
    shares_host_memory: bool
    kept_ranges: Kept | None = None
    """Where the ranges of a running job are kept (see `ranges`); None keeps none."""
    keeps_time: bool = False
    """Whether its clock is its own: what is handed to its threads has been done when they have taken it."""
    checked_elements: int = sys.maxsize
    """Values after which a check of bytes may stop, on a device that is slow at moving them."""

    @abstractmethod
    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised device memory, shape (elements,)."""

    _kept: _KeptBlocks | None = None

    def pinned_empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Page-locked host memory, shape (elements,). Raises PinError when it cannot be had."""
        return self.lock_pages(elements, dtype) if self._kept is None else self._kept.take(elements, dtype)

    def release_pinned(self, pinned: Tensor) -> None:
        """Give back what `pinned_empty` returned; neither it nor a view of it may be used afterwards."""
        if self._kept is None or not self._kept.give_back(pinned):
            self.unlock_pages(pinned)

    @contextlib.contextmanager
    def keeping_pinned(self) -> Iterator[None]:
        """Inside, page-locked memory that is given back is kept and handed out again; all is given back by then."""
        before, kept = self._kept, _KeptBlocks(self)
        self._kept = kept
        try:
            yield
        finally:
            self._kept = before
            kept.unlock()

    def lock_pages(self, elements: int, dtype: torch.dtype) -> Tensor:
        """`pinned_empty` anew, whatever is kept."""
        raise PinError(
            f"page-locking {elements * dtype.itemsize:,} bytes failed: this device locks no memory"
        )

    def try_lock(self, size: int, copied: int) -> None:
        """Page-lock a block of so many bytes, copy its last `copied` bytes both ways, and give it back.

        Raises:
            PinError: it cannot be locked.
        """
        pinned = self.pinned_empty(size, torch.uint8)
        piece, on_device = pinned[-copied:], self.empty(copied, torch.uint8)
        self.h2d(on_device, piece, non_blocking=True)
        self.d2h(piece, on_device, non_blocking=True)
        self.record_event().synchronize()
        self.release_pinned(pinned)

    def unlock_pages(self, pinned: Tensor) -> None:
        """`release_pinned`, for good."""
        del pinned

    @abstractmethod
    def why_not_pinned(self) -> str | None:
        """None where pinned memory is on offer, else the reason in words."""

    def host_empty(self, elements: int, dtype: torch.dtype, *, touched: bool = True) -> Tensor:
        """Pageable host memory, shape (elements,): touched pages, or ones that were never used.

        Untouched memory comes straight from the kernel, since an allocator may hand out pages that it
        kept. It is unmapped when the last tensor on it goes.
        """
        if touched:
            return torch.empty(elements, dtype=dtype, device="cpu").zero_()
        size = max(elements, 1) * dtype.itemsize
        # private, as an allocator's memory is: shared pages belong to a file system with its own costs
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=dtype)[:elements]

    @abstractmethod
    def d2h(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """Copy device to host on the current stream. Dtypes may differ only where torch casts."""

    @abstractmethod
    def h2d(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """Copy host to device on the current stream."""

    @abstractmethod
    def h2h(self, destination: Tensor, source: Tensor) -> None:
        """Copy host to host in the calling thread, casting where the dtypes differ."""

    @abstractmethod
    def cast(self, destination: Tensor, source: Tensor) -> None:
        """Copy within device memory on the current stream, casting where the dtypes differ."""

    def add(self, total: Tensor, addend: Tensor) -> None:
        """Add within device memory on the current stream, in the dtype of `total`."""
        total.add_(addend)

    def host_add(self, total: Tensor, addend: Tensor) -> None:
        """Add within host memory in the calling thread, in the dtype of `total`."""
        total.add_(addend)

    def matmul(self, out: Tensor, left: Tensor, right: Tensor) -> None:
        """Product of two matrices in device memory on the current stream: the stand-in for compute."""
        torch.mm(left, right, out=out)

    @abstractmethod
    def new_stream(self) -> Stream | None:
        """A stream beside the default one; None where the device has none."""

    @abstractmethod
    def on(self, stream: Stream | None) -> contextlib.AbstractContextManager[Any]:
        """Work inside goes to `stream`; None is the current one."""

    @abstractmethod
    def record_event(self) -> Event:
        """An event behind all work that is queued on the current stream."""

    @abstractmethod
    def order_after(self, stream: Stream | None, event: Event) -> None:
        """Later work on `stream` waits for `event`, without blocking the host."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until the whole device is idle."""

    @abstractmethod
    def synchronize_stream(self) -> None:
        """Block the host until the current stream is done."""

    def enter_thread(self) -> None:
        """Make this the current device of the calling thread: which one is current, is per thread."""
        return None

    def widen(self, destination: Tensor, source: Tensor, kept: Tensor | None = None) -> float:
        """Copy host to host as fp32 in the calling thread; the sum of the squares (see `host_pass.widen`)."""
        return host_pass.widen(destination, source, kept)

    def why_no_pass(self, rounded: torch.dtype | None) -> str | None:
        """None where this host has the compiled pass of an optimizer's step (see `machine.adam`)."""
        return adam.why_not_compiled(rounded)

    def optimizer_pass(
        self, memory: adam.Memory, values: adam.Constants, rounded: torch.dtype | None, done: bytearray
    ) -> adam.Piece:
        """That pass over pieces of `memory`, from any thread (see `adam.piece_of`)."""
        return adam.piece_of(memory, values, rounded, done)

    def norm(self, source: Tensor) -> Tensor:
        """2-norm of device memory accumulated in fp64, shape (), on the device, in stream order."""
        norm: Tensor = torch.linalg.vector_norm(source, dtype=torch.float64)
        return norm

    def record_stream(self, tensor: Tensor) -> None:
        """Keep device memory from being used again before the current stream's work is done."""
        del tensor

    def push_range(self, name: str) -> None:
        """Begin a range in whatever traces this device."""
        del name

    def pop_range(self) -> None:
        """End the last one."""
        return None

    def now(self) -> float:
        """Seconds on the clock that this device's work is timed with."""
        return time.perf_counter()

    def intraop_threads(self) -> int:
        """Threads that a host operation in the calling thread may use."""
        return torch.get_num_threads()

    def threads_of_deepspeeds_step(self) -> int:
        """Those of OpenMP, which torch and DeepSpeed's CPU Adam share."""
        return self.intraop_threads()

    def most_threads(self) -> int:
        """Host threads that each rank may have: its CPUs, shared by those that a launcher has started here."""
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
        return max(len(affinity()) // max(int(ranks) if ranks.isdigit() else 1, 1), 1)

    @contextlib.contextmanager
    def intraop(self, count: int) -> Iterator[None]:
        """Host operations inside use so many threads of torch's; 0 leaves them as they are."""
        before = torch.get_num_threads()
        if count:
            torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    # -- what a device that is not there does otherwise --

    @contextlib.contextmanager
    def selected(self) -> Iterator[Device]:
        """Make this the current device inside, and put the former one back."""
        yield self

    def own_threads(self, count: int) -> Executor | None:
        """Who stands for `count` host threads beside the calling one; None is threads of this process."""
        del count
        return None

    def twin(self) -> Device | None:
        """Another one like it, on which an operation that hangs does no harm; None where there is none."""
        return None

    def timed_only(self) -> contextlib.AbstractContextManager[Any]:
        """Only the clock is looked at inside, so that values need not arrive; a real device moves them still."""
        return contextlib.nullcontext()

    def computes(self) -> bool:
        """Whether compute of the device's can run beside its copies."""
        return not self.synchronous

    def host_facts(self) -> HostFacts | None:
        """The host beside it, where that is not the one of this process."""
        return None

    def host_limits(self, max_pinned_bytes: int | None) -> Limits | None:
        """The limits of that host, where it is not the one of this process."""
        del max_pinned_bytes
        return None
