"""The verdict on what was timed: the tie rule, the two pin keys, and the reasons in words and numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune_offload import units
from autotune_offload.decide.candidates import kind
from autotune_offload.decide.cost_model import CostModel
from autotune_offload.decide.entrant import Entrant
from autotune_offload.decide.reasons import NOT_HERE, OUT_OF_TIME, PINS, by_time, words
from autotune_offload.machine import limits
from autotune_offload.paths.page_locking import PinRules
from autotune_offload.paths.pinned_blocks import parameter_blocks
from autotune_offload.records import Accumulated, Baseline, Candidate, Choice, Path, Settings, ZeroSizes
from autotune_offload.spread import interquartile_range
from autotune_offload.workload import DTYPE_BYTES, middle_elements

_TIE = 0.02
"""Two medians closer than 2 % are never told apart, however small the spread in one process."""

_BUFFER_TIE = 0.01
"""The same between two of one path: they pin alike, and smaller buffers are not worth more than 1 %."""

_FAR = 2.0
"""Who takes more than this many times the best is not told apart by the noise, and does not add to it."""

RUN_STEPS = 1000
"""Over so many optimizer steps what locking takes at a start has to be earned back: a short run."""

_FEW_ROUNDS = 3
_UNREPEATED = 0.25
"""Taken for the noise of two entrants that ran in fewer rounds together than that: it cannot be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the trials gave. The verdict falls on `finalists` and `own`, which were timed last and in turn."""

    model: CostModel
    candidates: tuple[Entrant[Candidate], ...]
    """All of them, with seconds of a backward pass."""
    baselines: tuple[Entrant[Baseline], ...]
    """The same of DeepSpeed's sequences, the installed one's default first."""
    finalists: tuple[Entrant[Candidate], ...]
    own: tuple[Entrant[Baseline], ...]
    """The installed DeepSpeed's own sequence in either memory, its default first."""
    micro_steps: int = 1
    """How many backward passes the times of `finalists` and `own` are of."""
    others: tuple[Entrant[Candidate], ...] = ()
    """Who was to be timed beside the finalists, and was not: `failed` says why, or there was no time."""
    floor_seconds: float
    """Shorter times are all the same."""

    @property
    def installed(self) -> Entrant[Baseline]:
        """What the installed DeepSpeed does by default."""
        return self.own[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was tried and what was chosen."""

    baselines: tuple[Baseline, ...]
    candidates: tuple[Candidate, ...]
    choice: Choice
    warnings: tuple[str, ...]
    accumulations: tuple[Accumulated, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pin:
    """Whether one of the two `pin_memory` keys is on, why, and whether the noise left it open."""

    pinned: bool
    reason: str
    unsettled: bool = False

    @classmethod
    def measured(
        cls, section: str, what: str, pageable: float, pinned: float, noise: float, locking: _Locking
    ) -> _Pin:
        """On where the seconds from or into pinned memory are fewer beyond the noise, locking included."""
        gain = pageable / (pinned + locking.share_seconds)
        on = gain > 1 + noise
        times = (
            f"{what} {units.duration(pageable)} with pageable and {units.duration(pinned)} with pinned memory"
        )
        settled = on or gain < 1 / (1 + noise)
        return cls(
            pinned=on,
            unsettled=not settled,
            reason=f"{section} is {'' if on else 'not '}pinned: {times}"
            + ("" if settled else f", the same within the noise of {noise:.1%}{locking.counted}")
            + locking.words(pageable - pinned),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Locking:
    """What page-locking takes at each start, and the part of it that falls on one of the times compared."""

    seconds: float
    share_seconds: float

    @property
    def counted(self) -> str:
        """Beside a comparison that it takes part in."""
        return " with locking counted" if self.share_seconds > 0 else ""

    def words(self, gain_seconds: float) -> str:
        """Where it can be told from nothing: how long, and after how many steps it is earned back."""
        if self.share_seconds <= 0:
            return ""
        said = f"; locking takes {units.duration(self.seconds)} at each start"
        if gain_seconds <= 0:
            return said
        steps = max(round(RUN_STEPS * self.share_seconds / gain_seconds), 1)
        return f"{said}, earned back in {steps:,} step{'s' if steps > 1 else ''} of the {RUN_STEPS:,} counted"


class Verdict:
    """The choice by the tie rule, and its reasons."""

    def __init__(self, outcome: Outcome, rules: PinRules, steer: Settings) -> None:
        self.outcome, self.rules, self.steer = outcome, rules, steer
        self.best = min(outcome.finalists, key=self._cost)
        self.near = [e for e in outcome.finalists if self._ratio(e, self.best) <= 1 + self._apart(e)]
        rivals: list[Entrant[Any]] = [*self.near, outcome.installed]
        self.noise = max(map(self._apart, rivals))
        self.chosen = self._by_tie_rule()
        self.keeps_own = steer.path == "deepspeed" or not outcome.installed.timed
        self.gain = 1.0 if self.keeps_own else self._gain()

    def decision(self, sizes: ZeroSizes) -> Decision:
        """All of it, as records."""
        record = self.chosen.record
        alone = self._pin_alone()
        optimizer = self._pin_optimizer(alone)
        parameters = self._pin_parameters(with_optimizer=optimizer.pinned or alone.pinned)
        choice = Choice(
            path=record.path,
            cast=record.cast,
            buffer_bytes=record.buffer_bytes,
            buffer_count=record.buffer_count,
            host_threads=record.host_threads,
            pin_optimizer=optimizer.pinned,
            pin_optimizer_alone=alone.pinned,
            pin_parameters=parameters.pinned,
            unsettled_pins=("pin_optimizer",) * optimizer.unsettled
            + ("pin_parameters",) * parameters.unsettled,
            untried_pins=("pin_optimizer",) * (self.rules.untried and (optimizer.pinned or alone.pinned))
            + ("pin_parameters",) * (self.rules.untried_parameters and parameters.pinned),
            sizes=sizes,
            gain=self.gain,
            noise=self.noise,
            tie=any(e.record.path != record.path for e in self.near),
            reasons=(
                *self._reasons(),
                *self._where(),
                optimizer.reason,
                parameters.reason,
                *self._untried(optimizer.pinned or alone.pinned),
            ),
            accumulate=self.chosen.place if self.steer.accumulate == "auto" else self.steer.accumulate,
        )
        return Decision(
            baselines=tuple(e.reported() for e in self.outcome.baselines),
            candidates=tuple(sorted(map(_reported, self.outcome.candidates), key=by_time)),
            choice=choice,
            warnings=tuple(self._warnings(choice)),
            accumulations=tuple(self._accumulated()),
        )

    def _accumulated(self) -> list[Accumulated]:
        """What whole accumulations took, the fastest first."""
        if self.outcome.micro_steps == 1:
            return []
        entrants: list[Entrant[Any]] = [*self.outcome.finalists, *self.outcome.own]
        return [
            Accumulated(
                way=words(e.record),
                place=e.place,
                stock=isinstance(e.record, Baseline),
                installed=isinstance(e.record, Baseline) and e.record.installed,
                chosen=e is self.chosen,
                micro_steps=self.outcome.micro_steps,
                measured_seconds=e.median,
                spread=interquartile_range(e.seconds) / max(e.median, 1e-12),
                samples=len(e.seconds),
                raw_seconds=tuple(e.seconds),
            )
            for e in sorted(entrants, key=lambda e: e.median)
            if e.timed
        ]

    def _by_tie_rule(self) -> Entrant[Candidate]:
        """Within the noise, the path that pins less, with its micro-steps added up where DeepSpeed does."""
        path = min((e.record.path for e in self.near), key=PINS.__getitem__)
        same = [e for e in self.near if e.record.path == path]
        on_host = [e for e in same if e.place == "host"]
        as_deepspeed = [e for e in same if e.place == "device"]
        if not (on_host and as_deepspeed):
            return self._modest(same)
        host_, device = self._modest(on_host), self._modest(as_deepspeed)
        return host_ if self._ratio(device, host_) > 1 + self._noise_between(device, host_) else device

    def _modest(self, same: Sequence[Entrant[Candidate]]) -> Entrant[Candidate]:
        """Of one path, within a smaller tie, the smaller buffers.

        They pin alike: to give up the noise between them as well would buy nothing.
        """
        fastest = min(same, key=self._cost)
        return min((e for e in same if self._ratio(e, fastest) <= 1 + _BUFFER_TIE), key=_modesty)

    def best_of_each_path(
        self, within: Mapping[bool, float], able: Callable[[Candidate], bool]
    ) -> list[list[Entrant[Candidate]]]:
        """What would be chosen of each kind, by path: the chosen path first, then the fastest.

        Only whom `able` admits counts. A kind that takes more than so many times the fastest of its path is
        left out: `within` gives how many for kinds without and with threads of their own.
        """
        kinds: dict[Any, list[Entrant[Candidate]]] = {}
        for entrant in filter(lambda e: e.timed and able(e.record), self.outcome.candidates):
            kinds.setdefault(kind(entrant.record), []).append(entrant)
        paths: dict[Path, list[Entrant[Candidate]]] = {self.chosen.record.path: []}
        for entrant in sorted(map(self._modest, kinds.values()), key=lambda e: e.median):
            of_path = paths.setdefault(entrant.record.path, [])
            if not of_path or self._ratio(entrant, of_path[0]) <= within[entrant.record.host_threads > 0]:
                of_path.append(entrant)
        return [of_path for of_path in paths.values() if of_path]

    # -- comparing --

    def _counted(self, seconds: float) -> float:
        return max(seconds, self.outcome.floor_seconds)

    def _cost(self, entrant: Entrant[Any]) -> float:
        """Its time, with its part of what page-locking its destination takes at each start."""
        return self._counted(entrant.median) + (self._lock_share if entrant.memory == "pinned" else 0.0)

    def _gain(self) -> float:
        """DeepSpeed's own time over the chosen one's; locking counts where one of the two needs it and not the other.

        For DeepSpeed's own code it counts no further than the same code costs in its other memory.
        """
        own, chosen = self.outcome.installed, self.chosen
        if own.memory == chosen.memory:
            return self._counted(own.median) / self._counted(chosen.median)
        others = [self._cost(e) for e in self.outcome.own if e.timed]
        least = max(self._counted(own.median), min(others, default=math.inf))
        return min(self._cost(own), least) / self._cost(chosen)

    @property
    def _lock_share(self) -> float:
        """Of the seconds that locking for `offload_optimizer` takes, what falls on one of the times compared."""
        passes = self.outcome.micro_steps / self.rules.workload.accumulation_steps
        return self.rules.lock_seconds(self.rules.optimizer_blocks) * passes / RUN_STEPS

    def _ratio(self, entrant: Entrant[Any], other: Entrant[Any]) -> float:
        return self._cost(entrant) / self._cost(other)

    def _noise(self, one: Entrant[Any], other: Entrant[Any]) -> float:
        """Half the 95 % interval of the median ratio of two entrants that ran in the same rounds.

        1.253 sigma / sqrt(n) is the standard error of a median, and IQR / 1.349 estimates sigma (Kendall
        and Stuart, The Advanced Theory of Statistics, vol. 1, on order statistics).
        """
        ratios = [self._counted(theirs) / self._counted(ours) for ours, theirs in one.beside(other)]
        if other is one or not other.timed:
            return 0.0
        if one.behind or other.behind or self._ratio(other, one) > _FAR:
            return 0.0
        if len(ratios) < _FEW_ROUNDS:
            return _UNREPEATED
        error = 1.253 * interquartile_range(ratios) / 1.349 / math.sqrt(len(ratios))
        return 1.96 * error / statistics.median(ratios)

    def _apart(self, rival: Entrant[Any]) -> float:
        """What the fastest and a rival must differ by to be told apart, as a part of the fastest's time.

        Nobody else's noise counts: a rival that ran a few rounds and is clearly behind makes no tie of others.
        """
        return max(_TIE, self._noise(self.best, rival))

    def _noise_between(self, one: Entrant[Any], other: Entrant[Any]) -> float:
        """Of the two alone."""
        return max(_TIE, self._noise(one, other), self._noise(other, one))

    # -- the two keys --

    def _pin_optimizer(self, alone: _Pin) -> _Pin:
        """Our path says where its destination is; where DeepSpeed's own code stays, `alone` holds."""
        path = self.chosen.record.path
        if self.gain <= 1 + self.noise:
            return alone
        on = path == "pinned"
        others = [e for e in self.near if (e.record.path == "pinned") is not on]
        unsettled = bool(others) and self.rules.against_path("pinned") is None
        if on is alone.pinned:
            return replace(alone, unsettled=unsettled)
        section, _, why = alone.reason.partition(" is ")
        reason = f"{section} is {'' if on else 'not '}pinned for the path {path}; for DeepSpeed's own code it is {why}"
        return _Pin(pinned=on, unsettled=unsettled, reason=reason)

    def _pin_alone(self) -> _Pin:
        """Where DeepSpeed's own code carries the gradients, its own two times decide."""
        section, what = "offload_optimizer", "DeepSpeed's own copies take"
        limit = self.rules.against_path("pinned")
        if limit is not None:
            cause = NOT_HERE if self.rules.not_on_offer else limit
            return _Pin(pinned=False, reason=f"{section} is not pinned: {cause}")
        if self.steer.path not in ("auto", "deepspeed"):
            on = self.steer.path == "pinned"
            fixed = f"{section} is {'' if on else 'not '}pinned: you fixed the path {self.steer.path}"
            return _Pin(pinned=on, reason=fixed)
        stock = [b for b in self.outcome.baselines if b.record.name == self.outcome.installed.record.name]
        times = {b.memory: b for b in self.outcome.own if b.timed}
        if len(times) < 2:  # one of them was not timed over accumulations
            times = {b.memory: b for b in stock if b.timed}
        if len(times) < 2:
            missing = "pinned" if "pinned" not in times else "pageable"
            return _Pin(
                pinned=False,
                reason=f"{section} is not pinned: DeepSpeed's own copies into {missing} memory were not timed",
            )
        pageable, pinned = times["pageable"], times["pinned"]
        noise = self._noise_between(pageable, pinned)
        locking = _Locking(
            seconds=self.rules.lock_seconds(self.rules.optimizer_blocks), share_seconds=self._lock_share
        )
        return _Pin.measured(
            section, what, self._counted(pageable.median), self._counted(pinned.median), noise, locking
        )

    def _pin_parameters(self, *, with_optimizer: bool) -> _Pin:
        """Parameters are fetched h2d: their own two curves decide, at the size that most bytes have."""
        section, model = "offload_param", self.outcome.model
        if self.rules.not_on_offer is not None:
            return _Pin(pinned=False, reason=f"{section} is not pinned: {NOT_HERE}")
        limit = self.rules.against_parameters(with_optimizer=with_optimizer)
        if limit is None and not model.measured("h2d", "pinned"):
            limit = "no copies from page-locked memory were measured"
        if limit is not None:
            return _Pin(pinned=False, reason=f"{section} is not pinned: {limit}")
        workload = model.workload
        elements = -(-middle_elements(workload.parameters) // workload.world_size)
        size = DTYPE_BYTES[workload.dtype] * elements
        pageable, pinned = (model.line("h2d", m).seconds(size) for m in ("pageable", "pinned"))
        seconds = self.rules.lock_seconds(parameter_blocks(workload))
        fetches = (
            RUN_STEPS
            * workload.accumulation_steps
            * max(workload.parameter_elements // workload.world_size, 1)
        )
        locking = _Locking(seconds=seconds, share_seconds=seconds * elements / fetches)
        return _Pin.measured(
            section, f"a fetch of {units.size(size)} takes", pageable, pinned, self.noise, locking
        )

    def _untried(self, pinned: bool) -> Iterator[str]:
        """What was chosen from smaller blocks than a run will need."""
        if pinned and self.rules.untried:
            yield (
                f"offload_optimizer needs a page-locked block of {self.rules.largest_optimizer_bytes:,} bytes, and "
                f"blocks up to {self.rules.pin.proven_bytes:,} were tried here: a false of yours stays"
            )

    # -- where micro-steps are added up --

    def _where(self) -> Iterator[str]:
        """Why the chosen path adds up micro-steps where it does, if both places were to be tried."""
        chosen = self.chosen
        every = [*self.outcome.finalists, *self.outcome.others]
        there = [e for e in every if e.record.path == chosen.record.path and e.place != chosen.place]
        if not there:
            return
        other = min(there, key=lambda e: e.median)
        where = f"micro-steps are added up on the {chosen.place}"
        if not other.timed:
            why = other.failed or f"there was no time to try the {other.place}"
            as_deepspeed = ", as DeepSpeed does" if chosen.place == "device" else ""
            yield f"{where}{as_deepspeed}: {why}"
            return
        device, host_ = (chosen, other) if chosen.place == "device" else (other, chosen)
        yield (
            f"{where}: over {self._over}, adding on the host adds {units.duration(host_.median)} and on the device, as "
            f"DeepSpeed does, {units.duration(device.median)} "
            f"({self._ratio(device, host_):.2f}x, noise {self._noise_between(device, host_):.1%})"
        )

    @property
    def _over(self) -> str:
        """What the times that decide are of."""
        timed, steps = self.outcome.micro_steps, self.rules.workload.accumulation_steps
        if timed == 1:
            return "a backward pass"
        return f"an accumulation of {timed} micro-steps" + (f" of {steps}" if timed < steps else "")

    # -- in words --

    def _reasons(self) -> Iterator[str]:
        chosen, best = self.chosen, self.best
        yield from self._against_own()
        if chosen is not best:
            yield (
                f"{self._named(best)} was fastest with {units.duration(best.median)}, within the noise of "
                f"{self._named(chosen)}: a near tie goes to what pins less, then to the smaller buffers"
            )
        yield from self._other_paths()
        yield from self._other_cast()
        yield from self._not_tried()

    def _named(self, entrant: Entrant[Candidate]) -> str:
        on_host = " and micro-steps added up on the host" if entrant.place == "host" else ""
        return words(entrant.record) + on_host

    def _against_own(self) -> Iterator[str]:
        chosen, own = self.chosen, self.outcome.installed
        adds = f"{self._named(chosen)} adds {units.duration(chosen.median)} to {self._over}"
        own_words = f"DeepSpeed's own {words(own.record)}"
        if not own.timed:
            yield f"{adds}; {own_words} {own.failed or 'was not timed'}, so nothing is compared with it"
            return
        times = f"{own_words} adds {units.duration(own.median)}"
        if self.steer.path == "deepspeed":
            yield f"you fixed the path deepspeed, so DeepSpeed's own code is kept: {times}; {adds}"
            return
        counted = ""
        if chosen.memory != own.memory and self._lock_share > 0:
            counted = f", {units.duration(self._lock_share)} of locking counted for pinned memory"
        yield f"{adds}; {times} ({self.gain:.2f}x, noise {self.noise:.1%}{counted})"
        if self.gain < 1 / (1 + self.noise):
            yield "DeepSpeed's own code is faster, and is kept"
        elif self.gain <= 1 + self.noise:
            yield "that is no gain beyond the noise over DeepSpeed's own code, which is kept"

    def _other_paths(self) -> Iterator[str]:
        """The best of each other path that was clearly slower."""
        told = {self.chosen.record.path, *(e.record.path for e in self.near)}
        for other in sorted(self.outcome.finalists, key=lambda e: e.median):
            if other.record.path not in told:
                told.add(other.record.path)
                times = f"{self._ratio(other, self.chosen):.2f} times as much"
                yield f"{self._named(other)} adds {units.duration(other.median)}, {times}"

    def _other_cast(self) -> Iterator[str]:
        """The best of the same path with the cast elsewhere, where that is clearly slower in a backward pass."""
        record = self.chosen.record
        if self.chosen.place == "host":  # nothing is left to cast where sums end on the host
            return
        same = [e for e in self.outcome.candidates if e.timed and e.record.path == record.path]
        ours = next((e for e in same if e.record == record), self.chosen)
        best = min((e for e in same if e.record.cast != record.cast), key=lambda e: e.median, default=None)
        if best is not None and self._ratio(best, ours) > 1 + self.noise:
            where = (
                f"with the cast on the {best.record.cast} the same path adds {units.duration(best.median)}"
            )
            passes = "" if self.outcome.micro_steps == 1 else " to a backward pass"
            yield f"{where}{passes}, {self._ratio(best, ours):.2f} times as much"

    def _not_tried(self) -> Iterator[str]:
        if self.rules.not_on_offer is not None:
            why = f"{NOT_HERE}: {self.rules.not_on_offer}"
            yield f"{why}; so the paths pinned and staged were not tried"
            return
        for path in ("direct", "pinned", "staged"):
            entrants = [e for e in self.outcome.candidates if e.record.path == path]
            causes = [e.failed or e.record.rejected for e in entrants]
            failed = any(e.failed for e in entrants)
            if entrants and all(causes):
                yield f"{path} {'was put aside' if failed else 'was not tried'}: {causes[0]}"

    def _warnings(self, choice: Choice) -> Iterator[str]:
        for baseline in self.outcome.baselines:
            if baseline.failed:
                yield f"DeepSpeed's own {words(baseline.record)} {baseline.failed}"
        if self.rules.locks:
            yield from self._pinned_in_any_case(choice)

    def _pinned_in_any_case(self, choice: Choice) -> Iterator[str]:
        if not self.rules.own_blocks:
            return
        below = self.rules.layout.stage in (1, 2)
        what = "with offload_param on, DeepSpeed page-locks its flat copy of the parameters whatever pin_memory says"
        if below:
            what = "this DeepSpeed page-locks its fp32 weights whatever pin_memory says"
        limit = self.rules.against_deepspeeds_own()
        if limit is not None:
            yield f"{what}: it {limit}" + (
                "" if below else "; DeepSpeed will fail here: take offload_param out"
            )
        elif choice.path != "pinned" and not choice.pin_optimizer:
            yield f"{what}: {units.size(sum(map(limits.pinned_block_bytes, self.rules.own_blocks)))}"


def _modesty(entrant: Entrant[Candidate]) -> tuple[int, int, float]:
    """The smaller buffers first, then the fewer threads, then the faster."""
    c = entrant.record
    return c.buffer_bytes * c.buffer_count, c.host_threads, entrant.median


def _reported(entrant: Entrant[Candidate]) -> Candidate:
    """With its time, or with the reason why there is none."""
    if entrant.timed or entrant.record.rejected is not None:
        return entrant.reported()
    return replace(entrant.record, rejected=entrant.failed or OUT_OF_TIME)
