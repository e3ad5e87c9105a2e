"""Lines through timed transfers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune_offload.line import Line, fit

SIZES = tuple(1 << power for power in range(12, 29, 4))


@given(st.floats(0, 1e-2), st.floats(1e7, 1e12))
def test_fit_recovers_latency_and_bandwidth(latency: float, rate: float) -> None:
    """From exact points, both come back; a curve without latency included."""
    line = fit([(size, latency + size / rate) for size in SIZES])
    assert line.seconds(SIZES[-1]) == pytest.approx(latency + SIZES[-1] / rate, rel=1e-6)
    assert line.seconds(SIZES[0]) == pytest.approx(latency + SIZES[0] / rate, rel=1e-6)
    assert line.bytes_per_second == pytest.approx(rate, rel=1e-2) or latency > 1e3 * SIZES[-1] / rate


@given(st.lists(st.tuples(st.integers(1, 1 << 30), st.floats(1e-8, 1e3)), min_size=1, max_size=12))
def test_fit_is_positive_and_grows_with_the_size(points: list[tuple[int, float]]) -> None:
    """Whatever was measured: no negative latency, a positive bandwidth, and more bytes take longer."""
    line = fit(points)
    assert line.latency_seconds >= 0 and line.bytes_per_second > 0
    assert 0 <= line.seconds(1) <= line.seconds(1 << 20) <= line.seconds(1 << 30)
    assert line.seconds(1 << 20) < line.seconds(1 << 20, transfers=2) or line.latency_seconds < 1e-12


def test_fit_through_one_point_takes_all_for_bandwidth() -> None:
    """There is no second point to tell latency from bandwidth."""
    line = fit([(1000, 1e-3)])
    assert line.latency_seconds == pytest.approx(0.0, abs=1e-12)
    assert line.bytes_per_second == pytest.approx(1e6)


def test_fit_without_a_point_is_an_error() -> None:
    """Points without a duration do not count either."""
    with pytest.raises(ValueError, match="no points"):
        fit([(4096, 0.0)])


def test_efficiency_is_reached_at_the_size_that_a_line_says() -> None:
    """Half of the bandwidth is reached where latency and transfer take equally long."""
    line = Line(latency_us=10.0, bandwidth_gbps=10.0)
    assert line.bytes_at_efficiency(0.5) == pytest.approx(1e5)
    size = line.bytes_at_efficiency(0.95)
    assert size / line.seconds(size) == pytest.approx(0.95e10)


def test_what_a_line_is_not_given_takes_no_time() -> None:
    """A wait has no bandwidth, a rate no latency."""
    assert Line.of(latency_seconds=1e-3).seconds(1 << 40, transfers=2) == pytest.approx(2e-3)
    assert Line.of(bytes_per_second=1e9).seconds(1_000_000, transfers=5) == pytest.approx(1e-3)
