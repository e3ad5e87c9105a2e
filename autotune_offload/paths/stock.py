"""DeepSpeed's own gradient sequences, carried out as its releases do."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from autotune_offload.errors import PinError
from autotune_offload.machine.device import Device
from autotune_offload.paths.accumulation import Accumulation, Moment
from autotune_offload.upstream import StockSequence


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

    def offload_with_norm(self, source: Tensor, destination: Tensor, low: Tensor | None = None) -> Tensor:
        """To `low` and back, the norm through a fresh fp64 temporary (`_constant_buffered_norm2`), `offload`."""
        value = source if low is None else self.through_buffer(source, low)
        wide = self.device.empty(value.numel(), torch.float64)
        self.device.cast(wide, value)
        norm = self.device.norm(wide)
        self.offload(value, destination)
        return norm

    def through_buffer(self, value: Tensor, low: Tensor) -> Tensor:
        """Into the buffer, and what is read on from: the buffer where that is device memory, else a copy of it."""
        return _through_buffer(self.device, value, low)

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


class StockAccumulation(Accumulation):
    """The sums of micro-steps as `partition_grads` makes them: each goes to its buffer at once."""

    keeps_at_once = True

    def alike(self, moment: Moment) -> object:
        """Unlike what any path of ours does."""
        return type(self)

    def value(self, gradient: Tensor, low: Tensor, moment: Moment) -> Tensor:
        """The sum so far, in device memory and in `low`; in the first micro-step it has been in both."""
        if moment.first:
            return _through_buffer(self.device, super().value(gradient, low, moment), low)
        total = super().value(gradient, low, moment)
        super().keep(total, low)
        return total

    def keep(self, value: Tensor, low: Tensor) -> None:
        """It is there already."""


def _through_buffer(device: Device, value: Tensor, low: Tensor) -> Tensor:
    device.d2h(low, value, non_blocking=True)
    if device.shares_host_memory:
        return low
    back = device.empty(low.numel(), low.dtype)
    device.h2d(back, low, non_blocking=True)
    return back


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


def stock_path(
    sequence: StockSequence, device: Device, dtype: torch.dtype, largest_elements: int
) -> StockPath:
    """The sequence, ready to run on partitions of up to `largest_elements`."""
    return _STOCK_PATHS[sequence.name](device, dtype, largest_elements)
