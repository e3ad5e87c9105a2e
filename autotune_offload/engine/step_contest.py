"""Who makes the next step of one optimizer: DeepSpeed's own, or the pass with so many host threads.

All give the same bits, so that real steps are the trials. The rules are those by which paths are confirmed (see
`confirmation`): one step is one slot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from autotune_offload import units
from autotune_offload.engine.confirmation import FEWEST_ROUNDS, MOST_ROUNDS, Conclusion, Confirmation
from autotune_offload.engine.entrants import Confirmed
from autotune_offload.engine.rounds import OWN
from autotune_offload.engine.visible import Events
from autotune_offload.ranks import group
from autotune_offload.records import Record

OWN_STEP = "DeepSpeed's own step"

_log = logging.getLogger("autotune_offload")


class StepConfirm(Record, frozen=True, kw_only=True):
    """How steps are confirmed on the user's own."""

    seed: str = ""
    """The same on all ranks."""
    begins_with_own: bool = False
    """DeepSpeed's own step until something else is found."""
    fewest_rounds: int = FEWEST_ROUNDS
    most_rounds: int = MOST_ROUNDS


class StepTold(Record, frozen=True, kw_only=True):
    """What a run found out about its steps, for the next start."""

    threads: int
    """Host threads of the pass; 0 where DeepSpeed's own step is the faster, or the only one."""
    words: str
    differs: bool = False
    """Whether the pass gave other bits."""


StepTell = Callable[[StepTold], None]
"""Is told of each conclusion, and of a pass that was found wrong."""


class StepContest:
    """Host threads by which the next step is made, 0 for DeepSpeed's own.

    Args:
        counts: numbers of host threads, the one to begin with first.
        confirm: how.
        own_may_stay: whether DeepSpeed's own step may be what it comes to.
        tell: is told what is to be kept for the next start.
        engine: gives the engine, whose monitor gets the times; None where it is gone.
    """

    def __init__(
        self,
        counts: Sequence[int],
        confirm: StepConfirm,
        *,
        own_may_stay: bool,
        tell: StepTell | None,
        engine: Callable[[], Any] = lambda: None,
    ) -> None:
        self.confirmed: Confirmed | None = None
        self._ways = (OWN, *sorted(counts))
        self._names = (OWN_STEP, *(f"the pass with {_threads(count)}" for count in self._ways[1:]))
        self._tell_of_it = tell
        self._engine, self._events = engine, Events()
        self._schedule = Confirmation(
            self._ways,
            holder=OWN if confirm.begins_with_own else self._ways.index(counts[0]),
            seed=confirm.seed,
            fewest=confirm.fewest_rounds,
            most=confirm.most_rounds,
            own_may_win=own_may_stay,
        )

    @property
    def threads(self) -> int:
        """Of the next step."""
        return self._ways[self._schedule.carrier]

    @property
    def exploring(self) -> bool:
        """Whether steps are made in turn."""
        return self._schedule.exploring

    @property
    def switches(self) -> int:
        """How often another was committed to than had made the steps before."""
        return self._schedule.switches

    def over(self, seconds: float) -> bool:
        """A step is over and took so long; True where DeepSpeed's own has just been found to be the faster."""
        concluded = self._schedule.over(seconds, 1)
        if concluded is not None:
            self._conclude(concluded)
        gain = None if self.confirmed is None else self.confirmed.conclusion.gain
        self._events.write(self._engine(), step_seconds=seconds, step_gain=gain)
        return concluded is not None and concluded.winner == OWN

    def found_wrong(self, why: str) -> None:
        """The pass is not to be tried at the next start either."""
        self._tell(StepTold(threads=OWN, words=why, differs=True))

    def _conclude(self, concluded: Conclusion) -> None:
        self.confirmed = Confirmed(entrants=self._names, conclusion=concluded, of="a step")
        said = self.confirmed.sentence()
        if concluded.drifted is not None:
            before, after = map(units.duration, concluded.drifted)
            said = f"a step took {after}, {before} when it was confirmed; {said}"
        loud = concluded.drifted is not None and concluded.changed and group.present_rank() == 0
        _log.log(logging.WARNING if loud else logging.INFO, "autotune-offload: %s", said)
        self._tell(StepTold(threads=self._ways[concluded.winner], words=self.confirmed.sentence()))

    def _tell(self, told: StepTold) -> None:
        if self._tell_of_it is None:
            return
        try:
            self._tell_of_it(told)
        except Exception:  # the next start finds it out again
            _log.debug("autotune-offload: what was found of the step could not be kept", exc_info=True)


def _threads(count: int) -> str:
    return f"{count} host thread{'s' * (count > 1)}"
