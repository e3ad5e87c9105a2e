"""`direct` and `pinned`: straight into the destination."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, wait

import torch
from torch import Tensor

from autotune_offload.machine.device import Device, Event
from autotune_offload.paths.path import GradientPath, Spec, chunks, widen_in_place
from autotune_offload.paths.threads import HostThreads


class DestinationPath(GradientPath):
    """`direct` and `pinned`: straight into the destination, which is pageable or page-locked.

    A cast on the host widens from where the low-precision values stay, so that half the bytes cross the link
    and no further host memory is needed; where they are to stay nowhere, they land in the upper half of the
    destination itself and are widened in it.
    """

    def __init__(self, device: Device, spec: Spec, dtype: torch.dtype) -> None:
        """Allocates one fp32 scratch of `buffer_bytes` on the device for casts there."""
        super().__init__(device, spec, dtype)
        self._non_blocking = spec.path == "pinned"
        self._queued: Event | None = None
        self._landed: deque[tuple[Event, Tensor, Tensor | None]] = deque()
        self._widening: deque[Future[None]] = deque()
        self._scratch: Tensor | None = None
        if self.casts_on_device:
            self._scratch = device.empty(self.buffer_elements, torch.float32)
        self.threads = HostThreads(spec.host_threads, device)

    def offload(self, source: Tensor, destination: Tensor, low: Tensor | None = None) -> None:
        """Queue one partition; see `GradientPath.offload`."""
        if self.device.shares_host_memory:
            self._within_host(source, destination, low)
        elif self.dtype != torch.float32 and not self.casts_on_device:
            landing = destination.view(self.dtype)[destination.numel() :] if low is None else low
            self.device.d2h(landing, source, non_blocking=self._non_blocking)
            self._widen_later(destination, low)
        else:
            if low is not None:
                self.device.d2h(low, source, non_blocking=self._non_blocking)
            for wide, fp32 in self._cast_on_device(source, destination):
                self.device.d2h(fp32, wide, non_blocking=self._non_blocking)
            if self._non_blocking:
                self._queued = self.device.record_event()

    def _cast_on_device(self, source: Tensor, destination: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each piece of the source in fp32, with its place."""
        if self._scratch is None:
            yield source, destination
            return
        for part, fp32 in chunks(source, destination, self.buffer_elements):
            scratch = self._scratch[: part.numel()]
            self.device.cast(scratch, part)
            yield scratch, fp32

    def _within_host(self, source: Tensor, destination: Tensor, low: Tensor | None) -> None:
        if self._scratch is None:
            self.threads.copy(self.device, destination, source)
        else:
            for wide, fp32 in self._cast_on_device(source, destination):
                self.device.d2h(fp32, wide)
        if low is not None and low.data_ptr() != source.data_ptr():
            self.threads.copy(self.device, low, source)

    def offload_with_norm(self, source: Tensor, destination: Tensor, low: Tensor | None = None) -> Tensor:
        """Where device memory is host memory, the same pass that widens keeps the values and sums the squares."""
        if not self.device.shares_host_memory:
            return super().offload_with_norm(source, destination, low)
        kept = None if low is None or low.data_ptr() == source.data_ptr() else low
        if self._scratch is None:
            squares = self.threads.widen(self.device, destination, source, kept)
        else:
            squares = 0.0
            for part, fp32 in chunks(source, destination, self.buffer_elements):
                scratch = self._scratch[: part.numel()]
                squares += self.device.widen(scratch, part)
                self.device.d2h(fp32, scratch)
            if kept is not None:
                self.threads.copy(self.device, kept, source)
        return torch.tensor(math.sqrt(squares), dtype=torch.float64, device="cpu")

    def _widen_later(self, destination: Tensor, low: Tensor | None) -> None:
        """As soon as the copy is done: at once, in a thread, or at the drain if nothing else waits for it."""
        event = self.device.record_event() if self._non_blocking else None
        if self.threads.count:
            future = self.threads.submit(lambda: self._widen(event, destination, low))
            assert future is not None
            self._widening.append(future)
        elif event is None:
            self._widen(event, destination, low)
        else:
            self._landed.append((event, destination, low))

    def _widen(self, event: Event | None, destination: Tensor, low: Tensor | None) -> None:
        if event is not None:
            event.synchronize()
        if low is None:
            widen_in_place(self.device, destination, self.dtype)
        else:
            self.device.h2h(destination, low)

    def drain(self) -> None:
        """Wait for the copies, then for the casts on the host."""
        while self._landed:  # taken out when done: whoever was interrupted comes back
            self._widen(*self._landed[0])
            self._landed.popleft()
        while self._widening:
            self._widening[0].result()
            self._widening.popleft()
        if self._queued is not None:
            self._queued.synchronize()
            self._queued = None

    def recover(self) -> None:
        """Forget what was begun, when no thread is at it any more: copies alone fill `low`."""
        wait(self._widening)
        self._landed.clear()
        self._widening.clear()
        self._queued = None

    def close(self) -> None:
        """End the host threads and give back the scratch."""
        super().close()
        self._scratch = None
