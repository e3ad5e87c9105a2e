"""Part: the device, its driver and link, the host and its limits, versions, and what `doctor` says."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.device.link import ceiling
from benchmarks.device.scene import Scene, real_kind


def run(scene: Scene) -> None:
    """Facts first, since `doctor` asks a child process, which may take long."""
    from autotune_offload.machine import bus, host, limits
    from autotune_offload.records import to_plain

    device = scene.device()
    found, on_bus = host.facts(), bus.accelerators()
    scene.keep(
        kind=device.identity.kind,
        training_kind=real_kind(),
        device=to_plain(device.identity),
        host={**to_plain(found), "name": "HOST"},
        software=to_plain(host.software()),
        limits=to_plain(limits.limits()),
        bus=[_on_bus(each) for each in on_bus],
        ceiling=None if device.identity.kind == "cpu" else ceiling(device.identity, on_bus),
        why_not_pinned=device.why_not_pinned(),
        torch_build=_torch_build(),
        load=_load(),
    )
    scene.keep(doctor=_doctor())


def _on_bus(device: Any) -> dict[str, Any]:
    names = (
        "vendor",
        "link_width",
        "device_link_width",
        "slot_speed",
        "device_speed",
        "numa_node",
        "display",
    )
    return {name: getattr(device, name) for name in names}


def _torch_build() -> dict[str, Any]:
    import torch

    version = torch.version
    return {"cuda": version.cuda, "hip": getattr(version, "hip", None), "threads": torch.get_num_threads()}


def _load() -> float:
    """Processes that wanted to run, on average over the last minute; 0 where nothing tells it."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


def _doctor() -> str:
    """The block for issues, which names nobody."""
    from autotune_offload.doctor import pasted
    from autotune_offload.doctor.examine import examine
    from autotune_offload.machine import host

    return pasted.block(examine(), host.facts(), host.software())
