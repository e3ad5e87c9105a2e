"""The verdict on what was timed: the tie rule, the two pin keys, and the reasons in words and numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from autotune_offload import host, units
from autotune_offload.candidates import PinRules, flat_blocks, predicted
from autotune_offload.contest import Entrant, Places
from autotune_offload.cost_model import CostModel
from autotune_offload.ds_config import Settings
from autotune_offload.measure import interquartile_range
from autotune_offload.records import Accumulate, Baseline, Candidate, Choice, ZeroSizes
from autotune_offload.workload import DTYPE_BYTES, TIMED_MICRO_STEPS, middle_elements

_TIE = 0.02
"""Two medians closer than 2 % are never told apart, however small the spread in one process."""

_BUFFER_TIE = 0.01
"""The same between two of one path: they pin alike, and smaller buffers are not worth more than 1 %."""

_FAR = 2.0
"""Who takes more than this many times the best is not told apart by the noise, and does not add to it."""

_FEW_ROUNDS = 3
_UNREPEATED = 0.25
"""Taken for the noise of two entrants that ran in fewer rounds together than that: it cannot be seen."""

_NOT_HERE = "page-locked memory is not on offer here"
_PINS = {"direct": 0, "staged": 1, "pinned": 2}
_OUT_OF_TIME = "not tried: out of time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the trials gave. `finalists` were timed last; the installed DeepSpeed's own leads `baselines`."""

    model: CostModel
    finalists: tuple[Entrant[Candidate], ...]
    candidates: tuple[Entrant[Candidate], ...]
    baselines: tuple[Entrant[Baseline], ...]
    floor_seconds: float
    """Shorter times are all the same."""

    @property
    def installed(self) -> Entrant[Baseline]:
        """What the installed DeepSpeed does by default."""
        return self.baselines[0]


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
    reason: str
    unsettled: bool = False

    @classmethod
    def measured(cls, section: str, what: str, pageable: float, pinned: float, noise: float) -> _Pin:
        """On where the seconds from or into pinned memory are fewer beyond the noise."""
        gain = pageable / pinned
        on = gain > 1 + noise
        times = (
            f"{what} {units.duration(pageable)} with pageable and {units.duration(pinned)} with pinned memory"
        )
        settled = on or gain < 1 / (1 + noise)
        return cls(
            pinned=on,
            unsettled=not settled,
            reason=f"{section} is {'' if on else 'not '}pinned: {times}"
            + ("" if settled else f", the same within the noise of {noise:.1%}"),
        )


class Verdict:
    """The choice by the tie rule, and its reasons."""

    def __init__(self, outcome: Outcome, rules: PinRules, steer: Settings) -> None:
        self.outcome, self.rules, self.steer = outcome, rules, steer
        self.best = min(outcome.finalists, key=lambda e: e.median)
        rivals: list[Entrant[Any]] = [*outcome.finalists, outcome.installed]
        self.noise = max(_TIE, *(self._noise(self.best, e) for e in rivals))
        self.near = [e for e in outcome.finalists if self._ratio(e, self.best) <= 1 + self.noise]
        self.chosen = self._by_tie_rule()
        self.keeps_own = steer.path == "deepspeed" or not outcome.installed.timed
        self.gain = 1.0 if self.keeps_own else self._ratio(outcome.installed, self.chosen)

        self.places: Places | str | None = None
        """Both places for adding micro-steps up, why they were not timed, or None where there is no choice."""

    def decision(self, sizes: ZeroSizes) -> Decision:
        """All of it, as records."""
        record = self.chosen.record
        accumulate, where = self._accumulate()
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
            sizes=sizes,
            gain=self.gain,
            noise=self.noise,
            tie=any(e.record.path != record.path for e in self.near),
            reasons=(*self._reasons(), *where, optimizer.reason, parameters.reason),
            accumulate=accumulate,
        )
        return Decision(
            baselines=tuple(e.reported() for e in self.outcome.baselines),
            candidates=tuple(sorted(map(_reported, self.outcome.candidates), key=_by_time)),
            choice=choice,
            warnings=tuple(self._warnings(choice)),
        )

    def _by_tie_rule(self) -> Entrant[Candidate]:
        """Within the noise, the path that pins less; of its own, within a smaller tie, the smaller buffers.

        Two of one path pin alike: to give up the noise between them as well would buy nothing.
        """
        path = min((e.record.path for e in self.near), key=_PINS.__getitem__)
        same = [e for e in self.near if e.record.path == path]
        fastest = min(same, key=lambda e: e.median)
        return min((e for e in same if self._ratio(e, fastest) <= 1 + _BUFFER_TIE), key=_modesty)

    # -- comparing --

    def _counted(self, seconds: float) -> float:
        return max(seconds, self.outcome.floor_seconds)

    def _ratio(self, entrant: Entrant[Any], other: Entrant[Any]) -> float:
        return self._counted(entrant.median) / self._counted(other.median)

    def _noise(self, one: Entrant[Any], other: Entrant[Any]) -> float:
        """Half the 95 % interval of the median ratio of two entrants that ran in the same rounds.

        1.253 sigma / sqrt(n) is the standard error of a median, and IQR / 1.349 estimates sigma (Kendall
        and Stuart, The Advanced Theory of Statistics, vol. 1, on order statistics).
        """
        pairs = zip(one.seconds, other.seconds, strict=False)
        ratios = [self._counted(b) / self._counted(a) for a, b in pairs]
        if other is one or not other.timed:
            return 0.0
        if len(ratios) < _FEW_ROUNDS:
            return _UNREPEATED
        if self._ratio(other, one) > _FAR:
            return 0.0
        error = 1.253 * interquartile_range(ratios) / 1.349 / math.sqrt(len(ratios))
        return 1.96 * error / statistics.median(ratios)

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
            cause = _NOT_HERE if self.rules.not_on_offer else limit
            return _Pin(pinned=False, reason=f"{section} is not pinned: {cause}")
        if self.steer.path not in ("auto", "deepspeed"):
            on = self.steer.path == "pinned"
            fixed = f"{section} is {'' if on else 'not '}pinned: you fixed the path {self.steer.path}"
            return _Pin(pinned=on, reason=fixed)
        stock = [b for b in self.outcome.baselines if b.record.name == self.outcome.installed.record.name]
        times = {b.memory: b for b in stock if b.timed}
        if len(times) < 2:
            missing = "pinned" if "pinned" not in times else "pageable"
            return _Pin(
                pinned=False,
                reason=f"{section} is not pinned: DeepSpeed's own copies into {missing} memory were not timed",
            )
        pageable, pinned = times["pageable"], times["pinned"]
        noise = max(_TIE, self._noise(pageable, pinned), self._noise(pinned, pageable))
        return _Pin.measured(
            section, what, self._counted(pageable.median), self._counted(pinned.median), noise
        )

    def _pin_parameters(self, *, with_optimizer: bool) -> _Pin:
        """Parameters are fetched h2d: their own two curves decide, at the size that most bytes have."""
        section, model = "offload_param", self.outcome.model
        if self.rules.not_on_offer is not None:
            return _Pin(pinned=False, reason=f"{section} is not pinned: {_NOT_HERE}")
        limit = self.rules.against_parameters(with_optimizer=with_optimizer)
        if limit is None and not model.measured("h2d", "pinned"):
            limit = "no copies from page-locked memory were measured"
        if limit is not None:
            return _Pin(pinned=False, reason=f"{section} is not pinned: {limit}")
        workload = model.workload
        elements = -(-middle_elements(workload.parameters) // workload.world_size)
        size = DTYPE_BYTES[workload.dtype] * elements
        pageable, pinned = (model.line("h2d", m).seconds(size) for m in ("pageable", "pinned"))
        return _Pin.measured(section, f"a fetch of {units.size(size)} takes", pageable, pinned, self.noise)

    # -- where micro-steps are added up --

    def _accumulate(self) -> tuple[Accumulate, tuple[str, ...]]:
        """DeepSpeed's own place unless the other gains beyond the noise; and why."""
        if self.steer.accumulate != "auto":
            return self.steer.accumulate, ()
        if self.places is None:
            return "device", ()
        if isinstance(self.places, str):
            return "device", (f"micro-steps are added up on the device, as DeepSpeed does: {self.places}",)
        device, host_ = self.places["device"], self.places["host"]
        if not (device.timed and host_.timed):
            why = device.failed or host_.failed or "there was no time to try the host"
            return "device", (f"micro-steps are added up on the device, as DeepSpeed does: {why}",)
        noise = max(_TIE, self._noise(device, host_), self._noise(host_, device))
        gain = self._ratio(device, host_)
        place: Accumulate = "host" if gain > 1 + noise else "device"
        steps = self.rules.workload.accumulation_steps
        timed = f"{steps}" if steps <= TIMED_MICRO_STEPS else f"{TIMED_MICRO_STEPS} of {steps}"
        return place, (
            f"micro-steps are added up on the {place}: over {timed} of them, adding on the host adds "
            f"{units.duration(host_.median)} and on the device, as DeepSpeed does, {units.duration(device.median)} "
            f"({gain:.2f}x, noise {noise:.1%})",
        )

    # -- in words --

    def _reasons(self) -> Iterator[str]:
        chosen, best = self.chosen, self.best
        yield from self._against_own()
        if chosen is not best:
            yield (
                f"{words(best.record)} was fastest with {units.duration(best.median)}, within the noise of "
                f"{words(chosen.record)}: a near tie goes to what pins less, then to the smaller buffers"
            )
        yield from self._other_paths()
        yield from self._other_cast()
        yield from self._not_tried()

    def _against_own(self) -> Iterator[str]:
        chosen, own = self.chosen, self.outcome.installed
        adds = f"{words(chosen.record)} adds {units.duration(chosen.median)} to a backward pass"
        own_words = f"DeepSpeed's own {words(own.record)}"
        if not own.timed:
            yield f"{adds}; {own_words} {own.failed or 'was not timed'}, so nothing is compared with it"
            return
        times = f"{own_words} adds {units.duration(own.median)}"
        if self.steer.path == "deepspeed":
            yield f"you fixed the path deepspeed, so DeepSpeed's own code is kept: {times}; {adds}"
            return
        yield f"{adds}; {times} ({self.gain:.2f}x, noise {self.noise:.1%})"
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
                yield f"{words(other.record)} adds {units.duration(other.median)}, {times}"

    def _other_cast(self) -> Iterator[str]:
        """The best of the same path with the cast elsewhere, where that is clearly slower."""
        record = self.chosen.record
        others = [
            e
            for e in self.outcome.candidates
            if e.timed and e.record.path == record.path and e.record.cast != record.cast
        ]
        best = min(others, key=lambda e: e.median, default=None)
        if best is not None and self._ratio(best, self.chosen) > 1 + self.noise:
            times = f"{self._ratio(best, self.chosen):.2f} times as much"
            yield f"with the cast on the {best.record.cast} the same path adds {units.duration(best.median)}, {times}"

    def _not_tried(self) -> Iterator[str]:
        if self.rules.not_on_offer is not None:
            why = f"{_NOT_HERE}: {self.rules.not_on_offer}"
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
        what = "with offload_param on, DeepSpeed page-locks its flat copy of the parameters whatever pin_memory says"
        limit = self.rules.against_deepspeeds_own()
        if limit is not None:
            yield f"{what}: it {limit}; without offload_param it is not made"
        elif choice.path != "pinned" and not choice.pin_optimizer:
            flat = sum(map(host.pinned_block_bytes, flat_blocks(self.rules.workload)))
            yield f"{what}: {units.size(flat)}"


def _modesty(entrant: Entrant[Candidate]) -> tuple[int, int, float]:
    """The smaller buffers first, then the fewer threads, then the faster."""
    c = entrant.record
    return c.buffer_bytes * c.buffer_count, c.host_threads, entrant.median


def _reported(entrant: Entrant[Candidate]) -> Candidate:
    """With its time, or with the reason why there is none."""
    if entrant.timed or entrant.record.rejected is not None:
        return entrant.reported()
    return replace(entrant.record, rejected=entrant.failed or _OUT_OF_TIME)


def _by_time(candidate: Candidate) -> tuple[bool, float]:
    """Measured ones first."""
    if candidate.measured_seconds is not None:
        return False, candidate.measured_seconds
    return True, predicted(candidate)


def words(record: Candidate | Baseline) -> str:
    """A candidate or baseline in words, with the parameters that have an effect."""
    if isinstance(record, Baseline):
        return f"{record.name} into {record.memory} memory"
    said = f"{record.path} with the cast on the {record.cast}"
    if record.path == "staged":
        said += f" through {record.buffer_count} buffers of {units.size(record.buffer_bytes)}"
    elif record.cast == "device":
        said += f" in pieces of {units.size(record.buffer_bytes)}"
    if not record.host_threads:
        return said
    return said + f", {record.host_threads} host thread{'s' if record.host_threads > 1 else ''}"
