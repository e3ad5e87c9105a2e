"""Reading /proc and /sys: a file that is not there, or says nothing of use, is no error."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

ROOT = Path("/")
NO_LIMIT = 1 << 62  # cgroup v1 writes "none" as 2**63 - 1 rounded down to the page size
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)  # int() refuses thousands of digits
_MOST_CPUS = 1 << 16  # eight times what any kernel is built for


# -- CPUs and nodes -------------------------------------------------------------------------------


def affinity() -> frozenset[int]:
    """The CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def numa_nodes(root: Path) -> list[tuple[Path, frozenset[int]]]:
    """The folder and the CPUs of every NUMA node."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    return [(folder, cpu_list(contents(folder / "cpulist"))) for folder in sorted(folders)]


def cpu_nodes(root: Path) -> list[tuple[Path, frozenset[int]]]:
    """The NUMA nodes that have CPUs, and not memory alone."""
    return [(folder, cpus) for folder, cpus in numa_nodes(root) if cpus]


def bound_node(root: Path, cpus: frozenset[int]) -> Path | None:
    """The node that all of these CPUs lie on, where there are several; else None."""
    nodes = cpu_nodes(root)
    return next((folder for folder, own in nodes if len(nodes) > 1 and cpus <= own), None)


def cpu_list(text: str) -> frozenset[int]:
    """The kernel's list format: ``0-3,8,10-11``; what is no number or range of numbers is left out."""
    ranges = (_RANGE.fullmatch(part.strip()) for part in text.split(","))
    found = ((int(ends[1]), int(ends[2] or ends[1])) for ends in ranges if ends)
    return frozenset(cpu for first, last in found for cpu in range(first, min(last, _MOST_CPUS) + 1))


# -- reading --------------------------------------------------------------------------------------


def pages_bytes(name: str) -> int:
    """Bytes of so many pages of memory, as the C library counts them; it needs no /proc."""
    return os.sysconf(name) * mmap.PAGESIZE


def contents(path: Path) -> str:
    """The file's text, or "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def number_in(path: Path) -> int | None:
    """The one number in a file; None for anything else, and for what means "no limit"."""
    text = contents(path).strip()
    return limited(text) if text.isascii() and text.isdecimal() else None


def limited(digits: str) -> int | None:
    """A number of bytes; None for one that means "no limit"."""
    return int(digits) if len(digits) < 20 and int(digits) < NO_LIMIT else None


def kilobytes(path: Path, name: str) -> int | None:
    """One "kB" field of a meminfo or status file, in bytes."""
    found = re.search(rf"(?:^|\s){re.escape(name)}:\s*(\d{{1,18}}) kB", contents(path), re.ASCII)
    return int(found[1]) * 1024 if found else None
