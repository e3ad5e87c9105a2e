"""Who may carry the gradients of one optimizer, and what is to be told of them afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from autotune_offload import units
from autotune_offload.engine.confirmation import FEWEST_ROUNDS, MOST_ROUNDS, Conclusion, Confirmation
from autotune_offload.engine.delivery import Delivery
from autotune_offload.engine.rounds import OWN
from autotune_offload.engine.self_check import Checks
from autotune_offload.paths.path import Spec, pins
from autotune_offload.records import Record, path_in_words

OWN_NAME = "DeepSpeed's own code"


def in_words(spec: Spec | None) -> str:
    """A path as people are told of it; None is DeepSpeed's own code."""
    return OWN_NAME if spec is None else path_in_words(spec)


class Wrong(Record, frozen=True, kw_only=True):
    """A path that is not to be tried again on this machine, and why."""

    spec: Any
    kind: Literal["differs", "slower"]
    """It gave other bits than DeepSpeed's own code, or was clearly slower than the fastest."""
    why: str


class Told(Record, frozen=True, kw_only=True):
    """What a run found out, for the next start."""

    winner: Any
    """The path that carries, None for DeepSpeed's own code."""
    conclusion: Conclusion | None
    """None as long as there is none."""
    words: str
    wrong: tuple[Wrong, ...]


Tell = Callable[[Told], None]
"""Is told of each conclusion, and of each path that was found wrong."""


class Confirm(Record, frozen=True, kw_only=True):
    """What is to be confirmed on the user's own steps, beside the path that was chosen and DeepSpeed's own code."""

    others: tuple[Any, ...] = ()
    """More paths, whose gradients land in the same kind of memory."""
    seed: str = ""
    """The same on all ranks."""
    begins_with_own: bool = False
    """DeepSpeed's own code carries until something else is found, and not the path that was chosen."""
    fewest_rounds: int = FEWEST_ROUNDS
    most_rounds: int = MOST_ROUNDS


class Confirmed(Record, frozen=True, kw_only=True):
    """A conclusion with the names of its entrants."""

    entrants: tuple[str, ...]
    """In the order of `conclusion.seconds`; the first is DeepSpeed's own code."""
    conclusion: Conclusion
    of: str = "an accumulation"
    """What was timed."""

    def sentence(self) -> str:
        """Who was found to be the fastest, with the numbers."""
        found = self.conclusion
        name = self.entrants[found.winner]
        own, mine = found.seconds[OWN], found.seconds[found.winner]
        rounds = f"{found.rounds} round{'s' * (found.rounds != 1)}"
        if own is None or mine is None:
            return f"{name} stays: nothing could be compared in {rounds}"
        if found.winner == OWN:
            rival = min((s for s in found.seconds[1:] if s is not None), default=None)
            against = (
                f"{units.duration(rival)} of the best of the others"
                if rival is not None
                else "no other that is left"
            )
            return f"{name} stays: {units.duration(own)} {self.of} against {against}, in {rounds}"
        return (
            f"{name} takes {units.duration(mine)} {self.of}, {self.entrants[OWN]} {units.duration(own)}: "
            f"{found.gain:.2f}x (noise {found.noise:.1%}, {rounds})"
        )


class Entrant(msgspec.Struct, eq=False):
    """One who may carry; DeepSpeed's own code has no `spec`, and never a delivery."""

    spec: Spec | None
    delivery: Delivery | None = None
    checks: Checks | None = None
    why_not: str | None = None
    """Why it carries no more."""

    @property
    def name(self) -> str:
        """In words."""
        return in_words(self.spec)


class Once:
    """Without confirmation: the path, but for one accumulation of DeepSpeed's own code after the self-check."""

    exploring = False
    switches = 0
    holder = 1

    def __init__(self, *, beside: bool) -> None:
        """`beside`: whether there is that one accumulation."""
        self._beside, self._own_turn = beside, False

    @property
    def carrier(self) -> int:
        """Of the next accumulation."""
        return OWN if self._own_turn else 1

    @property
    def needed(self) -> frozenset[int]:
        """The path stays."""
        return frozenset({1})

    def leave(self, entrant: int) -> None:
        """Then there is nobody left."""
        del entrant

    def over(self, seconds: float | None, passes: int) -> None:
        """An accumulation is over; one that is not to be compared had the self-check in it."""
        del passes
        self._own_turn = self._beside and seconds is None
        self._beside = self._beside and not self._own_turn


def schedule(entrants: Sequence[Entrant], confirm: Confirm | None, *, beside: bool) -> Once | Confirmation:
    """Who carries when: `entrants` begin with DeepSpeed's own code and the path that was chosen."""
    if confirm is None:
        return Once(beside=beside)
    return Confirmation(
        [0 if each.spec is None else pins(each.spec.path) for each in entrants],
        holder=OWN if confirm.begins_with_own else 1,
        seed=confirm.seed,
        fewest=confirm.fewest_rounds,
        most=confirm.most_rounds,
    )
