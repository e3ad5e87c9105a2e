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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autotune_offload.errors import ConfigError
from autotune_offload.records import HostFacts, Limit, Limits, Software

FALLBACK_CACHE_BYTES = 32 << 20
"""Last-level cache where /sys does not tell: the size of one L3 of a common server CPU (AMD EPYC)."""

HOST_MARGIN_FRACTION = 0.1
HOST_MARGIN_BYTES = 1 << 30
"""Kept free of page-locked memory for everything else on the host, which cannot reclaim it: a tenth of
what is free, at least 1 GiB, but never more than half of what is free."""

_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
)

_WSL_MEMORY = "memory= under [wsl2] in .wslconfig, then `wsl --shutdown`; swap does not help"
"""WSL's own share of the machine, half of it by default (learn.microsoft.com, "Advanced settings
configuration in WSL"). How much of that Windows lets a driver lock is told nowhere: the pin sweep finds it."""

_ROOT = Path("/")
_NO_LIMIT = 1 << 62  # cgroup v1 writes "none" as 2**63 - 1 rounded down to the page size
_CAP_IPC_LOCK = 14  # linux/capability.h
_WHOLE_UID_RANGE = "4294967295"

# (limit, usage, the field of memory.stat with page cache that is given back under pressure): cgroup v2,
# its throttling limit, and v1. Beyond memory.high the kernel stalls the process, so it is a limit here.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


# -- what the host is -----------------------------------------------------------------------------


def facts(*, root: Path = _ROOT) -> HostFacts:
    """This host, as this process may use it.

    `numa_nodes` counts nodes with CPUs only: a GH200 shows its device memory as further nodes.
    `last_level_cache_bytes` is the sum of the last-level caches that the affinity reaches, or
    FALLBACK_CACHE_BYTES where they cannot be read.
    """
    cpus = _affinity()
    return HostFacts(
        name=platform.node() or "unknown",
        platform=platform.platform(),
        cpu_model=_cpu_model(root),
        cpu_count=os.cpu_count() or 1,
        affinity_cpus=len(cpus),
        ram_bytes=_pages("SC_PHYS_PAGES"),
        swap_bytes=_kilobytes(root / "proc/meminfo", "SwapTotal") or 0,
        numa_nodes=max(1, len(_cpu_nodes(root))),
        numa_bound=_bound_node(root, cpus) is not None,
        last_level_cache_bytes=_last_level_cache_bytes(root, cpus),
        page_bytes=mmap.PAGESIZE,
        wsl=_wsl(root),
    )


def identity(*, root: Path = _ROOT) -> str:
    """The same in all processes that share this host, another one elsewhere: by its boot and its name.

    Containers with a name of their own are hosts of their own.
    """
    boot = _text(root / "proc/sys/kernel/random/boot_id").strip()
    return hashlib.sha256(f"{boot} {platform.node()}".encode()).hexdigest()[:8]


def software() -> Software:
    """Versions of what takes part; nothing is imported for it."""
    return Software(
        python=platform.python_version(),
        torch=_version("torch", "not installed"),
        deepspeed=_version("deepspeed", "not installed"),
        autotune_offload=_version("autotune-offload", "0+unknown"),
    )


# -- what it may allocate and page-lock -----------------------------------------------------------


def limits(
    *,
    max_pinned_bytes: int | None = None,
    ranks_per_host: int = 1,
    pin_backend: str | None = None,
    root: Path = _ROOT,
) -> Limits:
    """What this process, one of `ranks_per_host`, may allocate and page-lock.

    RAM, cgroup and NUMA memory are what is free now, swap not counted. Their `Limit.bytes` are this
    rank's share after the margin (see HOST_MARGIN_BYTES); ranks that are bound to one node of several
    are taken to be spread over the nodes evenly. memlock and `max_pinned_bytes` hold for each process
    alone, so they are neither shared nor reduced. `pinnable_bytes` is the smallest of all bounds,
    `available_bytes` this rank's share of RAM and cgroup without the margin.

    Args:
        max_pinned_bytes: the user's own bound for one rank; None sets none.
        ranks_per_host: processes that share this host's memory.
        pin_backend: `DeviceIdentity.pin_backend`. With "torch" the accelerator's driver pins, which the
            kernel does not charge to RLIMIT_MEMLOCK, so memlock is no bound. DeepSpeed's "native" pins
            through mlock, and aborts the process beyond it. None is unknown: memlock counts.
        root: where /proc and /sys lie.

    Raises:
        ConfigError: a negative `max_pinned_bytes`, or `ranks_per_host` below 1.
    """
    if ranks_per_host < 1:
        raise ConfigError(f"ranks_per_host is {ranks_per_host}; give the processes on this host, at least 1")
    shared = [_ram(root), *_smallest(_cgroup_headrooms(root))]
    own = [_share(limit, ranks) for limit, ranks in _numa(root, ranks_per_host)]
    own += [] if pin_backend == "torch" else _memlock(root)
    return bounded(shared, own, ranks_per_host=ranks_per_host, max_pinned_bytes=max_pinned_bytes)


def bounded(
    shared: Sequence[Limit], own: Sequence[Limit], *, ranks_per_host: int, max_pinned_bytes: int | None
) -> Limits:
    """The limits that follow from bounds that all ranks of a host `shared`, and from one rank's `own`.

    Raises:
        ConfigError: a negative `max_pinned_bytes`.
    """
    if max_pinned_bytes is not None and max_pinned_bytes < 0:
        raise ConfigError(f'max_pinned_bytes is {max_pinned_bytes}; give a number of bytes from 0, or "auto"')
    bounds = [*(_share(limit, ranks_per_host) for limit in shared), *own, *_users(max_pinned_bytes)]
    return Limits(
        available_bytes=min(limit.bytes for limit in shared) // ranks_per_host,
        pinnable_bytes=min(limit.bytes for limit in bounds),
        bounds=tuple(bounds),
    )


def pinned_block_bytes(requested_bytes: int) -> int:
    """What torch's pinned allocator takes for one block: the next power of two (pytorch#150517)."""
    return 1 << (requested_bytes - 1).bit_length() if requested_bytes > 0 else 0


def pinning_peak_bytes(blocks: Iterable[int]) -> int:
    """Host memory at the worst moment of pinning tensors of these sizes in bytes.

    All rounded blocks, plus the pageable original of the largest, which exists until it is copied.
    """
    requested = tuple(blocks)
    return sum(map(pinned_block_bytes, requested)) + max(requested, default=0)


def check_pinned(
    blocks_bytes: Iterable[int],
    limits: Limits,
    *,
    in_any_case_bytes: Iterable[int] = (),
    beside_bytes: int = 0,
) -> str | None:
    """None where blocks of these sizes can be pinned, else a sentence that says why not.

    The rounded blocks must fit `pinnable_bytes`; with the second copy of the largest, and with what the
    run holds beside them, they must fit `available_bytes`.

    Args:
        blocks_bytes: what is to be pinned.
        limits: of this process.
        in_any_case_bytes: blocks that DeepSpeed pins whatever is chosen; they take their part of the limits.
        beside_bytes: pageable host memory that the run needs at the same time.
    """
    certain = tuple(in_any_case_bytes)
    blocks = (*blocks_bytes, *certain)
    locked, peak = sum(map(pinned_block_bytes, blocks)), pinning_peak_bytes(blocks) + beside_bytes
    if locked > limits.pinnable_bytes:
        share = f"; {_gb(sum(map(pinned_block_bytes, certain)))} of it DeepSpeed locks in any case"
        return (
            f"needs {_gb(locked)} of page-locked memory (each block rounded up to a power of two"
            f"{share if certain else ''}), but this process may lock "
            f"{_gb(limits.pinnable_bytes)}{tightest(limits.bounds)}"
        )
    if peak > limits.available_bytes:
        memory = tuple(bound for bound in limits.bounds if bound.name in ("ram", "cgroup"))
        states = f", beside {_gb(beside_bytes)} of optimizer state" if beside_bytes else ""
        return (
            f"needs {_gb(peak)} of host memory while the largest block is pinned (it exists twice{states}), "
            f"but this process has {_gb(limits.available_bytes)}{tightest(memory)}"
        )
    return None


def tightest(bounds: Sequence[Limit]) -> str:
    """The smallest bound, to be put behind its number: its name, where it comes from, how to raise it."""
    if not bounds:
        return ""
    least = min(bounds, key=lambda bound: bound.bytes)
    return f" ({least.name}: {least.source}); to raise it: {least.raise_by}"


def ranks_here(world_size: int, device_count: int) -> int:
    """How many of a job's ranks share this host.

    What the launcher says (torchrun, DeepSpeed, Open MPI, MVAPICH2, Hydra, in this order); without one, as
    many as there are devices for.
    """
    told = (os.environ.get(name, "").strip() for name in _LOCAL_SIZES)
    local = next((int(text) for text in told if text.isdecimal() and int(text) > 0), device_count)
    return max(min(world_size, local), 1)


def _share(limit: Limit, ranks: int) -> Limit:
    """One rank's part of a bound on the host's memory, after the margin."""
    margin = min(max(int(limit.bytes * HOST_MARGIN_FRACTION), HOST_MARGIN_BYTES), limit.bytes // 2)
    source = f"{limit.source}, less {_gb(margin)} for the rest of the host"
    if ranks > 1:
        source += f", shared by {ranks} ranks"
    return Limit(
        name=limit.name, bytes=(limit.bytes - margin) // ranks, source=source, raise_by=limit.raise_by
    )


def _smallest(bounds: Iterable[Limit]) -> list[Limit]:
    return sorted(bounds, key=lambda bound: bound.bytes)[:1]


def _ram(root: Path) -> Limit:
    path = root / "proc/meminfo"
    free = _kilobytes(path, "MemAvailable")
    if free is None:
        free, source = _pages("SC_AVPHYS_PAGES"), "sysconf(SC_AVPHYS_PAGES)"
    else:
        source = f"MemAvailable in {path}"
    # MemAvailable counts nodes without CPUs too: a GH200's device memory, which is not for us to take.
    foreign = sum(_kilobytes(node / "meminfo", "MemFree") or 0 for node, cpus in _nodes(root) if not cpus)
    free = max(0, free - foreign)
    return Limit(
        name="ram",
        bytes=free,
        source=f"{source}, {_gb(free)} free",
        raise_by=_WSL_MEMORY
        if _wsl(root)
        else "free memory on this host, or use one with more RAM; swap does not help",
    )


def _numa(root: Path, ranks: int) -> list[tuple[Limit, int]]:
    """The bound of the node that this process is bound to, with the ranks that share the node."""
    node = _bound_node(root, _affinity())
    if node is None:
        return []
    path = node / "meminfo"
    free = (_kilobytes(path, "MemFree") or 0) + (_kilobytes(path, "Inactive(file)") or 0)
    limit = Limit(
        name="numa",
        bytes=free,
        source=f"MemFree and Inactive(file) in {path}, {_gb(free)} free",
        raise_by="free memory on this node, or bind the process to one with more",
    )
    return [(limit, -(-ranks // len(_cpu_nodes(root))))]


def _memlock(root: Path) -> list[Limit]:
    path = root / "proc/self/limits"
    found = re.search(r"^Max locked memory\s+(\d+)\s", _text(path), re.MULTILINE)
    if found is None or _may_lock_any_amount(root):
        return []
    locked = _kilobytes(root / "proc/self/status", "VmLck") or 0
    return [
        Limit(
            name="memlock",
            bytes=max(0, int(found[1]) - locked),
            source=f"RLIMIT_MEMLOCK in {path}, {_gb(locked)} locked already",
            raise_by="`ulimit -l unlimited` (memlock in /etc/security/limits.conf), `--ulimit memlock=-1` or "
            "`--cap-add IPC_LOCK` for a container, LimitMEMLOCK=infinity for a systemd service",
        )
    ]


def _may_lock_any_amount(root: Path) -> bool:
    """CAP_IPC_LOCK, which counts in the first user namespace only: not for root of a rootless container."""
    capable = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", _text(root / "proc/self/status"), re.MULTILINE)
    if capable is None or not int(capable[1], 16) >> _CAP_IPC_LOCK & 1:
        return False
    uid_map = _text(root / "proc/self/uid_map").split()
    return not uid_map or uid_map == ["0", "0", _WHOLE_UID_RANGE]


def _users(max_pinned_bytes: int | None) -> list[Limit]:
    if max_pinned_bytes is None:
        return []
    return [
        Limit(
            name="max_pinned_bytes",
            bytes=max_pinned_bytes,
            source="max_pinned_bytes, set by the user",
            raise_by='a larger max_pinned_bytes, or "auto"',
        )
    ]


# -- cgroups --------------------------------------------------------------------------------------


def _cgroup_headrooms(root: Path) -> Iterator[Limit]:
    """What each cgroup that holds this process still allows, where it has a limit."""
    for folder in _cgroup_folders(root):
        for limit_name, usage_name, cache_field in _CGROUP_FILES:
            limit = _number(folder / limit_name)
            if limit is None:
                continue
            cache = re.search(rf"^{cache_field} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
            used = (_number(folder / usage_name) or 0) - (int(cache[1]) if cache else 0)
            free = min(limit, max(0, limit - used))
            yield Limit(
                name="cgroup",
                bytes=free,
                source=f"{folder / limit_name}, {_gb(free)} of {_gb(limit)} free",
                raise_by="a higher memory limit for this cgroup: `docker run --memory`, Kubernetes "
                "resources.limits.memory, Slurm --mem, systemd MemoryMax",
            )


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """The folders of this process's cgroup and its visible ancestors, of v2 and of v1's memory."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount_root, mount_point = _cgroup_mount(root, v1=bool(controllers))
        top = root / mount_point.lstrip("/")
        below = os.path.relpath(path, mount_root)
        # A path outside the mounted part belongs to another namespace: only the mounted top is ours to see.
        folder = top if below.startswith("..") else top / below
        yield folder
        yield from (parent for parent in folder.parents if parent.is_relative_to(top))


def _cgroup_mount(root: Path, *, v1: bool) -> tuple[str, str]:
    """Which part of the hierarchy is mounted, and where (proc_pid_mountinfo(5)); else the usual place."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind == ("cgroup" if v1 else "cgroup2") and (not v1 or "memory" in options.split(",")):
            mount_root, mount_point = left.split(" ")[3:5]
            return mount_root, mount_point
    return "/", "/sys/fs/cgroup/memory" if v1 else "/sys/fs/cgroup"


def _wsl(root: Path) -> bool:
    return "microsoft" in _text(root / "proc/version").lower()


# -- CPUs and nodes -------------------------------------------------------------------------------


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _cpu_model(root: Path) -> str:
    """The name in /proc/cpuinfo; on Arm, which has none there, the architecture with the part's numbers."""
    text = _text(root / "proc/cpuinfo")
    if named := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
        return named[1].strip()
    machine = platform.processor() or platform.machine() or "unknown"
    implementer = re.search(r"^CPU implementer\s*:\s*(\S+)", text, re.MULTILINE)
    part = re.search(r"^CPU part\s*:\s*(\S+)", text, re.MULTILINE)
    return f"{machine} implementer {implementer[1]} part {part[1]}" if implementer and part else machine


def _nodes(root: Path) -> list[tuple[Path, frozenset[int]]]:
    """The folder and the CPUs of every NUMA node."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    return [(folder, _cpu_list(_text(folder / "cpulist"))) for folder in sorted(folders)]


def _cpu_nodes(root: Path) -> list[tuple[Path, frozenset[int]]]:
    return [(folder, cpus) for folder, cpus in _nodes(root) if cpus]


def _bound_node(root: Path, cpus: frozenset[int]) -> Path | None:
    """The node that all of these CPUs lie on, where there are several; else None."""
    nodes = _cpu_nodes(root)
    return next((folder for folder, own in nodes if len(nodes) > 1 and cpus <= own), None)


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
        level, size = _number(index / "level"), re.fullmatch(r"(\d+)([KMG]?)\s*", _text(index / "size"))
        if level is not None and size and _text(index / "type").strip() != "Instruction":
            unit = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[size[2]]
            yield level, int(size[1]) * unit, sorted(_cpu_list(_text(index / "shared_cpu_list")))


def _cpu_list(text: str) -> frozenset[int]:
    """The kernel's list format: ``0-3,8,10-11``."""
    ranges = (part.split("-") for part in text.strip().split(",") if part.strip())
    return frozenset(cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1))


# -- accelerators on the bus ----------------------------------------------------------------------

_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel", "0x1da3": "Habana"}
_ACCELERATOR_CLASSES = ("0x0302", "0x0380", "0x1200")
"""3D controller, other display controller, processing accelerator (pci.ids). A plain VGA controller is an
accelerator only where it is NVIDIA's: those of the others sit in many a server for the console alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BusDevice:
    """An accelerator on the PCI bus; what /sys does not tell is None. Speeds in 1e9 transfers a second."""

    address: str
    vendor: str
    link_width: int | None
    device_link_width: int | None
    """The most that the device itself can do."""
    slot_speed: float | None
    """The most that what it is plugged into can do: an idle device lowers its own speed, this stays."""
    device_speed: float | None
    numa_node: int | None


def accelerators(*, root: Path = _ROOT) -> tuple[BusDevice, ...]:
    """The accelerators that /sys shows, whether or not any driver or library can use them."""
    found = sorted((root / "sys/bus/pci/devices").glob("*"))
    return tuple(_bus_device(folder) for folder in found if _is_accelerator(folder))


def _is_accelerator(folder: Path) -> bool:
    vendor, kind = _text(folder / "vendor").strip(), _text(folder / "class").strip()
    return vendor in _VENDORS and (
        kind.startswith(_ACCELERATOR_CLASSES) or (vendor == "0x10de" and kind.startswith("0x0300"))
    )


def _bus_device(folder: Path) -> BusDevice:
    node = _text(folder / "numa_node").strip()  # -1: the firmware does not say
    return BusDevice(
        address=folder.name,
        vendor=_VENDORS[_text(folder / "vendor").strip()],
        link_width=_number(folder / "current_link_width") or None,
        device_link_width=_number(folder / "max_link_width") or None,
        slot_speed=_transfers(folder.resolve().parent / "max_link_speed"),
        device_speed=_transfers(folder / "max_link_speed"),
        numa_node=int(node) if node.isdecimal() else None,
    )


def _transfers(path: Path) -> float | None:
    """The number of a file such as ``16.0 GT/s PCIe``; None for "Unknown"."""
    found = re.match(r"([\d.]+) GT/s", _text(path))
    return float(found[1]) if found else None


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


# -- reading --------------------------------------------------------------------------------------


def _pages(name: str) -> int:
    """Bytes of so many pages of memory, as the C library counts them; it needs no /proc."""
    return os.sysconf(name) * mmap.PAGESIZE


def _text(path: Path) -> str:
    """The file's text, or "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """The one number in a file; None for anything else, and for what means "no limit"."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() and int(text) < _NO_LIMIT else None


def _kilobytes(path: Path, name: str) -> int | None:
    """One "kB" field of a meminfo or status file, in bytes."""
    found = re.search(rf"(?:^|\s){re.escape(name)}:\s*(\d+) kB", _text(path))
    return int(found[1]) * 1024 if found else None


def _version(package: str, fallback: str) -> str:
    """A loaded package says it itself; the search through the metadata takes milliseconds at each start."""
    loaded = getattr(sys.modules.get(package), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return fallback


def _gb(count: int) -> str:
    """Bytes in GB (1e9) with three significant digits."""
    gigabytes = count / 1e9
    return f"{gigabytes:,.0f} GB" if gigabytes >= 100 else f"{gigabytes:.3g} GB"
