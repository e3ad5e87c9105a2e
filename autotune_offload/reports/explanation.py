"""For somebody who does not believe the choice: what would have to change for another way to win, and how to see.

The shares of a way's time come from its timeline, which the measured curves give; times are the trials'.
"""

from __future__ import annotations

from autotune_offload import units
from autotune_offload.records import Baseline, Profile
from autotune_offload.reports.alternatives import Alternative, chosen_candidate
from autotune_offload.reports.timeline import timeline

_PINS = ("pinned", "staged")


def to_win(row: Alternative, profile: Profile) -> str:
    """What would have to change on this machine for `row` to become the choice, in one sentence."""
    if row.chosen:
        return "nothing: it is the choice"
    if row.rejected is not None and _lacks_memory(row, profile):
        return _more_memory(row, profile)
    target, cost = _target(profile), row.measured_seconds or row.predicted_seconds
    if target is None or cost is None:
        return "it would have to be timed, and the chosen path too"
    if cost <= target:
        return _already_faster(row, profile)
    return _faster_stage(row, profile, cost, target)


def check(row: Alternative, profile: Profile) -> str:
    """The command that shows it on the machine itself."""
    if profile.host.cpu_model.startswith("described: "):
        return (
            "autotune-offload simulate MACHINE --plan thorough, with the changed number in the machine's file"
        )
    if isinstance(row.way, Baseline):
        return (
            "autotune-offload verify"
            if row.installed
            else "autotune-offload probe --plan thorough --refresh --no-save"
        )
    return f"autotune-offload probe --path {row.way.path} --cast {row.way.cast} --no-save"


def _target(profile: Profile) -> float | None:
    """What has to be undercut: the chosen time."""
    chosen = chosen_candidate(profile)
    return (chosen.measured_seconds or chosen.predicted_seconds) if chosen else None


def _lacks_memory(row: Alternative, profile: Profile) -> bool:
    return row.name.startswith(_PINS) and not row.rejected_by_prediction


def _more_memory(row: Alternative, profile: Profile) -> str:
    if profile.pin.seconds_per_gib is None:
        return "page-locked memory would have to be on offer: the accelerator's pin_memory has to return some"
    bounds = profile.limits.bounds
    if not bounds:
        return f"the limit would have to go: {row.rejected}"
    tightest = min(bounds, key=lambda bound: bound.bytes)
    return f"the limit {tightest.name} of {units.size(tightest.bytes)} would have to be higher: {tightest.raise_by}"


def _already_faster(row: Alternative, profile: Profile) -> str:
    if row.stock and not row.installed:
        return f"the installed DeepSpeed would have to run it, and is {profile.software.deepspeed}"
    noise = units.percent(profile.choice.noise)
    return f"the difference would have to exceed the noise of {noise}: a quieter machine or a longer --budget"


def _faster_stage(row: Alternative, profile: Profile, cost: float, target: float) -> str:
    """The part that most of the time goes to, and how much faster it would have to be."""
    line = timeline(profile, row.way)
    shares = line.shares
    total = sum(shares.values())
    if not total:
        return f"it would have to take {units.duration(target)} instead of {units.duration(cost)}"
    what, seconds = max(shares.items(), key=lambda item: item[1])
    part, excess = cost * seconds / total, cost - target
    told = f'"{what}" takes {units.percent(seconds / total)} of its time'
    if part <= excess:
        return f"{told}; even at no cost at all for that it would not win"
    return f"{told}, and would have to be {units.times(part / (part - excess))} as fast as it is"
