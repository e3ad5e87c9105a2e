"""Whether what is offloaded fits the host, and whether offloading frees anything there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from autotune_offload import upstream
from autotune_offload.doctor.checks import pinning
from autotune_offload.doctor.checks.case import Case
from autotune_offload.machine import host
from autotune_offload.machine import limits as machine_limits
from autotune_offload.records import Finding
from autotune_offload.units import gigabytes

_ONE_MEMORY = ("GB10", "MI300A")
"""Devices by name whose memory is the host's, where torch does not call them integrated."""

_BOTH: dict[str, Any] = {
    upstream.ZERO: {"stage": 3, **{str(section): {"device": "cpu"} for section in upstream.SECTION_STAGES}}
}


def memory(case: Case) -> Iterator[Finding]:
    """Whether all that is offloaded fits RAM and cgroup, and what is page-locked the node and its limits too."""
    if "torch" not in case.answers.answers:
        return  # what counts the bytes would load it

    from autotune_offload.paths.host_state import host_state

    workload, whose, known = pinning.model(case)
    parts = host_state(_BOTH if case.config is None else case.config, workload)
    too_much = list(_beyond(case, parts, whose, known))
    yield from too_much or pinning.memory(case, sum(parts.values()))


def _beyond(case: Case, parts: Mapping[str, int], whose: str, known: bool) -> Iterator[Finding]:
    needed = sum(parts.values())
    limits = machine_limits.limits(root=case.root, pin_backend="torch", ranks_per_host=case.ranks)
    if needed <= limits.available_bytes:
        return
    least = min((b for b in limits.bounds if b.name in ("ram", "cgroup")), key=lambda bound: bound.bytes)
    swap = host.facts(root=case.root).swap_bytes
    swapped = f"; its {gigabytes(swap)} of swap would be written and read in every step" if swap else ""
    yield Finding(
        id="memory",
        severity="will break" if known and case.config is not None else "notice",
        found=f"for {whose} a rank keeps {gigabytes(needed)} in host memory, page-locked or not "
        f"({', '.join(f'{what} {gigabytes(count)}' for what, count in parts.items())}), but it has "
        f"{gigabytes(limits.available_bytes)} ({least.name}: {least.source}){swapped}",
        costs="the kernel ends the process, with exit code -9 and no other word, when the last of it is first written: "
        "often in the first step",
        fix=f"more hosts share it, `nvme` keeps it on a disk, fewer sections keep it on the device; {least.raise_by}",
    )


def unified_memory(case: Case) -> Iterator[Finding]:
    """A device whose memory is the host's: what is offloaded stays where it was."""
    name = str(case.device.get("name"))
    if not (case.device.get("integrated") or any(word in name.upper() for word in _ONE_MEMORY)):
        return
    if case.config is not None and not _offloads_to_host(case.config):
        return
    yield Finding(
        id="unified-memory",
        severity="notice" if case.config is None else "costs",
        found=f"{name} has no memory of its own: host and device share one",
        costs="offloading to the CPU frees nothing there; every copy is made within the same memory, and page-locked "
        "memory is taken from the device",
        fix='take the offload sections out, or write "device": "none"; a smaller micro-batch, more ranks or `nvme` do '
        "free memory",
    )


def _offloads_to_host(config: Mapping[str, Any]) -> bool:
    from autotune_offload.config import sections

    zero = config.get(upstream.ZERO)
    holder = zero if isinstance(zero, Mapping) else {}
    return any(sections.device_of(holder, section) == "cpu" for section in upstream.SECTION_STAGES)
