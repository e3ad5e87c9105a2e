"""The self-check: the first gradients go through DeepSpeed's own code and through ours, and are compared.

The first of each kind of backward pass, that is: the first of all, the first after the number of micro-steps or the
boundary was changed, the first that adds to an accumulation that was ended before, the first that meets a
partition twice. A partition that is too large to be copied beside itself is compared piece by piece.
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
from autotune_offload.engine.tally import By
from autotune_offload.errors import in_words
from autotune_offload.machine.device import Device
from autotune_offload.paths.accumulation import Moment
from autotune_offload.records import Record

_CHECKED_PARTITIONS = 4
_CHECKED_ELEMENTS = 1 << 24
"""Both ways run over at most so many partitions and elements of each kind of pass, and over the first larger one."""

_PIECE_ELEMENTS = 1 << 22
"""Of a partition with more than `_CHECKED_ELEMENTS`: what our code leaves is known by a digest of each piece, for which
some hundred megabytes of host memory are enough."""


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

    def carry(self, param: Any, gradient: Tensor, moment: Moment, by: By = "path") -> list[Tensor]:
        """One partition by our code, which leaves the parameter's own gradient alone."""
        ...

    def carry_piece(self, param: Any, gradient: Tensor, moment: Moment, piece: slice) -> bool:
        """A piece of one partition by our code, as if there were no more of it; False where that has failed."""
        ...

    def count(self, by: By, param: Any, gradient: Tensor, moment: Moment) -> None:
        """One partition was moved."""
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
    large_elements: int = 0
    """Of the one with more than `_CHECKED_ELEMENTS` that was compared beside them."""

    def enough(self, elements: int) -> bool:
        """Whether a partition of so many need not be compared any more."""
        if elements > _CHECKED_ELEMENTS:
            return self.large_elements > 0
        return self.partitions >= _CHECKED_PARTITIONS or self.elements + elements > _CHECKED_ELEMENTS


class Checks:
    """The first partitions of the first backward that ends an accumulation, by our code and by DeepSpeed's.

    DeepSpeed's comes last, so that its results stay whatever ours has done.
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
        if so_far.enough(gradient.numel()):
            return ours.move(param, gradient, moment)
        destination = ours.stage3.destination(param, gradient)
        if destination is None:
            return ours.leave(param, gradient)
        if gradient.numel() > _CHECKED_ELEMENTS:
            return self._in_pieces(param, gradient, moment, destination, so_far)
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
        buffers = ours.carry(param, gradient, moment, "compared")
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
                or _norms_differ(norm, ours.stage3.norm(param), gradient.numel())
            )
        )
        return buffers

    def _in_pieces(
        self, param: Any, gradient: Tensor, moment: Moment, destination: Tensor, so_far: _Compared
    ) -> list[Tensor]:
        """As `_both`, where the copies for that might not fit: a digest of what ours left stands for each of them."""
        ours, low = self._carrier, self._carrier.stage3.buffer(param, gradient)
        found: list[tuple[int, int]] = []
        squares = 0.0
        ours.drain()
        ours.device.synchronize_stream()
        pieces = [slice(at, at + _PIECE_ELEMENTS) for at in range(0, gradient.numel(), _PIECE_ELEMENTS)]
        try:
            for piece in pieces:
                before = low[piece].clone()
                try:
                    if not ours.carry_piece(param, gradient, moment, piece):
                        break
                    found.append((_digest(destination[piece]), _digest(low[piece])))
                    norm = float(ours.stage3.norm(param))
                    squares += norm * norm
                finally:
                    low[piece].copy_(before)
        except Exception as error:  # most likely no memory for the copies
            ours.give_up(f"the self-check could not be made ({in_words(error)})")
        except BaseException:  # Ctrl-C: the partition is whole again
            ours.count("deepspeed", param, gradient, moment)
            ours.stock([param], [gradient])
            raise
        if not ours.active:
            return ours.leave(param, gradient)
        buffers = ours.stock([param], [gradient])
        ours.device.synchronize_stream()
        ours.count("compared", param, gradient, moment)
        so_far.large_elements = gradient.numel()
        self._judge(
            lambda: (
                _pieces_differ(found, [(_digest(destination[p]), _digest(low[p])) for p in pieces])
                or _norms_differ(math.sqrt(squares), ours.stage3.norm(param), gradient.numel())
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
            partitions=sum(of.partitions + (of.large_elements > 0) for of in compared),
            elements=sum(of.elements + of.large_elements for of in compared),
            mismatch=mismatch,
        )


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _difference(what: str, ours: Tensor, stock: Tensor) -> str | None:
    """In words; None where the bits are the same, or both are NaN: torch itself is free with their payload."""
    word = _WORDS[stock.element_size()]
    differ = (ours.view(word) != stock.view(word)) & ~(ours.isnan() & stock.isnan())
    wrong = int(differ.sum())
    return f"{wrong:,} of {ours.numel():,} values of one partition's {what} differ" if wrong else None


def _digest(values: Tensor) -> int:
    """Of the bits and their places, all NaN alike: a weighted sum modulo 2**64.

    Weights are odd, so that one value that differs always shows, and each is another, so that swapped ones do.
    """
    word = _WORDS[values.element_size()]
    bits = values.view(word).masked_fill(values.isnan(), -1).to(torch.int64)
    weights = torch.arange(values.numel(), dtype=torch.int64, device=values.device)
    weights.mul_(-7046029254386353131).bitwise_or_(1)  # the odd number next to 2**64 over the golden ratio
    return int(bits.mul_(weights).sum())


def _pieces_differ(ours: list[tuple[int, int]], stock: list[tuple[int, int]]) -> str | None:
    """In words; None where all digests are the same."""
    for at, what in enumerate(("fp32 gradient", "accumulation buffer")):
        wrong = sum(mine[at] != theirs[at] for mine, theirs in zip(ours, stock, strict=True))
        if wrong:
            return f"{wrong:,} of {len(stock):,} pieces of one partition's {what} differ"
    return None


def _norms_differ(ours: Tensor | float, stock: Tensor, elements: int) -> str | None:
    """In words; None where they agree as closely as two orders of adding so many squares must."""
    tolerance = max(elements, _CHECKED_ELEMENTS) * torch.finfo(stock.dtype).eps
    mine, theirs = float(ours), float(stock)
    if math.isfinite(theirs) and math.isfinite(mine):
        same = abs(mine - theirs) <= tolerance * theirs
    else:
        same = mine == theirs or (math.isnan(mine) and math.isnan(theirs))
    return None if same else f"the norm of one partition is {mine!r}, DeepSpeed's is {theirs!r}"
