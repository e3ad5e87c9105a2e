"""Adding up the gradients of an accumulation's micro-steps, before a path takes the sum to fp32.

DeepSpeed keeps the sum in host memory, in low precision, and adds on the device: the sum is fetched, added
to and written back. On the host the gradient alone crosses the link, is added to the sum there, and in the
last micro-step the sum is widened to fp32 where it lies. Both give the same bits: either way two values are
added in fp32 and rounded to the nearest, ties to even. The code that is timed in a trial is this.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable

import msgspec
import torch
from torch import Tensor

from autotune_offload.errors import PinError
from autotune_offload.machine.device import Device
from autotune_offload.paths.path import chunks
from autotune_offload.paths.ring import Ring
from autotune_offload.paths.threads import HostThreads
from autotune_offload.records import Accumulate

_THREADS = 4
"""Host threads that add: one adds some 4 GB/s (two thirds of what it copies), and a link brings several times that."""

_PIECES = _THREADS + 2
_PIECE_BYTES = 1 << 21
"""Of a gradient on its way into the sum on the host: longer on any link than a copy's latency, and what is
under way stays in a last-level cache until it is added. Two pieces are copied while each thread adds one."""

PINNED_BYTES = _PIECES * _PIECE_BYTES
"""Page-locked for adding on the host, where the path page-locks memory as well."""


class Moment(msgspec.Struct, frozen=True):
    """Where in an accumulation a gradient is reduced."""

    first: bool
    """The first micro-step: gradients are copied, later they are added."""
    boundary: bool
    """The last one: gradients go to the host in fp32."""


class Accumulation:
    """What comes before a path: gradients become sums in DeepSpeed's accumulation buffer.

    Where device memory is host memory there is one place, the buffer itself. Otherwise the first micro-step
    is copied into the buffer, and later ones are added on the device (`value`) or on the host (`on_host`).
    The buffer holds every sum, the last one too: a later pass may add to it, and whoever asks for an overflow
    reads it.

    Args:
        device: where gradients are reduced.
        place: where to add.
        page_lock: whether adding on the host takes page-locked buffers, where the host gives them.
    """

    keeps_at_once = False
    """Whether `value` puts every sum into the buffer, so that a path need not."""

    def __init__(self, device: Device, place: Accumulate, *, page_lock: bool) -> None:
        """Allocates nothing yet."""
        self.device = device
        self.place, self._page_lock = place, page_lock
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._sums: dict[torch.dtype, HostSums] = {}
        self._keeping = False

    def adds_on_host(self, moment: Moment) -> bool:
        """Whether this moment's gradients go through `on_host`, and not through `value`."""
        return self.place == "host" and not moment.first and not self.device.shares_host_memory

    def alike(self, moment: Moment) -> object:
        """Equal for two that do the same work in a micro-step before the last, into the same kind of buffer."""
        return (self.place, self._page_lock) if self.adds_on_host(moment) else None

    def value(self, gradient: Tensor, low: Tensor, moment: Moment) -> Tensor:
        """The sum so far in the dtype of `low`, until the next call; `keep` or a path then takes it to `low`.

        Args:
            gradient: device memory, shape (n,).
            low: the partition in DeepSpeed's buffer, shape (n,). Where device memory is host memory a sum is
                made in it, and `low` is what is returned.
            moment: what to do.
        """
        if moment.first:
            return gradient if gradient.dtype == low.dtype else self._cast(gradient, low.dtype)
        if self.device.shares_host_memory:
            return low.add_(gradient.to(low.dtype))
        total = self._scratch_for(low)
        self.device.h2d(total, low, non_blocking=True)
        self.device.add(total, self._narrowed(gradient, low.dtype))
        return total

    def keep(self, value: Tensor, low: Tensor) -> None:
        """Queue what `value` returned on its way to the buffer, where it does not lie there already."""
        if self.device.shares_host_memory:
            if value.data_ptr() != low.data_ptr():
                low.copy_(value)
            return
        self._keeping = True
        self.device.d2h(low, value, non_blocking=True)

    def on_host(self, gradient: Tensor, low: Tensor) -> tuple[HostSums, Tensor]:
        """Who adds this gradient to `low`, with its buffers allocated, and what to give it: rounded, if need be."""
        sent = self._narrowed(gradient, low.dtype)
        if sent.dtype not in self._sums:
            self._sums[sent.dtype] = HostSums(self.device, sent.dtype, page_lock=self._page_lock)
        return self._sums[sent.dtype], sent

    def link_bytes(self, gradient: Tensor, low: Tensor, moment: Moment) -> int:
        """What crosses the link for one partition before a path takes it, where there is a link."""
        if self.adds_on_host(moment):
            return gradient.numel() * min(gradient.element_size(), low.element_size())
        return low.nbytes * ((not moment.first) + (not moment.boundary))

    def drain(self) -> dict[int, float]:
        """Return when every sum holds its values: the norms of those that were widened since, by their key.

        On the stream that the gradients came on.
        """
        if self._keeping:  # at the end of a backward pass DeepSpeed has waited for the same
            self.device.record_event().synchronize()
            self._keeping = False
        for sums in self._sums.values():
            sums.drain()
        return self._norms()

    def recover(self) -> dict[int, float]:
        """After a failure: finish what was begun without buffers; the norms as from `drain`.

        Every copy that was queued must have been waited for.
        """
        for sums in self._sums.values():
            sums.recover()
        return self._norms()

    @property
    def pinned_bytes(self) -> int:
        """Page-locked for adding on the host."""
        return sum(sums.pinned_bytes for sums in tuple(self._sums.values()))

    def close(self) -> None:
        """Give back the buffers."""
        while self._sums:
            self._sums.popitem()[1].close()
        self._scratch.clear()

    def _norms(self) -> dict[int, float]:
        return {key: norm for sums in self._sums.values() for key, norm in sums.take_norms().items()}

    def _narrowed(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Rounded to the buffer's dtype where that is narrower; otherwise adding widens it, which is exact."""
        return self._cast(gradient, dtype) if _narrower(dtype, gradient.dtype) else gradient

    def _cast(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        cast = self.device.empty(gradient.numel(), dtype)
        self.device.cast(cast, gradient)
        return cast

    def _scratch_for(self, low: Tensor) -> Tensor:
        """Scratch on the device, grown to the largest partition and kept."""
        scratch = self._scratch.get(low.dtype)
        if scratch is None or scratch.numel() < low.numel():
            scratch = self._scratch[low.dtype] = self.device.empty(low.numel(), low.dtype)
        return scratch[: low.numel()]


def _narrower(buffer: torch.dtype, gradient: torch.dtype) -> bool:
    """Whether the accumulation buffer rounds the gradient."""
    return buffer != gradient and buffer != torch.float32


class _Addend(msgspec.Struct, eq=False):
    """One piece of a gradient, where it goes, and how far it has come.

    `buffer` holds it in host memory once its copy was queued, in place of `source`; `total` is its place in the
    sum, `wide` in the fp32 gradient where the sum ends here.
    """

    device: Device
    source: Tensor | None
    total: Tensor
    wide: Tensor | None
    buffer: Tensor | None = None
    added: bool = False
    landed: bool = False
    squares: float = 0.0

    def land(self, buffer: Tensor) -> None:
        """Add, and widen while the sum is in the cache; whoever was interrupted goes on where that was."""
        if not self.added:
            self.device.host_add(self.total, buffer)
            self.added = True
        if self.wide is not None:
            self.squares = self.device.widen(self.wide, self.total)
        self.landed = True

    def finish(self) -> None:
        """What `land` has not done yet, by torch alone."""
        if self.landed:
            return
        if not self.added:
            held = self.buffer if self.source is None else self.source
            assert held is not None
            self.total.add_(held.to(self.total.device))
            self.added = True
        if self.wide is not None:
            self.wide.copy_(self.total)
            self.squares = float(self.wide.double().pow(2).sum())
        self.landed = True


class _Partition(msgspec.Struct, eq=False):
    """The pieces of one gradient; `key` names its norm where it is widened."""

    total: Tensor
    key: int | None
    pieces: list[_Addend]

    @property
    def landed(self) -> bool:
        """Whether every piece has."""
        return all(piece.landed for piece in self.pieces)

    def norm(self) -> float:
        """Of the sum, when every piece has landed."""
        return math.sqrt(sum(piece.squares for piece in self.pieces))


class HostSums:
    """Adds gradients of one dtype to sums in host memory, each piece once its copy is there.

    A piece is added exactly once: after a failure `recover` adds those that are still in a buffer, or on
    the device, and no other.
    """

    def __init__(self, device: Device, dtype: torch.dtype, *, page_lock: bool) -> None:
        """Allocates the buffers: page-locked if that is asked for and the host lets us."""
        self._device = device
        self._elements = _PIECE_BYTES // dtype.itemsize
        self._pinned = False
        self._block: Tensor | None = None
        if page_lock:
            with contextlib.suppress(PinError):
                self._block = device.pinned_empty(_PIECES * self._elements, dtype)
                self._pinned = True
        if self._block is None:
            self._block = device.host_empty(_PIECES * self._elements, dtype)
        self._threads = HostThreads(_THREADS, device)
        self._ring = Ring(device, self._block, _PIECES, self._threads)
        self._pending: dict[int, _Partition] = {}
        """By where each sum lies."""
        self._norms: dict[int, float] = {}

    @property
    def pinned_bytes(self) -> int:
        """Of the buffers."""
        block = self._block
        return block.nbytes if block is not None and self._pinned else 0

    def add(
        self, gradient: Tensor, low: Tensor, destination: Tensor | None = None, key: int | None = None
    ) -> None:
        """Queue one partition's gradient on the current stream, to be added to `low`.

        With a fp32 `destination` the sum goes there, too, and the norm of it will be known by `key`. Whatever
        fails here or later, the partition is in the care of `recover`.
        """
        former = self._pending.get(low.data_ptr())
        if former is not None:
            if not former.landed:  # two threads must not add to one sum
                self._ring.drain()
            self._settle(low.data_ptr())
        partition = _Partition(low, key, list(self._cut(gradient, low, destination)))
        self._pending[low.data_ptr()] = partition
        for piece in partition.pieces:
            assert piece.source is not None
            piece.buffer = self._ring.put(piece.source, piece)
            piece.source = None  # its memory is the bucket's, which is used again in the order of this stream

    def _cut(self, gradient: Tensor, low: Tensor, destination: Tensor | None) -> Iterable[_Addend]:
        for start, (source, total) in zip(
            range(0, low.numel(), self._elements), chunks(gradient, low, self._elements), strict=True
        ):
            wide = None if destination is None else destination[start : start + self._elements]
            yield _Addend(self._device, source, total, wide)

    def drain(self) -> None:
        """Return when everything that was queued has been added, and widened where that was asked for."""
        self._ring.drain()
        self._settle(*self._pending)

    def recover(self) -> None:
        """The same after a failure, piece by piece."""
        self._ring.abandon()
        for partition in self._pending.values():
            for piece in partition.pieces:
                piece.finish()
        self._settle(*self._pending)

    def _settle(self, *places: int) -> None:
        """Those that have landed; what a failure left half done waits for `recover`."""
        for place in places:
            partition = self._pending[place]
            if not partition.landed:
                continue
            if partition.key is not None:
                self._norms[partition.key] = partition.norm()
            del self._pending[place]

    def take_norms(self) -> dict[int, float]:
        """Of the partitions that were widened since the last call, by key."""
        norms, self._norms = self._norms, {}
        return norms

    def close(self) -> None:
        """End the host threads and give back the buffers; whatever was queued must have been added."""
        self._threads.close()
        self._pending.clear()
        del self._ring
        block, self._block = self._block, None
        if block is not None and self._pinned:
            self._device.release_pinned(block)
