"""What is put into an engine, and what is confirmed there on the user's own steps.

The stored choice, or who has beaten it since, beside DeepSpeed's own code and the next best of the profile. What runs
have found out lies beside the profile; see `profiles.outcomes`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from msgspec import structs

from autotune_offload.decide.candidates import PARAMETERS, kind
from autotune_offload.engine.attach import attach
from autotune_offload.engine.confirmation import FEWEST_ROUNDS, MOST_ROUNDS, ROUNDS_AGAIN
from autotune_offload.engine.entrants import Confirm, Told
from autotune_offload.engine.status import Status
from autotune_offload.engine.step import StepStatus
from autotune_offload.engine.step_attach import StepSpec, attach_step
from autotune_offload.engine.step_contest import StepConfirm, StepTold
from autotune_offload.machine import limits as machine_limits
from autotune_offload.machine.device import Device
from autotune_offload.paths.accumulation import PINNED_BYTES
from autotune_offload.paths.path import destination_memory, page_locks
from autotune_offload.profiles import outcomes
from autotune_offload.profiles.lookup import limits_of_rank
from autotune_offload.profiles.outcomes import FoundStep, Outcome, Way
from autotune_offload.profiles.store import Store
from autotune_offload.records import (
    Candidate,
    Choice,
    Limits,
    Profile,
    Record,
    Settings,
    StepDecision,
)

MOST_OTHERS = 2
"""Beside the choice and DeepSpeed's own code."""

NEAR = 1.1
"""Others took at most so many times the best's time in the trials."""


class Plan(Record, frozen=True, kw_only=True):
    """What to attach; `why_not` where nothing is left to try."""

    choice: Choice | None = None
    confirm: Confirm | None = None
    why_not: str | None = None


def put_in(engine: Any, profile: Profile, settings: Settings, device: Device | None, seed: str) -> Status:
    """Attach what was chosen, with what is to be confirmed; the status, which says why nothing was attached, if so.

    Args:
        engine: what `deepspeed.initialize` returned.
        profile: with the choice that all ranks agreed on.
        settings: of the ``autotune_offload`` block.
        device: None takes DeepSpeed's accelerator.
        seed: the same on all ranks.
    """
    file = Store().path_of(profile.fingerprint)
    known = outcomes.about(file, profile.choice)
    limits = None if device is None else limits_of_rank(device, profile.workload, settings)
    plan = planned(profile, settings, known, limits, seed)
    if plan.choice is None:
        return Status(why_not=plan.why_not)

    def tell(told: Told) -> None:
        keep(file, profile.choice, told)

    return attach(engine, plan.choice, device, confirm=plan.confirm, tell=tell)


def planned(profile: Profile, settings: Settings, known: Outcome, limits: Limits | None, seed: str) -> Plan:
    """Who takes part, by what is measured and what is known."""
    kinds = ("differs", "slower") if settings.confirm else ("differs",)
    wrong = {each.way: each.why for each in known.wrong if each.kind in kinds}
    confirmed = bool(known.confirmed) and settings.confirm
    ours = [_with(profile.choice, known.winner)] if confirmed and known.winner is not None else []
    ours += [profile.choice]
    if settings.confirm and settings.path == "auto":
        ours += [_with(profile.choice, other) for other in others(profile)]
    ours = _without(ours, wrong)
    if not ours:
        return Plan(why_not=f"{wrong[Way.of(profile.choice)]}; {outcomes.CLEAR}")
    if not settings.confirm:
        return Plan(choice=ours[0])
    first, *rest = ours
    confirm = Confirm(
        others=tuple(fitting(first, rest, limits))[:MOST_OTHERS],
        seed=seed,
        begins_with_own=confirmed and known.winner is None,
        fewest_rounds=ROUNDS_AGAIN if confirmed else FEWEST_ROUNDS,
        most_rounds=_most_rounds(settings),
    )
    return Plan(choice=first, confirm=confirm)


def others(profile: Profile) -> Iterator[Candidate]:
    """The next best of each kind whose gradients land in the same kind of memory, the fastest first.

    DeepSpeed has made the destinations by then, and of one kind the trials have told the best already.
    """
    memory = destination_memory(profile.choice.path)
    timed = [
        each
        for each in profile.candidates
        if each.measured_seconds is not None and not each.rejected and destination_memory(each.path) == memory
    ]
    seconds = {Way.of(each): each.measured_seconds or 0.0 for each in timed}
    best = min(seconds.values(), default=0.0)
    seen = {kind(_as_candidate(profile.choice))}
    for each in sorted(timed, key=lambda each: seconds[Way.of(each)]):
        if seconds[Way.of(each)] <= NEAR * best and kind(each) not in seen:
            seen.add(kind(each))
            yield each


def fitting(first: Choice, rest: Sequence[Choice], limits: Limits | None) -> Iterator[Choice]:
    """Those whose page-locked buffers fit beside those of the others before them."""
    blocks = list(_blocks(first))
    for each in rest:
        more = list(_blocks(each))
        if not more or limits is None or machine_limits.check_pinned([*blocks, *more], limits) is None:
            blocks += more
            yield each


def keep(file: Path, choice: Choice, told: Told) -> None:
    """Put what a run found out beside the profile; of the ranks of one host the first keeps what was concluded."""
    first = os.environ.get("LOCAL_RANK", "").strip() in ("", "0")
    concluded = told.conclusion is not None and first
    wrong = [each for each in told.wrong if first or each.kind == "differs"]
    if not concluded and not wrong:
        return
    later = Outcome(
        choice=Way.of(choice),
        winner=None if told.winner is None else Way.of(told.winner),
        confirmed=told.words if concluded else "",
        when=datetime.now(timezone.utc).isoformat(timespec="seconds") if concluded else "",
        wrong=tuple(outcomes.Wrong(way=Way.of(each.spec), kind=each.kind, why=each.why) for each in wrong),
    )
    outcomes.save(file, outcomes.merged(outcomes.about(file, choice), later))


def put_step_in(
    engine: Any, profile: Profile, settings: Settings, device: Device | None, seed: str
) -> StepStatus:
    """The same for the optimizer's steps: made as decided, or as was found since, and confirmed there.

    Args:
        engine: what `deepspeed.initialize` returned.
        profile: with what was decided about the step, if anything was measured of it.
        settings: of the ``autotune_offload`` block.
        device: None takes DeepSpeed's accelerator.
        seed: the same on all ranks.
    """
    file = Store().path_of(profile.fingerprint)
    known = outcomes.about(file, profile.choice).step
    if known is not None and known.differs:
        return StepStatus(why_not=f"{known.words}; {outcomes.CLEAR}")

    def tell(told: StepTold) -> None:
        keep_step(file, profile.choice, told)

    return attach_step(engine, step_spec(settings, profile.step, known, seed), device, tell=tell)


def step_spec(
    settings: Settings, decided: StepDecision | None, known: FoundStep | None, seed: str
) -> StepSpec:
    """How steps are to be made, by what was decided and what is known; where neither is, all ways are tried."""
    spec = StepSpec(
        step=settings.step,
        begins_with=_best_threads(decided),
        page_lock=settings.max_pinned_bytes != 0
        and (decided is None or (decided.way, decided.back) != ("fused", "direct")),
    )
    if settings.confirm:
        return structs.replace(
            spec,
            begins_with=known.threads if known is not None and known.threads else spec.begins_with,
            confirm=StepConfirm(
                seed=f"{seed} step",
                begins_with_own=known is not None and known.threads == 0,
                fewest_rounds=FEWEST_ROUNDS if known is None else ROUNDS_AGAIN,
                most_rounds=_most_rounds(settings),
            ),
        )
    if decided is None:
        return spec
    if decided.way == "fused" or settings.step == "fused":
        return structs.replace(spec, threads=spec.begins_with or "auto", confirm=None)
    return structs.replace(spec, step="deepspeed")


def _best_threads(decided: StepDecision | None) -> int | None:
    """Of the decided pass, or of the fastest of those that DeepSpeed's own step was preferred to."""
    if decided is None:
        return None
    return decided.threads or next((each.threads for each in decided.candidates if each.threads), None)


def _most_rounds(settings: Settings) -> int:
    return MOST_ROUNDS if isinstance(settings.confirm_rounds, str) else settings.confirm_rounds


def keep_step(file: Path, choice: Choice, told: StepTold) -> None:
    """Put what a run found out about its steps beside the profile, if first on this host or a bit was wrong."""
    if not told.differs and os.environ.get("LOCAL_RANK", "").strip() not in ("", "0"):
        return
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    step = FoundStep(threads=told.threads, words=told.words, when=when, differs=told.differs)
    outcomes.save(
        file,
        outcomes.merged(outcomes.about(file, choice), Outcome(choice=Way.of(choice), step=step)),
    )


def _blocks(choice: Choice) -> Iterator[int]:
    if choice.path == "staged":
        yield choice.buffer_bytes * choice.buffer_count
    if page_locks(choice.path) and choice.accumulate == "host":
        yield PINNED_BYTES


def _with(choice: Choice, other: Candidate | Way) -> Choice:
    """The choice with another path in it; where micro-steps are added up stays, unless it says otherwise."""
    fields = structs.asdict(Way.of(other))
    if isinstance(other, Candidate):
        fields["accumulate"] = choice.accumulate
    return structs.replace(choice, **fields)


def _as_candidate(choice: Choice) -> Candidate:
    return Candidate(**{name: getattr(choice, name) for name in PARAMETERS})


def _without(ours: Sequence[Choice], wrong: dict[Way, str]) -> list[Choice]:
    """Each once, and none that is known to be wrong."""
    by_way = {Way.of(each): each for each in reversed(ours)}
    return [by_way[way] for way in dict.fromkeys(map(Way.of, ours)) if way not in wrong]
