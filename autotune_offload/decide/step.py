"""How the optimizer's step is to be made: what could be done, what each should take, and the decision in words.

Nothing is tried here: the rates are those of the pass itself, and the running engine times it against DeepSpeed's own
step before it stays. Only what that engine can carry out is a candidate.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from msgspec import structs

from autotune_offload import units
from autotune_offload.config.layout import PLAIN, Layout
from autotune_offload.machine.device import Device
from autotune_offload.paths.page_locking import PinRules
from autotune_offload.paths.step_stages import (
    PIECE_ELEMENTS,
    StepCosts,
    ring_buffers,
    step_costs,
    words,
)
from autotune_offload.records import (
    Back,
    Choice,
    Limits,
    Measurements,
    StepCandidate,
    StepDecision,
    Workload,
)
from autotune_offload.spread import spread
from autotune_offload.upstream import NEWEST, SUB_GROUP_ELEMENTS

_TIE = 0.02
"""Two predictions closer than that are the same, however well the rates agree with themselves."""

_PINS: dict[Back, int] = {"in place": 0, "direct": 0, "staged": 1}


def decide_step(
    device: Device,
    measurements: Measurements,
    workload: Workload,
    limits: Limits,
    choice: Choice,
    *,
    layout: Layout = PLAIN,
    version: str = NEWEST,
) -> StepDecision | None:
    """Choose how the steps of this workload are made; None where nothing of a step was measured.

    Args:
        device: where the weights go; where its memory is the host's, the copy back is the cast.
        measurements: curves and costs, and those of the step.
        workload: whose weights are stepped.
        limits: what may be page-locked.
        choice: of the gradient path, whose page-locked memory counts beside the ring.
        layout: what the configuration says of stage, devices and sizes.
        version: DeepSpeed's, which decides what is page-locked.
    """
    if measurements.step is None:
        return None
    rules = PinRules(
        workload=workload,
        pin=measurements.pin,
        limits=limits,
        locks=device.identity.pin_backend != "none",
        layout=layout,
        version=version,
    )
    shares = device.shares_host_memory
    costs = step_costs(
        measurements,
        workload,
        shares_host_memory=shares,
        sub_group_elements=layout.sub_group_elements or SUB_GROUP_ELEMENTS,
    )
    in_place = shares or layout.parameters == "cpu"
    own = StepCandidate(threads=0, back="in place" if in_place else "direct")
    own = structs.replace(own, predicted_seconds=costs.seconds(own))
    ours = [
        structs.replace(c, predicted_seconds=costs.seconds(c), rejected=_against(c, rules, choice))
        for c in _fused(costs, in_place=in_place)
    ]
    ours.sort(key=_predicted)
    able = [c for c in ours if c.rejected is None]
    noise = _noise(measurements)
    chosen = _by_tie_rule(able, noise) if able else own
    if _predicted(chosen) * (1 + noise) > _predicted(own):
        chosen = own
    return StepDecision(
        way="fused" if chosen.threads else "deepspeed",
        threads=chosen.threads,
        back=chosen.back,
        reasons=tuple(_reasons(costs, own, chosen, ours, noise)),
        candidates=(own, *ours),
    )


def _fused(costs: StepCosts, *, in_place: bool) -> Iterator[StepCandidate]:
    """The pass with each number of threads that was timed, and each way for its weights to get home."""
    backs: tuple[Back, ...] = ("in place",) if in_place else ("staged", "direct")
    for timed in costs.step.passes:
        for back in backs:
            ring = ring_buffers(timed.threads) * PIECE_ELEMENTS * costs.low_bytes
            yield StepCandidate(
                threads=timed.threads,
                back=back,
                piece_elements=PIECE_ELEMENTS,
                pinned_bytes=ring if back == "staged" else 0,
            )


def _against(candidate: StepCandidate, rules: PinRules, choice: Choice) -> str | None:
    if candidate.back != "staged":
        return None
    buffers = ring_buffers(candidate.threads)
    return rules.against_ring([candidate.pinned_bytes // buffers] * buffers, choice)


def _predicted(candidate: StepCandidate) -> float:
    return candidate.predicted_seconds or 0.0


def _noise(measurements: Measurements) -> float:
    """By which timed passes scatter, typically."""
    passes = measurements.step.passes if measurements.step else ()
    scatter = [spread(p.raw_seconds) for p in passes if len(p.raw_seconds) > 1]
    return max(statistics.median(scatter) if scatter else 0.0, _TIE)


def _by_tie_rule(able: Sequence[StepCandidate], noise: float) -> StepCandidate:
    """The fewest threads within the noise of the fastest; with these, what page-locks less, unless that takes longer.

    Two ways home of the same pass have its scatter in common, so that it makes no tie of them.
    """
    threads = min(c.threads for c in able if _predicted(c) <= _predicted(able[0]) * (1 + noise))
    same = [c for c in able if c.threads == threads]
    near = [c for c in same if _predicted(c) <= _predicted(same[0]) * (1 + _TIE)]
    return min(near, key=lambda c: _PINS[c.back])


# -- in words -------------------------------------------------------------------------------------


def _reasons(
    costs: StepCosts,
    own: StepCandidate,
    chosen: StepCandidate,
    ours: Sequence[StepCandidate],
    noise: float,
) -> Iterator[str]:
    at_least = f"{words(own)} should take at least {units.duration(own.predicted_seconds)}"
    parts = ", ".join(f"{work.what} {units.duration(seconds)}" for work, seconds in costs.parts(own))
    parts += f", with {units.threads(costs.step.threads)}"
    if not ours:
        why = costs.step.why_no_pass or "there was no time to measure it"
        yield f"there is no compiled pass: {why}; DeepSpeed's own step is kept: {at_least} ({parts})"
        return
    if not chosen.threads:
        best = min(ours, key=_predicted)
        yield (
            f"{at_least} ({parts}), and {words(best)} {units.duration(best.predicted_seconds)}: no gain beyond the "
            f"noise of {units.percent(noise)}, so the running engine begins with DeepSpeed's own"
        )
    else:
        times = units.times(_predicted(own) / max(_predicted(chosen), 1e-12))
        yield (
            f"{words(chosen)} should take {units.duration(chosen.predicted_seconds)} a step; {at_least} ({parts}): "
            f"{times}"
        )
        fastest = next(c for c in ours if c.rejected is None)
        if fastest is not chosen:
            yield (
                f"{words(fastest)} should take {units.duration(fastest.predicted_seconds)}, within the noise of "
                f"{units.percent(noise)}: a near tie goes to fewer threads, and to what page-locks less"
            )
    barred = [c for c in ours if c.rejected is not None]
    if barred:
        yield f"page-locked buffers were put aside: {barred[0].rejected}"
    yield (
        "the first real steps are the trials, of DeepSpeed's own step and of each number of threads: they have the "
        "last word, and begin with this"
    )
