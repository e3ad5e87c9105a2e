"""The gradient paths, written once against `Device`, and DeepSpeed's own sequences beside them.

A path takes a low-precision gradient partition from device memory to the fp32 gradient in host
memory. `offload` queues one partition on the current stream; `drain` returns when every destination
holds its values; `close` gives the path's buffers back. The code that is timed in a trial is this.

Where a cast is due, fp32 values are exact: bf16 and fp16 are subsets of fp32, so every path gives the
same bits. Only the payload of an fp16 NaN is left to torch, whose own `.float()` gives it differently in
the body and in the tail of one tensor.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from threading import Barrier
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from autotune_offload.device import Device, Event
from autotune_offload.errors import ConfigError, PinError
from autotune_offload.records import Cast, Memory, Path, Record

_TAIL_ELEMENTS = 1024
"""Below this, an in-place upcast goes through a copy: halving further costs more than it saves."""


class Spec(Protocol):
    """What a path is built from; candidates and choices have these fields."""

    @property
    def path(self) -> Path:
        """Which of our paths."""
        ...

    @property
    def cast(self) -> Cast:
        """Where low precision becomes fp32."""
        ...

    @property
    def buffer_bytes(self) -> int:
        """Of one piece, or of one buffer of the ring."""
        ...

    @property
    def buffer_count(self) -> int:
        """Buffers in the ring."""
        ...

    @property
    def host_threads(self) -> int:
        """Threads of the path's own; 0 is torch's pool in the calling thread."""
        ...


def build(device: Device, spec: Spec, dtype: torch.dtype) -> GradientPath:
    """The path that `spec` names, with its buffers allocated, for gradients of `dtype`.

    Raises:
        ConfigError: buffers smaller than one element, or no buffers.
        PinError: a staged path where page-locked memory cannot be had.
    """
    if spec.buffer_bytes < 4 or spec.buffer_count < 1 or spec.host_threads < 0:
        raise ConfigError(
            f"{spec.path} with {spec.buffer_count} buffers of {spec.buffer_bytes} bytes and "
            f"{spec.host_threads} host threads: expected at least one buffer of 4 bytes and no negative number"
        )
    if spec.path == "staged":
        return StagedPath(device, spec, dtype)
    return DestinationPath(device, spec, dtype)


def destination_memory(path: Path) -> Memory:
    """The kind of host memory in which this path wants the fp32 gradient."""
    return "pinned" if path == "pinned" else "pageable"


def page_locks(path: Path) -> bool:
    """Whether this path takes page-locked memory at all."""
    return path != "direct"


class HostThreads:
    """Who does a path's work on the host: the calling thread, or `count` threads of its own.

    With a count of 0, an operation runs at once in the calling thread on torch's intra-op pool. Each
    thread of its own runs single-threaded torch operations, so that none waits for a parallel region.
    """

    def __init__(self, count: int, device: Device | None = None) -> None:
        """Starts the threads, on `device`; the caller's own number of torch threads stays as it was."""
        self.count = count
        self._pool: Executor | None = device.own_threads(count) if count and device is not None else None
        if count and self._pool is None:
            threads = ThreadPoolExecutor(count, thread_name_prefix="autotune-offload")
            self._start(threads, device)
            self._pool = threads

    def _start(self, pool: ThreadPoolExecutor, device: Device | None) -> None:
        before = torch.get_num_threads()
        together = Barrier(self.count + 1)  # so that each of them takes one
        try:
            started = [pool.submit(_single_threaded, together, device) for _ in range(self.count)]
            together.wait()
            for future in started:
                future.result()
        except BaseException:
            together.abort()
            pool.shutdown()
            raise
        finally:
            # set_num_threads is per thread, but also what threads that start later begin with
            torch.set_num_threads(before)

    def submit(self, work: Callable[[], None]) -> Future[None] | None:
        """Run `work`: now and here (None), or soon in a thread of its own."""
        if self._pool is None:
            work()
            return None
        return self._pool.submit(work)

    def copy(self, device: Device, destination: Tensor, source: Tensor) -> None:
        """One copy, casting where dtypes differ, shared by all threads; returns when it is done."""
        if self._pool is None:
            device.h2h(destination, source)
            return
        pieces = zip(destination.chunk(self.count), source.chunk(self.count), strict=True)
        for future in [self._pool.submit(device.h2h, to, of) for to, of in pieces]:
            future.result()

    def widen(self, device: Device, destination: Tensor, source: Tensor) -> float:
        """One pass to fp32 shared by all threads; the sum of the squares."""
        if self._pool is None:
            return device.widen(destination, source)
        pieces = zip(destination.chunk(self.count), source.chunk(self.count), strict=True)
        return sum(
            future.result() for future in [self._pool.submit(device.widen, *piece) for piece in pieces]
        )

    def close(self) -> None:
        """End the threads after what was submitted."""
        if self._pool is not None:
            self._pool.shutdown()


def _single_threaded(together: Barrier, device: Device | None) -> None:
    try:
        torch.get_num_threads()  # a thread that was never asked takes the process's number at its first operation
        torch.set_num_threads(1)
        if device is not None:
            device.enter_thread()
    finally:
        together.wait()


class GradientPath(ABC):
    """One way from a gradient partition on the device to its fp32 destination on the host."""

    def __init__(self, device: Device, spec: Spec, dtype: torch.dtype) -> None:
        """Allocates nothing; subclasses allocate their buffers, and start the threads when they have them."""
        self.device = device
        self.dtype = dtype
        self.casts_on_device = spec.cast == "device" and dtype != torch.float32
        self.buffer_elements = spec.buffer_bytes // 4
        self.threads = HostThreads(0)

    @abstractmethod
    def offload(self, source: Tensor, destination: Tensor) -> None:
        """Queue one partition on the current stream, which is the same one until the next drain.

        Args:
            source: device memory, shape (n,), of the path's dtype; unchanged until the path drains or
                later work on the same stream, whichever is first.
            destination: host memory, shape (n,), float32, contiguous.
        """

    def offload_with_norm(self, source: Tensor, destination: Tensor) -> Tensor:
        """Queue one partition as `offload` does, and return its 2-norm.

        Returns:
            Shape (), float64, accumulated in fp64; on the device in stream order, or on the host.
        """
        norm = self.device.norm(source)
        self.offload(source, destination)
        return norm

    @abstractmethod
    def drain(self) -> None:
        """Return when every destination that was given to `offload` holds its values.

        The current stream does not matter here. What a host thread of the path's raised is raised here
        or by the next `offload`.
        """

    def close(self) -> None:
        """End the host threads and give back the buffers; the path must have been drained."""
        self.threads.close()


class DestinationPath(GradientPath):
    """`direct` and `pinned`: straight into the destination, which is pageable or page-locked.

    A cast on the host lands the low-precision values in the upper half of the destination itself and
    widens them there, so that half the bytes cross the link and no further host memory is needed.
    """

    def __init__(self, device: Device, spec: Spec, dtype: torch.dtype) -> None:
        """Allocates one fp32 scratch of `buffer_bytes` on the device for casts there."""
        super().__init__(device, spec, dtype)
        self._non_blocking = spec.path == "pinned"
        self._queued: Event | None = None
        self._landed: deque[tuple[Event, Tensor]] = deque()
        self._widening: deque[Future[None]] = deque()
        self._scratch: Tensor | None = None
        if self.casts_on_device:
            self._scratch = device.empty(self.buffer_elements, torch.float32)
        self.threads = HostThreads(spec.host_threads, device)

    def offload(self, source: Tensor, destination: Tensor) -> None:
        """Queue one partition; see `GradientPath.offload`."""
        if self._scratch is not None:
            for low, fp32 in chunks(source, destination, self.buffer_elements):
                scratch = self._scratch[: low.numel()]
                self.device.cast(scratch, low)
                self.device.d2h(fp32, scratch, non_blocking=self._non_blocking)
        elif self.device.shares_host_memory:
            self.threads.copy(self.device, destination, source)
        elif self.dtype == torch.float32:
            self.device.d2h(destination, source, non_blocking=self._non_blocking)
        else:
            landing = destination.view(self.dtype)[destination.numel() :]
            self.device.d2h(landing, source, non_blocking=self._non_blocking)
            self._widen_later(destination)
            return
        if self._non_blocking:
            self._queued = self.device.record_event()

    def offload_with_norm(self, source: Tensor, destination: Tensor) -> Tensor:
        """Where device memory is host memory, the same pass that widens sums the squares."""
        if not self.device.shares_host_memory:
            return super().offload_with_norm(source, destination)
        if self._scratch is None:
            squares = self.threads.widen(self.device, destination, source)
        else:
            squares = 0.0
            for low, fp32 in chunks(source, destination, self.buffer_elements):
                scratch = self._scratch[: low.numel()]
                squares += self.device.widen(scratch, low)
                self.device.d2h(fp32, scratch)
        return torch.tensor(math.sqrt(squares), dtype=torch.float64, device="cpu")

    def _widen_later(self, destination: Tensor) -> None:
        """As soon as the copy is done: at once, in a thread, or at the drain if nothing else waits for it."""
        event = self.device.record_event() if self._non_blocking else None
        if self.threads.count:
            future = self.threads.submit(lambda: self._widen(event, destination))
            assert future is not None
            self._widening.append(future)
        elif event is None:
            self._widen(event, destination)
        else:
            self._landed.append((event, destination))

    def _widen(self, event: Event | None, destination: Tensor) -> None:
        if event is not None:
            event.synchronize()
        widen_in_place(self.device, destination, self.dtype)

    def drain(self) -> None:
        """Wait for the copies, then for the casts on the host."""
        while self._landed:
            self._widen(*self._landed.popleft())
        while self._widening:
            self._widening.popleft().result()
        if self._queued is not None:
            self._queued.synchronize()
            self._queued = None

    def close(self) -> None:
        """End the host threads and give back the scratch."""
        super().close()
        self._scratch = None


class _Slot(msgspec.Struct):
    """One buffer of a ring and what is still to be done with its contents."""

    buffer: Tensor
    land: Callable[[], None] | None = None
    future: Future[None] | None = None


class Ring:
    """Buffers in host memory that the device fills and the host empties in turn, oldest first.

    While the host empties one buffer the device fills the next ones. Only the event behind a buffer's
    own copy is waited for.

    Args:
        device: fills the buffers, on the stream that is current at each `put`.
        block: host memory that is cut into the buffers; the ring does not own it.
        count: how many buffers.
        threads: who empties them; a count of 0 is the calling thread, at the latest moment.
    """

    def __init__(self, device: Device, block: Tensor, count: int, threads: HostThreads) -> None:
        self._device, self._threads = device, threads
        self._slots = deque(_Slot(buffer) for buffer in block.chunk(count))

    def put(self, source: Tensor, land: Callable[[Tensor], None]) -> Tensor:
        """Queue a copy of `source`, which fits; `land` is called with the buffer that it has arrived in.

        Blocks only while every buffer is still in use. Returns that buffer.
        """
        slot = self._slots[0]
        self._empty(slot)
        arrived = slot.buffer[: source.numel()]
        self._device.d2h(arrived, source, non_blocking=True)
        event = self._device.record_event()

        def work() -> None:
            event.synchronize()
            land(arrived)

        slot.land = work
        if self._threads.count:
            slot.future = self._threads.submit(work)
        self._slots.rotate(-1)
        return arrived

    def _empty(self, slot: _Slot) -> None:
        if slot.land is None:
            return
        try:
            if slot.future is not None:
                slot.future.result()
            else:
                slot.land()
        finally:
            slot.land = slot.future = None

    def drain(self) -> None:
        """Empty the buffers, oldest first; what one of them raises is raised here."""
        for slot in self._slots:
            self._empty(slot)

    def abandon(self) -> None:
        """Return when no thread is at work any more; what was not begun is forgotten."""
        for slot in self._slots:
            if slot.future is not None:
                wait([slot.future])
            slot.land = slot.future = None


class StagedPath(GradientPath):
    """`staged`: through a ring of page-locked buffers, then from each into pageable memory."""

    def __init__(self, device: Device, spec: Spec, dtype: torch.dtype) -> None:
        """Allocates the ring as one page-locked block, and a device scratch for casts there."""
        super().__init__(device, spec, dtype)
        landing = torch.float32 if self.casts_on_device else dtype
        self.buffer_elements = spec.buffer_bytes // landing.itemsize
        self._scratch: Tensor | None = None
        if self.casts_on_device:
            self._scratch = device.empty(self.buffer_elements, torch.float32)
        self._block: Tensor | None = device.pinned_empty(self.buffer_elements * spec.buffer_count, landing)
        self.threads = HostThreads(spec.host_threads, device)
        self._ring = Ring(device, self._block, spec.buffer_count, self.threads)

    def offload(self, source: Tensor, destination: Tensor) -> None:
        """Queue one partition; blocks only while every buffer is still in use."""
        for low, fp32 in chunks(source, destination, self.buffer_elements):
            self._ring.put(self._landing(low), functools.partial(self._land, fp32))

    def _landing(self, low: Tensor) -> Tensor:
        """What crosses the link: the values, or their cast in the scratch."""
        if self._scratch is None:
            return low
        scratch = self._scratch[: low.numel()]
        self.device.cast(scratch, low)
        return scratch

    def _land(self, destination: Tensor, buffer: Tensor) -> None:
        self.device.h2h(destination, buffer)

    def drain(self) -> None:
        """Empty the buffers, oldest first."""
        self._ring.drain()

    def close(self) -> None:
        """End the host threads and unpin the ring."""
        super().close()
        self._scratch = None
        if self._block is not None:
            del self._ring
            self.device.release_pinned(self._block)
            self._block = None


def widen_in_place(device: Device, destination: Tensor, dtype: torch.dtype) -> None:
    """Turn low-precision values in the upper half of `destination`'s bytes into fp32 over all of it.

    Each step widens the front half of what is left: its fp32 values end where the values still to be
    read begin. A last short piece is copied out first.

    Args:
        device: does the copies, in the calling thread.
        destination: host memory, shape (n,), float32, contiguous; bytes 2n to 4n hold n values.
        dtype: bfloat16 or float16.
    """
    total = destination.numel()
    low = destination.view(dtype)[total:]
    done = 0
    while (half := (total - done) // 2) >= _TAIL_ELEMENTS:
        device.h2h(destination[done : done + half], low[done : done + half])
        done += half
    device.h2h(destination[done:], low[done:].clone())


def moved_bytes(spec: Spec, gradient: Tensor) -> int:
    """Bytes of one partition that cross the link on the path of `spec`, where there is a link."""
    itemsize = 4 if spec.cast == "device" else gradient.element_size()
    return gradient.numel() * itemsize


def chunks(source: Tensor, destination: Tensor, elements: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of pieces of `elements` elements, the last one shorter."""
    for start in range(0, source.numel(), elements):
        yield source[start : start + elements], destination[start : start + elements]


# -- DeepSpeed's own sequences --------------------------------------------------------------------


class StockSequence(Record, frozen=True, kw_only=True):
    """How one range of DeepSpeed versions moves a gradient at the accumulation boundary.

    `first` and `last` bound the versions, inclusive, as (major, minor, patch); `default_memory` is
    where those versions put the destination when `pin_memory` is not written.
    """

    name: str
    first: tuple[int, int, int]
    last: tuple[int, int, int]
    default_memory: Memory

    @property
    def versions(self) -> str:
        """The range in words."""
        low = ".".join(map(str, self.first))
        return f"{low} and newer" if self.last == _NEWEST else f"{low} to {'.'.join(map(str, self.last))}"

    def build(self, device: Device, dtype: torch.dtype, largest_elements: int) -> StockPath:
        """The sequence, ready to run on partitions of up to `largest_elements`."""
        return _STOCK_PATHS[self.name](device, dtype, largest_elements)


_NEWEST = (10_000, 0, 0)

# partition_grads in deepspeed/runtime/zero/stage3.py, read in the wheels of 17 versions
STOCK_SEQUENCES = (
    StockSequence(name="implicit_upcast", first=(0, 14, 5), last=(0, 15, 3), default_memory="pageable"),
    StockSequence(name="bounce_buffer", first=(0, 15, 4), last=(0, 16, 2), default_memory="pageable"),
    StockSequence(name="explicit_upcast", first=(0, 16, 3), last=(0, 19, 4), default_memory="pageable"),
    StockSequence(
        name="explicit_upcast_non_blocking", first=(0, 19, 5), last=_NEWEST, default_memory="pinned"
    ),
)


class StockPath(ABC):
    """A DeepSpeed sequence with the face of a `GradientPath`, temporaries and waits as in its source."""

    def __init__(self, device: Device, dtype: torch.dtype, largest_elements: int) -> None:
        """Keeps what the sequence needs; `largest_elements` sizes a bounce buffer."""
        self.device = device
        self.dtype = dtype
        self.largest_elements = largest_elements

    @abstractmethod
    def offload(self, source: Tensor, destination: Tensor) -> None:
        """Queue or do one partition, as that DeepSpeed does."""

    def offload_with_norm(self, source: Tensor, destination: Tensor) -> Tensor:
        """The norm first, through a fresh fp64 temporary (`_constant_buffered_norm2`), then `offload`."""
        wide = self.device.empty(source.numel(), torch.float64)
        self.device.cast(wide, source)
        norm = self.device.norm(wide)
        self.offload(source, destination)
        return norm

    def drain(self) -> None:
        """The stream's end, as the epilogue waits for it."""
        self.device.record_event().synchronize()

    def close(self) -> None:
        """Give back what was allocated."""
        return None

    def _upcast(self, source: Tensor) -> Tensor:
        """`.float()`: a fresh temporary each time, unless the gradient is fp32 already."""
        if source.dtype == torch.float32:
            return source
        fp32 = self.device.empty(source.numel(), torch.float32)
        self.device.cast(fp32, source)
        return fp32


class _ImplicitUpcast(StockPath):
    """copy_ between different dtypes: torch makes a fresh, cold temporary on the host and casts there."""

    def offload(self, source: Tensor, destination: Tensor) -> None:
        self.device.d2h(destination, source)


class _BounceBuffer(StockPath):
    """A page-locked buffer as long as the largest partition, the whole device waited for, then h2h."""

    def __init__(self, device: Device, dtype: torch.dtype, largest_elements: int) -> None:
        super().__init__(device, dtype, largest_elements)
        self._pinned = True
        try:
            self._bounce = device.pinned_empty(largest_elements, torch.float32)
        except PinError:  # the CPU accelerator's pin_memory gives pageable memory
            self._pinned = False
            self._bounce = device.host_empty(largest_elements, torch.float32)

    def offload(self, source: Tensor, destination: Tensor) -> None:
        bounce = self._bounce[: source.numel()]
        self.device.d2h(bounce, self._upcast(source))
        self.device.synchronize()
        self.device.h2h(destination, bounce)

    def close(self) -> None:
        if self._pinned:
            self._pinned = False
            self.device.release_pinned(self._bounce)


class _ExplicitUpcast(StockPath):
    """Cast on the device into a fresh temporary, then one blocking copy."""

    def offload(self, source: Tensor, destination: Tensor) -> None:
        self.device.d2h(destination, self._upcast(source))


class _ExplicitUpcastNonBlocking(StockPath):
    """Cast on the device into a fresh temporary, then one copy that blocks only for pageable memory."""

    def offload(self, source: Tensor, destination: Tensor) -> None:
        self.device.d2h(destination, self._upcast(source), non_blocking=True)


_STOCK_PATHS: dict[str, type[StockPath]] = {
    "implicit_upcast": _ImplicitUpcast,
    "bounce_buffer": _BounceBuffer,
    "explicit_upcast": _ExplicitUpcast,
    "explicit_upcast_non_blocking": _ExplicitUpcastNonBlocking,
}


def named_sequence(name: str) -> StockSequence:
    """One of `STOCK_SEQUENCES` by its name, as a `Baseline` has it."""
    return next(sequence for sequence in STOCK_SEQUENCES if sequence.name == name)


def stock_sequence(version: tuple[int, int, int]) -> StockSequence:
    """The sequence of a DeepSpeed version; older than any known counts as the oldest."""
    for sequence in reversed(STOCK_SEQUENCES):
        if version >= sequence.first:
            return sequence
    return STOCK_SEQUENCES[0]
