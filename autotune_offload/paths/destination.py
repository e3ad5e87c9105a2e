"""`direct` and `pinned`: straight into the destination."""

from __future__ import annotations

import math
from collections import deque
from concurrent.futures import Future

import torch
from torch import Tensor

from autotune_offload.machine.device import Device, Event
from autotune_offload.paths.path import GradientPath, Spec, chunks, widen_in_place
from autotune_offload.paths.threads import HostThreads


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
