"""How far timings scatter, and which differences they can tell: the one notion of noise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def interquartile_range(seconds: Sequence[float]) -> float:
    """Distance between the quartiles; 0 for fewer than two samples."""
    if len(seconds) < 2:
        return 0.0
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return high - low
