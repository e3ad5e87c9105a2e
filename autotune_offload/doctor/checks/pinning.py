"""Page-locked memory: who locks it, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from packaging.version import Version

from autotune_offload import upstream
from autotune_offload.config import sections as config_sections
from autotune_offload.config.layout import layout_of
from autotune_offload.doctor.checks.case import Case
from autotune_offload.machine import host
from autotune_offload.machine import limits as machine_limits
from autotune_offload.records import Finding, Limit, Workload
from autotune_offload.workload import DEFAULT_PARAMETERS, from_parameter_count


def pin_backend(case: Case) -> Iterator[Finding]:
    """What DS_PIN_MEMORY_BACKEND and its like choose."""
    named = case.environ.get("DS_PIN_MEMORY_BACKEND", "torch").strip().lower()
    if named not in ("torch", "native"):
        yield Finding(
            id="pin-backend",
            severity="notice",
            found=f'DS_PIN_MEMORY_BACKEND is "{named}", which DeepSpeed takes as "torch"',
            fix='write "torch" or "native", or unset it',
        )
    elif named == "native" and Version(case.version) < upstream.NATIVE_PINS_SINCE:
        yield Finding(
            id="pin-backend",
            severity="notice",
            found=f"DS_PIN_MEMORY_BACKEND=native has no effect: DeepSpeed {case.version} does not read it",
            fix=f"unset it, or use DeepSpeed {upstream.NATIVE_PINS_SINCE} or newer",
        )
    elif named == "native" and (why := _why_not_built(case)):
        yield Finding(
            id="pin-backend",
            severity="will break",
            found=f"DS_PIN_MEMORY_BACKEND=native needs DeepSpeed's pin_memory operation, which cannot be built: {why}",
            costs="`deepspeed.initialize` ends in a RuntimeError at the first block",
            fix="mend what it names (`apt install g++ python3-dev`, `pip install ninja`), or unset the variable",
        )
    if str(case.device.get("pin_backend")).startswith("native,"):
        yield Finding(
            id="pin-backend",
            severity="costs",
            found="page-locked memory is not registered with the device (DS_PIN_MEMORY_REGISTER_DEVICE)",
            costs="its copies are those of pageable memory: 10 to 17 GB/s where 53 to 55 were measured with "
            "registration on an H200 (DeepSpeed PR 8283)",
            fix="unset DS_PIN_MEMORY_REGISTER_DEVICE",
        )


def _why_not_built(case: Case) -> str | None:
    why = case.answers.errors.get("native_pins") or case.answers.answers.get("native_pins")
    return str(why) if why else None


def memlock(case: Case) -> Iterator[Finding]:
    """RLIMIT_MEMLOCK, where it bounds what is page-locked and no capability lifts it."""
    limits = machine_limits.limits(root=case.root)  # of an unknown backend, so that memlock counts
    bound = next((bound for bound in limits.bounds if bound.name == "memlock"), None)
    if bound is None:
        return
    workload, whose, _ = model(case)
    blocks = _blocks(case, workload)
    if _backend(case) == "native":
        if blocks and sum(blocks) > bound.bytes:
            yield _native_beyond(bound, sum(blocks), whose)
    elif case.device.get("kind") not in ("cpu", "cuda") or _on_nvme(case.config):
        which = (
            "the NVMe swapper locks its buffers itself"
            if _on_nvme(case.config)
            else "some drivers stay within it"
        )
        yield Finding(
            id="memlock",
            severity="notice",
            found=f"this process may lock {_gb(bound.bytes)} ({bound.source}) and has no CAP_IPC_LOCK: {which}",
            costs="page-locking may fail beyond it",
            fix=bound.raise_by,
        )


def _native_beyond(bound: Limit, wanted_bytes: int, whose: str) -> Finding:
    return Finding(
        id="memlock",
        severity="will break",
        found=f"DS_PIN_MEMORY_BACKEND=native would lock {_gb(wanted_bytes)} for {whose}, but this process may lock "
        f"{_gb(bound.bytes)} ({bound.source}) and has no CAP_IPC_LOCK",
        costs="DeepSpeed aborts the process on the first block beyond the limit",
        fix=f"{bound.raise_by}; or unset DS_PIN_MEMORY_BACKEND: a driver's own page-locking does not count there",
    )


def cgroup(case: Case) -> Iterator[Finding]:
    """A cgroup's limit below the host's free RAM, the smallest over all ancestors."""
    bounds = {
        bound.name: bound for bound in machine_limits.limits(root=case.root, pin_backend="torch").bounds
    }
    cgroup, ram = bounds.get("cgroup"), bounds["ram"]
    if cgroup is not None and cgroup.bytes < ram.bytes:
        yield Finding(
            id="cgroup",
            severity="notice",
            found=f"a cgroup leaves this process less than the host has: {cgroup.source}; the host's RAM: {ram.source}",
            costs="beyond it the kernel kills or stalls the process, whatever `free` shows; page-locked memory counts "
            "in full",
            fix=cgroup.raise_by,
        )


def memory(case: Case, kept_bytes: int) -> Iterator[Finding]:
    """Whether what DeepSpeed would page-lock fits RAM, cgroup and node, within all that a rank keeps on the host."""
    workload, whose, known = model(case)
    blocks = _blocks(case, workload)
    limits = case.limits(workload)
    beside = max(kept_bytes - sum(blocks), 0)
    why = machine_limits.check_pinned(blocks, limits, beside_bytes=beside) if blocks else None
    if why is None:
        return
    found, _, raise_by = why.partition("; to raise it: ")
    swap = host.facts(root=case.root).swap_bytes
    swapped = f"; its {_gb(swap)} of swap cannot hold page-locked memory" if swap else ""
    yield Finding(
        id="memory",
        severity="will break" if known and case.config is not None else "notice",
        found=f"for {whose} DeepSpeed {found}{swapped}",
        costs="page-locking fails, or the kernel ends the process",
        fix=f'"pin_memory": false in offload_optimizer, which `autotune_offload.initialize` chooses by itself; '
        f"{raise_by}",
    )


def model(case: Case) -> tuple[Workload, str, bool]:
    """The model that sizes are counted for, in words, and whether it is the user's own."""
    profile = case.profile()
    if profile is not None:
        return profile.workload, f"the stored profile's model ({profile.workload.source})", True
    stand_in = from_parameter_count(DEFAULT_PARAMETERS)
    return stand_in, f"{stand_in.source}, which stands in since no stored profile fits,", False


def _blocks(case: Case, workload: Workload) -> list[int]:
    """Bytes of what DeepSpeed page-locks for this model by the config, or with both offloads without one."""
    if _backend(case) == "none" or "torch" not in case.answers.answers:
        return []  # without torch nothing is page-locked, and what follows would load it

    from autotune_offload.paths.pinned_blocks import optimizer_blocks, own_blocks

    layout = layout_of(case.config)
    locks = {} if case.config is None else config_sections.page_locks(case.config, case.version)
    blocks = own_blocks(workload, layout, case.version)
    if case.config is None or locks.get("offload_optimizer"):
        blocks += optimizer_blocks(workload, layout, case.version)
    return blocks


def _backend(case: Case) -> str:
    """Who page-locks: "native", "torch" or "none"; by the environment where the device did not answer."""
    told = case.device.get("pin_backend") or case.environ.get("DS_PIN_MEMORY_BACKEND", "torch")
    return str(told).strip().lower().partition(",")[0]


def _on_nvme(config: Mapping[str, Any] | None) -> bool:
    named = (config_sections.section(config, upstream.ZERO, name) for name in upstream.SECTION_STAGES)
    return any(section.get("device") == "nvme" for section in named)


def _gb(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 10**8 else f"{count:,} bytes"
