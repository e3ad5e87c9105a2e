"""The memory limits of the cgroups that hold this process, v2 and v1, and what each still allows."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from autotune_offload.machine.procfs import contents, limited, number_in
from autotune_offload.records import Limit
from autotune_offload.units import gigabytes

# (limit, usage, the field of memory.stat with page cache that is given back under pressure): cgroup v2,
# its throttling limit, and v1. Beyond memory.high the kernel stalls the process, so it is a limit here.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def headrooms(root: Path) -> Iterator[Limit]:
    """What each cgroup that holds this process still allows, where it has a limit."""
    folders = tuple(_folders(root))
    for folder in folders:
        for limit_name, usage_name, cache_field in _FILES:
            limit = number_in(folder / limit_name)
            if limit is None:
                continue
            used = (number_in(folder / usage_name) or 0) - (_stat(folder, cache_field) or 0)
            yield _headroom(f"{folder / limit_name}", limit, used)
    for folder in folders:
        above = _stat(folder, "hierarchical_memory_limit")
        if above is not None:
            # v1's own word for the smallest limit up to the root, which a container need not see itself. What the
            # others below that limit use cannot be seen either.
            used = (number_in(folder / "memory.usage_in_bytes") or 0) - (
                _stat(folder, "total_inactive_file") or 0
            )
            yield _headroom(f"hierarchical_memory_limit in {folder / 'memory.stat'}", above, used)


def _stat(folder: Path, field: str) -> int | None:
    found = re.search(rf"^{field} (\d+)$", contents(folder / "memory.stat"), re.MULTILINE | re.ASCII)
    return limited(found[1]) if found else None


def _headroom(source: str, limit: int, used: int) -> Limit:
    free = min(limit, max(0, limit - used))
    return Limit(
        name="cgroup",
        bytes=free,
        source=f"{source}, {gigabytes(free)} of {gigabytes(limit)} free",
        raise_by="a higher memory limit for this cgroup: `docker run --memory`, Kubernetes "
        "resources.limits.memory, Slurm --mem, systemd MemoryMax",
    )


def _folders(root: Path) -> Iterator[Path]:
    """The folders of this process's cgroup and its visible ancestors, of v2 and of v1's memory."""
    for line in contents(root / "proc/self/cgroup").splitlines():
        fields = line.split(":", 2)
        if len(fields) < 3 or not fields[2].startswith("/"):
            continue  # not the form of cgroups(7): gVisor and others that only play Linux
        _, controllers, path = fields
        if controllers and "memory" not in controllers.split(","):
            continue
        mount_root, mount_point = _mount(root, v1=bool(controllers))
        top = root / mount_point.lstrip("/")
        below = os.path.relpath(path, mount_root)
        # A path outside the mounted part belongs to another namespace: only the mounted top is ours to see.
        folder = top if below.startswith("..") else top / below
        yield folder
        yield from (parent for parent in folder.parents if parent.is_relative_to(top))


def _mount(root: Path, *, v1: bool) -> tuple[str, str]:
    """Which part of the hierarchy is mounted, and where (proc_pid_mountinfo(5)); else the usual place."""
    for line in contents(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        place, kind = left.split(" ")[3:5], right.split(" ")
        if len(place) < 2 or not place[0].startswith("/") or kind[0] != ("cgroup" if v1 else "cgroup2"):
            continue
        if not v1 or "memory" in kind[-1].split(","):
            return place[0], place[1]
    return "/", "/sys/fs/cgroup/memory" if v1 else "/sys/fs/cgroup"
