"""Who carries the gradients of one optimizer now, who is next, and whose buffers exist."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from autotune_offload import units
from autotune_offload.engine.confirmation import Conclusion
from autotune_offload.engine.delivery import Delivery
from autotune_offload.engine.entrants import (
    Confirm,
    Confirmed,
    Entrant,
    Tell,
    Told,
    Wrong,
    in_words,
    schedule,
)
from autotune_offload.engine.norms import Norms
from autotune_offload.engine.rounds import OWN
from autotune_offload.engine.self_check import Carrier, Checks
from autotune_offload.engine.stage3 import Stage3
from autotune_offload.errors import in_words as error_in_words
from autotune_offload.machine.device import Device
from autotune_offload.paths.path import Spec
from autotune_offload.ranks import group

_log = logging.getLogger("autotune_offload")


class Contest:
    """DeepSpeed's own code and one path or more, of which one carries at a time.

    Args:
        stage3: the optimizer.
        device: where gradients are reduced.
        norms: of this optimizer.
        choice: the path that was chosen.
        confirm: what to try beside it; None confirms nothing.
        failed: is told whose path has failed, and with what.
        tell: is told what is to be kept for the next start.
        checks: what compares paths with DeepSpeed's own code; None compares nothing.
    """

    def __init__(
        self,
        stage3: Stage3,
        device: Device,
        norms: Norms,
        choice: Spec,
        confirm: Confirm | None,
        failed: Callable[[Entrant, BaseException], None],
        *,
        tell: Tell | None,
        checks: Carrier | None,
    ) -> None:
        """Builds every path; raises what `paths.build` does for `choice`, and leaves others out that cannot be."""
        self.confirmed: Confirmed | None = None
        self.wrong: list[Wrong] = []
        self._stage3, self._device, self._norms, self._failed = stage3, device, norms, failed
        self._tell_of_it = tell
        self.entrants = [Entrant(spec) for spec in (None, choice, *(confirm.others if confirm else ()))]
        for entrant in self.entrants[1:]:
            entrant.checks = None if checks is None else Checks(checks)
        self._schedule = schedule(self.entrants, confirm, beside=checks is not None)
        self._build(self.entrants[1])
        self._furnish()
        self.present = self.entrants[self._schedule.carrier]

    @property
    def own(self) -> Entrant:
        """DeepSpeed's own code."""
        return self.entrants[OWN]

    @property
    def able(self) -> list[Entrant]:
        """The paths that can still carry."""
        return [each for each in self.entrants if each.delivery is not None and each.why_not is None]

    @property
    def carriers(self) -> tuple[str, ...]:
        """Those that take turns, or who carries, in words."""
        if not self._schedule.exploring:
            return (self.entrants[self._schedule.holder].name,)
        return tuple(each.name for each in [self.own, *self.able])

    @property
    def left_out(self) -> tuple[tuple[str, str], ...]:
        """Those that carry no more, in words, each with the reason."""
        return tuple((each.name, each.why_not) for each in self.entrants if each.why_not is not None)

    @property
    def pinned_bytes(self) -> dict[str, int]:
        """What is page-locked for all of them now, by what it is for."""
        found: dict[str, int] = {}
        for each in self.entrants:
            for name, count in (each.delivery.pinned_bytes if each.delivery is not None else {}).items():
                found[name] = found.get(name, 0) + count
        return found

    @property
    def gain(self) -> float | None:
        """DeepSpeed's own time over that of whoever was committed to; None before."""
        return None if self.confirmed is None else self.confirmed.conclusion.gain

    @property
    def switches(self) -> int:
        """How often another was committed to than had carried before."""
        return self._schedule.switches

    def leave(self, entrant: Entrant, cause: str) -> bool:
        """It carries no more, and DeepSpeed's own code does in its place; False where no path is left."""
        entrant.why_not = cause
        self._schedule.leave(self.entrants.index(entrant))
        if not self.able:
            return False
        if self.present is entrant:
            self.present = self.own
        _give_back(entrant)
        return True

    def found_wrong(self, entrant: Entrant, why: str) -> None:
        """Not to be tried at the next start either."""
        self.wrong.append(Wrong(spec=entrant.spec, kind="differs", why=why))
        self._tell(None)

    def turn(self, seconds: float | None, passes: int) -> None:
        """An accumulation is over and everything has arrived: whoever's turn it is carries the next."""
        concluded = self._schedule.over(seconds, passes)
        self._furnish()
        self.present = self.entrants[self._schedule.carrier]
        for number, entrant in enumerate(self.entrants):
            if number not in self._schedule.needed:
                _give_back(entrant)
        if concluded is not None:
            self._conclude(concluded)

    def end(self) -> None:
        """Deliver what is under way, and give all buffers back."""
        for entrant in self.entrants:
            if entrant.delivery is not None:
                entrant.delivery.end()
            entrant.checks = None

    # -- buffers --

    def _build(self, entrant: Entrant) -> None:
        if entrant.spec is not None and entrant.delivery is None:
            failed = functools.partial(self._failed, entrant)
            entrant.delivery = Delivery(self._stage3, self._device, entrant.spec, failed, self._norms)

    def _furnish(self) -> None:
        """Buffers for whoever needs them; who gets none takes no part."""
        for number, entrant in enumerate(self.entrants):
            if number not in self._schedule.needed or entrant.why_not is not None:
                continue
            try:
                self._build(entrant)
            except Exception as error:  # most likely no memory
                entrant.why_not = f"it cannot be built: {error_in_words(error)}"
                self._schedule.leave(number)

    # -- what came of it --

    def _conclude(self, concluded: Conclusion) -> None:
        names = tuple(each.name for each in self.entrants)
        self.confirmed = Confirmed(entrants=names, conclusion=concluded)
        said = self.confirmed.sentence()
        if concluded.drifted is not None:
            before, after = map(units.duration, concluded.drifted)
            said = f"an accumulation took {after}, {before} when it was confirmed; {said}"
        loud = concluded.changed and group.present_rank() == 0
        _log.log(logging.WARNING if loud else logging.INFO, "autotune-offload: %s", said)
        best = concluded.seconds[concluded.winner]
        for number in concluded.behind:
            seconds = concluded.seconds[number]
            if (
                concluded.drifted is None
                and seconds is not None
                and best is not None
                and number != concluded.winner
            ):
                why = f"{units.duration(seconds)} an accumulation, {seconds / best:.2f} times as long as the fastest"
                self.wrong.append(Wrong(spec=self.entrants[number].spec, kind="slower", why=why))
        self._tell(concluded)

    def _tell(self, concluded: Conclusion | None) -> None:
        if self._tell_of_it is None:
            return
        holder = self.entrants[self._schedule.holder]
        words = in_words(holder.spec) if self.confirmed is None else self.confirmed.sentence()
        told = Told(winner=holder.spec, conclusion=concluded, words=words, wrong=tuple(self.wrong))
        try:
            self._tell_of_it(told)
        except Exception:  # the next start finds it out again
            _log.debug("autotune-offload: what was found could not be kept", exc_info=True)


def _give_back(entrant: Entrant) -> None:
    delivery, entrant.delivery = entrant.delivery, None
    if delivery is not None:
        delivery.end()
