"""`staged`: a ring of page-locked buffers that the device fills and the host empties."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from autotune_offload.machine.device import Device
from autotune_offload.machine.ranges import named
from autotune_offload.paths.path import GradientPath, Spec, chunks
from autotune_offload.paths.threads import HostThreads


class Piece(Protocol):
    """What is put into a ring: it knows where it goes."""

    def land(self, buffer: Tensor) -> None:
        """Take it there from `buffer`, in which it has arrived."""


class _Slot(msgspec.Struct):
    """One buffer of a ring, what of it is in use, and what is still to be done with that."""

    buffer: Tensor
    arrived: Tensor | None = None
    work: Callable[[], None] | None = None
    piece: Piece | None = None
    future: Future[None] | None = None

    def clear(self) -> None:
        """Nothing is to be done any more."""
        self.arrived = self.work = self.piece = self.future = None


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

    def put(self, source: Tensor, piece: Piece) -> Tensor:
        """Queue a copy of `source`, which fits; `piece` lands from the buffer that it has arrived in.

        Blocks only while every buffer is still in use. Returns that buffer.
        """
        slot = self._slots[0]
        self._empty(slot)
        arrived = slot.buffer[: source.numel()]
        with named(self._device, "piece into the ring"):
            self._device.d2h(arrived, source, non_blocking=True)
            event = self._device.record_event()

        def work() -> None:
            with named(self._device, "wait for a piece"):
                event.synchronize()
            with named(self._device, "piece out of the ring"):
                piece.land(arrived)

        slot.arrived, slot.piece, slot.work = arrived, piece, work
        if self._threads.count:
            slot.future = self._threads.submit(work)
        self._slots.rotate(-1)
        return arrived

    def _empty(self, slot: _Slot) -> None:
        if slot.work is None:
            return
        if slot.future is not None:
            with named(self._device, "wait for a thread"):
                slot.future.result()
        else:
            slot.work()
        slot.clear()  # only now: whoever was interrupted comes back

    def drain(self) -> None:
        """Empty the buffers, oldest first; what one of them raises is raised here."""
        for slot in self._slots:
            self._empty(slot)

    def abandon(self) -> list[tuple[Tensor, Piece]]:
        """Return when no thread is at work any more: the buffers that were not emptied, or failed in that."""
        left = []
        for slot in self._slots:
            done = slot.future is not None and _succeeded(slot.future)
            if slot.arrived is not None and slot.piece is not None and not done:
                left.append((slot.arrived, slot.piece))
            slot.clear()
        return left


def _succeeded(future: Future[None]) -> bool:
    """Known when it is done: `exception` waits for that."""
    return not future.cancelled() and future.exception() is None


class _Landing(msgspec.Struct):
    """Where one piece goes from a buffer. A thread of the path's own takes it to both places in one pass."""

    device: Device
    destination: Tensor
    low: Tensor | None
    own_thread: bool

    def land(self, buffer: Tensor) -> None:
        """As it is to `low`, and to fp32."""
        if self.own_thread and self.low is not None and self.low.dtype == buffer.dtype:
            self.device.widen(self.destination, buffer, self.low)
            return
        if self.low is not None:
            self.device.h2h(self.low, buffer)
        self.device.h2h(self.destination, buffer)


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

    @property
    def pinned_bytes(self) -> int:
        """Of the ring."""
        block = self._block
        return 0 if block is None else block.nbytes

    def offload(self, source: Tensor, destination: Tensor, low: Tensor | None = None) -> None:
        """Queue one partition; blocks only while every buffer is still in use."""
        kept = itertools.repeat(None) if low is None else torch.split(low, self.buffer_elements)
        pieces = chunks(source, destination, self.buffer_elements)
        for (part, fp32), stays in zip(pieces, kept, strict=False):
            landing = _Landing(self.device, fp32, stays, own_thread=self.threads.count > 0)
            self._ring.put(self._landing(part), landing)

    def _landing(self, low: Tensor) -> Tensor:
        """What crosses the link: the values, or their cast in the scratch."""
        if self._scratch is None:
            return low
        scratch = self._scratch[: low.numel()]
        self.device.cast(scratch, low)
        return scratch

    def drain(self) -> None:
        """Empty the buffers, oldest first."""
        self._ring.drain()

    def recover(self) -> None:
        """Empty the buffers by torch alone, into every `low`."""
        for buffer, piece in self._ring.abandon():
            if isinstance(piece, _Landing) and piece.low is not None:
                piece.low.copy_(buffer)

    def close(self) -> None:
        """End the host threads and unpin the ring."""
        super().close()
        self._scratch = None
        if self._block is not None:
            del self._ring
            self.device.release_pinned(self._block)
            self._block = None
