"""Blocks of simulated memory: which pages were never touched, and which are page-locked."""

from __future__ import annotations

import torch
from torch import Tensor

from autotune_offload.records import Memory

_JUNK = 0x5A


class Blocks:
    """What is known of memory by its address.

    Args:
        checked_bytes: so much of new memory holds junk, as far as checks look: not by chance what was there before.
    """

    def __init__(self, checked_bytes: int) -> None:
        self._checked_bytes = checked_bytes
        self._pinned: dict[int, int] = {}
        self._cold: dict[int, list[int]] = {}

    def fresh(self, tensor: Tensor, *, cold: bool) -> None:
        """Memory that was just handed out."""
        tensor.view(torch.uint8)[: self._checked_bytes].fill_(_JUNK)
        begin = tensor.data_ptr()
        for old in [
            b for b, (size, _) in self._cold.items() if b < begin + tensor.nbytes and begin < b + size
        ]:
            del self._cold[old]  # memory that was given back and is handed out again
        if cold and tensor.nbytes:
            self._cold[begin] = [tensor.nbytes, 0]

    def is_cold(self, destination: Tensor) -> bool:
        """Whether these pages are written for the first time; they are not cold any more afterwards."""
        if not self._cold:
            return False
        at = destination.data_ptr()
        for begin, block in self._cold.items():
            if begin <= at < begin + block[0]:
                block[1] += destination.nbytes
                if block[1] >= block[0]:
                    del self._cold[begin]
                return True
        return False

    def lock(self, tensor: Tensor) -> None:
        """It is page-locked from now on."""
        self._pinned[tensor.data_ptr()] = tensor.nbytes

    def unlock(self, tensor: Tensor) -> None:
        """Forget that it was page-locked."""
        self._pinned.pop(tensor.data_ptr(), None)

    def memory_of(self, tensor: Tensor) -> Memory:
        """The kind of host memory that a tensor lies in."""
        at = tensor.data_ptr()
        for begin, size in self._pinned.items():
            if begin <= at < begin + size:
                return "pinned"
        return "pageable"
