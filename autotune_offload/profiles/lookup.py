"""Finds the stored profile that fits this host, device and workload."""

from __future__ import annotations

from dataclasses import replace

from autotune_offload.machine import host, limits
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.profiles.environment import WORKLOAD_FIELD, Environment
from autotune_offload.profiles.recheck import doubt
from autotune_offload.profiles.store import Miss, Store
from autotune_offload.records import Profile, Scalar, Settings, Workload
from autotune_offload.workload import default_workload

MEMORY_SHARE = 8
"""Buffers for measuring take at most one part in so many of the memory that is free."""


def lookup(
    store: Store,
    workload: Workload | None,
    device: AcceleratorDevice | None = None,
    settings: Settings | None = None,
) -> Profile | Miss:
    """The stored profile for the present environment and what the user fixed, or why there is none.

    A workload of None takes the newest one that was decided for any model. One that is found is checked
    against today's limits and by one copy on the device (see `recheck`).
    """
    device = device or AcceleratorDevice()
    ignore = frozenset({WORKLOAD_FIELD}) if workload is None else frozenset[str]()
    here = present(device, workload or default_workload(), settings or Settings())
    found = store.lookup(here.fingerprint(), ignore=ignore)
    if isinstance(found, Miss):
        return found
    return doubt(found, device, here.limits) or found


def present_fingerprint(
    device: AcceleratorDevice, workload: Workload, settings: Settings
) -> dict[str, Scalar]:
    """The fingerprint of this process, host and device, read now."""
    return present(device, workload, settings).fingerprint()


def present(device: AcceleratorDevice, workload: Workload, settings: Settings) -> Environment:
    """This process, host and device, read now."""
    return Environment(
        host=host.facts(),
        device=device.identity,
        software=host.software(),
        limits=limits.limits(pin_backend=device.identity.pin_backend),
        workload=workload,
        settings=settings,
    )


def capped(settings: Settings, max_pinned_bytes: int | None) -> Settings:
    """With the smaller of the two bounds that may be given."""
    given = (max_pinned_bytes, settings.max_pinned_bytes)
    least = min((cap for cap in given if isinstance(cap, int)), default=None)
    return settings if least is None else replace(settings, max_pinned_bytes=least)
