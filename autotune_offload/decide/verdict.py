"""The verdict on what was timed: who is told apart from whom, and the tie rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune_offload import spread
from autotune_offload.decide.candidates import kind
from autotune_offload.decide.cost_model import CostModel
from autotune_offload.decide.entrant import Entrant
from autotune_offload.paths.page_locking import PinRules
from autotune_offload.paths.path import pins
from autotune_offload.records import Baseline, Candidate, Path, Settings

_BUFFER_TIE = 0.01
"""The same between two of one path: they pin alike, and smaller buffers are not worth more than 1 %."""

_FAR = 2.0
"""Who takes more than this many times the best is not told apart by the noise, and does not add to it."""

RUN_STEPS = 1000
"""Over so many optimizer steps what locking takes at a start has to be earned back: a short run."""


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


class Verdict:
    """The choice by the tie rule, and what it was compared with."""

    def __init__(self, outcome: Outcome, rules: PinRules, steer: Settings) -> None:
        self.outcome, self.rules, self.steer = outcome, rules, steer
        self.best = min(outcome.finalists, key=self._cost)
        self.near = [e for e in outcome.finalists if self.ratio(e, self.best) <= 1 + self.apart(e)]
        rivals: list[Entrant[Any]] = [*self.near, outcome.installed]
        self.noise = max(map(self.apart, rivals))
        self.chosen = self._by_tie_rule()
        self.keeps_own = steer.path == "deepspeed" or not outcome.installed.timed
        self.gain = 1.0 if self.keeps_own else self._gain()

    def _by_tie_rule(self) -> Entrant[Candidate]:
        """Within the noise, the path that pins less, with its micro-steps added up where DeepSpeed does."""
        path = min((e.record.path for e in self.near), key=pins)
        same = [e for e in self.near if e.record.path == path]
        on_host = [e for e in same if e.place == "host"]
        as_deepspeed = [e for e in same if e.place == "device"]
        if not (on_host and as_deepspeed):
            return self._modest(same)
        host_, device = self._modest(on_host), self._modest(as_deepspeed)
        return host_ if self.ratio(device, host_) > 1 + self.noise_between(device, host_) else device

    def _modest(self, same: Sequence[Entrant[Candidate]]) -> Entrant[Candidate]:
        """Of one path, within a smaller tie, the smaller buffers.

        They pin alike: to give up the noise between them as well would buy nothing.
        """
        fastest = min(same, key=self._cost)
        return min((e for e in same if self.ratio(e, fastest) <= 1 + _BUFFER_TIE), key=_modesty)

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
            if not of_path or self.ratio(entrant, of_path[0]) <= within[entrant.record.host_threads > 0]:
                of_path.append(entrant)
        return [of_path for of_path in paths.values() if of_path]

    def counted(self, seconds: float) -> float:
        """Seconds above the floor below which all times are the same."""
        return max(seconds, self.outcome.floor_seconds)

    def _cost(self, entrant: Entrant[Any]) -> float:
        """Its time, with its part of what page-locking its destination takes at each start."""
        return self.counted(entrant.median) + (self.lock_share if entrant.memory == "pinned" else 0.0)

    def _gain(self) -> float:
        """DeepSpeed's own time over the chosen one's; locking counts where one of the two needs it and not the other.

        For DeepSpeed's own code it counts no further than the same code costs in its other memory.
        """
        own, chosen = self.outcome.installed, self.chosen
        if own.memory == chosen.memory:
            return self.counted(own.median) / self.counted(chosen.median)
        others = [self._cost(e) for e in self.outcome.own if e.timed]
        least = max(self.counted(own.median), min(others, default=math.inf))
        return min(self._cost(own), least) / self._cost(chosen)

    @property
    def lock_share(self) -> float:
        """Of the seconds that locking for `offload_optimizer` takes, what falls on one of the times compared."""
        passes = self.outcome.micro_steps / self.rules.workload.accumulation_steps
        return self.rules.lock_seconds(self.rules.optimizer_blocks) * passes / RUN_STEPS

    def ratio(self, entrant: Entrant[Any], other: Entrant[Any]) -> float:
        """Of two costs."""
        return self._cost(entrant) / self._cost(other)

    def _noise(self, one: Entrant[Any], other: Entrant[Any]) -> float:
        """Of the times of two entrants in the rounds that both ran."""
        ratios = [self.counted(theirs) / self.counted(ours) for ours, theirs in one.beside(other)]
        if other is one or not other.timed:
            return 0.0
        if one.behind or other.behind or self.ratio(other, one) > _FAR:
            return 0.0
        if len(ratios) < spread.SEEN_FROM:
            return spread.UNSEEN
        return spread.noise(ratios)

    def apart(self, rival: Entrant[Any]) -> float:
        """What the fastest and a rival must differ by to be told apart, as a part of the fastest's time.

        Nobody else's noise counts: a rival that ran a few rounds and is clearly behind makes no tie of others.
        """
        return max(spread.TIE, self._noise(self.best, rival))

    def noise_between(self, one: Entrant[Any], other: Entrant[Any]) -> float:
        """Of the two alone."""
        return max(spread.TIE, self._noise(one, other), self._noise(other, one))

    @property
    def over(self) -> str:
        """What the times that decide are of."""
        timed, steps = self.outcome.micro_steps, self.rules.workload.accumulation_steps
        if timed == 1:
            return "a backward pass"
        return f"an accumulation of {timed} micro-steps" + (f" of {steps}" if timed < steps else "")


def _modesty(entrant: Entrant[Candidate]) -> tuple[int, int, float]:
    """The smaller buffers first, then the fewer threads, then the faster."""
    c = entrant.record
    return c.buffer_bytes * c.buffer_count, c.host_threads, entrant.median
