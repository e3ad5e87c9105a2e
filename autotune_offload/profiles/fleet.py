"""Many ranks' and hosts' profiles side by side: how far they spread, who stands out, and what that costs the job.

Every step of a job waits for its slowest rank, so one slow link costs all of them. Who is slow is told by
the median and the median absolute deviation (MAD) of ranks with the same device: up to half of them may be
wrong without moving either (Rousseeuw and Croux 1993, JASA 88).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune_offload.profiles.store import Entry, Store
from autotune_offload.records import Kind, Profile, backward_seconds
from autotune_offload.workload import DTYPE_BYTES, workload_class

LEAST_SHARE = 0.2
"""Nearer than this to the median nobody stands out, however alike the others are: what lies within 10 % of a
common value on both sides never gives an alarm (0.9 / 1.1 is above 0.8)."""

DEVIATIONS = 6.0
"""Nor who is within so many standard deviations of the median, as the MAD estimates them."""

_MAD_TO_SIGMA = 1.4826  # of a normal distribution
LEAST_MEMBERS = 3
"""Of two that differ, nobody can say which is wrong."""

_KINDS: tuple[Kind, ...] = ("d2h", "h2d", "h2h")
OFFLOAD = "offload"
"""The metric of the chosen path: fp32 gradient bytes over what it adds to a backward pass."""

METRICS = (*_KINDS, OFFLOAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What one rank of a fleet measured, in a form that fits a message."""

    host: str
    device: str
    index: int
    workload: str
    path: str
    rates_gbps: dict[str, float]
    """By metric; of a transfer kind the best memory's, at its largest size."""
    facts: dict[str, str]
    """What may explain a difference, by name."""
    backward_seconds: float | None
    gradient_bytes: int
    """That this rank offloads in a backward pass, in fp32."""
    parameter_bytes: int
    """That it fetches in a step: its share of the parameters, for forward and backward."""
    rank: int | None = None
    source: str = ""

    @property
    def label(self) -> str:
        """Who it is, in words."""
        return (
            f"{self.host} rank {self.rank}" if self.rank is not None else f"{self.host} device {self.index}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One metric over the members with one device, and for `offload` with one workload."""

    metric: str
    device: str
    members: int
    median_gbps: float
    mad_gbps: float
    lowest_gbps: float
    lowest: str
    highest_gbps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """A member that is slower than the others beyond the noise, and what it costs every step of the job."""

    label: str
    metric: str
    gbps: float
    median_gbps: float
    members: int
    costs_seconds: float
    """More in each step than a member at the median."""
    measured: bool
    """Whether that was timed, or follows from bytes over bandwidth."""
    reasons: tuple[str, ...]
    """Facts in which it differs from most of the others."""

    @property
    def times(self) -> float:
        """How many times as slow as the median."""
        return self.median_gbps / self.gbps


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A fleet at a glance."""

    members: tuple[Member, ...]
    spreads: tuple[Spread, ...]
    outliers: tuple[Outlier, ...]
    """Those that cost most first."""
    costs_seconds: float
    """What the job would gain in each step with all outliers at the median: it waits for the slowest."""
    notices: tuple[str, ...] = ()


# -- members --------------------------------------------------------------------------------------


def member(profile: Profile, *, rank: int | None = None, source: str = "") -> Member:
    """One profile as a member of a fleet."""
    workload, device = profile.workload, profile.device
    seconds = backward_seconds(profile)
    sustained = {kind: _sustained_gbps(profile, kind) for kind in _KINDS}
    rates: dict[str, float] = {kind: rate for kind, rate in sustained.items() if rate is not None}
    gradient_bytes = 4 * workload.elements
    if seconds:
        rates[OFFLOAD] = gradient_bytes / seconds / 1e9
    local = workload.parameter_elements // workload.world_size * DTYPE_BYTES[workload.dtype]
    return Member(
        host=profile.host.name,
        device=f"{device.kind} {device.name}",
        index=device.index,
        workload=workload_class(workload),
        path=profile.choice.path if profile.choice.beats_deepspeed else "DeepSpeed's own",
        rates_gbps=rates,
        facts=_facts(profile),
        backward_seconds=seconds,
        gradient_bytes=gradient_bytes,
        parameter_bytes=2 * local,
        rank=rank,
        source=source,
    )


def _sustained_gbps(profile: Profile, kind: Kind) -> float | None:
    points = [t for t in profile.transfers if t.kind == kind and not t.duplex and t.state == "warm"]
    if not points:
        return None
    largest = {(t.memory, t.threads): t for t in sorted(points, key=lambda t: t.bytes)}
    return max(t.gbps for t in largest.values())


def _facts(profile: Profile) -> dict[str, str]:
    device, host = profile.device, profile.host
    named = {
        "link": f"generation {device.link_generation} x{device.link_width}" if device.link_width else None,
        "NUMA binding": ("bound to one node" if host.numa_bound else "unbound")
        if host.numa_nodes > 1
        else None,
        "page-locking": "not on offer"
        if profile.pin.seconds_per_gib is None
        else f"through {device.pin_backend}",
        "CPUs": str(host.affinity_cpus),
        "CPU": host.cpu_model,
        "driver": device.driver,
        "MIG slice": device.mig_slice,
        "torch": profile.software.torch,
        "DeepSpeed": profile.software.deepspeed,
        "ranks copying": str(profile.ranks_copying),
    }
    return {name: fact for name, fact in named.items() if fact is not None}


def entries_below(folder: Path) -> Iterator[Entry]:
    """Every stored profile in a folder, newest first, then in those below it; unreadable ones too."""
    for place in (folder, *sorted(path for path in folder.rglob("*") if path.is_dir())):
        yield from Store(place).entries()


def newest(profiles: Iterable[tuple[Profile, Path]]) -> list[Member]:
    """A member for each device of each host and each workload: what it measured last."""
    latest: dict[tuple[str, int, str], tuple[Profile, Path]] = {}
    for profile, path in profiles:
        who = (profile.host.name, profile.device.index, workload_class(profile.workload))
        if who not in latest or latest[who][0].created < profile.created:
            latest[who] = (profile, path)
    return [member(profile, source=str(path)) for profile, path in latest.values()]


# -- the survey -----------------------------------------------------------------------------------


def survey(members: Sequence[Member]) -> Survey:
    """How far the members spread, and who stands out."""
    spreads, outliers = [], []
    for metric in METRICS:
        for group in _groups(members, metric):
            spread = _spread(metric, group)
            spreads.append(spread)
            outliers += [_outlier(each, spread, group) for each in group if _stands_out(each, spread)]
    told = _once_each(sorted(outliers, key=lambda outlier: -outlier.costs_seconds))
    return Survey(
        members=tuple(members),
        spreads=tuple(spreads),
        outliers=tuple(told),
        costs_seconds=sum(_worst(told, metrics) for metrics in (("d2h", "h2h", OFFLOAD), ("h2d",))),
        notices=tuple(_notices(members)),
    )


def _groups(members: Sequence[Member], metric: str) -> list[list[Member]]:
    found: dict[tuple[str, str], list[Member]] = {}
    for each in members:
        if metric in each.rates_gbps:
            like = (each.device, each.workload if metric == OFFLOAD else "")
            found.setdefault(like, []).append(each)
    return list(found.values())


def _spread(metric: str, group: Sequence[Member]) -> Spread:
    rates = [each.rates_gbps[metric] for each in group]
    median = statistics.median(rates)
    slowest = min(group, key=lambda each: each.rates_gbps[metric])
    return Spread(
        metric=metric,
        device=slowest.device,
        members=len(group),
        median_gbps=median,
        mad_gbps=statistics.median(abs(rate - median) for rate in rates),
        lowest_gbps=min(rates),
        lowest=slowest.label,
        highest_gbps=max(rates),
    )


def _stands_out(each: Member, spread: Spread) -> bool:
    """Slower than the median by a share that matters, and by more than the others scatter.

    The MAD of a few values is itself uncertain, so that fewer members allow more.
    """
    if spread.members < LEAST_MEMBERS:
        return False
    behind = spread.median_gbps - each.rates_gbps[spread.metric]
    scatter = DEVIATIONS * _MAD_TO_SIGMA * spread.mad_gbps * (1 + 2 / spread.members)
    return behind > max(LEAST_SHARE * spread.median_gbps, scatter)


def _outlier(each: Member, spread: Spread, group: Sequence[Member]) -> Outlier:
    rate = each.rates_gbps[spread.metric]
    moved = each.parameter_bytes if spread.metric == "h2d" else each.gradient_bytes
    return Outlier(
        label=each.label,
        metric=spread.metric,
        gbps=rate,
        median_gbps=spread.median_gbps,
        members=spread.members,
        costs_seconds=moved * (1 / rate - 1 / spread.median_gbps) / 1e9,
        measured=spread.metric == OFFLOAD,
        reasons=tuple(_differences(each, group)),
    )


def _differences(each: Member, group: Sequence[Member]) -> Iterator[str]:
    """Facts that most of the group share and this one does not."""
    for name, fact in each.facts.items():
        usual, count = Counter(other.facts.get(name, "none") for other in group).most_common(1)[0]
        if fact != usual and 2 * count > len(group):
            yield f"{name}: {fact}, where {count} of {len(group)} have {usual}"


def _once_each(outliers: Iterable[Outlier]) -> list[Outlier]:
    """Where the offload of a member was timed as slow, its slow copies are the cause and not a second cost."""
    told = list(outliers)
    timed = {outlier.label for outlier in told if outlier.measured}
    return [o for o in told if o.measured or o.label not in timed or o.metric == "h2d"]


def _worst(outliers: Iterable[Outlier], metrics: Sequence[str]) -> float:
    return max((o.costs_seconds for o in outliers if o.metric in metrics), default=0.0)


def _notices(members: Sequence[Member]) -> Iterator[str]:
    devices = Counter(each.device for each in members)
    if len(devices) > 1:
        counted = ", ".join(f"{count} x {device}" for device, count in devices.most_common())
        yield f"mixed accelerators ({counted}): each is compared with its like; a job waits for the slowest"
    for device, count in devices.items():
        if count < LEAST_MEMBERS:
            few = "one profile" if count == 1 else "two profiles"
            yield f"{few} of {device}: at least {LEAST_MEMBERS} are needed to say who stands out"
