"""The process of one part: `python -m benchmarks.device.part NAME --folder FOLDER --seconds S`."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from pathlib import Path

from benchmarks.device.parts import PARTS, named
from benchmarks.device.scene import SHORT, Scene, Sizes

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG in linux/prctl.h


def main() -> int:
    """Runs the part; what it raises is the last line that it says, and its exit status is 1 then."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=[part.name for part in PARTS])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--fake", metavar="KIND")
    options = parser.parse_args()
    _end_with_parent()
    os.environ.setdefault("DS_LOG_LEVEL", "error")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else products may differ from run to run
    scene = Scene(
        name=options.name,
        folder=options.folder,
        seconds=options.seconds,
        sizes=SHORT if options.short else Sizes(),
        fake=options.fake,
    )
    named(options.name).run(scene)
    return 0


def _end_with_parent() -> None:
    """Even where that is killed and can end nothing any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
