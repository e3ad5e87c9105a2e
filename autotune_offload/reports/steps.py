"""The optimizer step of a profile as people read it: each way with its time, and the parts of two of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autotune_offload import units
from autotune_offload.paths.step_stages import PASS_BYTES, step_costs, words
from autotune_offload.records import Profile, StepCandidate

OWN = "DeepSpeed's own"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One way to make a step. `times_chosen` is its predicted time over the chosen one's."""

    way: StepCandidate
    name: str
    chosen: bool
    own: bool
    times_chosen: float | None

    @property
    def said(self) -> str:
        """What put it aside, or that it is the choice."""
        if self.chosen:
            return "chosen"
        return self.way.rejected or f"{units.times(self.times_chosen)} the chosen time"


def step_rows(profile: Profile) -> list[StepRow]:
    """DeepSpeed's own first, then what was weighed, the fastest first; nothing where no step was decided."""
    if profile.step is None:
        return []
    chosen = profile.step.chosen
    return [
        StepRow(
            way=each,
            name=words(each),
            chosen=each == chosen,
            own=not each.threads,
            times_chosen=_ratio(each, chosen),
        )
        for each in profile.step.candidates
    ]


def best_steps(profile: Profile) -> list[StepRow]:
    """DeepSpeed's own, the chosen one, and the best of each other way for weights to get home."""
    rows, seen, kept = step_rows(profile), set(), []
    for row in sorted(rows, key=lambda r: (not r.own, not r.chosen)):
        if row.own or row.way.back not in seen:
            kept.append(row)
        if not row.own:
            seen.add(row.way.back)
    return [row for row in rows if row in kept]


def step_parts(profile: Profile) -> dict[str, dict[str, float]]:
    """Seconds of the parts of DeepSpeed's own step and of the chosen one, whatever they hide behind."""
    decided, measurements = profile.step, profile.measurements
    if decided is None or measurements.step is None:
        return {}
    on_host = profile.device.kind == "cpu"
    costs = step_costs(measurements, profile.workload, shares_host_memory=on_host)
    ways = {OWN: decided.own} | ({"chosen": decided.chosen} if decided.threads else {})
    try:
        return {
            name: {work.what: seconds for work, seconds in costs.parts(way)} for name, way in ways.items()
        }
    except ValueError:  # a profile without the curves
        return {}


def measured_rates(profile: Profile) -> Iterator[tuple[str, str]]:
    """What was timed of a step, in a few words each."""
    rates = profile.step_rates
    if rates is None:
        return
    for timed in rates.passes:
        each = timed.median_seconds / timed.elements
        scatter = units.percent(timed.iqr_seconds / timed.median_seconds)
        reached = units.rate(PASS_BYTES / each / 1e9)
        yield (
            f"pass, {units.threads(timed.threads)}",
            f"{units.duration(each * 1e9)} a billion weights of {timed.dtype}, {reached} ({scatter})",
        )
    if rates.why_no_pass is not None:
        yield "pass", f"not timed: {rates.why_no_pass}"
    for cast in rates.narrowings:
        by = f", {units.threads(cast.threads)}" if cast.threads else ""
        pages = " into new pages" if cast.state == "cold" else ""
        yield f"cast back {cast.where}", f"fp32 to {cast.dtype}{pages}{by}: {units.rate(cast.gbps)}"


def _ratio(each: StepCandidate, chosen: StepCandidate) -> float | None:
    if not each.predicted_seconds or not chosen.predicted_seconds:
        return None
    return each.predicted_seconds / chosen.predicted_seconds
