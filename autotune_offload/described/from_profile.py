"""A stored profile as a machine description, so that what was measured once can be simulated anywhere."""

from __future__ import annotations

from typing import Any

import msgspec

from autotune_offload.described import machine
from autotune_offload.described.machine import Machine
from autotune_offload.errors import ProfileError
from autotune_offload.line import Line, fit
from autotune_offload.records import Cast, Kind, Memory, Profile, State

_PIN_UNKNOWN_MS = 400.0
"""A GiB, where nothing pinned on the profile's host; then the description says that nothing locks."""


def machine_from(profile: Profile, name: str = "profile") -> Machine:
    """The machine that a profile was measured on, as far as its curves tell.

    Each line is fitted to a measured curve; where one is missing, the description's source says what stands
    for it. What a probe does not measure (ranks that share, compute) is left at one rank and none.

    Raises:
        ProfileError: curves are missing without which there is no description.
    """
    numbers = _Numbers(profile)
    pins = profile.pin.largest_bytes > 0
    largest = None if pins and profile.pin.capped else profile.pin.largest_bytes
    memlock = next((bound.bytes for bound in profile.limits.bounds if bound.name == "memlock"), None)
    described: dict[str, Any] = {
        "schema": machine.SCHEMA,
        "name": name,
        "title": f"{profile.device.name} of {profile.host.name}, measured {profile.created}",
        "kind": profile.device.kind,
        "ranks_per_host": max(profile.device.count, 1),
        "link_shared_by_ranks": 1,
        "link": {"name": "measured", "peak_gbps": numbers.fastest()},
        "d2h": {
            "pinned": numbers.line("d2h", "pinned", "warm"),
            "pageable": numbers.line("d2h", "pageable", "warm"),
            "pageable_cold": numbers.line("d2h", "pageable", "cold"),
        },
        "h2d": {
            "pinned": numbers.line("h2d", "pinned", "warm"),
            "pageable": numbers.line("h2d", "pageable", "warm"),
        },
        "h2h": msgspec.structs.asdict(numbers.line("h2h", "pageable", "warm", 1))
        | {"threads_gbps": numbers.line("h2h", "pageable", "warm").bandwidth_gbps},
        "host": {
            "mem_gbps": 2 * numbers.fastest_copy(),
            "intraop_threads": max(profile.host.affinity_cpus, 1),
            "ram_bytes": profile.host.ram_bytes,
        },
        "sync": {
            "device_us": profile.sync.device_seconds * 1e6,
            "stream_us": profile.sync.stream_seconds * 1e6,
            "event_us": profile.sync.event_seconds * 1e6,
        },
        "pin": {"ms_per_gib": (profile.pin.seconds_per_gib or _PIN_UNKNOWN_MS * 1e-3) * 1e3}
        | ({} if largest is None else {"largest_bytes": largest}),
        "cast": {"device_gbps": numbers.cast("device", 0), "host_gbps": numbers.cast("host", 1)},
        "duplex": {"mode": "shared", "total_gbps": numbers.both_ways()},
        "limits": {
            key: value
            for key, value in (
                ("memlock_bytes", memlock),
                ("device_memory_bytes", profile.device.memory_bytes),
            )
            if value is not None
        },
        "notes": f"from a profile of {profile.created}, plan {profile.plan}",
    }
    described = msgspec.to_builtins(described)
    described["sources"] = [_source(field, value, profile) for field, value in machine.numbers(described)]
    return machine.parse(described, "the profile's machine")


def _source(field: str, value: float, profile: Profile) -> dict[str, Any]:
    derived = field in {"link.peak_gbps", "host.mem_gbps"}
    return {
        "field": field,
        "value": value,
        "kind": "derived" if derived else "measured",
        "confidence": "medium",
        "estimate": derived,
        "url": f"profile of {profile.host.name}, {profile.created}",
    }


class _Numbers:
    """The profile's curves as lines."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def line(self, kind: Kind, memory: Memory, state: State, threads: int = 0) -> Line:
        """Fitted to one curve, or to its nearest relative."""
        for relative in (
            (kind, memory, state, threads),
            (kind, memory, "warm", 0),
            (kind, "pageable", "warm", 0),
        ):
            points = [
                (each.bytes, each.median_seconds)
                for each in self.profile.transfers
                if (each.kind, each.memory, each.state, each.threads) == relative and not each.duplex
            ]
            if points:
                return fit(points)
        raise ProfileError(
            f"the profile holds no {kind} curve, so no machine can be described by it; "
            "measure again with `autotune-offload probe --refresh`"
        )

    def cast(self, where: Cast, threads: int) -> float:
        """fp32 GB a second; where nothing was cast, what a copy reaches."""
        rates = {(each.where, each.threads): each.gbps for each in self.profile.casts}
        fallback = self.line("h2h", "pageable", "warm", 1).bandwidth_gbps
        return rates.get((where, threads)) or rates.get((where, 0)) or fallback

    def fastest(self) -> float:
        """Of the link's four lines."""
        kinds: tuple[Kind, ...] = ("d2h", "h2d")
        memories: tuple[Memory, ...] = ("pinned", "pageable")
        return max(self.line(k, m, "warm").bandwidth_gbps for k in kinds for m in memories)

    def fastest_copy(self) -> float:
        """GB a second of everything that goes through the host's memory."""
        copy = max(self.line("h2h", "pageable", "warm", n).bandwidth_gbps for n in (0, 1))
        return copy + self.fastest()

    def both_ways(self) -> float:
        """What both directions carry together, or twice the fastest where it was not measured."""
        duplex = [each.gbps for each in self.profile.transfers if each.duplex]
        return sum(duplex) if len(duplex) == 2 else 2 * self.fastest()
