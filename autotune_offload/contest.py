"""Timed rounds: entrants run in turn on one bench, whoever fails is put aside with the reason.

`Race` times entrants in interleaved rounds, so that a host that slows down in the middle slows down
all of them. `search` is Optuna over such races.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from autotune_offload.accumulation import Accumulation
from autotune_offload.candidates import PARAMETERS, key, predicted
from autotune_offload.device import Device
from autotune_offload.errors import AutotuneError
from autotune_offload.measure import interquartile_range
from autotune_offload.paths import build, destination_memory, named_sequence, page_locks
from autotune_offload.records import Accumulate, Baseline, Candidate, Memory
from autotune_offload.trials import Bench, Window

R = TypeVar("R", Candidate, Baseline)

MAX_ROUNDS = 60
_SEARCH_ROUNDS = 3
_IDLE_ASKS = 3
_FAILURES = (AutotuneError, RuntimeError, MemoryError, OSError)
"""What a path may end in that is its own fault: wrong bytes, no pinned memory, out of memory, a lost device."""


@dataclass(slots=True, kw_only=True)
class Entrant(Generic[R]):
    """One contestant: a candidate of ours, or a sequence of DeepSpeed's.

    `place` is where it adds up micro-steps, if there are several. `seconds` holds its times, each for the
    whole workload, and `rounds` in which round of all each was taken; `failed` says why it was put aside,
    `checked` that its bytes were compared once, `behind` that it left a race early because it was clearly slower.
    """

    record: R
    place: Accumulate = "device"
    seconds: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    checked: bool = False
    behind: bool = False
    failed: str | None = None

    @property
    def memory(self) -> Memory:
        """Where its fp32 gradients land."""
        if isinstance(self.record, Baseline):
            return self.record.memory
        return destination_memory(self.record.path)

    @property
    def median(self) -> float:
        """Of its rounds; endless without one."""
        return statistics.median(self.seconds) if self.seconds else math.inf

    @property
    def timed(self) -> bool:
        """Whether it has a time that counts."""
        return bool(self.seconds) and self.failed is None

    def beside(self, other: Entrant[Any]) -> list[tuple[float, float]]:
        """Both times of every round in which the two ran."""
        theirs = dict(zip(other.rounds, other.seconds, strict=True))
        own = zip(self.rounds, self.seconds, strict=True)
        return [(seconds, theirs[number]) for number, seconds in own if number in theirs]

    def anew(self) -> Entrant[R]:
        """The same without its times."""
        return replace(self, seconds=[], rounds=[], behind=False)

    def reported(self) -> R:
        """The record with what was measured."""
        if not self.timed:
            return self.record
        return replace(
            self.record,
            measured_seconds=self.median,
            spread=interquartile_range(self.seconds) / max(self.median, 1e-12),
            samples=len(self.seconds),
            raw_seconds=tuple(self.seconds),
        )


class Race:
    """Entrants that are timed in turn. A context manager: the paths live inside.

    Args:
        device: the current device.
        bench: what they run on.
        entrants: who takes part. The first `sure` of them start and run once whatever the clock says.
        deadline: on the device's clock; after it nothing more is started or timed.
        sure: how many do not heed the deadline the first time.
        trial: how an entrant is built, checked and timed.
    """

    def __init__(
        self,
        device: Device,
        bench: Bench,
        entrants: Sequence[Entrant[Any]],
        *,
        deadline: float,
        sure: int = 0,
        trial: Trial | None = None,
    ) -> None:
        self.device, self.bench, self.entrants = device, bench, entrants
        self.deadline, self.sure = deadline, sure
        self._trial = trial or Trial(device, bench)
        self._paths: dict[int, Any] = {}
        self._rounds = 0
        self._random = random.Random(0)

    def __enter__(self) -> Race:
        with contextlib.ExitStack() as stack:  # closes what was started when a start is interrupted
            stack.callback(self.close)
            for index, entrant in enumerate(self.entrants):
                if index < self.sure or not self.over:
                    self._start(index, entrant)
            stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back what the paths hold."""
        while self._paths:
            _, path = self._paths.popitem()
            path.close()

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return self.device.now() >= self.deadline

    def round(self) -> None:
        """Time everyone once more, after the first round in a drawn order.

        Whoever follows a multi-threaded operation finds its threads still spinning on the other cores, so
        that no entrant may always follow the same one.
        """
        self._trial.begin_round()
        order = list(range(len(self.entrants)))
        if self._rounds:
            self._random.shuffle(order)
        for index in order:
            sure = self._rounds == 0 and index < self.sure
            if index in self._paths and (sure or not self.over):
                self._time(index)
        self._rounds += 1

    def drop_beyond(self, factor: float, keep: Sequence[Entrant[Any]] = ()) -> None:
        """Time no more who takes that many times the least, but for whom to keep."""
        least = min((e.median for e in self.entrants if e.timed), default=math.inf)
        for index, entrant in enumerate(self.entrants):
            kept = any(entrant is each for each in keep)
            if index in self._paths and not kept and entrant.median > factor * least:
                entrant.behind = True
                self._paths.pop(index).close()

    def _start(self, index: int, entrant: Entrant[Any]) -> None:
        """Build the path and warm it up: the first time with a check bit for bit."""
        with _put_aside_on_failure(entrant):
            path = self._trial.built(entrant)
            self._paths[index] = path
            warm_up = self._trial.warm_up if entrant.checked else self._trial.check
            warm_up(path, entrant.memory)
            entrant.checked = True
        self._leave_if_failed(index)

    def _time(self, index: int) -> None:
        entrant = self.entrants[index]
        with _put_aside_on_failure(entrant):
            entrant.seconds.append(self._trial.time(self._paths[index], entrant.memory))
            entrant.rounds.append(self._trial.rounds)
        self._leave_if_failed(index)

    def _leave_if_failed(self, index: int) -> None:
        if self.entrants[index].failed is not None and index in self._paths:
            with contextlib.suppress(*_FAILURES):  # it failed already; the others go on
                self._paths.pop(index).close()


@contextlib.contextmanager
def _put_aside_on_failure(entrant: Entrant[Any]) -> Iterator[None]:
    try:
        yield
    except _FAILURES as error:
        named = str(error) if isinstance(error, AutotuneError) else f"{type(error).__name__}: {error}"
        entrant.failed = f"failed in a trial: {named}"


class Trial:
    """How an entrant is built and timed: its path alone, one backward pass at a time."""

    def __init__(self, device: Device, bench: Bench) -> None:
        self.device, self.bench = device, bench
        self.rounds = 0

    def built(self, entrant: Entrant[Any]) -> Any:
        """What the bench runs, with its buffers allocated."""
        record = entrant.record
        if isinstance(record, Candidate):
            return build(self.device, record, self.bench.dtype)
        sequence = named_sequence(record.name)
        return sequence.build(self.device, self.bench.dtype, self.bench.largest_elements)

    def begin_round(self) -> None:
        """Called before each round of a race."""
        self.rounds += 1

    def check(self, built: Any, memory: Memory) -> None:
        """Once, bit for bit."""
        self.bench.check(built, memory)

    def warm_up(self, built: Any, memory: Memory) -> None:
        """For one whose bytes were compared before."""
        self.bench.time(built, memory)

    def time(self, built: Any, memory: Memory) -> float:
        """Seconds, for the whole workload."""
        return self.bench.time(built, memory)


class AccumulationTrial(Trial):
    """The same over whole accumulations of so many micro-steps, which are added up where the entrant says.

    Until the last micro-step the same is done for several entrants. It is timed once a round, for all of them:
    the time goes to what they differ in, and the noise of what they share cancels out of their ratios.
    """

    def __init__(self, device: Device, bench: Bench, micro_steps: int) -> None:
        super().__init__(device, bench)
        self.micro_steps = micro_steps
        self._shared: dict[Any, float] = {}

    def begin_round(self) -> None:
        """What entrants share is timed anew."""
        super().begin_round()
        self._shared.clear()

    def built(self, entrant: Entrant[Any]) -> Any:
        """A path or sequence, and what adds up before it."""
        page_lock = isinstance(entrant.record, Candidate) and page_locks(entrant.record.path)
        accumulation = Accumulation(self.device, entrant.place, page_lock=page_lock)
        return Window(super().built(entrant), accumulation, self.micro_steps)

    def check(self, built: Any, memory: Memory) -> None:
        """Once, bit for bit."""
        self.bench.check_accumulation(built, memory)

    def warm_up(self, built: Any, memory: Memory) -> None:
        """For one whose bytes were compared before."""
        self.bench.warm_up_accumulation(built, memory)

    def time(self, built: Any, memory: Memory) -> float:
        """Seconds, for the whole workload and all micro-steps."""
        seconds = 0.0
        for moment, count in built.moments:
            alike = moment, memory, built.accumulation.alike(moment)
            each = None if moment.boundary else self._shared.get(alike)
            if each is None:
                each = self._shared[alike] = self.bench.time_micro_step(built, moment, memory)
            seconds += count * each
        return seconds


def dealt(finalists: list[Entrant[Candidate]], baselines: list[Entrant[Baseline]]) -> list[Entrant[Any]]:
    """The fastest and DeepSpeed's own first: if time is short, those two count."""
    return [*finalists[:1], *baselines[:1], *finalists[1:], *baselines[1:]]


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
        with _quiet_optuna() as optuna:
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
                wanted = key(replace(of, **{name: step}))
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
def _quiet_optuna() -> Iterator[Any]:
    """Optuna with its log lines off; the level is the process's, so the former one comes back."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield optuna
    finally:
        optuna.logging.set_verbosity(before)
