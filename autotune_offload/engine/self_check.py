"""The self-check: the first gradients go through DeepSpeed's own code and through ours, and are compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from autotune_offload.engine.stage3 import Stage3
from autotune_offload.errors import in_words
from autotune_offload.machine.device import Device
from autotune_offload.paths.accumulation import Moment
from autotune_offload.records import Record

_CHECKED_PARTITIONS = 4
_CHECKED_ELEMENTS = 1 << 24
"""Both ways run over at most so many partitions and elements of one backward."""


class SelfCheck(Record, frozen=True, kw_only=True):
    """How the path compared with DeepSpeed's own code on the first gradients of the first backward."""

    partitions: int
    elements: int
    mismatch: str | None = None


class Carrier(Protocol):
    """Who moves partitions, by our code and by DeepSpeed's: an attached path."""

    device: Device
    stage3: Stage3

    @property
    def active(self) -> bool:
        """Whether our code carries gradients."""
        ...

    def move(self, param: Any, gradient: Tensor, moment: Moment) -> list[Tensor]:
        """One partition by our code, and all that goes with it; DeepSpeed's buffer view."""
        ...

    def carry(self, param: Any, gradient: Tensor, moment: Moment) -> list[Tensor]:
        """One partition by our code, which leaves the parameter's own gradient alone."""
        ...

    def leave(self, param: Any, gradient: Tensor) -> list[Tensor]:
        """One partition by DeepSpeed's own code, counted as left to it."""
        ...

    def stock(self, param: Any, gradient: Tensor) -> list[Tensor]:
        """One partition by DeepSpeed's own code."""
        ...

    def drain(self) -> None:
        """Return when every gradient is where it belongs."""
        ...

    def is_fresh(self, ds_id: int) -> bool:
        """Whether the accumulation buffer holds what DeepSpeed would have left there."""
        ...

    def freshen(self, ds_id: int | None = None) -> None:
        """Make it so."""
        ...

    def mismatch(self, found: str, result: SelfCheck) -> None:
        """What is to be done when the two differ."""
        ...

    def give_up(self, cause: str) -> None:
        """Hand over to DeepSpeed's own code for good."""
        ...


class Checks:
    """The first partitions of the first backward that ends an accumulation, by our code and by DeepSpeed's.

    DeepSpeed's comes last, so that its results stay whatever ours has done. Until one partition has
    been found equal, those that are too large to be compared are left to DeepSpeed.
    """

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._partitions = self._elements = 0

    def compare(self, param: Any, gradient: Tensor, moment: Moment) -> list[Tensor]:
        """Move one partition; at a boundary, while the check still runs, both ways."""
        ours = self._carrier
        if not moment.boundary or self._partitions >= _CHECKED_PARTITIONS:
            return ours.move(param, gradient, moment)
        if self._elements + gradient.numel() > _CHECKED_ELEMENTS:
            return ours.move(param, gradient, moment) if self._partitions else ours.leave(param, gradient)
        destination = ours.stage3.destination(param, gradient)
        if destination is None:
            return ours.leave(param, gradient)
        return self._both(param, gradient, moment, destination)

    def _both(self, param: Any, gradient: Tensor, moment: Moment, destination: Tensor) -> list[Tensor]:
        ours, low = self._carrier, self._carrier.stage3.buffer(param, gradient)
        try:
            ours.freshen(param.ds_id)
            ours.device.synchronize_stream()
            before, kept, found = low.clone(), torch.empty_like(low), torch.empty_like(destination)
        except Exception as error:  # most likely no memory for the copies
            ours.give_up(f"the self-check could not be made ({in_words(error)})")
            return ours.leave(param, gradient)
        buffers = ours.carry(param, gradient, moment)
        ours.drain()
        if not ours.active:  # it failed, and DeepSpeed's code has done the work
            param.grad = None
            return buffers
        kept_any = ours.is_fresh(param.ds_id)
        kept.copy_(low)
        found.copy_(destination)
        norm = ours.stage3.norm(param)
        low.copy_(before)
        buffers = ours.stock(param, gradient)
        ours.device.synchronize_stream()
        self._partitions += 1
        self._elements += gradient.numel()
        self._judge(
            lambda: (
                _difference("fp32 gradient", found, destination)
                or (_difference("accumulation buffer", kept, low) if kept_any else None)
                or _norms_differ(norm, ours.stage3.norm(param))
            )
        )
        return buffers

    def _judge(self, compare: Callable[[], str | None]) -> None:
        try:
            mismatch = compare()
        except Exception as error:  # no memory to compare in
            mismatch = in_words(error)
        if mismatch is not None:
            self._carrier.mismatch(mismatch, self.result(mismatch))

    def result(self, mismatch: str | None = None) -> SelfCheck:
        """What was compared."""
        return SelfCheck(partitions=self._partitions, elements=self._elements, mismatch=mismatch)


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _difference(what: str, ours: Tensor, stock: Tensor) -> str | None:
    """In words; None where the bits are the same, or both are NaN: torch itself is free with their payload."""
    word = _WORDS[stock.element_size()]
    differ = (ours.view(word) != stock.view(word)) & ~(ours.isnan() & stock.isnan())
    wrong = int(differ.sum())
    return f"{wrong:,} of {ours.numel():,} values of one partition's {what} differ" if wrong else None


def _norms_differ(ours: Tensor, stock: Tensor) -> str | None:
    """In words; None where they agree as closely as two orders of adding 2**24 squares must."""
    tolerance = _CHECKED_ELEMENTS * torch.finfo(stock.dtype).eps
    mine, theirs = float(ours), float(stock)
    if math.isfinite(theirs) and math.isfinite(mine):
        same = abs(mine - theirs) <= tolerance * theirs
    else:
        same = mine == theirs or (math.isnan(mine) and math.isnan(theirs))
    return None if same else f"the norm of one partition is {mine!r}, DeepSpeed's is {theirs!r}"
