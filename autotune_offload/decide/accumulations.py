"""The contest over whole accumulations: what came out best over single backward passes runs again.

Where micro-steps are added up, and what a path's own threads do meanwhile, shows in an accumulation alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from autotune_offload.decide.candidates import kind
from autotune_offload.decide.entrant import Entrant
from autotune_offload.decide.race import MAX_ROUNDS, Race
from autotune_offload.decide.trial import AccumulationTrial
from autotune_offload.decide.verdict import Outcome, Verdict
from autotune_offload.records import Baseline, Candidate

_WITHIN = {False: 1.25, True: 2.0}
"""Of a path's kinds those run that take up to this many times its fastest's in a backward pass, more of those with
threads of their own: they work while the sum crosses the link, which a backward pass alone does not show."""

_DROPPED = (2.0, 1.4, 1.2)
"""Who takes more than this many times the least after the first, second, and every later round leaves the race."""

_RING_SHARE = 8
"""Of a partition that is cut for the sample, a ring may be such a part: more of the landing than really would be
hides behind the next sum otherwise, since the next one comes too soon."""

_AGAIN_WITHIN = 1.1
"""Who takes up to this many times the least in the first race runs in the second, where it leaves beyond this."""

_FEW_ROUNDS = 3
_ENOUGH_ROUNDS = 4
"""Less than that tells nothing apart that is near."""

_FIRST_SHARE = 0.35
"""Of the time: then the leader runs beside its neighbours in the space, whom a backward pass ranks otherwise."""


def over_accumulations(passes: Verdict, trial: AccumulationTrial, deadline: float) -> Outcome:
    """The best of each kind again, over whole accumulations and with each place to add up, beside DeepSpeed's own.

    Args:
        passes: the verdict on single backward passes.
        trial: times accumulations.
        deadline: when to stop; the first of ours and DeepSpeed's own run once in any case.
    """
    outcome, now = passes.outcome, trial.device.now()
    most_bytes = 4 * trial.bench.largest_elements // _RING_SHARE if trial.bench.cuts else sys.maxsize
    ours = _entrants(passes, most_bytes) or _entrants(passes, sys.maxsize)
    own = [replace(e.anew(), checked=False) for e in outcome.own if e.failed is None]
    until = now + (deadline - now) * _FIRST_SHARE
    _race(trial, ours, own, deadline, until=until, dropped=_DROPPED, rounds=len(_DROPPED), sure=2)
    if not any(e.timed for e in ours):  # the paths themselves ran: the choice falls on backward passes alone
        return replace(outcome, others=tuple(ours))
    left = _left(ours)
    finer = next(filter(None, (list(_neighbours(outcome, e, most_bytes)) for e in left)), [])
    timings = sum(len(e.seconds) for e in ours) + sum(len(e.seconds) for e in own)
    room = _room(deadline - trial.device.now(), (trial.device.now() - now) / timings) - len(own)
    left = left[: max(room - len(finer), room // 2, 1)]
    finer = finer[: max(room - len(left), 0)]
    for entrant in ours:
        entrant.behind = all(entrant is not e for e in left)
    _race_passes(trial, finer, deadline)
    added = [Entrant(record=e.record) for e in finer if e.timed]
    _race(trial, [*left, *added], [e for e in own if e.timed], deadline, dropped=(_AGAIN_WITHIN,))
    ours += added
    return replace(
        outcome,
        finalists=tuple(e for e in ours if e.timed),
        own=tuple(own) or outcome.own,
        others=tuple(e for e in ours if not e.timed),
        micro_steps=trial.micro_steps,
        floor_seconds=outcome.floor_seconds * trial.micro_steps,
    )


def _entrants(passes: Verdict, most_bytes: int) -> list[Entrant[Candidate]]:
    """Every kind that adds up on the device, and every path that adds up on the host: it casts nothing there."""
    wanted, entrants = passes.steer.accumulate, []
    for best, *other_kinds in passes.best_of_each_path(_WITHIN, lambda c: _ring_bytes(c) <= most_bytes):
        if wanted != "host":
            entrants += [Entrant(record=e.record) for e in (best, *other_kinds)]
        if wanted != "device":
            why = passes.rules.against_host_sums(best.record)
            entrants.append(Entrant(record=best.record, place="host", failed=why))
    return entrants


def _race(
    trial: AccumulationTrial,
    ours: Sequence[Entrant[Candidate]],
    own: Sequence[Entrant[Baseline]],
    deadline: float,
    *,
    dropped: Sequence[float],
    until: float = math.inf,
    rounds: int = MAX_ROUNDS,
    sure: int = 0,
) -> None:
    """In turn until the deadline; who is clearly behind leaves early, but for DeepSpeed's own default.

    No round is begun after `until`. DeepSpeed's own come second: both their times are needed for the pin key.
    """
    able = [e for e in ours if e.failed is None]
    entrants: list[Entrant[Any]] = [*able[:1], *own, *able[1:]]
    with Race(trial.device, trial.bench, entrants, deadline=deadline, sure=sure, trial=trial) as race:
        for index in range(rounds):
            race.round()
            race.drop_beyond(dropped[min(index, len(dropped) - 1)], keep=own[:1])
            if race.over or trial.device.now() >= until:
                break


def _room(seconds: float, each: float) -> int:
    """How many can be timed often enough in so many seconds where each time takes so long."""
    return int(max(seconds, 0.0) / (_ENOUGH_ROUNDS * max(each, 1e-9)))


def _left(ours: Sequence[Entrant[Candidate]]) -> list[Entrant[Candidate]]:
    """Who is not clearly behind, the fastest first."""
    ranked = sorted((e for e in ours if e.timed), key=lambda e: e.median)
    return [e for e in ranked if e.median <= _AGAIN_WITHIN * ranked[0].median]


def _neighbours(
    outcome: Outcome, leader: Entrant[Candidate], most_bytes: int
) -> Iterator[Entrant[Candidate]]:
    """One step from the leader in buffer size, or with another number of buffers, as far as limits admit them."""
    if leader.place == "host":  # what is sent to the host's sums does not pass the path's buffers
        return
    record = leader.record
    able = [e for e in outcome.candidates if e.failed is None and e.record.rejected is None]
    same = [
        e for e in able if kind(e.record) == kind(record) and e.record.host_threads == record.host_threads
    ]
    sizes = sorted({e.record.buffer_bytes for e in same})
    at = sizes.index(record.buffer_bytes)
    for entrant in same:
        same_count = entrant.record.buffer_count == record.buffer_count
        steps = abs(sizes.index(entrant.record.buffer_bytes) - at)
        near = (steps == 1 and same_count) or (steps == 0 and not same_count)
        if near and _ring_bytes(entrant.record) <= most_bytes:
            yield entrant


def _ring_bytes(candidate: Candidate) -> int:
    return candidate.buffer_bytes * candidate.buffer_count if candidate.path == "staged" else 0


def _race_passes(trial: AccumulationTrial, entrants: Sequence[Entrant[Candidate]], deadline: float) -> None:
    """Whoever the search left out runs a few backward passes, so that every time of a candidate is of the same."""
    untimed = [e for e in entrants if not e.timed]
    with Race(trial.device, trial.bench, untimed, deadline=deadline) as race:
        for _ in range(_FEW_ROUNDS):
            race.round()
