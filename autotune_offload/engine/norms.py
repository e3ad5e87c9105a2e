"""Norms of partitions: ours as long as nobody can tell, in DeepSpeed's own order of summation where one could.

Both add the squares of the same values in fp64, each in its own order, so the last bits of a partition's norm
may differ. DeepSpeed adds the squares of these norms up and rounds the sum to fp32, and only that goes on: into
the global norm, the check for overflow, the factor of clipping. Two orders of adding n non-negative numbers
differ by no more than 2(n - 1) units of rounding of the sum (Higham, Accuracy and Stability of Numerical
Algorithms, section 4.2). Where a sum as near as that would be rounded otherwise, the norms are computed again
by DeepSpeed's own code, from the same values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from autotune_offload.engine.stage3 import Stage3
from autotune_offload.machine.device import Device

_UNIT = 2.0**-53
"""Of rounding in fp64."""

_FEW = 64
"""Roundings beside those of the sums: square roots and squares, far more than there are."""


class _Own(msgspec.Struct, frozen=True):
    """A norm that we gave DeepSpeed, of which partition, and how many values that has."""

    norm: Tensor
    ds_id: int
    elements: int


class Norms:
    """What was given to DeepSpeed as the norms of partitions, and may still have other last bits than its own."""

    def __init__(self, stage3: Stage3, device: Device) -> None:
        """Knows of none."""
        self._stage3, self._device = stage3, device
        self._own: dict[int, _Own] = {}
        self._landing: dict[int, tuple[int, int]] = {}
        self._values: dict[int, float] = {}

    def give(self, param: Any, norm: Tensor, elements: int) -> None:
        """One of ours."""
        key = self._stage3.optimizer.get_param_id(param)
        self._own[key] = _Own(norm, param.ds_id, elements)
        self._stage3.norms[key] = norm

    def will_land(self, param: Any, elements: int) -> int:
        """The key of a partition whose norm comes with a drain."""
        key: int = self._stage3.optimizer.get_param_id(param)
        self._landing[key] = param.ds_id, elements
        return key

    def landed(self, norms: Mapping[int, float]) -> None:
        """Give what came with a drain, on the device: the norms of other partitions may lie there."""
        self._values.update(norms)  # here they are safe from whatever fails below
        if not self._values:
            return
        there = self._device.empty(len(self._values), torch.float64)
        self._device.h2d(there, torch.tensor(list(self._values.values()), dtype=torch.float64, device="cpu"))
        for key, norm in zip(self._values, there.unbind(), strict=True):
            self._own[key] = _Own(norm, *self._landing[key])
            self._stage3.norms[key] = norm
        self._values.clear()

    def make_exact(self, param: Any) -> None:
        """Before the values of a partition change while its norm stays."""
        key = self._stage3.optimizer.get_param_id(param)
        if self._is_ours(key):
            self._compute(key)

    def make_all_exact(self) -> None:
        """Before all of them may become unreadable."""
        for key in [key for key in self._own if self._is_ours(key)]:
            self._compute(key)
        self._own.clear()

    def make_exact_where_it_shows(self, params: Iterable[Any]) -> None:
        """Before DeepSpeed adds up the norms of a sub-group: its fp32 sum will be what it would have been."""
        keys = [self._stage3.optimizer.get_param_id(param) for param in params]
        ours = [key for key in keys if self._is_ours(key)]
        if ours and self._shows([key for key in keys if key in self._stage3.norms], ours):
            for key in ours:
                self._compute(key)

    def _shows(self, keys: list[int], ours: list[int]) -> bool:
        if getattr(self._stage3.optimizer, "model_parallel_rank", 0):  # it adds up but some of them
            return True
        norms = [self._stage3.norms[key] for key in keys]
        total = float(torch.stack([norm.to(norms[0]) for norm in norms]).square().sum())
        if not math.isfinite(total):  # in any order
            return False
        roundings = max(self._own[key].elements for key in ours) + len(keys) + _FEW
        apart = 2 * roundings * _UNIT
        low, high = torch.tensor(
            [total * (1 - apart), total * (1 + apart)], dtype=torch.float32, device="cpu"
        )
        return bool(low != high)

    def _is_ours(self, key: int) -> bool:
        """Not computed by DeepSpeed since, nor set by the user, nor gone with the step."""
        return key in self._own and self._stage3.norms.get(key) is self._own[key].norm

    def _compute(self, key: int) -> None:
        own = self._own[key]
        low = self._stage3.buffers[own.ds_id].narrow(0, 0, own.elements)
        if not self._device.shares_host_memory:
            there = self._device.empty(own.elements, low.dtype)
            self._device.h2d(there, low)
            low = there
        self._stage3.norms[key] = self._stage3.optimizer._constant_buffered_norm2(low)
        del self._own[key]
