"""Finds the stored profile that fits this host, device and workload."""

from __future__ import annotations

from msgspec import structs

from autotune_offload.config.layout import PLAIN, Layout
from autotune_offload.machine import host, limits
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.machine.device import Device
from autotune_offload.profiles.environment import WORKLOAD_FIELD, Environment
from autotune_offload.profiles.recheck import doubt
from autotune_offload.profiles.store import Miss, Store
from autotune_offload.records import Limits, Profile, Scalar, Settings, Workload
from autotune_offload.workload import default_workload


def lookup(
    store: Store,
    workload: Workload | None,
    device: AcceleratorDevice | None = None,
    settings: Settings | None = None,
    layout: Layout = PLAIN,
) -> Profile | Miss:
    """The stored profile for the present environment and what the user fixed, or why there is none.

    A workload of None takes the newest one that was decided for any model. One that is found is checked
    against today's limits and by one copy on the device (see `recheck`).
    """
    device = device or AcceleratorDevice()
    settings = settings or Settings()
    ignore = frozenset({WORKLOAD_FIELD}) if workload is None else frozenset[str]()
    here = present(device, workload or default_workload(), settings, layout)
    found = store.lookup(here.fingerprint(), ignore=ignore)
    if isinstance(found, Miss):
        return found
    return doubt(found, device, limits_of_rank(device, found.workload, settings), layout) or found


def present_fingerprint(
    device: AcceleratorDevice, workload: Workload, settings: Settings, layout: Layout = PLAIN
) -> dict[str, Scalar]:
    """The fingerprint of this process, host and device, read now."""
    return present(device, workload, settings, layout).fingerprint()


def present(
    device: AcceleratorDevice, workload: Workload, settings: Settings, layout: Layout = PLAIN
) -> Environment:
    """This process, host and device, read now."""
    return Environment(
        host=host.facts(),
        device=device.identity,
        software=host.software(),
        limits=limits_of_rank(device, workload, settings),
        workload=workload,
        settings=settings,
        layout=layout,
    )


def limits_of_rank(
    device: Device, workload: Workload, settings: Settings, *, ranks_per_host: int = 1
) -> Limits:
    """What this rank may allocate and page-lock now: the one place where it is computed.

    A rank has its part of the host's memory, as many as there are of it on this host; and what the user set for it.

    Args:
        device: whose `pin_backend` says whether memlock counts. A described one brings its host along.
        workload: for how many ranks there are; how many of them are here is the launcher's to say.
        settings: for `max_pinned_bytes`.
        ranks_per_host: as many as these at least.
    """
    most = None if isinstance(settings.max_pinned_bytes, str) else settings.max_pinned_bytes
    return device.host_limits(most) or limits.limits(
        max_pinned_bytes=most,
        pin_backend=device.identity.pin_backend,
        ranks_per_host=max(ranks_per_host, limits.ranks_here(workload.world_size, device.identity.count)),
    )


def capped(settings: Settings, max_pinned_bytes: int | None) -> Settings:
    """With the smaller of the two bounds that may be given."""
    given = (max_pinned_bytes, settings.max_pinned_bytes)
    least = min((cap for cap in given if isinstance(cap, int)), default=None)
    return settings if least is None else structs.replace(settings, max_pinned_bytes=least)
