"""Accelerators on the PCI bus, as the kernel lists them; no driver is asked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from autotune_offload.machine.procfs import ROOT, contents, number_in

# -- accelerators on the bus ----------------------------------------------------------------------

_VENDORS = {
    "0x10de": "NVIDIA",
    "0x1002": "AMD",
    "0x8086": "Intel",
    "0x1da3": "Habana",
    "0x19e5": "Huawei",
    "0xcabc": "Cambricon",
}
"""Those that DeepSpeed has an accelerator for, by their numbers in pci.ids."""

_ACCELERATOR_CLASSES = ("0x0302", "0x0380", "0x1200")
"""3D controller, other display controller, processing accelerator (pci.ids)."""

_DISPLAY_CLASS = "0x0300"
_DISPLAYS = ("AMD", "Intel")
"""Whose VGA controllers may compute as well as drive a screen. NVIDIA's all do; those of others, in many a server,
are there for the console alone."""


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
    display: bool = False
    """Whether it is a display card, which may be of use to torch or not: a Radeon or an Arc as well as an old one."""


def accelerators(*, root: Path = ROOT) -> tuple[BusDevice, ...]:
    """The accelerators that /sys shows, whether or not any driver or library can use them."""
    found = sorted((root / "sys/bus/pci/devices").glob("*"))
    return tuple(_bus_device(folder) for folder in found if _is_accelerator(folder))


def _is_accelerator(folder: Path) -> bool:
    vendor, kind = _vendor(folder), contents(folder / "class").strip()
    if kind.startswith(_ACCELERATOR_CLASSES):
        return vendor is not None
    return (vendor == "NVIDIA" and kind.startswith(_DISPLAY_CLASS)) or _is_display_card(folder)


def _is_display_card(folder: Path) -> bool:
    """With a link of its own: graphics within the processor or on the board have none, or lie on the first bus."""
    vga = contents(folder / "class").strip().startswith(_DISPLAY_CLASS)
    card = bool(number_in(folder / "max_link_width")) and folder.name.split(":")[1:2] != ["00"]
    return vga and card and _vendor(folder) in _DISPLAYS


def _vendor(folder: Path) -> str | None:
    return _VENDORS.get(contents(folder / "vendor").strip())


def _bus_device(folder: Path) -> BusDevice:
    node = contents(folder / "numa_node").strip()  # -1: the firmware does not say
    return BusDevice(
        address=folder.name,
        vendor=_vendor(folder) or "unknown",
        link_width=number_in(folder / "current_link_width") or None,
        device_link_width=number_in(folder / "max_link_width") or None,
        slot_speed=_transfers(folder.resolve().parent / "max_link_speed"),
        device_speed=_transfers(folder / "max_link_speed"),
        numa_node=int(node) if re.fullmatch(r"\d{1,6}", node, re.ASCII) else None,
        display=_is_display_card(folder),
    )


def _transfers(path: Path) -> float | None:
    """The number of a file such as ``16.0 GT/s PCIe``; None for "Unknown"."""
    found = re.match(r"(\d+(?:\.\d+)?) GT/s", contents(path), re.ASCII)
    return float(found[1]) if found else None
