"""Optuna over races."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import structs

from autotune_offload.decide.candidates import PARAMETERS, key, predicted
from autotune_offload.decide.entrant import Entrant
from autotune_offload.decide.race import Race
from autotune_offload.machine.device import Device
from autotune_offload.measure.bench import Bench
from autotune_offload.records import Candidate

_SEARCH_ROUNDS = 3
_IDLE_ASKS = 3


# -- search ---------------------------------------------------------------------------------------


class Search:
    """Optuna over open candidates, minimising the time relative to a reference in the same rounds.

    Args:
        device: the current device; its clock counts.
        bench: what is timed on.
        entrants: the open candidates.
        find: the candidate that Optuna's values mean, or None where that combination is not open.
        floor_seconds: shorter times count as this long.
        deadline: when to stop.
        progress: told the part of the time that is spent.
    """

    def __init__(
        self,
        device: Device,
        bench: Bench,
        entrants: Sequence[Entrant[Candidate]],
        find: Callable[[Mapping[str, Any]], Entrant[Candidate] | None],
        *,
        floor_seconds: float,
        deadline: float,
        progress: Callable[[float], None],
    ) -> None:
        self.floor_seconds = floor_seconds
        self.device, self.bench, self.entrants, self.find = device, bench, entrants, find
        self.deadline, self.progress = deadline, progress
        self._started = device.now()
        self._known: dict[int, float] = {}
        self._reference: Entrant[Candidate] | None = None

    def run(self, starts: Sequence[Candidate]) -> None:
        """Race the starts, then what Optuna asks for, until the time is up or all were timed."""
        with quiet_optuna() as optuna:
            study = optuna.create_study(
                sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=8),
                pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=0),
            )
            for start in starts:
                study.enqueue_trial(_asked(start), skip_if_exists=True)
            values = {name: sorted({getattr(e.record, name) for e in self.entrants}) for name in PARAMETERS}
            idle, fastest = 0, math.inf
            while not self._done():
                if idle >= _IDLE_ASKS:  # Optuna comes back to what it knows: name what nobody tried yet
                    study.enqueue_trial(_asked(min(self._left(), key=lambda e: predicted(e.record)).record))
                trial = study.ask()
                asked = {name: trial.suggest_categorical(name, options) for name, options in values.items()}
                entrant = self.find(asked)
                idle = 0 if entrant in self._left() else idle + 1
                value, complete = self._answer(trial, entrant)
                if entrant is not None and value is not None and value < fastest:
                    fastest = value
                    for near in self._neighbours(entrant.record, values):
                        study.enqueue_trial(_asked(near), skip_if_exists=True)
                states = optuna.trial.TrialState
                study.tell(trial, value, state=states.COMPLETE if complete else states.PRUNED)

    def _neighbours(self, of: Candidate, values: Mapping[str, list[Any]]) -> Iterator[Candidate]:
        """Who was not tried yet and is one step away in one of the buffers' or the threads' values."""
        for name in ("buffer_bytes", "buffer_count", "host_threads"):
            steps = values[name]
            at = steps.index(getattr(of, name))
            for step in steps[max(at - 1, 0) : at] + steps[at + 1 : at + 2]:
                wanted = key(structs.replace(of, **{name: step}))
                yield from (e.record for e in self._left() if key(e.record) == wanted)

    def _left(self) -> list[Entrant[Candidate]]:
        return [e for e in self.entrants if not e.seconds and e.failed is None]

    def _done(self) -> bool:
        now = self.device.now()
        self.progress(min((now - self._started) / max(self.deadline - self._started, 1e-9), 1.0))
        return now >= self.deadline or not self._left()

    def _answer(self, trial: Any, entrant: Entrant[Candidate] | None) -> tuple[float | None, bool]:
        """What Optuna is told: the relative time, and whether all rounds were run."""
        if entrant is None or entrant.failed is not None:
            return None, False
        if id(entrant) in self._known:
            return self._known[id(entrant)], True
        stopped = False

        def prune(step: int, ratio: float) -> bool:
            nonlocal stopped
            trial.report(ratio, step)
            stopped = bool(trial.should_prune())
            return stopped

        ratio = self._race(entrant, prune)
        if ratio is None:
            return None, False
        self._known[id(entrant)] = ratio
        return (None, False) if stopped else (ratio, True)

    def _race(self, entrant: Entrant[Candidate], prune: Callable[[int, float], bool]) -> float | None:
        """The median time over the reference's; None where one of the two failed or time was up."""
        reference = self._present_reference(entrant)
        if entrant is reference and entrant.timed:
            return 1.0
        ratios: list[float] = []
        with Race(self.device, self.bench, [reference, entrant], deadline=self.deadline) as race:
            for step in range(_SEARCH_ROUNDS):
                counts = len(reference.seconds), len(entrant.seconds)
                race.round()
                if len(reference.seconds) == counts[0] or len(entrant.seconds) == counts[1]:
                    break
                times = [max(e.seconds[-1], self.floor_seconds) for e in (entrant, reference)]
                ratios.append(times[0] / times[1])
                if prune(step, statistics.median(ratios)):
                    break
        return statistics.median(ratios) if ratios and entrant.failed is None else None

    def _present_reference(self, entrant: Entrant[Candidate]) -> Entrant[Candidate]:
        """The same as long as it does not fail; then another that was timed, or `entrant` itself."""
        if self._reference is None or not self._reference.timed:
            self._reference = next((e for e in self.entrants if e.timed), entrant)
        return self._reference


def _asked(candidate: Candidate) -> dict[str, Any]:
    return dict(zip(PARAMETERS, key(candidate), strict=True))


@contextlib.contextmanager
def quiet_optuna() -> Iterator[Any]:
    """Optuna with its log lines off; the level is the process's, so the former one comes back."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield optuna
    finally:
        optuna.logging.set_verbosity(before)
