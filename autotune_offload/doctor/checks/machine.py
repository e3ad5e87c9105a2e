"""The link to the device, NUMA nodes, threads."""

from __future__ import annotations

from collections.abc import Iterator

from autotune_offload import units
from autotune_offload.doctor.checks.case import Case, whole
from autotune_offload.machine import bus, host
from autotune_offload.records import Finding

_TELLING = 1.1
"""Less than that is not worth a word: times scatter."""


def link(case: Case) -> Iterator[Finding]:
    """A link that is narrower or slower than the device can do."""
    devices = _accelerators(case)
    for device in devices:
        name = f"the link of the {device.vendor} device at {device.address}"
        yield from _narrow(name, device.link_width, device.device_link_width)
        if device.slot_speed and device.device_speed and device.slot_speed < device.device_speed:
            yield _slow(
                name,
                f"{device.slot_speed:g} GT/s",
                f"{device.device_speed:g} GT/s",
                device.device_speed / device.slot_speed,
            )
    nvml = case.answers.answers.get("link") or {}
    if any(device.link_width for device in devices if device.vendor == "NVIDIA"):
        return  # told above already
    name = f"the link of {case.device.get('name')}"
    yield from _narrow(name, nvml.get("width"), nvml.get("device_width"))
    now, best = nvml.get("generation"), nvml.get("device_generation")
    if now and best and now < best:
        yield _slow(name, f"generation {now}", f"generation {best}", 2.0 ** (best - now))


def _accelerators(case: Case) -> list[bus.BusDevice]:
    """Those that are there to compute: a card for a screen need not have a wide link."""
    return [device for device in bus.accelerators(root=case.root) if not device.display]


def _narrow(name: str, width: int | None, most: int | None) -> Iterator[Finding]:
    if width and most and width < most:
        yield Finding(
            id="link",
            severity="costs",
            found=f"{name} is x{width} wide; the device can do x{most}",
            costs=f"copies between host and device take up to {most / width:.3g} times as long",
            fix="another slot or riser, or the firmware's bifurcation setting; a virtual machine may show less than "
            "there is",
        )


def _slow(name: str, now: str, best: str, ratio: float) -> Finding:
    return Finding(
        id="link",
        severity="costs",
        found=f"{name} can run at {now} in its slot; the device can do {best}",
        costs=f"copies between host and device take up to {ratio:.3g} times as long",
        fix="another slot or host, or the firmware's setting of the link speed",
    )


def numa(case: Case) -> Iterator[Finding]:
    """A process that no node holds, on a host of several."""
    facts = host.facts(root=case.root)
    if facts.numa_nodes < 2 or facts.numa_bound:
        return
    nodes = sorted({str(d.numa_node) for d in _accelerators(case) if d.numa_node is not None})
    where = f" (the accelerators here are at node {', '.join(nodes)})" if nodes else ""
    yield Finding(
        id="numa",
        severity="costs",
        found=f"this process may run on all {facts.numa_nodes} NUMA nodes of the host, and on none alone",
        costs="copies cross between nodes: 4 to 12 GB/s unbound against 24 bound in DeepSpeed issue 1576",
        fix=f"start each rank on its device's node{where}: `deepspeed --bind_cores_to_rank`, or "
        "`numactl --cpunodebind=N --membind=N`",
    )


def threads(case: Case) -> Iterator[Finding]:
    """Threads of all ranks against the CPUs that they may use: too many, or far too few."""
    named = whole(case.environ.get("OMP_NUM_THREADS", "").partition(",")[0])
    threads = named or (case.answers.answers.get("torch") or {}).get("threads")
    cpus = host.facts(root=case.root).affinity_cpus
    if not threads:
        return
    whose = "OMP_NUM_THREADS" if named else "torch's own number of threads"
    share = max(cpus // case.ranks, 1)
    if threads * case.ranks > cpus:
        yield Finding(
            id="threads",
            severity="costs",
            found=f"{case.ranks} ranks with {threads} threads each ({whose}) share {cpus} CPUs",
            costs="threads wait for each other in every host copy and in DeepSpeed's CPU Adam, which takes all of them "
            f"in each rank; {_the_pass(share)}",
            fix=f"OMP_NUM_THREADS={share}; nothing, if the launcher gives each rank CPUs of its own",
        )
    elif named and named * 2 <= share:
        yield Finding(
            id="threads",
            severity="costs",
            found=f"OMP_NUM_THREADS={named} with {case.ranks} ranks leaves {cpus - named * case.ranks} of {cpus} "
            "CPUs idle",
            costs=f"host copies and DeepSpeed's CPU Adam run on {units.threads(named)} (torchrun, and accelerate "
            f"through it, set 1 where there are several ranks){_by_profile(case, named, share)}; {_the_pass(share)}",
            fix=f"OMP_NUM_THREADS={share}",
        )


def _the_pass(share: int) -> str:
    """What neither variable nor launcher decides."""
    return (
        f"the compiled pass has threads of its own, up to {share} a rank, of which the first real steps choose: where "
        "it makes the step, that is not lost"
    )


def _by_profile(case: Case, threads: int, share: int) -> str:
    """How much faster the memory of this host answers more threads, where a stored profile tells."""
    profile = case.profile()
    rates = profile.step_rates if profile is not None else None
    times = {p.threads: p.median_seconds / p.elements for p in rates.passes} if rates is not None else {}
    few = [n for n in times if n <= threads]
    more = [n for n in times if threads < n <= share]
    if not few or not more:
        return ""
    best = min(more, key=times.__getitem__)
    ratio = times[max(few)] / times[best]
    if ratio < _TELLING:
        return ""
    return f": one pass over its memory takes {ratio:.3g} times as long as with {best} (stored profile)"
