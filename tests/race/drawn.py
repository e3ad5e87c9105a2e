"""What a seed draws for a run: paths, sizes, and whatever else is not the device's schedule."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest

from autotune_offload.engine import self_check
from autotune_offload.paths import accumulation
from tests.factories import make_choice

SIZES = (5, 40, 190)
PIECE_BYTES = 64
"""Of a gradient that is added on the host, and of a buffer of a ring: many pieces of each partition."""


class Differs(AssertionError):
    """Something is not as DeepSpeed's own code leaves it, or was done that must not be."""


class Draw:
    """What a seed draws; whatever is given beforehand is not drawn."""

    def __init__(self, seed: object, fixed: dict[str, Any]) -> None:
        self._random, self._fixed = random.Random(f"loop {seed}"), fixed

    def one(self, name: str, *choices: Any) -> Any:
        """One of these; what is given is which, or a list to draw from."""
        given = self._fixed.get(name, list(choices))
        return self._random.choice(given) if isinstance(given, list) else given

    def chance(self, name: str, probability: float) -> bool:
        """Whether it happens; what is given is whether, or how likely."""
        return bool(self._random.random() < self._fixed.get(name, probability))


def spec(draw: Draw, **fixed: Any) -> Any:
    """A path, and where it adds up."""
    drawn = {
        "path": draw.one("path", "direct", "pinned", "staged"),
        "cast": draw.one("cast", "device", "host"),
        "buffer_bytes": draw.one("buffer", PIECE_BYTES, 4 * PIECE_BYTES),
        "buffer_count": draw.one("count", 1, 2, 4),
        "host_threads": draw.one("threads", 0, 2),
        "accumulate": draw.one("place", "device", "host"),
    }
    return make_choice(**drawn | fixed)


@contextlib.contextmanager
def small() -> Iterator[None]:
    """Constants that are sized for real gradients, sized for ours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accumulation, "_PIECE_BYTES", PIECE_BYTES)
        patch.setattr(self_check, "_CHECKED_ELEMENTS", 100)
        patch.setattr(self_check, "_PIECE_ELEMENTS", 32)
        yield
