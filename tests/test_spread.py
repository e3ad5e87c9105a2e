"""Tests of `autotune_offload.spread`: the interval of a median, and what it can tell apart."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune_offload import spread
from autotune_offload.spread import CONFIDENCE, FEWEST, interval_of_median

values = st.floats(min_value=1e-6, max_value=1e3)


@pytest.mark.parametrize(
    ("count", "outside", "confidence"), [(6, 0, 0.96875), (10, 1, 0.97852), (20, 5, 0.95861)]
)
def test_interval_of_the_median_matches_published_tables(count: int, outside: int, confidence: float) -> None:
    """The ranks and confidence are those of the sign test's tables."""
    found = interval_of_median(range(count))
    assert (found.low, found.high) == (outside, count - 1 - outside)
    assert found.confidence == pytest.approx(confidence, abs=1e-5)


@given(st.integers(min_value=FEWEST, max_value=500))
def test_interval_holds_its_confidence_and_is_the_narrowest_that_does(count: int) -> None:
    """One value more at each end left out would fall below 95 %."""
    found = interval_of_median(range(count))
    outside = int(found.low)
    exact = 1 - 2 * sum(math.comb(count, k) for k in range(outside + 1)) / 2**count
    narrower = exact - 2 * math.comb(count, outside + 1) / 2**count
    assert found.confidence == pytest.approx(exact)
    assert narrower < CONFIDENCE <= found.confidence


@pytest.mark.parametrize(("count", "confidence"), [(1, 0.0), (2, 0.5), (3, 0.75), (FEWEST - 1, 0.9375)])
def test_of_too_few_values_the_range_is_all_there_is(count: int, confidence: float) -> None:
    """It holds the median with less than 95 %, and says with how much."""
    found = interval_of_median([5.0, 3.0, 4.0, 2.0, 6.0][:count])
    assert (found.low, found.high) == (min([5, 3, 4, 2, 6][:count]), max([5, 3, 4, 2, 6][:count]))
    assert found.confidence == confidence < CONFIDENCE


@given(st.lists(values, min_size=1, max_size=40))
def test_noise_is_half_the_interval_over_the_median(series: list[float]) -> None:
    """Equal values have none, and the unit does not matter."""
    found = interval_of_median(series)
    assert found.low <= statistics.median(series) <= found.high
    assert spread.noise([series[0]] * len(series)) == 0
    assert spread.noise([4 * value for value in series]) == pytest.approx(spread.noise(series))


def test_the_interval_covers_the_true_median_as_often_as_it_says() -> None:
    """Over 2,000 drawn series of skewed, long-tailed times, at each length."""
    drawn = random.Random(0)
    for count in (3, 6, 10, 25):
        held = 0
        for _ in range(2000):
            found = interval_of_median([drawn.lognormvariate(0.0, 1.0) for _ in range(count)])
            held += found.low <= 1.0 <= found.high
        assert held / 2000 == pytest.approx(found.confidence, abs=0.02)


@given(st.lists(values, min_size=2, max_size=40))
def test_spread_is_the_interquartile_range_over_the_median(series: list[float]) -> None:
    """One value has none."""
    low, median, high = statistics.quantiles(series, n=4, method="inclusive")
    assert spread.spread(series) == pytest.approx((high - low) / median)
    assert spread.spread(series[:1]) == 0
