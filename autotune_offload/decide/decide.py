"""From measurements to a choice: what is admitted is tried, and the verdict falls on what was timed.

The order of authority: what a user fixed, then limits, then measured time, then the tie rule. The cost
model only decides what is tried first and what is not tried at all.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import structs

from autotune_offload.config.layout import PLAIN, Layout
from autotune_offload.decide.accumulations import over_accumulations
from autotune_offload.decide.candidates import admitted, effective, key, kind
from autotune_offload.decide.cost_model import CostModel
from autotune_offload.decide.decision import Decision, decision
from autotune_offload.decide.entrant import Entrant
from autotune_offload.decide.race import MAX_ROUNDS, Race, dealt
from autotune_offload.decide.reasons import words
from autotune_offload.decide.search import Search
from autotune_offload.decide.sizes import zero_sizes
from autotune_offload.decide.trial import AccumulationTrial
from autotune_offload.decide.verdict import Outcome, Verdict
from autotune_offload.errors import MeasurementError
from autotune_offload.machine.device import Device
from autotune_offload.measure.bench import PASSES_OF_A_SAMPLE, Bench
from autotune_offload.paths.page_locking import PinRules
from autotune_offload.records import (
    Baseline,
    Candidate,
    Limits,
    Measurements,
    Memory,
    Plan,
    Progress,
    Settings,
    Workload,
)
from autotune_offload.upstream import STOCK_SEQUENCES, StockSequence, stock_sequence
from autotune_offload.workload import TIMED_MICRO_STEPS

_UNSEEN = 1e-3
"""Part of a backward's compute that cannot be seen beside it: shorter times are all the same."""

_SEARCH_SHARE = 0.45
"""Of the trials' time; the rest is for the interleaved rounds that decide."""

_ACCUMULATIONS_SHARE = 0.5
"""Of the trials' time, where micro-steps are added up: for whole accumulations."""

_OLDER_SHARE = 0.3
"""Of what is left after the first final rounds, for the sequences of older DeepSpeeds."""

_LEAST_PASSES = 100
"""Passes over the sample that the trials' time should allow; the sample is made smaller for it."""

_LEAST_MICRO_STEPS = 350
"""The same for whole accumulations: a first race of a dozen, a second of half as many in three rounds, and each
micro-step that is timed takes the sample four times."""

_BOUNCES = "bounce_buffer"
_LEAST_ELEMENTS = 1 << 18

_TRIAL_BYTES = 20
"""A gradient of the sample takes at most: its source, its place and the buffer, these two also page-locked."""

_MIN_ROUNDS = 3


def decide(
    device: Device,
    plan: Plan,
    measurements: Measurements,
    workload: Workload,
    limits: Limits,
    *,
    deepspeed_version: tuple[int, int, int],
    steer: Settings,
    cache_bytes: int,
    deadline: float,
    progress: Progress,
    layout: Layout = PLAIN,
) -> Decision:
    """Choose how this workload's gradients leave this device.

    Args:
        device: the current device; trials run on it.
        plan: how many finalists, how large a sample.
        measurements: curves and costs of this device and host.
        workload: what is offloaded.
        limits: what may be page-locked.
        deepspeed_version: whose own sequence is the one to beat.
        steer: what the user fixed.
        cache_bytes: last-level cache; the sample of the workload exceeds it where time allows.
        deadline: on the device's clock, when the trials end.
        progress: told what is being tried, and the part of the trials' time that is spent.
        layout: what the configuration says of stage, devices and sizes; the plain one without.

    Raises:
        ConfigError: the user fixed something that this host cannot do.
        MeasurementError: not one path could be timed.
    """
    stock = stock_sequence(deepspeed_version)
    rules = PinRules(
        workload=workload,
        pin=measurements.pin,
        limits=limits,
        locks=device.identity.pin_backend != "none",
        layout=layout,
        version=".".join(map(str, deepspeed_version)),
    )
    steps = _micro_steps(device, workload)
    passes_by = deadline
    if steps > 1:
        passes_by -= max(deadline - device.now(), 0.0) * _ACCUMULATIONS_SHARE
    sized = partial(
        sample_elements, device, plan, measurements, workload, cache_bytes, limits.measuring_bytes
    )
    with device.keeping_pinned():
        with contextlib.closing(Bench(device, workload, sized(passes_by))) as bench:
            model = cost_model(device, measurements, workload, compute_seconds=bench.compute_seconds)
            baselines = _baselines(model, rules, stock)
            steered = _with_own_path(steer, baselines[0].record)
            contest = _Contest(device, bench, model, admitted(model, device, rules, steered), baselines)
            share = 1 - _ACCUMULATIONS_SHARE * (steps > 1)
            rounds = MAX_ROUNDS if steps == 1 else _MIN_ROUNDS + 1
            outcome = contest.run(plan, passes_by, rounds, lambda what, done: progress(what, done * share))
        if steps > 1:
            progress("whole accumulations", share)
            passes = Verdict(outcome, rules, steer)
            measured = (passes.chosen.median + outcome.installed.median) / 2
            elements = sized(deadline, least_passes=_LEAST_MICRO_STEPS, pass_seconds=measured)
            if workload.elements <= PASSES_OF_A_SAMPLE * elements:
                elements = workload.elements  # takes no longer, and nothing is left to estimate
            with contextlib.closing(Bench(device, workload, elements, parts=1)) as bench:
                trial = AccumulationTrial(device, bench, steps)
                outcome = over_accumulations(passes, trial, deadline)
    return decision(Verdict(outcome, rules, steer), zero_sizes(model, workload, device, rules))


def _micro_steps(device: Device, workload: Workload) -> int:
    """How many are timed together; 1 where there is one, and where they are added up in place."""
    return 1 if device.shares_host_memory else min(workload.accumulation_steps, TIMED_MICRO_STEPS)


def cost_model(
    device: Device, measurements: Measurements, workload: Workload, *, compute_seconds: float = 0.0
) -> CostModel:
    """The cost model of this device, with so much compute in a backward to hide behind."""
    return CostModel(
        measurements,
        workload,
        shares_host_memory=device.shares_host_memory,
        synchronous=device.synchronous,
        compute_seconds=compute_seconds,
    )


def sample_elements(
    device: Device,
    plan: Plan,
    measurements: Measurements,
    workload: Workload,
    cache_bytes: int,
    memory_bytes: int,
    deadline: float,
    *,
    least_passes: int = _LEAST_PASSES,
    pass_seconds: float = math.inf,
) -> int:
    """Elements of the workload's sample: beyond the caches, unless memory or time for so many passes is too short.

    `pass_seconds` is what a pass over the workload takes, as far as it was measured; else the model predicts it.
    """
    wanted = min(max(plan.trial_bytes, 2 * cache_bytes) // 4, memory_bytes // _TRIAL_BYTES)
    if math.isinf(pass_seconds):
        model = cost_model(device, measurements, workload)
        ours = Candidate(path="direct", cast="host", buffer_bytes=1 << 20, buffer_count=1)
        own = Baseline(name="explicit_upcast", versions="", memory="pageable", installed=False)
        pass_seconds = (model.seconds(ours) + model.seconds(own)) / 2
    seconds = max(deadline - device.now(), 0.0) / least_passes
    affordable = workload.elements * seconds / max(pass_seconds, 1e-12)
    return max(int(min(wanted, affordable)), _LEAST_ELEMENTS)


def _baselines(model: CostModel, rules: PinRules, stock: StockSequence) -> list[Entrant[Baseline]]:
    """DeepSpeed's own sequence first, in its default memory and in the other; then the older ones."""
    memories: tuple[Memory, ...] = ("pageable",) if rules.against_path("pinned") else ("pageable", "pinned")
    default = stock.default_memory if stock.default_memory in memories else "pageable"
    pairs = [(stock, default)] + [(stock, m) for m in memories if m != default]
    pairs += [(s, "pageable") for s in STOCK_SEQUENCES if s is not stock]
    entrants = []
    for sequence, memory in pairs:
        own = Baseline(
            name=sequence.name,
            versions=sequence.versions,
            memory=memory,
            installed=sequence is stock and memory == default,
        )
        record = structs.replace(own, predicted_seconds=model.seconds(own))
        entrants.append(Entrant(record=record, failed=_why_not_timed(sequence, rules)))
    return entrants


def _why_not_timed(sequence: StockSequence, rules: PinRules) -> str | None:
    """One of them page-locks whatever `pin_memory` says: not where nothing may be locked."""
    why = rules.against_bounce_buffer() if sequence.name == _BOUNCES else None
    return None if why is None else f"was not tried: {why}"


def _with_own_path(steer: Settings, own: Baseline) -> Settings:
    """Path "deepspeed" as the path of ours that is most like it."""
    if steer.path != "deepspeed":
        return steer
    return structs.replace(steer, path="pinned" if own.memory == "pinned" else "direct")


# -- trials ---------------------------------------------------------------------------------------


class _Contest:
    """Opening, search and final rounds."""

    def __init__(
        self,
        device: Device,
        bench: Bench,
        model: CostModel,
        candidates: Sequence[Candidate],
        baselines: list[Entrant[Baseline]],
    ) -> None:
        self.device, self.bench, self.model = device, bench, model
        self.candidates = {key(c): Entrant(record=c) for c in candidates}
        self.baselines = baselines
        self.floor_seconds = max(_UNSEEN * model.compute_seconds, 1e-9)

    @property
    def installed(self) -> Entrant[Baseline]:
        """What the installed DeepSpeed does by default."""
        return self.baselines[0]

    @property
    def open(self) -> list[Entrant[Candidate]]:
        """Who may be tried, the best prediction first."""
        return [e for e in self.candidates.values() if e.record.rejected is None and e.failed is None]

    def run(self, plan: Plan, deadline: float, rounds: int, progress: Progress) -> Outcome:
        """Time what is admitted until the deadline or so many final rounds; at least one of ours runs once."""
        now = self.device.now()
        progress("searching paths and buffers", 0.0)
        self._open(deadline)
        Search(
            self.device,
            self.bench,
            self.open,
            self._find,
            floor_seconds=self.floor_seconds,
            deadline=now + (deadline - now) * _SEARCH_SHARE,
            progress=lambda done: progress("searching paths and buffers", done * _SEARCH_SHARE),
        ).run(self._starts())
        ranked = sorted((e for e in self.open if e.timed), key=lambda e: e.median)
        progress("final rounds", _SEARCH_SHARE)
        finalists = self._final_rounds(_with_each_path(ranked, plan.finalists), rounds, deadline)
        if not finalists:
            raise MeasurementError(f"not one gradient path could be timed: {self._failures()}")
        return Outcome(
            model=self.model,
            candidates=tuple(self.candidates.values()),
            baselines=tuple(self.baselines),
            finalists=finalists,
            own=tuple(b for b in self.baselines if b.record.name == self.installed.record.name),
            floor_seconds=self.floor_seconds,
        )

    def _open(self, deadline: float) -> None:
        """The model's best guess beside DeepSpeed's own code, whatever the clock says."""
        for guess in self.open:
            pair: list[Entrant[Any]] = [guess]
            if not (self.installed.seconds or self.installed.failed):
                pair.append(self.installed)
            with Race(self.device, self.bench, pair, deadline=deadline, sure=2) as race:
                race.round()
            if guess.timed:
                return
        raise MeasurementError(f"not one gradient path could be timed: {self._failures()}")

    def _failures(self) -> str:
        return "; ".join(f"{words(e.record)} {e.failed}" for e in self.candidates.values() if e.failed)

    def _starts(self) -> list[Candidate]:
        """The best guess, DeepSpeed's own way in our terms, and the best guess of every kind."""
        best: dict[Any, Candidate] = {}
        for entrant in self.open:
            best.setdefault(kind(entrant.record), entrant.record)
        own = "pinned" if self.installed.memory == "pinned" else "direct"
        like_stock = [c for c in best.values() if c.path == own and c.cast == "device"]
        return [self.open[0].record, *like_stock, *best.values()]

    def _find(self, asked: Mapping[str, Any]) -> Entrant[Candidate] | None:
        entrant = self.candidates.get(effective(self.device, self.model.workload, dict(asked)))
        return entrant if entrant is not None and entrant.record.rejected is None else None

    def _final_rounds(
        self, ranked: Sequence[Entrant[Candidate]], rounds: int, deadline: float
    ) -> tuple[Entrant[Candidate], ...]:
        """All finalists and DeepSpeed's own in turn, from the start again: earlier rounds ran at other times.

        The older DeepSpeeds are shown, not decided by: they get a few rounds among themselves, once there
        are enough of the others, since a slow one would take the time that the decision rests on.
        """
        finalists = [e.anew() for e in ranked]
        baselines = [e.anew() for e in self.baselines if e.failed is None]
        own = [e for e in baselines if e.record.name == self.installed.record.name]
        older = [e for e in baselines if e.record.name != self.installed.record.name]
        with Race(self.device, self.bench, dealt(finalists, own), deadline=deadline) as race:
            for index in range(rounds):
                if index == _MIN_ROUNDS:
                    self._time_older(older, deadline)
                race.round()
                if race.over:
                    break
        for entrant in finalists:
            if entrant.seconds or entrant.failed:
                self.candidates[key(entrant.record)] = entrant
        for baseline in baselines:
            if baseline.seconds or baseline.failed:
                self.baselines = [baseline if b.record == baseline.record else b for b in self.baselines]
        latest = [self.candidates[key(e.record)] for e in ranked]
        return tuple(e for e in latest if e.timed)

    def _time_older(self, older: list[Entrant[Baseline]], deadline: float) -> None:
        now = self.device.now()
        until = now + (deadline - now) * _OLDER_SHARE
        with Race(self.device, self.bench, older, deadline=until) as race:
            for _ in range(_MIN_ROUNDS):
                race.round()


def _with_each_path(ranked: Sequence[Entrant[Candidate]], count: int) -> list[Entrant[Candidate]]:
    """The fastest, and the fastest of every path: a path is not lost to a bad moment in the search."""
    finalists = list(ranked[:count])
    for entrant in ranked[count:]:
        if all(entrant.record.path != other.record.path for other in finalists):
            finalists.append(entrant)
    return finalists
