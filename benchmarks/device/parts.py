"""The parts in their order, and how they share the time."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from benchmarks.device.scene import Scene


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part: `module` has its `run`, and `weight` is its share of the time beside the others'."""

    name: str
    title: str
    weight: float

    def run(self, scene: Scene) -> None:
        """In the calling process."""
        module = importlib.import_module(f"benchmarks.device.{self.name}")
        cast("Callable[[Scene], None]", module.run)(scene)


PARTS = (
    Part(name="here", title="What is here", weight=30),
    Part(name="build", title="What is compiled first", weight=160),
    Part(name="probes", title="The probe, and whether its choice flips", weight=75),
    Part(name="copies", title="Copies against a plain loop and the link", weight=30),
    Part(name="sweep", title="The choice against an exhaustive sweep", weight=50),
    Part(name="training", title="Gradients and steps in real training", weight=130),
    Part(name="profiled", title="Bytes over the link, and what of the copies is hidden", weight=60),
    Part(name="identity", title="The same bits, with streams held up", weight=150),
    Part(name="memory", title="Page-locked and device memory", weight=45),
    Part(name="described", title="The machine description, and how far its predictions are", weight=30),
)
"""`build` comes early, since a compiler beside a measurement would be in its numbers, and seldom takes long twice."""


_TRAINING = frozenset({"training", "profiled", "identity", "memory"})


def asked_for(names: Sequence[str]) -> tuple[Part, ...]:
    """Those of these names, with what they go by: the device, and for training what has to be compiled."""
    needed = {"here", *names} | ({"build"} if _TRAINING & {*names} else set())
    return tuple(part for part in PARTS if part.name in needed)


def named(name: str) -> Part:
    """The part of that name."""
    return next(part for part in PARTS if part.name == name)


def limit_seconds(left_seconds: float, parts: Sequence[Part]) -> float:
    """For the first of `parts`, which are all that are still to come: its share of what is left.

    So what earlier parts have not used goes to all later ones.
    """
    return left_seconds * parts[0].weight / sum(part.weight for part in parts)
