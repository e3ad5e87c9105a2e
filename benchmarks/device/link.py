"""What the device's link can carry one way, by what NVML or the kernel says of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune_offload.machine.bus import BusDevice
from autotune_offload.records import DeviceIdentity
from autotune_offload.reports.page import LANE_GBPS

_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""PCI Express generations by 1e9 transfers a second a lane (PCI-SIG, base specifications 1.0 to 6.0)."""


def ceiling(identity: DeviceIdentity, on_bus: Sequence[BusDevice]) -> dict[str, Any] | None:
    """`gbps`, `name` and `source`; None where nothing tells it, or where several devices differ.

    NVML's word is about this device. /sys lists all of them, so it is taken only where all have the same link.
    """
    if identity.link_generation in LANE_GBPS and identity.link_width:
        return _carried(identity.link_generation, identity.link_width, "NVML")
    links = {_link(device) for device in on_bus if not device.display}
    if len(links) != 1 or (link := links.pop()) is None:
        return None
    return _carried(*link, "/sys")


def _carried(generation: int, width: int, source: str) -> dict[str, Any]:
    return {
        "gbps": LANE_GBPS[generation] * width,
        "name": f"PCIe {generation} x{width}",
        "source": source,
    }


def _link(device: BusDevice) -> tuple[int, int] | None:
    """Generation and width; an idle device lowers its present speed, so the most of slot and device counts."""
    speeds = [speed for speed in (device.slot_speed, device.device_speed) if speed]
    generation = _GENERATIONS.get(min(speeds)) if speeds else None
    if generation is None or not device.link_width:
        return None
    return generation, device.link_width
