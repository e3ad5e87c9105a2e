"""Explore, then commit: which entrant carries which accumulation of a running job, and who stays.

A trial in a probe is not the job. All entrants give the same bits and hold no collective, so that real steps can try
them. Nothing here knows torch, an optimizer or another rank: numbers of entrants, and what an accumulation took.

First rounds (see `rounds`), until the fastest and DeepSpeed's own code are told apart as well as the decision needs
it, then the winner. From then on a watch: where two windows in a row are slower than what was committed to, beyond
the noise, there are rounds again, as far as the budget goes.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from autotune_offload import spread
from autotune_offload.engine.rounds import OWN, Rival, Rounds
from autotune_offload.records import Record

MOST_ROUNDS = 20
"""Then it is decided whatever is known."""

FEWEST_ROUNDS = spread.FEWEST
"""Before anything is decided where nothing was confirmed before: the fewest that give an interval. Where all but the
fastest are far behind in each of them, fewer are enough."""

ROUNDS_AGAIN = 3
"""Where it was confirmed before, at an earlier start or in this run."""

WINDOW = 50
"""Accumulations whose median is compared with what was committed to."""

SLOWER = 1.25
WINDOWS = 2
"""So many windows in a row that are slower by that, with all of their interval, are drift."""

SHARE = 0.02
"""Of all accumulations, those that rounds after drift may take at most."""

FIRST_PAUSE = 10 * WINDOW
"""Accumulations after rounds that changed nothing in which there are none again; twice as many each time."""

MOST_SWITCHES = 4
"""In a run, the first commitment included where it is to another than the run began with."""


class Conclusion(Record, frozen=True, kw_only=True):
    """What rounds came to. Entrants by number; seconds are medians of an accumulation."""

    winner: int
    before: int
    """Who carried before these rounds."""
    seconds: tuple[float | None, ...]
    """By entrant, of those that have times."""
    gain: float
    """DeepSpeed's own time over the winner's in the same rounds."""
    noise: float
    """Of that ratio."""
    rounds: int
    behind: tuple[int, ...]
    """Those that left early, clearly slower than the fastest."""
    drifted: tuple[float, float] | None = None
    """The median that was committed to and the later one, where that is why there were rounds."""

    @property
    def changed(self) -> bool:
        """Whether another carries now."""
        return self.winner != self.before


class Confirmation:
    """The state of one job on one rank.

    Args:
        costs: for each entrant what it takes of the host besides time, such as what it page-locks, for near ties; the
            first is DeepSpeed's own code.
        holder: who carries before anything is known.
        seed: the same on all ranks, which then draw the same orders.
        fewest: rounds before the first conclusion.
        most: rounds at most.
        own_may_win: False where DeepSpeed's own code is there to be compared with, and is not to stay while any other
            can.
    """

    def __init__(
        self,
        costs: Sequence[int],
        *,
        holder: int,
        seed: str,
        fewest: int = FEWEST_ROUNDS,
        most: int = MOST_ROUNDS,
        own_may_win: bool = True,
    ) -> None:
        self.holder = holder
        self.conclusion: Conclusion | None = None
        self.switches = 0
        self._costs = list(costs)
        self._own_may_win = own_may_win
        self._draw = random.Random(seed)
        self._out: set[int] = set()
        self._most, self._fewest = most, min(fewest, most)
        self._watch = _Watch()
        self._accumulations = self._spent = 0
        self._passes: int | None = None
        self._pause, self._not_before = FIRST_PAUSE, 0
        self._drifted: tuple[float, float] | None = None
        self._rounds: Rounds | None = self._new_rounds()

    @property
    def exploring(self) -> bool:
        """Whether entrants take turns."""
        return self._rounds is not None

    @property
    def carrier(self) -> int:
        """Who carries the next accumulation."""
        rounds = self._rounds
        if rounds is None:
            return self.holder
        if rounds.slot in rounds.racing:
            return rounds.slot
        best = rounds.best
        return self.holder if best is None else best

    @property
    def needed(self) -> frozenset[int]:
        """Those whose buffers have to exist."""
        return frozenset({self.holder} if self._rounds is None else {self.holder, *self._rounds.racing})

    def leave(self, entrant: int) -> None:
        """It cannot carry any more, for good; DeepSpeed's own code holds in its place."""
        self._out.add(entrant)
        if self._rounds is not None:
            self._rounds.leave(entrant)
        if self.holder == entrant:
            self.holder = OWN
            self._watch = _Watch()

    def over(self, seconds: float | None, passes: int) -> Conclusion | None:
        """An accumulation is over, carried by `carrier`: what it took, None where that is not to be compared.

        `passes` is the number of its backward passes. Returns what was concluded, where that has just been.
        """
        self._accumulations += 1
        self._passes = passes
        if self._rounds is None:
            self._look_for_drift(seconds, passes)
            return None
        self._spent += self.conclusion is not None
        if not self._rounds.over(seconds, passes):
            return None
        return self._judged(self._rounds)

    # -- rounds --

    def _new_rounds(self) -> Rounds:
        everybody = range(len(self._costs))
        able = set(everybody) - self._out
        return Rounds(able, len(everybody), self._draw, warm_up=True, own_may_win=self._own_may_win)

    def _judged(self, rounds: Rounds) -> Conclusion | None:
        rounds.drop_behind()
        if rounds.done < self._most and not self._settled(rounds):
            return None
        return self._conclude(rounds)

    def _settled(self, rounds: Rounds) -> bool:
        """Whether the fastest and its rival, DeepSpeed's own code or the next to it, are known well enough."""
        if rounds.racing == {OWN}:
            return True
        best = rounds.best
        rival = None if best is None else self._rival(rounds, best)
        if rival is None or rounds.done < self._fewest:
            return rival is not None and rival.far
        return rival.settled

    @staticmethod
    def _rival(rounds: Rounds, best: int) -> Rival | None:
        if best != OWN:
            return rounds.against(OWN, best)
        others = [rounds.against(each, OWN) for each in sorted(rounds.racing - {OWN})]
        return min(
            (rival for rival in others if rival is not None), key=lambda rival: rival.ratio, default=None
        )

    def _conclude(self, rounds: Rounds) -> Conclusion:
        best = rounds.best
        winner = self.holder if best is None else self._by_tie_rule(rounds, best)
        stands = rounds.against(OWN, winner)
        concluded = Conclusion(
            winner=winner,
            before=self.holder,
            seconds=tuple(rounds.median(each) for each in range(len(self._costs))),
            gain=1.0 if stands is None else stands.ratio,
            noise=0.0 if stands is None else stands.noise,
            rounds=rounds.done,
            behind=tuple(sorted(rounds.behind)),
            drifted=self._drifted,
        )
        self.switches += concluded.changed
        self._after(concluded)
        self.holder, self.conclusion, self._rounds = winner, concluded, None
        self._watch = _Watch(rounds.median(winner), self._passes)
        return concluded

    def _by_tie_rule(self, rounds: Rounds, best: int) -> int:
        """Within the noise of the fastest: after drift who carries, else who costs less, DeepSpeed's own code first."""
        able = rounds.racing if self._own_may_win or best == OWN else rounds.racing - {OWN}
        near = [each for each in sorted(able) if self._near(rounds, each, best)]
        if self.conclusion is not None and self.holder in near:
            return self.holder
        return min(near, key=lambda each: (self._costs[each], each))

    @staticmethod
    def _near(rounds: Rounds, entrant: int, best: int) -> bool:
        rival = rounds.against(entrant, best)
        return rival is not None and rival.near

    # -- drift --

    def _look_for_drift(self, seconds: float | None, passes: int) -> None:
        drifted = self._watch.saw(seconds, passes)
        if drifted is None or not self._affordable:
            return
        self._drifted = drifted
        self._fewest = self._most = min(ROUNDS_AGAIN, self._most)
        self._rounds = self._new_rounds()

    @property
    def _affordable(self) -> bool:
        able = len(self._costs) - len(self._out)
        slots = (ROUNDS_AGAIN + 1) * len(self._costs) - 1
        return (
            able > 1
            and self.switches < MOST_SWITCHES
            and self._accumulations >= self._not_before
            and self._spent + slots <= SHARE * self._accumulations
        )

    def _after(self, concluded: Conclusion) -> None:
        if concluded.drifted is None or concluded.changed:
            return
        self._not_before = self._accumulations + self._pause
        self._pause *= 2


class _Watch:
    """Windows of accumulations of one carrier, against what it was committed for."""

    def __init__(self, reference: float | None = None, passes: int | None = None) -> None:
        """`reference` is of accumulations of so many passes; without it the first window gives it."""
        self._reference, self._passes = reference, passes
        self._window: list[float] = []
        self._slow = 0

    def saw(self, seconds: float | None, passes: int) -> tuple[float, float] | None:
        """The reference and the median of the last window, where so many in a row were slower; None otherwise."""
        if passes != self._passes:
            self._reference = self._reference if self._passes is None else None
            self._passes, self._slow = passes, 0
            self._window.clear()
        if seconds is not None:
            self._window.append(seconds)
        if len(self._window) < WINDOW:
            return None
        window, self._window = self._window, []
        return self._judged(window)

    def _judged(self, window: Sequence[float]) -> tuple[float, float] | None:
        median = statistics.median(window)
        if self._reference is None:
            self._reference = median
            return None
        slower = spread.interval_of_median(window).low > SLOWER * self._reference
        self._slow = self._slow + 1 if slower else 0
        return (self._reference, median) if self._slow >= WINDOWS else None
