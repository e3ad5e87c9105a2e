"""Devices that a child process makes to go wrong in it: each blocks, aborts or fails for real."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autotune_offload.errors import PinError
from autotune_offload.testing import FakeAccelerator, FakeAcceleratorDevice

HERE = __name__
HANGS_ABOVE_BYTES = 1 << 20


class _Cuda(FakeAcceleratorDevice):
    """A CUDA device as far as memory and copies go."""

    def __init__(self, index: int | None = None) -> None:
        super().__init__(FakeAccelerator("cuda"), index)

    def d2h(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """Copies, unless this device does not."""
        if non_blocking:
            self.copies_pinned(destination.nbytes)
        super().d2h(destination, source)

    def copies_pinned(self, size: int) -> None:
        """What goes wrong in a copy from or to page-locked memory."""


class Honest(_Cuda):
    """Nothing goes wrong."""


class PinnedCopyHangs(_Cuda):
    """A page-locked copy above HANGS_ABOVE_BYTES blocks in the driver, and SIGTERM does not end it."""

    def copies_pinned(self, size: int) -> None:
        """Blocks."""
        if size > HANGS_ABOVE_BYTES:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(3600)


class Builds(_Cuda):
    """Making it starts a compiler in a process group of its own, as ninja does, and waits for it.

    The file that HANGS names then holds the compiler's process id.
    """

    def __init__(self, index: int | None = None) -> None:
        compiler = subprocess.Popen(["sleep", "3600"], preexec_fn=os.setpgrp)
        started = Path(os.environ["HANGS"])
        started.with_suffix(".part").write_text(str(compiler.pid))
        started.with_suffix(".part").rename(started)
        compiler.wait()
        super().__init__(index)


class NeverAnswers(_Cuda):
    """Its first copy blocks. Before, it makes the file that the environment variable HANGS names."""

    def h2d(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """Blocks."""
        if "HANGS" in os.environ:
            open(os.environ["HANGS"], "w").close()
        time.sleep(3600)


class AbortsInPin(_Cuda):
    """Locking a second page aborts the process, as DeepSpeed's native backend does beyond memlock."""

    def pinned_empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Aborts."""
        if elements > 4096:
            os.write(2, b"Assertion `rc == 0' failed.\n")
            os.abort()
        return super().pinned_empty(elements, dtype)


class KilledInPin(_Cuda):
    """The kernel kills whoever locks more than 64 KiB."""

    def pinned_empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Dies."""
        if elements > 1 << 16:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().pinned_empty(elements, dtype)


class PinFails(_Cuda):
    """No more than 64 KiB lock in one block."""

    def pinned_empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Refuses."""
        if elements > 1 << 16:
            raise PinError(f"page-locking {elements:,} bytes failed: CUDA error: invalid argument")
        return super().pinned_empty(elements, dtype)


class CannotStart(_Cuda):
    """Its runtime raises."""

    def __init__(self, index: int | None = None) -> None:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")


def starts_never(index: int) -> Any:
    """Blocks before there is a device."""
    del index
    time.sleep(3600)
