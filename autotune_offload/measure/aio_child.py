"""The child process that writes and reads files by DeepSpeed's aio handle: one for each rank.

A failed allocation, a short read and an odd size end in C++ assertions, which end the process; so nothing of this runs
in a process of the user's. What is timed is what the swapper does: several files submitted together by its own helpers
(`deepspeed/runtime/swap_tensor/utils.py`), then one wait. Every byte that is read is compared with what was written.

    python -m autotune_offload.measure.aio_child

Takes one JSON object a line on stdin, answers each with one on stdout, and ends with its parent.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_ODD = 0x5EED


def main() -> int:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what DeepSpeed and its compilers print is not an answer
    worker: _Worker | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if worker is None:
                worker = _Worker(**asked)
                said: dict[str, Any] = {"ready": worker.version}
            else:
                said = {"seconds": worker.timed(asked["what"], asked["setting"])}
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(said) + "\n")
    return 0


class _Worker:
    """One rank's files and locked buffers.

    Args:
        folder: this rank's own.
        files: submitted together.
        file_bytes: of each, a multiple of 1 MiB.
    """

    def __init__(self, folder: str, files: int, file_bytes: int) -> None:
        _require_direct(Path(folder))
        import deepspeed
        import torch
        from deepspeed.ops.op_builder import AsyncIOBuilder

        self.version = deepspeed.__version__
        self._make = AsyncIOBuilder().load(verbose=False).aio_handle
        self._torch = torch
        self._keeper = self._make(1 << 20, 8, False, True, 1)
        one = torch.empty(0, dtype=torch.float32)
        count = file_bytes // 4
        self._sent = [self._keeper.new_cpu_locked_tensor(count, one) for _ in range(files)]
        self._got = [self._keeper.new_cpu_locked_tensor(count, one) for _ in range(files)]
        self._kept = [str(Path(folder) / f"read{number}") for number in range(files)]
        self._written = [str(Path(folder) / f"written{number}") for number in range(files)]
        random = torch.Generator().manual_seed(_ODD)
        for buffer in self._sent:
            buffer.view(torch.int32).random_(generator=random)
        for path in (*self._kept, *self._written):
            with open(path, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, file_bytes)  # a full disk is told here, and no assertion
        self._write(self._keeper, self._kept)
        self._differs = [buffer.clone() for buffer in self._sent]

    def timed(self, what: str, setting: list[Any]) -> float:
        """Seconds of writing all files, reading them, or both at once, with handles made so."""
        handles = [self._make(*setting) for _ in range(2 if what == "both" else 1)]
        for buffer in self._got:
            buffer.zero_()
        for buffer in self._sent:
            buffer.view(self._torch.int32).add_(1)
        began = time.perf_counter()
        if what != "read":
            self._submit("swap_out_tensors", handles[-1], self._sent, self._written)
        if what != "write":
            self._submit("swap_in_tensors", handles[0], self._got, self._kept)
        for handle in handles:
            done = handle.wait()
            if done != len(self._sent):
                raise RuntimeError(f"{done} of {len(self._sent)} transfers were completed")
        seconds = time.perf_counter() - began
        self._compare(what)
        return seconds

    def _compare(self, what: str) -> None:
        if what != "write":
            self._same(self._got, self._differs, "read")
        if what != "read":
            self._submit("swap_in_tensors", self._keeper, self._got, self._written)
            self._keeper.wait()
            self._same(self._got, self._sent, "written")

    def _same(self, found: list[Any], wanted: list[Any], what: str) -> None:
        words = self._torch.int32
        for one, other in zip(found, wanted, strict=True):
            if not self._torch.equal(one.view(words), other.view(words)):
                raise ValueError(f"the bytes that were {what} are not those that were sent")

    def _write(self, handle: Any, paths: list[str]) -> None:
        self._submit("swap_out_tensors", handle, self._sent, paths)
        handle.wait()

    @staticmethod
    def _submit(how: str, handle: Any, buffers: list[Any], paths: list[str]) -> None:
        from deepspeed.runtime.swap_tensor import utils

        getattr(utils, how)(handle, buffers, paths)


def _require_direct(folder: Path) -> None:
    """Raises OSError where files cannot be opened past the page cache, which DeepSpeed's handle does."""
    probe = folder / "direct"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError as error:
        raise OSError(f"files there cannot be opened with O_DIRECT ({error.strerror})") from None
    finally:
        probe.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
