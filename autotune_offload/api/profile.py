"""The profile that a decision rests on: stored, or measured now, by one rank or agreed by all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import structs

from autotune_offload import records
from autotune_offload.api.notices import log, warn
from autotune_offload.api.probe import load_plan, probe
from autotune_offload.config.keys import NAMES
from autotune_offload.config.layout import layout_of
from autotune_offload.errors import ProfileError
from autotune_offload.interruption import cleaned_up
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.profiles.lookup import lookup
from autotune_offload.profiles.store import Miss, Store
from autotune_offload.ranks import agree, turns
from autotune_offload.ranks import group as ranks_group
from autotune_offload.ranks.agreement import Agreement
from autotune_offload.records import Profile, Record, Workload, ZeroSizes


class Found(Record, frozen=True, kw_only=True):
    """A profile, where it comes from, and the configuration that it is for."""

    profile: Profile
    config: Mapping[str, Any]
    source: str
    notices: tuple[str, ...] = ()
    loud: tuple[str, ...] = ()


def profile_for(
    config: dict[str, Any],
    workload: Workload | None,
    settings: records.Settings,
    device: AcceleratorDevice,
    agreement: Agreement | None,
) -> Found:
    """The stored profile of this environment, or a new one that is stored if it can be; agreed by all ranks."""
    store = Store()
    budget = None if isinstance(settings.budget_seconds, str) else settings.budget_seconds
    layout = layout_of(config)

    missed: list[Miss] = []

    def look() -> Profile | None:
        found = lookup(store, workload, device, settings, layout)
        if not isinstance(found, Miss):
            return found
        missed.append(found)
        return None

    def measured(ranks_per_host: int) -> Profile:
        why_not = store.why_not_writable()
        if why_not is not None:
            warn(f"measuring this host without a cache: {why_not}")
        elif missed:
            log.info("measuring this host: %s", missed[-1].reason)
        with cleaned_up():
            return probe(
                workload=workload,
                budget_seconds=budget,
                settings=settings,
                device=device,
                missed=missed[-1] if missed else None,
                ranks_per_host=ranks_per_host,
                layout=layout,
            )

    if agreement is None and ranks_group.announced_ranks() == 1:
        found = look()
        if found is not None:
            return Found(profile=found, config=config, source=_from_store(found))
        profile = measured(1)
        return Found(profile=profile, config=config, **_kept(store, profile))
    seconds = budget or load_plan("standard").budget_seconds
    if agreement is not None:
        return _agreed(config, look(), measured, agreement, device, store, seconds)
    return _for_this_host(config, look, measured, store, seconds)


def _agreed(
    config: dict[str, Any],
    found: Profile | None,
    measured: Callable[[int], Profile],
    agreement: Agreement,
    device: AcceleratorDevice,
    store: Store,
    measure_seconds: float,
) -> Found:
    agreed = agree.agree(
        agreement,
        found,
        measured,
        config=config,
        device=device.identity,
        measure_seconds=measure_seconds,
    )
    where: dict[str, Any] = {"source": "measured now by all ranks"}
    if not agreed.measured:
        where = {"source": _from_store(agreed.profile)}
    elif agreed.keeper:
        where = _kept(store, agreed.own)
    return Found(profile=agreed.profile, config=agreed.config, loud=agreed.notices, **where)


def _for_this_host(
    config: dict[str, Any],
    look: Callable[[], Profile | None],
    measured: Callable[[int], Profile],
    store: Store,
    measure_seconds: float,
) -> Found:
    """One profile for all ranks of this host, through the store; without sizes, which other hosts must share."""
    found, where = look(), None
    if found is None:
        with turns.turn_on_host(store.folder, turns.turn_seconds(measure_seconds)):
            found = look()
            if found is None:
                found = measured(1)
                where = _kept(store, found)
    kept = "is left as it is, since the ranks cannot agree on it before there is a process group"
    sizes = ZeroSizes(reasons={name: f"{NAMES[name]} {kept}" for name in found.choice.sizes.reasons})
    profile = structs.replace(found, choice=structs.replace(found.choice, sizes=sizes))
    return Found(profile=profile, config=config, **(where or {"source": _from_store(found)}))


def _from_store(profile: Profile) -> str:
    return f"stored profile of {profile.created}"


def _kept(store: Store, profile: Profile) -> dict[str, Any]:
    """Store a profile; where it is now, or why it is not."""
    why_not = store.why_not_writable()
    if why_not is None:
        try:
            with cleaned_up():
                return {"source": f"measured now, stored in {store.save(profile)}"}
        except ProfileError as error:  # a disk that has filled up since
            why_not = str(error)
            warn(f"the profile was not stored: {why_not}")
    return {"source": "measured now", "notices": (f"the profile was not stored: {why_not}",)}
