"""A device whose streams are held up for drawn times, so that work which is not waited for comes too late.

Where a wait is missing, the host or another stream reads memory before its values are there, and training gives other
bits. `torch.cuda._sleep` keeps a stream of a CUDA or ROCm device busy for a number of clock cycles.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.machine.device import Event

MOST_CYCLES = 400_000
"""A quarter of a millisecond at 1.6 GHz: far longer than the copies of a small model take."""

_SHARE = 0.3
"""Of the operations that are held up."""


def sleeper(kind: str) -> Callable[[int], None] | None:
    """What holds up the current stream for so many cycles; None where there is nothing."""
    return getattr(torch.cuda, "_sleep", None) if kind == "cuda" else None


class SleepyDevice(AcceleratorDevice):
    """DeepSpeed's accelerator, with sleeps before its copies, casts and sums, and before its events.

    Args:
        sleep: queues a sleep of so many cycles on the current stream.
        seed: of the drawn times.
        accelerator: None asks DeepSpeed.
    """

    def __init__(self, sleep: Callable[[int], None], seed: int, accelerator: Any = None) -> None:
        super().__init__(accelerator)
        self._sleep, self._drawn = sleep, random.Random(seed)
        self.slept = 0

    def hold_up(self) -> None:
        """The current stream, with a drawn chance and for a drawn time."""
        if self._drawn.random() < _SHARE:
            self._sleep(self._drawn.randrange(1, MOST_CYCLES))
            self.slept += 1

    def d2h(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """As ever, later."""
        self.hold_up()
        super().d2h(destination, source, non_blocking=non_blocking)

    def h2d(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """As ever, later."""
        self.hold_up()
        super().h2d(destination, source, non_blocking=non_blocking)

    def cast(self, destination: Tensor, source: Tensor) -> None:
        """As ever, later."""
        self.hold_up()
        super().cast(destination, source)

    def add(self, total: Tensor, addend: Tensor) -> None:
        """As ever, later."""
        self.hold_up()
        super().add(total, addend)

    def norm(self, source: Tensor) -> Tensor:
        """As ever, later."""
        self.hold_up()
        return super().norm(source)

    def record_event(self) -> Event:
        """Behind a sleep."""
        self.hold_up()
        return super().record_event()


def hold_up_backward(module: nn.Module, device: SleepyDevice) -> None:
    """Hold up the compute stream, too: wherever the gradient of a layer's output arrives."""

    def held(gradient: Tensor) -> None:
        del gradient
        device.hold_up()

    def after(layer: nn.Module, given: Any, output: Any) -> None:
        del layer, given
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(held)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    for layer in module.modules():
        layer.register_forward_hook(after)
