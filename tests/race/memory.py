"""Device memory as a caching allocator gives it out: what is freed is used again, in the order of one stream alone.

Source of the rules: torch's documentation of `Tensor.record_stream` and of CUDA's caching allocator. A block belongs
to the stream on which it was allocated. Freed, it goes at once to whoever asks next, whose work comes behind on that
stream; work on another stream is waited for only where `record_stream` has told of it.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from autotune_offload.testing import JUNK

if TYPE_CHECKING:
    from tests.fakes import DeferredStream

_ALIGNED = 64
"""Bytes that a block is a multiple of, so that blocks fit others that ask."""


class _Block(msgspec.Struct, eq=False):
    """A piece of memory that is never given back to the host, with the stream that it belongs to."""

    memory: Tensor
    stream: Any
    users: list[Any] = []
    held: list[tuple[Any, int]] = []

    @property
    def begin(self) -> int:
        return self.memory.data_ptr()


class Memory:
    """Blocks by address; `draw` decides whether a freed one is used again."""

    def __init__(self, draw: random.Random, lock: Any) -> None:
        self._draw, self._lock = draw, lock
        self._blocks: list[_Block] = []
        self._free: list[_Block] = []
        self._freed: list[_Block] = []

    def allocate(self, elements: int, dtype: torch.dtype, stream: DeferredStream) -> Tensor:
        """Memory on which nobody else has a tensor; what was in it may still be in use on its stream."""
        size = elements * dtype.itemsize
        with self._lock:
            block = self._reused(size, stream) or self._new(size, stream)
        owned = torch.from_numpy(block.memory.numpy())  # a storage of its own: who holds it, is seen
        weakref.finalize(owned.untyped_storage(), self._let_go, block).atexit = False
        return owned[:size].view(dtype)

    def _new(self, size: int, stream: DeferredStream) -> _Block:
        whole = max(-(-size // _ALIGNED), 1) * _ALIGNED
        block = _Block(torch.full((whole,), JUNK, dtype=torch.uint8), stream)
        self._blocks.append(block)
        return block

    def _reused(self, size: int, stream: DeferredStream) -> _Block | None:
        for block in [block for block in self._freed if all(s.done >= at for s, at in block.held)]:
            self._freed.remove(block)
            self._give(block)
        fitting = [b for b in self._free if b.stream is stream and b.memory.nbytes >= size]
        if not fitting or self._draw.random() < 0.2:
            return None
        block = min(fitting, key=lambda one: one.memory.nbytes)
        self._free.remove(block)
        return block

    def _let_go(self, block: _Block) -> None:
        with self._lock:
            if not block.users:
                self._give(block)
                return
            block.held = [(stream, stream.put) for stream in block.users]
            block.users = []
            self._freed.append(block)

    def _give(self, block: _Block) -> None:
        """To whoever comes next on its stream, and writes there."""
        block.stream.add(lambda: block.memory.fill_(JUNK))
        self._free.append(block)

    def _find(self, tensor: Tensor) -> _Block | None:
        begin = tensor.data_ptr()
        return next((b for b in self._blocks if b.begin <= begin < b.begin + b.memory.nbytes), None)

    def has(self, tensor: Tensor) -> bool:
        """Whether it lies here."""
        return self._find(tensor) is not None

    def used_on(self, tensor: Tensor, stream: DeferredStream) -> None:
        """`record_stream`."""
        block = self._find(tensor)
        assert block is not None, "record_stream of what is no memory of the device's"
        if stream is not block.stream and stream not in block.users:
            block.users = [*block.users, stream]

    def alias(self, tensor: Tensor) -> Tensor:
        """The same place, by a reference that keeps nothing from being freed: queued work holds no memory."""
        block = self._find(tensor)
        if block is None:
            return tensor
        offset = tensor.data_ptr() - block.begin
        flat = block.memory[offset : block.memory.nbytes]
        flat = flat[: flat.nbytes // tensor.element_size() * tensor.element_size()].view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())


class Pages:
    """Page-locked host memory with copies under way; one that is given back meanwhile is a fault."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self._under_way: list[tuple[int, int]] = []

    def during(self, work: Callable[[], object], tensor: Tensor) -> Callable[[], object]:
        """`work`, which reads or writes `tensor` when it is done."""
        span = (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        self._under_way.append(span)

        def done() -> None:
            self._under_way.remove(span)
            work()

        return done

    def give_back(self, pinned: Tensor) -> None:
        """What lies there from now on is somebody else's."""
        begin, end = pinned.data_ptr(), pinned.data_ptr() + pinned.nbytes
        if any(one < end and begin < other for one, other in self._under_way):
            self.faults.append("page-locked memory was given back with a copy under way")
        pinned.view(torch.uint8).fill_(JUNK)
