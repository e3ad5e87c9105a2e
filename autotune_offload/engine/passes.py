"""What kinds of backward passes there were since the last step: each is compared once."""

from __future__ import annotations

from typing import Any

from autotune_offload.engine import stage3
from autotune_offload.paths.accumulation import Moment
from autotune_offload.records import Record


class Kind(Record, frozen=True, kw_only=True):
    """What tells how a gradient at an accumulation boundary is moved from how others are."""

    adds: bool
    """To what the accumulation buffer holds."""
    met_before: bool
    """The partition was reduced in this backward pass already."""
    ended_before: bool
    """A backward pass has ended this accumulation already."""
    accumulation_steps: int
    boundary_by_hand: bool


class Passes:
    """Follows one engine's backward passes."""

    def __init__(self) -> None:
        """Before the first."""
        self._met: set[int] = set()
        self._at_boundary = self._ended = False

    def kind(self, engine: Any, param: Any, moment: Moment) -> Kind:
        """Of this partition now."""
        return Kind(
            adds=not moment.first,
            met_before=param.ds_id in self._met,
            ended_before=self._ended,
            accumulation_steps=stage3.accumulation_steps(engine),
            boundary_by_hand=stage3.boundary_by_hand(engine),
        )

    def met(self, param: Any, moment: Moment) -> None:
        """A partition was reduced."""
        self._met.add(param.ds_id)
        self._at_boundary = moment.boundary

    def passed(self) -> None:
        """A backward pass has come to its epilogue."""
        self._met.clear()
        self._ended, self._at_boundary = self._ended or self._at_boundary, False

    def stepped(self) -> None:
        """The optimizer takes its step."""
        self._met.clear()
        self._ended = self._at_boundary = False
