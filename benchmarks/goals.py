"""What a benchmark is to reach, said at its end: which goal was missed, and by how much."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A number that is to lie within its limits, in one unit."""

    name: str
    found: float
    least: float | None = None
    most: float | None = None
    unit: str = ""

    @property
    def missed_by(self) -> float:
        """How far the number is outside; 0 where it is not."""
        over = 0.0 if self.most is None else self.found - self.most
        under = 0.0 if self.least is None else self.least - self.found
        return max(over, under, 0.0)

    def __str__(self) -> str:
        """In one line."""
        limits = (("at least", self.least), ("at most", self.most))
        wanted = " and ".join(f"{word} {limit:.4g}" for word, limit in limits if limit is not None)
        met = f"MISSED by {self.missed_by:.3g}{self.unit}" if self.missed_by else "ok"
        return f"goal: {self.name} {self.found:.4g}{self.unit}, {wanted}: {met}"


def judged(goals: Iterable[Goal]) -> int:
    """Print every goal, the missed ones last; the exit status, 1 where one is missed."""
    ordered = sorted(goals, key=lambda goal: goal.missed_by > 0)
    for goal in ordered:
        print(goal, flush=True)
    missed = sum(goal.missed_by > 0 for goal in ordered)
    print(
        f"{missed} of {len(ordered)} goals missed" if missed else f"all {len(ordered)} goals met", flush=True
    )
    return 1 if missed else 0
