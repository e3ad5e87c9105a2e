"""What a stored profile must share with the present to be used: one table, from which the key is built.

`docs/cache.md` holds the same table; a test keeps them equal.
"""

from __future__ import annotations

from collections.abc import Callable

from autotune_offload import workload as workloads
from autotune_offload.config.layout import PLAIN, Layout
from autotune_offload.records import (
    SCHEMA,
    DeviceIdentity,
    HostFacts,
    Limits,
    Record,
    Scalar,
    Settings,
    Software,
    Workload,
)
from autotune_offload.upstream import parse_version, stock_sequence

WORKLOAD_FIELD = "workload"
"""The fingerprint's field that a lookup leaves out while the model is not known yet."""


class Environment(Record, frozen=True, kw_only=True):
    """Everything that a fingerprint is made of."""

    host: HostFacts
    device: DeviceIdentity
    software: Software
    limits: Limits
    workload: Workload
    settings: Settings
    layout: Layout = PLAIN

    def fingerprint(self) -> dict[str, Scalar]:
        """Each field of `INVALIDATES` with its present value."""
        return {name: value(self) for name, (value, _) in INVALIDATES.items()}


def release(version: str) -> tuple[int, int, int]:
    """Major, minor and patch of a DeepSpeed version; 0.19.8+cu13 is (0, 19, 8)."""
    parsed = parse_version(version)
    return parsed.major, parsed.minor, parsed.micro


def _link(here: Environment) -> str | None:
    device = here.device
    if device.link_generation is None and device.link_width is None:
        return None
    return f"gen{device.link_generation} x{device.link_width}"


def _memlock_class(here: Environment) -> int | None:
    """None where nothing bounds it, else its power of two: what is locked already changes all the time."""
    memlock = next((limit.bytes for limit in here.limits.bounds if limit.name == "memlock"), None)
    return None if memlock is None else memlock.bit_length()


def _workload_class(here: Environment) -> str:
    """With the micro-steps as far as they are timed, where they are: on the CPU they are added up in place."""
    steps = min(here.workload.accumulation_steps, workloads.TIMED_MICRO_STEPS)
    accumulated = f" micro_steps={steps}" if steps > 1 and here.device.kind != "cpu" else ""
    return workloads.workload_class(here.workload) + accumulated


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


INVALIDATES: dict[str, tuple[Callable[[Environment], Scalar], str]] = {
    "device.kind": (lambda here: here.device.kind, "cuda, hpu, cpu, ...: another kind of device"),
    "device.name": (lambda here: here.device.name, "another model of it"),
    "device.capability": (lambda here: here.device.capability, "its compute capability"),
    "device.memory_bytes": (lambda here: here.device.memory_bytes, "its memory bounds the sizes"),
    "device.mig_slice": (lambda here: here.device.mig_slice, "a slice has a part of the copy engines"),
    "device.link": (_link, "generation and width of the link: every copy's rate"),
    "device.pin_backend": (
        lambda here: here.device.pin_backend,
        "who page-locks: torch, DeepSpeed's own code (registered or not), or nobody",
    ),
    "device.settings": (
        lambda here: here.device.settings,
        "variables that change page-locking or copying: the allocator's `pinned_*` settings, CUDA_LAUNCH_BLOCKING "
        "and its like",
    ),
    "host.cpu_model": (lambda here: here.host.cpu_model, "casts and host copies run there"),
    "host.affinity_cpus": (lambda here: here.host.affinity_cpus, "how many CPUs this process may use"),
    "host.numa_bound": (lambda here: here.host.numa_bound, "bound to one NUMA node or not"),
    "limits.memlock_class": (
        _memlock_class,
        "RLIMIT_MEMLOCK as a power of two, or none: whether pinning is on offer",
    ),
    "software.torch": (lambda here: _minor(here.software.torch), "major and minor version"),
    "software.deepspeed": (lambda here: _minor(here.software.deepspeed), "major and minor version"),
    "software.sequence": (
        lambda here: stock_sequence(release(here.software.deepspeed)).name,
        "how this DeepSpeed moves a gradient, which patch releases have changed",
    ),
    "schema": (lambda here: SCHEMA, "the stored form"),
    WORKLOAD_FIELD: (
        _workload_class,
        "dtype, ranks, the powers of two of the gradients' total and middle size; off the CPU micro-steps up to 4",
    ),
    "layout": (
        lambda here: here.layout.differing(here.workload.elements),
        "stage 1 or 2, and a `sub_group_size` of the user's, by its power of two: what DeepSpeed page-locks",
    ),
    "fixed": (lambda here: here.settings.fixed, "what the `autotune_offload` block fixes of the choice"),
}
"""What makes a stored profile a miss when it differs: its value now, and why it counts."""

RECORDED: dict[str, str] = {
    "host.name": "a label; one profile may serve a hundred equal hosts",
    "host.platform": "kernel and C library change with every update",
    "host.cpu_count": "CPUs that this process may not use do not matter",
    "host.ram_bytes": "what is free is checked at each start instead, see below",
    "host.swap_bytes": "no path uses it",
    "host.numa_nodes": "`host.numa_bound` says what matters of it",
    "host.last_level_cache_bytes": "follows from the CPU model",
    "host.page_bytes": "follows from the kernel",
    "host.wsl": "what it changes is measured",
    "device.count": "one rank uses one device",
    "device.index": "the devices of one host are taken to be alike; the re-check at the start finds one that is not",
    "device.driver": "changes with every update; the re-check finds one that copies more slowly",
    "device.link_generation": "part of `device.link`",
    "device.link_width": "part of `device.link`",
    "software.python": "nothing that is measured runs in it",
    "software.autotune_offload": "`schema` says what matters of it",
    "limits.available_bytes": "changes from minute to minute; checked at each start instead",
    "limits.pinnable_bytes": "the same",
    "limits.bounds": "the same, but for `limits.memlock_class`",
}
"""What a profile holds about where it was measured, and does not have to share; and why not."""
