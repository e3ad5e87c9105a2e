"""The self-check: the first gradients go through DeepSpeed's own code and through ours, and are compared.

The first of each kind of backward pass, that is: the first of all, the first after the number of micro-steps or the
boundary was changed, the first that adds to an accumulation that was ended before, the first that meets a
partition twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from autotune_offload.engine.passes import Kind
from autotune_offload.engine.stage3 import Stage3
from autotune_offload.errors import in_words
from autotune_offload.machine.device import Device
from autotune_offload.paths.accumulation import Moment
from autotune_offload.records import Record

_CHECKED_PARTITIONS = 4
_CHECKED_ELEMENTS = 1 << 24
"""Both ways run over at most so many partitions and elements of each kind of pass."""


class SelfCheck(Record, frozen=True, kw_only=True):
    """How the path compared with DeepSpeed's own code on the first gradients of each kind of backward pass."""

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

    def stock(self, params: Sequence[Any], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Partitions by DeepSpeed's own code."""
        ...

    def drain(self) -> None:
        """Return when every gradient is where it belongs."""
        ...

    def mismatch(self, found: str, result: SelfCheck) -> None:
        """What is to be done when the two differ."""
        ...

    def give_up(self, cause: str) -> None:
        """Hand over to DeepSpeed's own code for good."""
        ...


class _Compared(msgspec.Struct):
    """How much of one kind."""

    partitions: int = 0
    elements: int = 0


class Checks:
    """The first partitions of the first backward that ends an accumulation, by our code and by DeepSpeed's.

    DeepSpeed's comes last, so that its results stay whatever ours has done. Until one partition has
    been found equal, those that are too large to be compared are left to DeepSpeed.
    """

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._compared: dict[Kind, _Compared] = {}
        self._closed: set[Kind] = set()

    def compare(self, param: Any, gradient: Tensor, moment: Moment, kind: Kind) -> list[Tensor]:
        """Move one partition; at a boundary, while the check of this kind still runs, both ways."""
        ours = self._carrier
        if not moment.boundary or kind in self._closed:
            return ours.move(param, gradient, moment)
        so_far = self._compared.setdefault(kind, _Compared())
        if so_far.partitions >= _CHECKED_PARTITIONS:
            return ours.move(param, gradient, moment)
        if so_far.elements + gradient.numel() > _CHECKED_ELEMENTS:
            known = so_far.partitions or self._closed
            return ours.move(param, gradient, moment) if known else ours.leave(param, gradient)
        destination = ours.stage3.destination(param, gradient)
        if destination is None:
            return ours.leave(param, gradient)
        return self._both(param, gradient, moment, destination, so_far)

    def end_of_accumulation(self) -> bool:
        """At the end of a backward pass that ended one: whether kinds were met that had not been compared."""
        new = self._compared.keys() - self._closed
        self._closed |= new
        return bool(new)

    def _both(
        self, param: Any, gradient: Tensor, moment: Moment, destination: Tensor, so_far: _Compared
    ) -> list[Tensor]:
        ours, low = self._carrier, self._carrier.stage3.buffer(param, gradient)
        try:
            ours.drain()
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
        kept.copy_(low)
        found.copy_(destination)
        norm = ours.stage3.norm(param)
        low.copy_(before)
        buffers = ours.stock([param], [gradient])
        ours.device.synchronize_stream()
        so_far.partitions += 1
        so_far.elements += gradient.numel()
        self._judge(
            lambda: (
                _difference("fp32 gradient", found, destination)
                or _difference("accumulation buffer", kept, low)
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
        compared = self._compared.values()
        return SelfCheck(
            partitions=sum(of.partitions for of in compared),
            elements=sum(of.elements for of in compared),
            mismatch=mismatch,
        )


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
