"""What was tried and what was chosen, as records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec import structs

from autotune_offload import spread
from autotune_offload.decide.candidates import predicted
from autotune_offload.decide.entrant import Entrant
from autotune_offload.decide.pins import optimizer_pin, own_pin, parameters_pin
from autotune_offload.decide.reasons import (
    place_reasons,
    reasons,
    untried_reasons,
    warnings,
    words,
)
from autotune_offload.decide.verdict import Verdict
from autotune_offload.records import Accumulated, Baseline, Candidate, Choice, ZeroSizes

_OUT_OF_TIME = "not tried: out of time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was tried and what was chosen."""

    baselines: tuple[Baseline, ...]
    candidates: tuple[Candidate, ...]
    choice: Choice
    warnings: tuple[str, ...]
    accumulations: tuple[Accumulated, ...] = ()


def decision(verdict: Verdict, sizes: ZeroSizes) -> Decision:
    """All of it, as records."""
    record = verdict.chosen.record
    alone = own_pin(verdict)
    optimizer = optimizer_pin(verdict, alone)
    locks = optimizer.pinned or alone.pinned
    parameters = parameters_pin(verdict, with_optimizer=locks)
    choice = Choice(
        path=record.path,
        cast=record.cast,
        buffer_bytes=record.buffer_bytes,
        buffer_count=record.buffer_count,
        host_threads=record.host_threads,
        pin_optimizer=optimizer.pinned,
        pin_optimizer_alone=alone.pinned,
        pin_parameters=parameters.pinned,
        unsettled_pins=("pin_optimizer",) * optimizer.unsettled + ("pin_parameters",) * parameters.unsettled,
        untried_pins=("pin_optimizer",) * (verdict.rules.untried and locks)
        + ("pin_parameters",) * (verdict.rules.untried_parameters and parameters.pinned),
        sizes=sizes,
        gain=verdict.gain,
        noise=verdict.noise,
        tie=any(e.record.path != record.path for e in verdict.near),
        reasons=(
            *reasons(verdict),
            *place_reasons(verdict),
            optimizer.reason,
            parameters.reason,
            *(untried_reasons(verdict) if locks else ()),
        ),
        accumulate=verdict.chosen.place if verdict.steer.accumulate == "auto" else verdict.steer.accumulate,
    )
    return Decision(
        baselines=tuple(e.reported() for e in verdict.outcome.baselines),
        candidates=tuple(sorted(map(_reported, verdict.outcome.candidates), key=_by_time)),
        choice=choice,
        warnings=tuple(warnings(verdict, choice)),
        accumulations=tuple(_accumulated(verdict)),
    )


def _accumulated(verdict: Verdict) -> list[Accumulated]:
    """What whole accumulations took, the fastest first."""
    if verdict.outcome.micro_steps == 1:
        return []
    entrants: list[Entrant[Any]] = [*verdict.outcome.finalists, *verdict.outcome.own]
    return [
        Accumulated(
            way=words(e.record),
            place=e.place,
            stock=isinstance(e.record, Baseline),
            installed=isinstance(e.record, Baseline) and e.record.installed,
            chosen=e is verdict.chosen,
            micro_steps=verdict.outcome.micro_steps,
            measured_seconds=e.median,
            spread=spread.spread(e.seconds),
            samples=len(e.seconds),
            raw_seconds=tuple(e.seconds),
        )
        for e in sorted(entrants, key=lambda e: e.median)
        if e.timed
    ]


def _reported(entrant: Entrant[Candidate]) -> Candidate:
    """With its time, or with the reason why there is none."""
    if entrant.timed or entrant.record.rejected is not None:
        return entrant.reported()
    return structs.replace(entrant.record, rejected=entrant.failed or _OUT_OF_TIME)


def _by_time(candidate: Candidate) -> tuple[bool, float]:
    """Measured ones first."""
    if candidate.measured_seconds is not None:
        return False, candidate.measured_seconds
    return True, predicted(candidate)
