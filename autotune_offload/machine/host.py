"""The only reader of facts about the host: what it is, which software runs, how much it may page-lock.

Nothing here raises for a fact that cannot be read: each has a documented stand-in. Every function that
reads /proc or /sys takes `root`, the directory under which they lie.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import mmap
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from autotune_offload.machine.limits import in_wsl
from autotune_offload.machine.procfs import (
    ROOT,
    affinity,
    bound_node,
    contents,
    cpu_list,
    cpu_nodes,
    kilobytes,
    number_in,
    pages_bytes,
)
from autotune_offload.records import HostFacts, Software

FALLBACK_CACHE_BYTES = 32 << 20
"""Last-level cache where /sys does not tell: the size of one L3 of a common server CPU (AMD EPYC)."""


# -- what the host is -----------------------------------------------------------------------------


def facts(*, root: Path = ROOT) -> HostFacts:
    """This host, as this process may use it.

    `numa_nodes` counts nodes with CPUs only: a GH200 shows its device memory as further nodes.
    `last_level_cache_bytes` is the sum of the last-level caches that the affinity reaches, or
    FALLBACK_CACHE_BYTES where they cannot be read.
    """
    cpus = affinity()
    return HostFacts(
        name=platform.node() or "unknown",
        platform=platform.platform(),
        cpu_model=_cpu_model(root),
        cpu_count=os.cpu_count() or 1,
        affinity_cpus=len(cpus),
        ram_bytes=pages_bytes("SC_PHYS_PAGES"),
        swap_bytes=kilobytes(root / "proc/meminfo", "SwapTotal") or 0,
        numa_nodes=max(1, len(cpu_nodes(root))),
        numa_bound=bound_node(root, cpus) is not None,
        last_level_cache_bytes=_last_level_cache_bytes(root, cpus),
        page_bytes=mmap.PAGESIZE,
        wsl=in_wsl(root),
    )


def identity(*, root: Path = ROOT) -> str:
    """The same in all processes that share this host, another one elsewhere: by its boot and its name.

    Containers with a name of their own are hosts of their own.
    """
    boot = contents(root / "proc/sys/kernel/random/boot_id").strip()
    return hashlib.sha256(f"{boot} {platform.node()}".encode()).hexdigest()[:8]


def software() -> Software:
    """Versions of what takes part; nothing is imported for it."""
    return Software(
        python=platform.python_version(),
        torch=_version("torch", "not installed"),
        deepspeed=_version("deepspeed", "not installed"),
        autotune_offload=_version("autotune-offload", "0+unknown"),
    )


def _cpu_model(root: Path) -> str:
    """The name in /proc/cpuinfo; on Arm, which has none there, the architecture with the part's numbers."""
    text = contents(root / "proc/cpuinfo")
    if named := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
        return named[1].strip()
    machine = platform.processor() or platform.machine() or "unknown"
    implementer = re.search(r"^CPU implementer\s*:\s*(\S+)", text, re.MULTILINE)
    part = re.search(r"^CPU part\s*:\s*(\S+)", text, re.MULTILINE)
    return f"{machine} implementer {implementer[1]} part {part[1]}" if implementer and part else machine


def _last_level_cache_bytes(root: Path, cpus: frozenset[int]) -> int:
    total, covered = 0, set[int]()
    for cpu in sorted(cpus):
        if cpu not in covered:
            _, size, shared = max(
                _caches(root / f"sys/devices/system/cpu/cpu{cpu}/cache"), default=(0, 0, [])
            )
            total += size
            covered.update(shared)
    return total or FALLBACK_CACHE_BYTES


def _caches(folder: Path) -> Iterator[tuple[int, int, list[int]]]:
    """Level, bytes and sharing CPUs of each data cache of one CPU."""
    for index in folder.glob("index[0-9]*"):
        level, size = (
            number_in(index / "level"),
            re.fullmatch(r"(\d{1,12})([KMG]?)\s*", contents(index / "size"), re.ASCII),
        )
        if level is not None and size and contents(index / "type").strip() != "Instruction":
            unit = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[size[2]]
            yield level, int(size[1]) * unit, sorted(cpu_list(contents(index / "shared_cpu_list")))


# -- other processes ------------------------------------------------------------------------------


def users_of(paths: Iterable[Path]) -> dict[Path, int]:
    """Those of these files that a process has open, with its id. Other users' processes cannot be seen."""
    import psutil  # here, since a start reads facts and limits without it

    wanted = {path.resolve(): path for path in paths}
    found: dict[Path, int] = {}
    for process in psutil.process_iter() if wanted else ():
        with suppress(psutil.Error):
            for file in process.open_files():
                if (path := wanted.get(Path(file.path))) is not None:
                    found[path] = process.pid
    return found


def _version(package: str, fallback: str) -> str:
    """A loaded package says it itself; the search through the metadata takes milliseconds at each start."""
    loaded = getattr(sys.modules.get(package), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return fallback
