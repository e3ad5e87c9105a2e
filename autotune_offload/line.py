"""A straight line through timed transfers: latency plus bytes over bandwidth.

Hockney, Parallel Computing 20(3), 1994.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

Positive = Annotated[float, Meta(gt=0)]
Least0 = Annotated[float, Meta(ge=0)]


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Latency and bandwidth of one kind of transfer, in the units that machine files have."""

    latency_us: Least0
    bandwidth_gbps: Positive

    @classmethod
    def of(cls, *, latency_seconds: float = 0.0, bytes_per_second: float = math.inf) -> Line:
        """The line of these; what is left out takes no time."""
        return Line(latency_us=latency_seconds * 1e6, bandwidth_gbps=bytes_per_second / 1e9)

    @property
    def latency_seconds(self) -> float:
        """What a transfer of nothing takes."""
        return self.latency_us * 1e-6

    @property
    def bytes_per_second(self) -> float:
        """What a transfer without end reaches."""
        return self.bandwidth_gbps * 1e9

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
    return Line.of(latency_seconds=latency, bytes_per_second=1 / slope)
