"""The optimizer's pass over host memory, compiled on first use: scale, Adam and 16-bit weights at once.

Bit for bit what `torch.Tensor.mul_`, DeepSpeed's vectorized CPU Adam and `torch.Tensor.copy_` leave in memory, one
after the other (`csrc/includes/cpu_adam.h`, read in 0.14.5 to 0.19.8): 30 bytes of memory traffic for each weight
with 16-bit weights, and 34 where the gradient is scaled, in place of 44 to 60.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from autotune_offload.machine import compiled, variants
from autotune_offload.records import Record

SOURCE = Path(__file__).with_name("adam.c")
FLAGS = variants.PASSES[SOURCE.name]

BLOCK_ELEMENTS = 128
"""DeepSpeed rounds down to eight vectors of at most sixteen values (`ROUND_DOWN(_param_size, SIMD_WIDTH * span)`):
a cut at a multiple of this leaves every element in the loop where DeepSpeed has it, for AVX-512, AVX2 and NEON."""


class Setting(Record, frozen=True, kw_only=True):
    """What one call of DeepSpeed's `adam_update` is given beside memory."""

    step: int
    rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    corrects_bias: bool


class Memory(Record, frozen=True, kw_only=True):
    """What a pass reads and writes: host memory, fp32, shape (n,), contiguous, none overlapping another."""

    weights: Tensor
    gradients: Tensor
    first: Tensor
    second: Tensor

    @property
    def elements(self) -> int:
        """Of each."""
        return self.weights.numel()

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All four."""
        return self.weights, self.gradients, self.first, self.second

    def part(self, begin: int, end: int) -> Memory:
        """Views of some elements."""
        weights, gradients, first, second = (tensor[begin:end] for tensor in self.tensors())
        return Memory(weights=weights, gradients=gradients, first=first, second=second)

    def why_not(self) -> str | None:
        """None where the pass may be given this."""
        odd = next((t for t in self.tensors() if not _plain(t, torch.float32)), None)
        if odd is not None:
            return f"its memory is {odd.dtype} {tuple(odd.shape)} on {odd.device}, not contiguous fp32 of the host"
        if len({t.numel() for t in self.tensors()}) > 1:
            return "weights, gradients and moments are not of one length"
        return None


class Constants(ctypes.Structure):
    """`struct constants` of adam.c."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("scale", "beta1", "beta2", "rest1", "rest2")),
        *((name, ctypes.c_float) for name in ("bias2", "epsilon", "step_size", "decay")),
        ("scales", ctypes.c_int32),
        ("decays", ctypes.c_int32),
    )


class Powers(Protocol):
    """Who knows beta1^t and beta2^t at a call as DeepSpeed's operation has them."""

    def at(self, setting: Setting) -> tuple[float, float]:
        """Both, in float, for this call."""
        ...


class KeptPowers:
    """beta^t as the operation keeps it from call to call: a running product in float, or `pow` after a jump.

    Args:
        beta1: that the operation was created with.
        beta2: the same.
        repeats: whether a further call of the same step finds the powers as they are (0.19.0 and newer); before
            that it raised to the power anew.
    """

    def __init__(self, beta1: float, beta2: float, *, repeats: bool) -> None:
        self.repeats = repeats
        self._step = 0
        self._betas = (_float(beta1), _float(beta2))
        self._powers = (1.0, 1.0)

    def at(self, setting: Setting) -> tuple[float, float]:
        """Both for this call, which counts: `Adam_Optimizer::IncrementStep`."""
        betas, step = (_float(setting.beta1), _float(setting.beta2)), setting.step
        if betas == self._betas and step == self._step + 1:
            self._powers = (_float(self._powers[0] * betas[0]), _float(self._powers[1] * betas[1]))
        elif betas != self._betas or step != self._step or not self.repeats:
            self._powers = (_float(math.pow(betas[0], step)), _float(math.pow(betas[1], step)))
        self._step, self._betas = step, betas
        return self._powers


def _float(value: float) -> float:
    """Rounded to fp32. A product of two fp32 values is exact in fp64, so that it is rounded once."""
    return ctypes.c_float(value).value


def constants(setting: Setting, powers: tuple[float, float], scale: float, *, decoupled: bool) -> Constants:
    """What the pass computes with.

    Args:
        setting: of the call.
        powers: beta1^t and beta2^t.
        scale: of the gradient, taken in fp32; exactly 1 leaves the gradient as it is.
        decoupled: AdamW; otherwise weight decay is added to the gradient.

    Raises:
        RuntimeError: there is no compiled pass, see `why_not_compiled`.
    """
    found = Constants()
    _library().adam_constants(
        ctypes.byref(found),
        *(
            ctypes.c_float(value)
            for value in (
                *(scale, setting.beta1, setting.beta2, *powers),
                *(setting.rate, setting.epsilon, setting.weight_decay),
            )
        ),
        ctypes.c_int32(setting.corrects_bias),
        ctypes.c_int32(decoupled),
    )
    return found


Piece = Callable[[int, int, int, Tensor | None], None]
"""One piece: its first element, the one after its last, its number, and where its rounded weights go."""


def why_not_compiled(rounded: torch.dtype | None = None) -> str | None:
    """None where the pass is there, and rounds weights to that dtype as it goes."""
    library = compiled.library(SOURCE, *FLAGS)
    if isinstance(library, str):
        return library
    if not hasattr(library, _symbol(None)):
        return "this processor has no fused multiply-add"
    return None if hasattr(library, _symbol(rounded)) else f"no compiled pass to {rounded} on this processor"


def flushes_subnormals() -> bool:
    """Whether the calling thread flushes subnormal numbers, which other threads need not do."""
    return bool(_library().flushes_subnormals())


def piece_of(memory: Memory, values: Constants, rounded: torch.dtype | None, done: bytearray) -> Piece:
    """The pass over pieces of `memory`, from any thread; each sets its byte of `done` when it is whole.

    Raises:
        ValueError: memory that is not as `Memory` says.
        RuntimeError: there is no compiled pass, see `why_not_compiled`.
    """
    if (found := memory.why_not()) is not None:
        raise ValueError(f"the pass cannot be made: {found}")
    function = getattr(_library(), _symbol(rounded))
    function.argtypes = (*([ctypes.c_void_p] * 5), ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_void_p)
    function.restype = None
    starts = tuple(tensor.data_ptr() for tensor in memory.tensors())
    flags = (ctypes.c_uint8 * len(done)).from_buffer(done)
    first_flag, held = ctypes.addressof(flags), ctypes.byref(values)

    def piece(begin: int, end: int, number: int, to: Tensor | None) -> None:
        if not 0 <= begin <= end <= memory.elements or not 0 <= number < len(flags):
            raise ValueError(f"piece {number} of elements {begin} to {end}: there are {memory.elements}")
        if rounded is not None and (to is None or not _plain(to, rounded) or to.numel() != end - begin):
            raise ValueError(f"piece {number}: its rounded weights need {end - begin} values of {rounded}")
        at = (start + 4 * begin for start in starts)
        function(*at, None if to is None else to.data_ptr(), end - begin, held, first_flag + number)

    return piece


def _library() -> ctypes.CDLL:
    library = compiled.library(SOURCE, *FLAGS)
    if isinstance(library, str):
        raise RuntimeError(library)
    return library


def _symbol(rounded: torch.dtype | None) -> str:
    return f"adam_to_{'none' if rounded is None else str(rounded).removeprefix('torch.')}"


def _plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    host = tensor.device.type == "cpu" and tensor.dtype == dtype
    return host and tensor.dim() == 1 and tensor.is_contiguous()
