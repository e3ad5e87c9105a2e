"""Rounds of real accumulations: every entrant carries one in each, and who is clearly behind leaves.

What is known here is numbers alone: entrants by their number, of which 0 is DeepSpeed's own code, and what each
accumulation took. An accumulation is one slot, whatever became of it, so that ranks which draw the same orders try
the same entrants at the same time without a word between them.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence

from autotune_offload import spread
from autotune_offload.records import Record

OWN = 0
"""DeepSpeed's own code, in every round."""

FAR = 2.0
"""Who takes more than so many times the best's time in both of the first two rounds leaves before noise is seen."""

BEHIND = 1.1
"""Who is behind by that with all of an interval leaves: entrants were within 10 % of each other in their trials."""

FEW = 4
"""After so many rounds, each with more than FAR times the other's time, no more need be known: of two that are alike
all four times of one lie above the other's in 1.4 % of all cases (Mann and Whitney 1947)."""

_TOGETHER = 2
"""One round tells nothing: whatever else the host does may have met one of the two."""


class Rival(Record, frozen=True, kw_only=True):
    """How an entrant stands to another: the median of the ratios of their times, and the noise of it."""

    ratio: float
    noise: float
    low: float
    """The lower end of the interval of the ratio."""
    rounds: int

    @property
    def near(self) -> bool:
        """Whether the two are not told apart, or this one is faster."""
        return self.ratio <= 1 + max(spread.TIE, self.noise)

    @property
    def behind(self) -> bool:
        """Whether it is so far behind that nothing more need be known."""
        if self.rounds < spread.SEEN_FROM:
            return self.rounds >= _TOGETHER and self.low > FAR
        return self.low > BEHIND and self.settled

    @property
    def far(self) -> bool:
        """Whether so few rounds are enough, since in each of them it was far behind."""
        return self.rounds >= FEW and self.low > FAR

    @property
    def settled(self) -> bool:
        """Whether the ratio is known as well as a decision needs it.

        To a tie, or to a third of the difference; or whatever it is exactly, all of its interval is beyond a tie.
        """
        known = self.noise <= max(spread.TIE, (self.ratio - 1) / 3)
        beyond = self.rounds >= spread.FEWEST and self.low > 1 + spread.TIE and not self.near
        return known or beyond


class Rounds:
    """One series of rounds.

    Args:
        entrants: who takes part; `OWN` does.
        everybody: how many there are of all, with those that do not take part: orders are drawn for all of them.
        draw: gives the orders.
        warm_up: whether one round that does not count comes first, in which `OWN` has no slot.
        own_may_win: whether `OWN` may be the best while others take part.
    """

    def __init__(
        self,
        entrants: Iterable[int],
        everybody: int,
        draw: random.Random,
        *,
        warm_up: bool,
        own_may_win: bool = True,
    ) -> None:
        self.racing = set(entrants)
        self.behind: dict[int, Rival] = {}
        self.done = 0
        self._everybody, self._draw = everybody, draw
        self._seconds: dict[int, dict[int, float]] = {number: {} for number in range(everybody)}
        self._passes: int | None = None
        self._warming = warm_up
        self._own_may_win = own_may_win
        self._order = self._drawn()

    @property
    def slot(self) -> int:
        """Whose turn it is; it may have left."""
        return self._order[0]

    @property
    def counts(self) -> bool:
        """Whether what the next slot takes is looked at."""
        return not self._warming and self.slot in self.racing

    def over(self, seconds: float | None, passes: int) -> bool:
        """The accumulation of this slot took so long, None where that is not to be compared; True at a round's end.

        Of a round only accumulations with as many backward passes as its first one count.
        """
        self._passes = passes if self._passes is None else self._passes
        if self.counts and seconds is not None and self._passes == passes:
            self._seconds[self.slot][self.done] = seconds
        del self._order[0]
        if self._order:
            return False
        counted, self._warming = not self._warming, False
        self.done += counted
        self._passes, self._order = None, self._drawn()
        return counted

    def leave(self, entrant: int) -> None:
        """It takes no further part; what it took so far is forgotten."""
        self.racing.discard(entrant)
        self._seconds[entrant].clear()

    def drop_behind(self) -> None:
        """Those that are clearly behind the best leave; `OWN` does not."""
        best = self.best
        for entrant in sorted(self.racing - {OWN, best}):
            rival = self.against(entrant, best) if best is not None else None
            if rival is not None and rival.behind:
                self.behind[entrant] = rival
                self.racing.discard(entrant)

    @property
    def best(self) -> int | None:
        """The fastest by its times over `OWN`'s in the same rounds; None before there are any."""
        able = self.racing if self._own_may_win else self.racing - {OWN} or self.racing
        timed = {entrant: self.against(entrant, OWN) for entrant in sorted(able)}
        ratios = {entrant: rival.ratio for entrant, rival in timed.items() if rival is not None}
        return min(ratios, key=ratios.__getitem__) if ratios else None

    def against(self, entrant: int, other: int) -> Rival | None:
        """How an entrant stands to another in the rounds that both ran; None where there is none."""
        ratios = self._ratios(entrant, other)
        if not ratios:
            return None
        noise = spread.noise(ratios) if len(ratios) >= spread.SEEN_FROM else spread.UNSEEN
        return Rival(
            ratio=statistics.median(ratios),
            noise=0.0 if entrant == other else noise,
            low=spread.interval_of_median(ratios).low,
            rounds=len(ratios),
        )

    def median(self, entrant: int) -> float | None:
        """Seconds of an accumulation; None where none counted."""
        seconds = self._seconds[entrant]
        return statistics.median(seconds.values()) if seconds else None

    def _ratios(self, entrant: int, other: int) -> Sequence[float]:
        mine, theirs = self._seconds[entrant], self._seconds[other]
        return [mine[number] / theirs[number] for number in sorted(mine.keys() & theirs.keys())]

    def _drawn(self) -> list[int]:
        """All of them in a drawn order, those that take no part too: others may, on another rank."""
        order = list(range(self._everybody))
        self._draw.shuffle(order)
        return [each for each in order if each != OWN] if self._warming and self._everybody > 1 else order
