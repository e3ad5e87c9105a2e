"""How much host memory this process may allocate and page-lock, and who says so."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from autotune_offload.errors import ConfigError
from autotune_offload.machine import allocator
from autotune_offload.machine.cgroups import headrooms
from autotune_offload.machine.procfs import (
    ROOT,
    affinity,
    bound_node,
    contents,
    cpu_nodes,
    kilobytes,
    numa_nodes,
    pages_bytes,
)
from autotune_offload.records import Limit, Limits
from autotune_offload.units import gigabytes

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

_CAP_IPC_LOCK = 14  # linux/capability.h
_WHOLE_UID_RANGE = "4294967295"

# -- what it may allocate and page-lock -----------------------------------------------------------


def limits(
    *,
    max_pinned_bytes: int | None = None,
    ranks_per_host: int = 1,
    pin_backend: str | None = None,
    root: Path = ROOT,
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
    shared = [_ram(root), *_smallest(headrooms(root))]
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
    """What torch's pinned allocator takes for one block: the next power of two (pytorch#150517), if it rounds."""
    most = allocator.rounded_up_to()
    if most is not None and requested_bytes > most:
        return requested_bytes
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
        share = f"; {gigabytes(sum(map(pinned_block_bytes, certain)))} of it DeepSpeed locks in any case"
        return (
            f"needs {gigabytes(locked)} of page-locked memory (each block {allocator.rounding()}"
            f"{share if certain else ''}), but this process may lock "
            f"{gigabytes(limits.pinnable_bytes)}{tightest(limits.bounds)}"
        )
    if peak > limits.available_bytes:
        memory = tuple(bound for bound in limits.bounds if bound.name in ("ram", "cgroup"))
        states = f", beside {gigabytes(beside_bytes)} of optimizer state" if beside_bytes else ""
        return (
            f"needs {gigabytes(peak)} of host memory while the largest block is pinned (it exists twice{states}), "
            f"but this process has {gigabytes(limits.available_bytes)}{tightest(memory)}"
        )
    return None


def tightest(bounds: Sequence[Limit]) -> str:
    """The smallest bound, to be put behind its number: its name, where it comes from, how to raise it."""
    if not bounds:
        return ""
    least = min(bounds, key=lambda bound: bound.bytes)
    return f" ({least.name}: {least.source}); to raise it: {least.raise_by}"


def ranks_here(world_size: int, device_count: int, environ: Mapping[str, str] | None = None) -> int:
    """How many of a job's ranks share this host.

    What the launcher says (torchrun, DeepSpeed, Open MPI, MVAPICH2, Hydra, in this order); without one, as
    many as there are devices for.
    """
    told = ((os.environ if environ is None else environ).get(name, "").strip() for name in _LOCAL_SIZES)
    local = next((int(text) for text in told if text.isdecimal() and int(text) > 0), device_count)
    return max(min(world_size, local), 1)


def _share(limit: Limit, ranks: int) -> Limit:
    """One rank's part of a bound on the host's memory, after the margin."""
    margin = min(max(int(limit.bytes * HOST_MARGIN_FRACTION), HOST_MARGIN_BYTES), limit.bytes // 2)
    source = f"{limit.source}, less {gigabytes(margin)} for the rest of the host"
    if ranks > 1:
        source += f", shared by {ranks} ranks"
    return Limit(
        name=limit.name, bytes=(limit.bytes - margin) // ranks, source=source, raise_by=limit.raise_by
    )


def _smallest(bounds: Iterable[Limit]) -> list[Limit]:
    """The smallest of them; of equal ones the first."""
    return sorted(bounds, key=lambda bound: bound.bytes)[:1]


def _ram(root: Path) -> Limit:
    path = root / "proc/meminfo"
    free = kilobytes(path, "MemAvailable")
    if free is None:
        free, source = pages_bytes("SC_AVPHYS_PAGES"), "sysconf(SC_AVPHYS_PAGES)"
    else:
        source = f"MemAvailable in {path}"
    # MemAvailable counts nodes without CPUs too: a GH200's device memory, which is not for us to take.
    foreign = sum(kilobytes(node / "meminfo", "MemFree") or 0 for node, cpus in numa_nodes(root) if not cpus)
    free = max(0, free - foreign)
    return Limit(
        name="ram",
        bytes=free,
        source=f"{source}, {gigabytes(free)} free",
        raise_by=_WSL_MEMORY
        if in_wsl(root)
        else "free memory on this host, or use one with more RAM; swap does not help",
    )


def _numa(root: Path, ranks: int) -> list[tuple[Limit, int]]:
    """The bound of the node that this process is bound to, with the ranks that share the node."""
    node = bound_node(root, affinity())
    if node is None:
        return []
    path = node / "meminfo"
    free = (kilobytes(path, "MemFree") or 0) + (kilobytes(path, "Inactive(file)") or 0)
    limit = Limit(
        name="numa",
        bytes=free,
        source=f"MemFree and Inactive(file) in {path}, {gigabytes(free)} free",
        raise_by="free memory on this node, or bind the process to one with more",
    )
    return [(limit, -(-ranks // len(cpu_nodes(root))))]


def _memlock(root: Path) -> list[Limit]:
    path = root / "proc/self/limits"
    found = re.search(r"^Max locked memory\s+(\d{1,20})\s", contents(path), re.MULTILINE | re.ASCII)
    if found is None or _may_lock_any_amount(root):
        return []
    locked = kilobytes(root / "proc/self/status", "VmLck") or 0
    return [
        Limit(
            name="memlock",
            bytes=max(0, int(found[1]) - locked),
            source=f"RLIMIT_MEMLOCK in {path}, {gigabytes(locked)} locked already",
            raise_by="`ulimit -l unlimited` (memlock in /etc/security/limits.conf), `--ulimit memlock=-1` or "
            "`--cap-add IPC_LOCK` for a container, LimitMEMLOCK=infinity for a systemd service",
        )
    ]


def _may_lock_any_amount(root: Path) -> bool:
    """CAP_IPC_LOCK, which counts in the first user namespace only: not for root of a rootless container."""
    capable = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", contents(root / "proc/self/status"), re.MULTILINE)
    if capable is None or not int(capable[1], 16) >> _CAP_IPC_LOCK & 1:
        return False
    uid_map = contents(root / "proc/self/uid_map").split()
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


def in_wsl(root: Path) -> bool:
    """Whether this is the Windows Subsystem for Linux."""
    return "microsoft" in contents(root / "proc/version").lower()
