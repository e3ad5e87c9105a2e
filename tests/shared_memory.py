"""What DeepSpeed's shared-memory operation leaves in /dev/shm: 66 MB for each process that has ever used it.

A few runs of the tests would fill the memory of a machine with them.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

FOLDER, PROC = Path("/dev/shm"), Path("/proc")


def buffers(folder: Path = FOLDER) -> set[Path]:
    """Those that are there now."""
    return set(folder.glob("deepspeed_allreduce_buffer_*"))


def remove_since(before: set[Path], folder: Path = FOLDER) -> None:
    """Remove those that were not there before and that no process has mapped."""
    left = {str(path): path for path in buffers(folder) - before}
    for maps in PROC.glob("[0-9]*/maps") if left else ():
        with contextlib.suppress(OSError):
            for line in maps.read_text().splitlines():
                left.pop(line[line.find("/") :], None)
    for path in left.values():
        with contextlib.suppress(OSError):
            path.unlink()
