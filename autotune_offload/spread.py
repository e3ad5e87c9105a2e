"""How far timings scatter, and which differences they can tell: the one notion of noise.

A series is told by its median; its spread is the interquartile range over it. Two things are compared by the ratios
of their times in the rounds that both ran. The noise of such a comparison is half the interval that holds the true
median of the ratios with 95 %, by order statistics: it assumes nothing about how the times are distributed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
FEWEST = 6
"""Below this no interval reaches `CONFIDENCE`: with 5 values even the whole range holds 93.75 %, with 3 75 %."""

TIE = 0.02
"""Two medians closer than 2 % are never told apart, however small the spread in one process."""

SEEN_FROM = 3
"""Rounds together from which noise can be seen."""

UNSEEN = 0.25
"""Taken for it in fewer."""

_SHORTEST = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Two values of a series that have its true median between them with at least this confidence."""

    low: float
    high: float
    confidence: float


def interquartile_range(values: Sequence[float]) -> float:
    """Distance between the quartiles; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def spread(values: Sequence[float]) -> float:
    """The interquartile range as a part of the median."""
    return interquartile_range(values) / max(statistics.median(values), _SHORTEST)


def interval_of_median(values: Sequence[float]) -> Interval:
    """The narrowest interval of the median that holds it with `CONFIDENCE`; of too few values, their whole range.

    The number of values below the true median is binomial with 1/2, so dropping k at each end leaves
    out the median with probability 2 P(X <= k). See David and Nagaraja, Order Statistics, 7.1.
    """
    count, ordered = len(values), sorted(values)
    outside, miss = 0, 2.0 ** (1 - count)
    while (wider := miss + 2.0 ** (1 - count) * math.comb(count, outside + 1)) <= 1 - CONFIDENCE:
        outside, miss = outside + 1, wider
    return Interval(low=ordered[outside], high=ordered[-1 - outside], confidence=1 - miss)


def noise(ratios: Sequence[float]) -> float:
    """Half the interval of their median, as a part of it: differences below that are not told apart."""
    interval = interval_of_median(ratios)
    return (interval.high - interval.low) / 2 / max(statistics.median(ratios), _SHORTEST)
