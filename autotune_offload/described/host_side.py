"""The host of a described machine: its facts, and what a rank may allocate there."""

from __future__ import annotations

import math

from autotune_offload.described.machine import Machine
from autotune_offload.machine import limits
from autotune_offload.records import HostFacts, Limit, Limits

UNTOLD_RAM_BYTES = 1 << 40
"""Taken for a host's memory where the description does not tell: it bounds next to nothing."""


def facts_of(machine: Machine) -> HostFacts:
    """The described host."""
    cores = math.ceil(machine.h2h.threads_gbps / machine.h2h.bandwidth_gbps)
    return HostFacts(
        name=machine.name,
        platform="simulated",
        cpu_model=f"described: {machine.title}",
        cpu_count=cores,
        affinity_cpus=cores,
        ram_bytes=_ram_bytes(machine),
        swap_bytes=0,
        numa_nodes=1,
        numa_bound=True,
        last_level_cache_bytes=0,
        page_bytes=4096,
        wsl=False,
    )


def limits_of(machine: Machine, ranks: int, max_pinned_bytes: int | None) -> Limits:
    """What one of `ranks` ranks may allocate and page-lock, by the description and by `max_pinned_bytes`."""
    told = f"machine {machine.name}, host.ram_bytes"
    untold = f"machine {machine.name} does not tell its memory"
    ram = Limit(
        name="ram",
        bytes=_ram_bytes(machine),
        source=told if machine.host.ram_bytes is not None else untold,
        raise_by="use a host with more memory",
    )
    own = []
    if machine.limits.memlock_bytes is not None:
        memlock = Limit(
            name="memlock",
            bytes=machine.limits.memlock_bytes,
            source=f"machine {machine.name}, limits.memlock_bytes",
            raise_by="ulimit -l unlimited, or docker run --ulimit memlock=-1",
        )
        own.append(memlock)
    here = min(ranks, machine.ranks_per_host)
    return limits.bounded([ram], own, ranks_per_host=here, max_pinned_bytes=max_pinned_bytes)


def _ram_bytes(machine: Machine) -> int:
    told = machine.host.ram_bytes
    return UNTOLD_RAM_BYTES if told is None else told
