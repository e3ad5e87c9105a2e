"""Locks that killed builds of DeepSpeed's operations left behind."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from autotune_offload.doctor.checks.case import Case
from autotune_offload.machine import host
from autotune_offload.records import Finding


def build_lock(case: Case) -> Iterator[Finding]:
    """Locks of op builds: one that nobody holds hangs DeepSpeed, and names path and age."""
    locks = [lock for folder in _build_folders(case.environ) for lock in sorted(folder.glob("*/lock"))]
    users = host.users_of(locks)
    for lock in locks:
        with suppress(FileNotFoundError):  # the build has ended meanwhile
            age = f"{_age(time.time() - lock.stat().st_mtime)} old"
            if lock in users:
                yield Finding(
                    id="build-lock",
                    severity="notice",
                    found=f"{lock}, {age}: process {users[lock]} is building this DeepSpeed operation",
                    costs="whoever needs the operation waits until that is done",
                    fix="none needed",
                )
            else:
                yield Finding(
                    id="build-lock",
                    severity="will break",
                    found=f"{lock}, {age}, is the lock of a build that no process of yours on this host has open",
                    costs="`deepspeed.initialize` waits for it for ever, without a word",
                    fix=f"rm {shlex.quote(str(lock))}; not before you know that no other user or host builds in "
                    "this folder",
                )


def _build_folders(environ: Mapping[str, str]) -> list[Path]:
    """Where torch builds extensions for this Python (`torch.utils.cpp_extension._get_build_directory`)."""
    named = environ.get("TORCH_EXTENSIONS_DIR")
    if named is not None:
        return [Path(named)]
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    caches = Path(environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return sorted((caches / "torch_extensions").glob(f"{python}_*"))


def _age(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
