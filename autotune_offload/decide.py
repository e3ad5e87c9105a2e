"""From measurements to a choice: model, pruning, search over timed trials, tie rule, reasons.

The order of authority: what a user fixed, then limits, then measured time, then the tie rule. The cost
model only decides what is tried first and what is not tried at all.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotune_offload import host
from autotune_offload.cost_model import CostModel, Line
from autotune_offload.device import Device
from autotune_offload.ds_config import Settings
from autotune_offload.errors import ConfigError
from autotune_offload.measure import Progress, interquartile_range
from autotune_offload.paths import STOCK_SEQUENCES, StockSequence, build, destination_memory, stock_sequence
from autotune_offload.records import (
    Baseline,
    Candidate,
    Choice,
    Limits,
    Measurements,
    Memory,
    Path,
    Plan,
    Workload,
    ZeroSizes,
)
from autotune_offload.trials import Bench, Offload
from autotune_offload.workload import DTYPE_BYTES

_BUFFER_BYTES = tuple(1 << power for power in range(18, 26, 1))
"""256 KiB to 32 MiB: below, the cost of each piece dominates; above, no curve gains."""

_BUFFER_COUNTS = (2, 3, 4)
_PRUNE_BEYOND = 2.0
"""A candidate that is predicted to take this many times the best is not tried."""

_TIE = 0.02
"""Two medians closer than 2 % are never told apart, however small the spread in one process."""

_SEARCH_SHARE = 0.45
"""Of the trials' time; the rest is for the interleaved rounds that decide."""

_SEARCH_ROUNDS = 3
_MIN_ROUNDS = 3
_MAX_ROUNDS = 60
_SUB_GROUP_ELEMENTS = 1_000_000_000  # DeepSpeed's default
_REDUCE_BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's default
_PREFETCH_BUCKET_ELEMENTS = 50_000_000  # DeepSpeed's default
_PERSISTENCE_ELEMENTS = 100_000  # DeepSpeed's default
_BUCKETS_A_BACKWARD = 16
"""So many times do gradients leave in a backward pass, if the link's latency allows."""

_EFFICIENCY = 0.95
"""Share of the link's bandwidth that a bucket should reach."""

_DEVICE_MEMORY_SHARE = 0.02
"""Of the device's memory at most for one bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was tried and what was chosen."""

    baselines: tuple[Baseline, ...]
    candidates: tuple[Candidate, ...]
    choice: Choice
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pin:
    """Whether one of the two `pin_memory` keys is on, why, and whether the noise left it open."""

    pinned: bool
    unsettled: bool
    reason: str

    @classmethod
    def limited(cls, section: str, why: str) -> _Pin:
        """Off, since page-locking is not on offer or does not fit."""
        return cls(pinned=False, unsettled=False, reason=f"{section} is not pinned: {why}")

    @classmethod
    def measured(cls, section: str, what: str, pageable: float, pinned: float, noise: float) -> _Pin:
        """On where the seconds from or into pinned memory are fewer beyond the noise."""
        gain = pageable / max(pinned, 1e-12)
        on = gain > 1 + noise
        times = f"{what} {_ms(pageable)} with pageable and {_ms(pinned)} with pinned memory"
        return cls(
            pinned=on,
            unsettled=1 / (1 + noise) <= gain <= 1 + noise,
            reason=f"{section} is {'' if on else 'not '}pinned: {times}",
        )


@dataclass(slots=True, kw_only=True)
class _Entrant:
    """One contestant of the trials: a candidate of ours, or a sequence of DeepSpeed's."""

    record: Candidate | Baseline
    memory: Memory
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


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
        cache_bytes: last-level cache; the sample of the workload exceeds it.
        deadline: on the device's clock, when the trials end.
        progress: told what is being tried.

    Raises:
        ConfigError: the user fixed something that this host cannot do.
    """
    most_elements = max(plan.trial_bytes, 2 * cache_bytes) // 4
    bench = Bench(device, workload, most_elements)
    try:
        model = CostModel(
            measurements,
            workload,
            shares_host_memory=device.shares_host_memory,
            synchronous=device.synchronous,
            compute_seconds=bench.compute_seconds,
        )
        contest = _Contest(device, bench, model, plan, limits, steer, stock_sequence(deepspeed_version))
        contest.run(deadline, progress)
    finally:
        bench.close()
    sizes = zero_sizes(model, workload, device, measurements)
    return contest.decision(sizes)


class _Contest:
    """Candidates and baselines through limits, model, search and final rounds."""

    def __init__(
        self,
        device: Device,
        bench: Bench,
        model: CostModel,
        plan: Plan,
        limits: Limits,
        steer: Settings,
        stock: StockSequence,
    ) -> None:
        self.device, self.bench, self.model, self.plan = device, bench, model, plan
        self.limits, self.steer, self.stock = limits, steer, stock
        self.why_not_pinned = (
            model.measurements.pin.reason if not model.measurements.pin.largest_bytes else None
        )
        self.candidates = {_key(c): c for c in self._admitted()}
        self.baselines = self._baselines()
        self.entrants: dict[tuple[Any, ...], _Entrant] = {}
        self.finalists: list[_Entrant] = []

    # -- who takes part --

    def _admitted(self) -> Iterator[Candidate]:
        """Every combination the user left open, with its prediction, or with the limit that rejects it."""
        rejected = {path: self._limit(path) for path in ("direct", "pinned", "staged")}
        predicted = [self._predicted(c) for c in grid(self.device, self.model.workload, self.steer)]
        if not predicted:
            raise ConfigError(f'no gradient path fits {_fixed(self.steer)}; leave one of them at "auto"')
        open_ones = [c for c in predicted if rejected[c.path] is None]
        if not open_ones:
            reasons = "; ".join(f"{path}: {why}" for path, why in rejected.items() if why)
            raise ConfigError(f"{_fixed(self.steer)} cannot run here: {reasons}")
        best = min(c.predicted_seconds or 0.0 for c in open_ones)
        families: set[tuple[Any, ...]] = set()
        for candidate in sorted(predicted, key=lambda c: c.predicted_seconds or 0.0):
            why = rejected[candidate.path] or self._ring_limit(candidate)
            family = (candidate.path, candidate.cast) if why else _family(candidate)
            first = family not in families
            families.add(family)
            seconds = candidate.predicted_seconds or 0.0
            if why is None and not first and seconds > _PRUNE_BEYOND * best:
                why = f"predicted {_ms(seconds)} against {_ms(best)} for the best: not tried"
            if why is None or first or not rejected[candidate.path]:
                yield replace(candidate, rejected=why)

    def _predicted(self, c: Candidate) -> Candidate:
        seconds = self.model.path_seconds(c.path, c.cast, c.buffer_bytes, c.buffer_count, c.host_threads)
        return replace(c, predicted_seconds=seconds)

    def _limit(self, path: Path) -> str | None:
        """Why this path cannot run in this process, if so."""
        if path == "direct":
            return None
        if self.why_not_pinned is not None:
            return f"pinned memory is not on offer: {self.why_not_pinned}"
        if path == "staged":
            return None
        blocks = pinned_blocks(self.model.workload)
        pin = self.model.measurements.pin
        if not pin.capped and max(blocks) > pin.largest_bytes:
            return (
                f"needs a page-locked block of {max(blocks):,} bytes, but the largest that could be "
                f"locked here is {pin.largest_bytes:,} ({pin.reason}); lower sub_group_size"
            )
        return host.check_pinned(blocks, self.limits)

    def _ring_limit(self, candidate: Candidate) -> str | None:
        if candidate.path != "staged":
            return None
        return host.check_pinned([candidate.buffer_bytes * candidate.buffer_count], self.limits)

    def _baselines(self) -> list[_Entrant]:
        """DeepSpeed's own sequence first, in its default memory and in the other; then the older ones."""
        memories: tuple[Memory, ...] = ("pageable",) if self._limit("pinned") else ("pageable", "pinned")
        default = self.stock.default_memory if self.stock.default_memory in memories else "pageable"
        pairs = [(self.stock, default)] + [(self.stock, m) for m in memories if m != default]
        pairs += [(s, "pageable") for s in STOCK_SEQUENCES if s is not self.stock]
        return [
            _Entrant(
                memory=memory,
                record=Baseline(
                    name=sequence.name,
                    versions=sequence.versions,
                    memory=memory,
                    installed=sequence is self.stock and memory == default,
                    predicted_seconds=self.model.stock_seconds(sequence.name, memory),
                ),
            )
            for sequence, memory in pairs
        ]

    # -- trials --

    def run(self, deadline: float, progress: Progress) -> None:
        """Search, then time the finalists and the baselines in turn until the deadline."""
        now = self.device.now()
        progress("searching paths and buffers", 0.45)
        self._search(now + (deadline - now) * _SEARCH_SHARE)
        ranked = sorted((e for e in self.entrants.values() if e.seconds), key=lambda e: e.median)
        self.finalists = self._with_each_path(ranked)
        progress("final rounds", 0.75)
        self._final_rounds(deadline)

    def _open(self) -> list[Candidate]:
        return [c for c in self.candidates.values() if c.rejected is None]

    def _search(self, deadline: float) -> None:
        """Optuna over what is open, from the model's best guess, minimising time relative to that guess.

        Every trial runs beside the reference in the same rounds, so that a host that slows down in
        the middle slows down both.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        guess = min(self._open(), key=lambda c: c.predicted_seconds or 0.0)
        reference = self._entrant(guess)
        study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=8),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=0),
        )
        for start in self._starts(guess):
            study.enqueue_trial(_parameters(start), skip_if_exists=True)
        for _ in range(3 * len(self.candidates)):
            if self.device.now() >= deadline:
                break
            trial = study.ask()
            candidate = self._suggested(trial)
            value = self._relative(trial, candidate, reference) if candidate else None
            study.tell(trial, value, state=None if value is not None else optuna.trial.TrialState.PRUNED)

    def _starts(self, guess: Candidate) -> list[Candidate]:
        """DeepSpeed's own way in our terms, and the model's best guess of every path and cast."""
        best: dict[tuple[str, str], Candidate] = {}
        for candidate in sorted(self._open(), key=lambda c: c.predicted_seconds or 0.0):
            best.setdefault((candidate.path, candidate.cast), candidate)
        own = (self._installed.memory == "pinned" and "pinned") or "direct"
        like_stock = [c for (path, cast), c in best.items() if path == own and cast == "device"]
        return [guess, *like_stock, *best.values()]

    @property
    def _installed(self) -> _Entrant:
        return self.baselines[0]

    def _suggested(self, trial: Any) -> Candidate | None:
        """The candidate that Optuna asks for; None where that combination is not open."""
        choices = {name: _values(self._open(), name) for name in _PARAMETERS}
        chosen = {name: trial.suggest_categorical(name, values) for name, values in choices.items()}
        wanted = self.candidates.get(_effective(self.device, self.model.workload, chosen))
        return wanted if wanted is not None and wanted.rejected is None else None

    def _relative(self, trial: Any, candidate: Candidate, reference: _Entrant) -> float | None:
        entrant = self._entrant(candidate)
        ratios: list[float] = []
        paths = [self._started(e) for e in (reference, entrant)]
        try:
            for step in range(_SEARCH_ROUNDS):
                base, own = (self._timed(e, p) for e, p in zip((reference, entrant), paths, strict=True))
                ratios.append(own / max(base, 1e-9))
                trial.report(statistics.median(ratios), step)
                if trial.should_prune():
                    break
        finally:
            for path in paths:
                path.close()
        return statistics.median(ratios)

    def _entrant(self, candidate: Candidate) -> _Entrant:
        key = _key(candidate)
        if key not in self.entrants:
            self.entrants[key] = _Entrant(record=candidate, memory=destination_memory(candidate.path))
        return self.entrants[key]

    def _started(self, entrant: _Entrant) -> Offload:
        """The path, checked bit for bit the first time it runs (which also warms it up)."""
        if isinstance(entrant.record, Baseline):
            sequence = next(s for s in STOCK_SEQUENCES if s.name == entrant.record.name)
            path: Offload = sequence.build(self.device, self.bench.dtype, self.bench.largest_elements)
        else:
            path = build(self.device, entrant.record, self.bench.dtype)
        try:
            self.bench.check(path, entrant.memory)
        except BaseException:
            path.close()
            raise
        return path

    def _timed(self, entrant: _Entrant, path: Offload) -> float:
        seconds = self.bench.time(path, entrant.memory)
        entrant.seconds.append(seconds)
        return seconds

    def _with_each_path(self, ranked: list[_Entrant]) -> list[_Entrant]:
        """The fastest, and the fastest of every path: a path is not lost to a bad moment in the search."""
        finalists = ranked[: self.plan.finalists]
        for entrant in ranked:
            if all(_path(entrant) != _path(other) for other in finalists):
                finalists.append(entrant)
        return finalists

    def _final_rounds(self, deadline: float) -> None:
        """All finalists and baselines in turn, the order rotated, so that drift hits all alike."""
        for entrant in (*self.finalists, *self.baselines):
            entrant.seconds.clear()
        field_ = [(e, self._started(e)) for e in (*self.finalists, *self.baselines)]
        try:
            for round_index in range(_MAX_ROUNDS):
                turn = round_index % len(field_)
                # the older DeepSpeeds are shown, not decided by: they need no more than a few rounds
                for entrant, path in field_[turn:] + field_[:turn]:
                    if round_index < _MIN_ROUNDS or not _only_shown(entrant, self.stock):
                        self._timed(entrant, path)
                if round_index + 1 >= _MIN_ROUNDS and self.device.now() >= deadline:
                    break
        finally:
            for _, path in field_:
                path.close()

    # -- the rules --

    def decision(self, sizes: ZeroSizes) -> Decision:
        """The choice by the tie rule, with its reasons."""
        best = min(self.finalists, key=lambda e: e.median)
        noise = max(_TIE, *(_noise(best, e) for e in (*self.finalists, self._installed)))
        near = [e for e in self.finalists if e.median <= best.median * (1 + noise)]
        chosen = min(near, key=_modesty)
        record = chosen.record
        assert isinstance(record, Candidate)
        gain = self._installed.median / max(chosen.median, 1e-12)
        optimizer, parameters = self._pin_optimizer(noise), self._pin_parameters(noise)
        choice = Choice(
            path=record.path,
            cast=record.cast,
            buffer_bytes=record.buffer_bytes,
            buffer_count=record.buffer_count,
            host_threads=record.host_threads,
            pin_optimizer=optimizer.pinned,
            pin_parameters=parameters.pinned,
            unsettled_pins=("pin_optimizer",) * optimizer.unsettled
            + ("pin_parameters",) * parameters.unsettled,
            sizes=sizes,
            gain=gain,
            noise=noise,
            tie=any(_path(e) != record.path for e in near),
            reasons=(*self._reasons(chosen, best, near, gain, noise), optimizer.reason, parameters.reason),
        )
        return Decision(
            baselines=tuple(_reported(e) for e in self.baselines),  # type: ignore[misc]  # all are baselines
            candidates=self._reported_candidates(),
            choice=choice,
            warnings=self._warnings(choice),
        )

    def _reasons(
        self, chosen: _Entrant, best: _Entrant, near: Sequence[_Entrant], gain: float, noise: float
    ) -> Iterator[str]:
        stock = self._installed
        yield (
            f"{_words(chosen)} adds {_ms(chosen.median)} to a backward pass; DeepSpeed's own "
            f"{_words(stock)} adds {_ms(stock.median)} ({gain:.2f}x, noise {noise:.1%})"
        )
        if gain <= 1 + noise:
            yield "that is no gain beyond the noise over DeepSpeed's own code, which may as well be kept"
        if chosen is not best:
            yield (
                f"{_words(best)} was fastest with {_ms(best.median)}, within the noise of {_words(chosen)}: "
                "a near tie goes to what pins less, then to the smaller buffers"
            )
        others = {
            _path(e): e for e in sorted(self.finalists, key=lambda e: -e.median) if _path(e) != _path(chosen)
        }
        for other in others.values():
            if other not in near:
                yield f"{_words(other)} adds {_ms(other.median)}, {other.median / chosen.median:.2f} times as much"
        for path in ("pinned", "staged"):
            why = self._limit(path)
            if why is not None:
                yield f"{path} was not tried: {why}"

    def _pin_optimizer(self, noise: float) -> _Pin:
        """DeepSpeed's own code carries the gradients, so its own two times decide about the key."""
        times = {e.memory: e.median for e in self.baselines if _is(e.record, self.stock)}
        if "pinned" not in times:
            return _Pin.limited("offload_optimizer", str(self._limit("pinned")))
        return _Pin.measured(
            "offload_optimizer", "DeepSpeed's own copies take", times["pageable"], times["pinned"], noise
        )

    def _pin_parameters(self, noise: float) -> _Pin:
        """Parameters are fetched h2d: their own two curves decide, at the size that most bytes have."""
        limit = self._limit_parameters()
        if limit is not None:
            return _Pin.limited("offload_param", limit)
        size = DTYPE_BYTES[self.model.workload.dtype] * _typical(self.model.workload)
        pageable, pinned = (self.model.line("h2d", m).seconds(size) for m in ("pageable", "pinned"))
        return _Pin.measured("offload_param", f"a fetch of {size:,} bytes takes", pageable, pinned, noise)

    def _limit_parameters(self) -> str | None:
        if self.why_not_pinned is not None:
            return f"pinned memory is not on offer: {self.why_not_pinned}"
        workload = self.model.workload
        share = workload.parameter_elements // workload.world_size
        return host.check_pinned([share * DTYPE_BYTES[workload.dtype]], self.limits)

    def _reported_candidates(self) -> tuple[Candidate, ...]:
        """All of them: timed ones with their times, the rest with why they were not."""
        final = {_key(e.record): e for e in self.finalists}  # type: ignore[arg-type]  # finalists are candidates
        reported = []
        for key, candidate in self.candidates.items():
            entrant = final.get(key) or self.entrants.get(key)
            reported.append(_reported(entrant) if entrant and entrant.seconds else candidate)
        return tuple(sorted(reported, key=_by_time))  # type: ignore[arg-type]  # all are candidates

    def _warnings(self, choice: Choice) -> tuple[str, ...]:
        pins_less = choice.path != "pinned" and not choice.pin_optimizer
        kept = DTYPE_BYTES[self.model.workload.dtype] * self.model.workload.elements
        if self.why_not_pinned is None and pins_less:
            return (
                f"with offload_param on, DeepSpeed page-locks {host.pinned_block_bytes(kept):,} bytes for "
                "its flat parameter buffer whatever pin_memory says",
            )
        return ()


def grid(device: Device, workload: Workload, steer: Settings) -> Iterator[Candidate]:
    """Every combination of path, cast, buffers and host threads that differs in effect here.

    What a combination does not use has one value: no host threads where the host casts nothing, one
    buffer where there is no ring, no smaller buffers than the largest partition needs.
    """
    seen = set()
    for path in ("direct", "pinned", "staged"):
        for cast in ("device", "host"):
            for buffer_bytes in _BUFFER_BYTES:
                for buffer_count in _BUFFER_COUNTS:
                    for threads in _thread_counts(device):
                        wanted: dict[str, Any] = {
                            "path": path,
                            "cast": cast,
                            "buffer_bytes": _fixed_or(steer.buffer_bytes, buffer_bytes),
                            "buffer_count": _fixed_or(steer.buffer_count, buffer_count),
                            "host_threads": _fixed_or(steer.host_threads, threads),
                        }
                        key = _effective(device, workload, wanted)
                        if key not in seen and _agrees(steer, key):
                            seen.add(key)
                            yield Candidate(**dict(zip(_PARAMETERS, key, strict=True)))


_PARAMETERS = ("path", "cast", "buffer_bytes", "buffer_count", "host_threads")


def _effective(device: Device, workload: Workload, wanted: dict[str, Any]) -> tuple[Any, ...]:
    """`wanted` with what it does not use at its one value."""
    path, cast = wanted["path"], wanted["cast"]
    buffer_bytes, count, threads = wanted["buffer_bytes"], wanted["buffer_count"], wanted["host_threads"]
    if workload.dtype == "float32":
        cast = "host"  # nothing is cast, and nothing is allocated on the device for it
    if path != "staged":
        count = 1
        if cast == "host":
            buffer_bytes = _BUFFER_BYTES[0]  # the destination is the buffer
    host_works = path == "staged" or (cast == "host" and workload.dtype != "float32")
    if path != "staged" and device.shares_host_memory and cast == "host":
        host_works = True  # the copy itself
    if not host_works:
        threads = 0
    return path, cast, buffer_bytes, count, threads


def _agrees(steer: Settings, key: tuple[Any, ...]) -> bool:
    path, cast, *_ = key
    return steer.path in ("auto", "deepspeed", path) and steer.cast in ("auto", cast)


def _fixed_or(fixed: int | str, value: int) -> int:
    return value if isinstance(fixed, str) else fixed


def _fixed(steer: Settings) -> str:
    fixed = {name: getattr(steer, name) for name in _PARAMETERS if getattr(steer, name) != "auto"}
    return ", ".join(f"{name} {value}" for name, value in fixed.items()) or "the search space"


def _thread_counts(device: Device) -> tuple[int, ...]:
    """Torch's own pool, one thread apart, and as many as torch itself would use."""
    return tuple(sorted({0, 1, device.intraop_threads()}))


def _values(candidates: Sequence[Candidate], name: str) -> list[Any]:
    return sorted({getattr(c, name) for c in candidates})


def _key(candidate: Candidate) -> tuple[Any, ...]:
    return tuple(getattr(candidate, name) for name in _PARAMETERS)


def _family(candidate: Candidate) -> tuple[Any, ...]:
    """What differs in kind and not in size: of each family, the model's best is always tried."""
    return candidate.path, candidate.cast, candidate.host_threads


def _parameters(candidate: Candidate) -> dict[str, Any]:
    return dict(zip(_PARAMETERS, _key(candidate), strict=True))


def pinned_blocks(workload: Workload) -> list[int]:
    """Bytes of each block that DeepSpeed pins with `offload_optimizer.pin_memory`, before rounding.

    The flat low-precision accumulation buffer, the fp32 gradients of each sub-group, and the flat
    parameters that it pins in any case (stage3.py: grad_partitions_flat_buffer,
    initialize_optimizer_states, _create_param_groups_fp16_flat_cpu_memory).
    """
    low = DTYPE_BYTES[workload.dtype] * workload.elements
    whole, rest = divmod(workload.elements, _SUB_GROUP_ELEMENTS)
    return [low, low, *[4 * _SUB_GROUP_ELEMENTS] * whole, *([4 * rest] if rest else [])]


# -- comparing ------------------------------------------------------------------------------------


def _noise(best: _Entrant, other: _Entrant) -> float:
    """Half the 95 % interval of the median ratio of two entrants that ran in the same rounds.

    1.253 sigma / sqrt(n) is the standard error of a median, and IQR / 1.349 estimates sigma (Kendall
    and Stuart, The Advanced Theory of Statistics, vol. 1, on order statistics).
    """
    pairs = list(zip(best.seconds, other.seconds, strict=False))
    if other is best or len(pairs) < 2:
        return 0.0
    ratios = [b / max(a, 1e-12) for a, b in pairs]
    error = 1.253 * interquartile_range(ratios) / 1.349 / math.sqrt(len(ratios))
    return 1.96 * error / statistics.median(ratios)


def _modesty(entrant: _Entrant) -> tuple[int, int, int]:
    """What pins less, then what needs smaller buffers, then fewer threads."""
    record = entrant.record
    assert isinstance(record, Candidate)
    pins = {"direct": 0, "staged": 1, "pinned": 2}[record.path]
    return pins, record.buffer_bytes * record.buffer_count, record.host_threads


def _path(entrant: _Entrant) -> str:
    return entrant.record.path if isinstance(entrant.record, Candidate) else entrant.record.name


def _is(record: Candidate | Baseline, stock: StockSequence) -> bool:
    return isinstance(record, Baseline) and record.name == stock.name


def _only_shown(entrant: _Entrant, stock: StockSequence) -> bool:
    return isinstance(entrant.record, Baseline) and not _is(entrant.record, stock)


def _by_time(candidate: Candidate) -> tuple[bool, float]:
    seconds = candidate.measured_seconds
    return seconds is None, seconds if seconds is not None else candidate.predicted_seconds or math.inf


def _reported(entrant: _Entrant) -> Candidate | Baseline:
    if not entrant.seconds:
        return entrant.record
    return replace(
        entrant.record,
        measured_seconds=entrant.median,
        spread=interquartile_range(entrant.seconds) / max(entrant.median, 1e-12),
        samples=len(entrant.seconds),
        raw_seconds=tuple(entrant.seconds),
    )


def _typical(workload: Workload) -> int:
    """Elements of the partition of a parameter in which the middle byte lies."""
    half, seen, middle = workload.parameter_elements / 2, 0, 1
    for size, count in workload.parameters:
        middle = -(-size // workload.world_size)
        seen += size * count
        if seen >= half:
            break
    return middle


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 10 else f"{seconds:.3g} s"


def _words(entrant: _Entrant) -> str:
    record = entrant.record
    if isinstance(record, Baseline):
        return f"{record.name} into {record.memory} memory"
    words = f"{record.path} with the cast on the {record.cast}"
    if record.path == "staged":
        words += f" through {record.buffer_count} buffers of {record.buffer_bytes:,} bytes"
    elif record.cast == "device":
        words += f" in pieces of {record.buffer_bytes:,} bytes"
    return words + (f", {record.host_threads} host threads" if record.host_threads else "")


# -- ZeRO-3 sizes ---------------------------------------------------------------------------------


def zero_sizes(model: CostModel, workload: Workload, device: Device, measurements: Measurements) -> ZeroSizes:
    """The ZeRO-3 sizes that follow from the curves, each with its sentence.

    Where nothing runs beside the host there is nothing to overlap, and DeepSpeed's own values stay.
    """
    sub_group, about_sub_group = _sub_group(measurements)
    if device.synchronous:
        kept = f"on the {device.identity.kind} nothing overlaps, so DeepSpeed's own value stays"
        return ZeroSizes(
            sub_group_elements=sub_group,
            reasons={
                "reduce_bucket_elements": kept,
                "prefetch_bucket_elements": kept,
                "persistence_threshold_elements": kept,
                "sub_group_elements": about_sub_group,
            },
        )
    low = DTYPE_BYTES[workload.dtype]
    pinned: Memory = "pinned" if measurements.pin.largest_bytes else "pageable"
    room = int((device.identity.memory_bytes or 1 << 33) * _DEVICE_MEMORY_SHARE) // low
    reduce, about_reduce = _reduce_bucket(model.line("d2h", pinned), workload, room)
    prefetch, about_prefetch = _prefetch_bucket(model.line("h2d", pinned), workload, low, room)
    persist, about_persist = _persistence(model.line("h2d", pinned), low)
    return ZeroSizes(
        reduce_bucket_elements=reduce,
        prefetch_bucket_elements=prefetch,
        persistence_threshold_elements=persist,
        sub_group_elements=sub_group,
        reasons={
            "reduce_bucket_elements": about_reduce,
            "prefetch_bucket_elements": about_prefetch,
            "persistence_threshold_elements": about_persist,
            "sub_group_elements": about_sub_group,
        },
    )


def _reduce_bucket(link: Line, workload: Workload, room: int) -> tuple[int, str]:
    """Whole parameters fill a bucket; each rank offloads its share of it as fp32."""
    efficient = int(link.bytes_at_efficiency(_EFFICIENCY) / 4) * workload.world_size
    wanted = workload.parameter_elements // _BUCKETS_A_BACKWARD
    value = _round_up(min(max(efficient, wanted, 1), room, _REDUCE_BUCKET_ELEMENTS), room)
    return value, (
        f"{value:,} elements: gradients leave about {max(workload.parameter_elements // value, 1)} times in a "
        f"backward pass; below {efficient:,} the link's latency of {link.latency_seconds * 1e6:.3g} us would cost "
        f"over {1 - _EFFICIENCY:.0%}; the buffer takes {_DEVICE_MEMORY_SHARE:.0%} of the device's memory at most"
    )


def _prefetch_bucket(link: Line, workload: Workload, low: int, room: int) -> tuple[int, str]:
    efficient = int(link.bytes_at_efficiency(_EFFICIENCY) / low) * workload.world_size
    largest = workload.parameters[0][0]
    value = _round_up(min(max(efficient, min(largest, _PREFETCH_BUCKET_ELEMENTS), 1), room), room)
    return value, (
        f"{value:,} elements: one largest parameter ahead, and at least the {efficient:,} at which h2d reaches "
        f"{_EFFICIENCY:.0%} of its {link.bytes_per_second / 1e9:.3g} GB/s"
    )


def _persistence(link: Line, low: int) -> tuple[int, str]:
    half = int(link.bytes_at_efficiency(0.5) / low)
    value = max(min(half, _PERSISTENCE_ELEMENTS), 1)
    return value, (
        f"{value:,} elements: up to {half:,} a fetch is mostly latency ({link.latency_seconds * 1e6:.3g} us), and "
        f"DeepSpeed's own {_PERSISTENCE_ELEMENTS:,} bounds the memory"
    )


def _sub_group(measurements: Measurements) -> tuple[int | None, str]:
    """Only a block that cannot be pinned asks for smaller tiles; DeepSpeed pins one a sub-group."""
    pin = measurements.pin
    if pin.capped or not pin.largest_bytes or pin.largest_bytes >= 4 * _SUB_GROUP_ELEMENTS:
        return None, "no block that DeepSpeed pins for a sub-group failed here, so its own value stays"
    value = pin.largest_bytes // 4
    return value, f"{value:,} elements: the largest block that pins here has {pin.largest_bytes:,} bytes"


def _round_up(elements: int, most: int) -> int:
    """The next power of two, where that is not too much."""
    power = 1 << max(elements - 1, 0).bit_length()
    return power if power <= most else max(elements, 1)
