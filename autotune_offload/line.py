"""A straight line through timed transfers: latency plus bytes over bandwidth.

Hockney, Parallel Computing 20(3), 1994.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """latency + bytes / bandwidth, fitted to one curve."""

    latency_seconds: float
    bytes_per_second: float

    def seconds(self, size_bytes: float, transfers: float = 1) -> float:
        """Time for `size_bytes` in `transfers` pieces."""
        return transfers * self.latency_seconds + size_bytes / self.bytes_per_second

    def bytes_at_efficiency(self, efficiency: float) -> float:
        """Size from which a transfer reaches this share of the bandwidth."""
        return self.latency_seconds * self.bytes_per_second * efficiency / (1 - efficiency)


def fit(points: Iterable[tuple[int, float]]) -> Line:
    """The line with the least squared relative errors through (bytes, seconds).

    Raises:
        ValueError: without a point.
    """
    weighted = [(size / seconds, 1 / seconds) for size, seconds in points if seconds > 0]
    if not weighted:
        raise ValueError("no points to fit a line to")
    # minimise sum((a u + b x - 1)^2) with u = 1 / t and x = n / t
    uu, xx = sum(u * u for _, u in weighted), sum(x * x for x, _ in weighted)
    ux = sum(u * x for x, u in weighted)
    u1, x1 = sum(u for _, u in weighted), sum(x for x, _ in weighted)
    determinant = uu * xx - ux * ux
    slope = (uu * x1 - ux * u1) / determinant if determinant > 1e-12 * uu * xx else x1 / xx
    latency = (u1 - slope * ux) / uu
    if latency < 0 or slope <= 0:
        latency, slope = 0.0, x1 / xx
    return Line(latency_seconds=latency, bytes_per_second=1 / slope)
