"""The fused host pass, compiled on first use: widen a gradient to fp32 and sum its squares in fp64.

Torch needs three passes for it (copy, cast to fp64, dot product), each through memory. Where there is no
C compiler, those three run in pieces that stay in the cache, which takes about twice as long.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from autotune_offload import places

_SOURCE = Path(__file__).with_name("widen.c")
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC")
_COMPILE_SECONDS = 60
_PIECE_ELEMENTS = 1 << 17
"""512 KiB of fp32 and 1 MiB of fp64: a piece and its squares stay in a level-2 cache or just beyond."""

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

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
    library = _library()
    if isinstance(library, str):
        return library
    return None if hasattr(library, _symbol(dtype)) else f"no compiled pass for {dtype} on this processor"


@functools.cache
def _one_pass(dtype: torch.dtype) -> OnePass:
    library = _library()
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


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The compiled source, or why there is none."""
    try:
        return ctypes.CDLL(str(_built()))
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        detail = getattr(error, "stderr", None)
        return f"the fused pass could not be compiled or loaded: {(detail or str(error)).strip()[:300]}"


def _built() -> Path:
    """The shared object of this source, compiler and processor, compiled unless it is there already."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=True
    ).stdout
    key = hashlib.sha256(
        "\0".join((_SOURCE.read_text(), version, *_FLAGS, _processor())).encode()
    ).hexdigest()
    built = _private_folder() / f"widen-{key[:16]}.so"
    if not built.exists():
        _compile(compiler, built)
    return built


def _private_folder() -> Path:
    """A folder that only this user can write to, since code is loaded from it; a new one if need be."""
    folder = places.kernels()
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _only_ours(folder) and os.access(folder, os.W_OK):
            return folder
    temporary = tempfile.mkdtemp(prefix="autotune-offload-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return Path(temporary)


def _only_ours(folder: Path) -> bool:
    """Whether nobody else can put a file into the folder, or another folder into its place."""
    found, above = folder.lstat(), folder.parent.stat()
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & _OTHERS_WRITE
    kept = (
        not above.st_mode & stat.S_IWOTH or above.st_mode & stat.S_ISVTX
    )  # many a umask leaves the group in
    return bool(own and kept and above.st_uid in {os.getuid(), 0})


def _compile(compiler: list[str], built: Path) -> None:
    """Into a file of its own, then into place: whoever compiles at the same time does no harm."""
    handle, name = tempfile.mkstemp(dir=built.parent, suffix=".so.tmp")
    os.close(handle)
    try:
        subprocess.run(
            [*compiler, *_FLAGS, "-o", name, str(_SOURCE)],
            capture_output=True,
            text=True,
            timeout=_COMPILE_SECONDS,
            check=True,
        )
        os.replace(name, built)
    finally:
        Path(name).unlink(missing_ok=True)


def _processor() -> str:
    """What -march=native depends on: a home may be shared by hosts with other processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        import platform

        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
