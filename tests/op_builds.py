"""Keeps DeepSpeed's compiled operations between runs, without the locks that killed builds leave.

torch builds an operation under ``$TORCH_EXTENSIONS_DIR/<operation>`` with a file ``lock`` in it, which the
building process keeps open (`torch/utils/file_baton.py`). A build that is killed leaves the file, and every
later process waits for it for ever. So: a lock that no process has open is removed.

    python -m tests.op_builds

clears the directory that the environment names, before something else than the tests uses it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from autotune_offload.machine import host

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_DIRECTORY = ROOT / ".cache" / "torch_extensions"


def environment() -> dict[str, str]:
    """What the builds need: a kept directory, and this interpreter's own ninja first on the path."""
    scripts = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath)
    if path.split(os.pathsep)[0] != scripts:
        path = os.pathsep.join([scripts, path])
    return {
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR") or str(DEFAULT_DIRECTORY),
        "PATH": path,
    }


def remove_stale_locks(directory: Path) -> list[Path]:
    """Removes the locks of builds that no longer run; gives their paths."""
    locks = {path.resolve() for path in directory.glob("*/lock")}
    stale = sorted(locks - host.users_of(locks).keys())
    for lock in stale:
        lock.unlink(missing_ok=True)
    return stale


if __name__ == "__main__":
    for removed in remove_stale_locks(Path(environment()["TORCH_EXTENSIONS_DIR"])):
        print(f"removed the lock of a build that was killed: {removed}", file=sys.stderr)  # noqa: T201  a script's notice
