"""The fused host pass, compiled on first use: widen a gradient to fp32 and sum its squares in fp64.

Torch needs three passes for it (copy, cast to fp64, dot product), each through memory. Where there is no
C compiler, those three run in pieces that stay in the cache, which takes about twice as long.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from autotune_offload.machine import compiled

_SOURCE = Path(__file__).with_name("widen.c")
_PIECE_ELEMENTS = 1 << 17
"""512 KiB of fp32 and 1 MiB of fp64: a piece and its squares stay in a level-2 cache or just beyond."""

_log = logging.getLogger(__name__)

OnePass = Callable[[Tensor, Tensor, Tensor | None], float]


def widen(destination: Tensor, source: Tensor, kept: Tensor | None = None) -> float:
    """Copy `source` into `destination` as fp32, and as it is into `kept`; return the sum of its squares.

    Args:
        destination: host memory, shape (n,), float32, contiguous.
        source: host memory, shape (n,), bfloat16, float16 or float32, contiguous, no overlap.
        kept: host memory, shape (n,), of the source's dtype, contiguous, no overlap.

    Raises:
        ValueError: tensors that are not like that; the compiled pass would write past their end.
    """
    if not (_plain(destination) and _plain(source)) or destination.dtype != torch.float32:
        raise ValueError(
            f"expected contiguous host memory and an fp32 destination, found {_form(destination, source)}"
        )
    if destination.numel() != source.numel():
        raise ValueError(f"expected as many elements on both sides, found {_form(destination, source)}")
    if kept is not None and not (_plain(kept) and (kept.dtype, kept.shape) == (source.dtype, source.shape)):
        raise ValueError(f"expected the values to be kept as they are, found {_form(kept, source)}")
    return _one_pass(source.dtype)(destination, source, kept)


def _plain(tensor: Tensor) -> bool:
    return tensor.dim() == 1 and tensor.is_contiguous() and tensor.device.type == "cpu"


def _form(*tensors: Tensor) -> str:
    return " from ".join(f"{t.dtype} {tuple(t.shape)}, strides {t.stride()}, on {t.device}" for t in tensors)


def why_not_fused(dtype: torch.dtype) -> str | None:
    """None where the compiled pass is used for this dtype, else why torch's own operations are."""
    library = compiled.library(_SOURCE)
    if isinstance(library, str):
        return library
    return None if hasattr(library, _symbol(dtype)) else f"no compiled pass for {dtype} on this processor"


@functools.cache
def _one_pass(dtype: torch.dtype) -> OnePass:
    library = compiled.library(_SOURCE)
    if isinstance(library, str) or not hasattr(library, _symbol(dtype)):
        _log.info("gradient norms take three passes: %s", why_not_fused(dtype))
        return in_pieces
    function = getattr(library, _symbol(dtype))
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ssize_t)
    function.restype = ctypes.c_double

    def fused(destination: Tensor, source: Tensor, kept: Tensor | None) -> float:
        # a foreign call releases the GIL, so that host threads run side by side
        at = None if kept is None else kept.data_ptr()
        return float(function(destination.data_ptr(), source.data_ptr(), at, source.numel()))

    return fused


def _symbol(dtype: torch.dtype) -> str:
    return f"widen_{str(dtype).removeprefix('torch.')}"


def in_pieces(destination: Tensor, source: Tensor, kept: Tensor | None = None) -> float:
    """The same by torch's operations, each piece while it is in the cache."""
    wide = torch.empty(min(_PIECE_ELEMENTS, source.numel()), dtype=torch.float64, device="cpu")
    total = 0.0
    for start in range(0, source.numel(), _PIECE_ELEMENTS):
        piece = destination[start : start + _PIECE_ELEMENTS]
        piece.copy_(source[start : start + _PIECE_ELEMENTS])
        if kept is not None:
            kept[start : start + _PIECE_ELEMENTS].copy_(source[start : start + _PIECE_ELEMENTS])
        squares = wide[: piece.numel()].copy_(piece)
        total += float(torch.dot(squares, squares))
    return total
