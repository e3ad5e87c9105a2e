"""A stand-in for the backward pass's own work, for copies to hide behind."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autotune_offload.machine.device import Device
from autotune_offload.records import Workload

MICRO_BATCH_TOKENS = 4096
"""Tokens of a micro-batch in the stand-in for compute: a context of 4,096 with one sequence."""

SQUARE = 1024
"""Side of the stand-in's matrices."""


def products(sizes: Sequence[int], world_size: int) -> list[int]:
    """Products of two SQUARE by SQUARE matrices in the backward pass of each partition's parameter.

    A backward pass does 4 floating-point operations a parameter and token (Kaplan et al.,
    arXiv:2001.08361, section 2.1); a partition stands for `world_size` times as many parameters.
    """
    return whole_numbers([4 * MICRO_BATCH_TOKENS * size * world_size / (2 * SQUARE**3) for size in sizes])


class Compute:
    """Matrix products on the current stream, as many for each partition as its backward would take."""

    def __init__(self, device: Device, sizes: Sequence[int], workload: Workload) -> None:
        self._device = device
        dtype: torch.dtype = getattr(torch, workload.dtype)
        self._square = device.empty(SQUARE * SQUARE, dtype).zero_().view(SQUARE, SQUARE)
        self._out = device.empty(SQUARE * SQUARE, dtype).view(SQUARE, SQUARE)
        self._products = products(sizes, workload.world_size)
        self._multiply()  # the first product loads the kernel
        device.synchronize()

    def _multiply(self) -> None:
        self._device.matmul(self._out, self._square, self._square)

    def queue(self, index: int) -> None:
        """The compute that makes partition `index`."""
        for _ in range(self._products[index]):
            self._multiply()

    def alone(self) -> float:
        """Seconds of the whole sample's compute with nothing beside it."""
        self._device.synchronize()
        before = self._device.now()
        for index in range(len(self._products)):
            self.queue(index)
        self._device.synchronize()
        return self._device.now() - before


def whole_numbers(amounts: Sequence[float]) -> list[int]:
    """Whole numbers with the same running sum."""
    done, total, whole = 0, 0.0, []
    for amount in amounts:
        total += amount
        whole.append(round(total) - done)
        done += whole[-1]
    return whole
