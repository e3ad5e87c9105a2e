"""C sources of this package: built into the wheel, else compiled on first use and loaded from a private folder.

Foreign calls release the GIL, so that host threads run such a pass side by side.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from autotune_offload import places
from autotune_offload.descendants import run_in_session
from autotune_offload.machine import variants

_FLAGS = (*variants.FLAGS, "-march=native")
_COMPILE_SECONDS = 60
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


_used: dict[str, str] = {}


def used() -> dict[str, str]:
    """What this process has asked for so far: by the source's name, where its pass comes from, or why there is none."""
    return dict(_used)


@functools.cache
def library(source: Path, *flags: str) -> ctypes.CDLL | str:
    """The compiled source, or why there is none.

    What came with the package for this processor goes first; what cannot be loaded is passed over.

    Args:
        source: a C file beside the module that calls it.
        flags: of the compiler, after those that every source gets.
    """
    for level, path in variants.shipped(source, flags):
        with contextlib.suppress(OSError):
            found = ctypes.CDLL(str(path))
            _used[source.stem] = f"came with the package, built for {level}"
            return found
    try:
        found = ctypes.CDLL(str(_built(source, (*_FLAGS, *flags))))
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        detail = getattr(error, "stderr", None)
        why = f"the fused pass could not be compiled or loaded: {(detail or str(error)).strip()[:300]}"
        _used[source.stem] = f"not there, torch's operations or DeepSpeed's own step in its place: {why}"
        return why
    _used[source.stem] = "compiled on this host"
    return found


def _built(source: Path, flags: tuple[str, ...]) -> Path:
    """The shared object of this source, compiler and processor, compiled unless it is there already."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    version = run_in_session([*compiler, "--version"], seconds=_COMPILE_SECONDS)
    key = hashlib.sha256("\0".join((source.read_text(), version, *flags, _processor())).encode()).hexdigest()
    built = _private_folder() / f"{source.stem}-{key[:16]}.so"
    if not built.exists():
        _compile([*compiler, *flags], source, built)
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


def _compile(compiler: list[str], source: Path, built: Path) -> None:
    """Into a folder of its own, then into place: whoever compiles at the same time does no harm.

    What a compiler puts into TMPDIR it leaves there when it is killed: that is the same folder.
    """
    with tempfile.TemporaryDirectory(dir=built.parent, suffix=".tmp", ignore_cleanup_errors=True) as folder:
        made, environment = f"{folder}/{built.name}", {**os.environ, "TMPDIR": folder}
        run_in_session(
            [*compiler, "-o", made, str(source)], seconds=_COMPILE_SECONDS, environment=environment
        )
        os.replace(made, built)


def _processor() -> str:
    """What -march=native depends on: a home may be shared by hosts with other processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        import platform

        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
