"""What the measured curves say: a line for each kind of copy, a rate for each cast.

Every transfer is latency plus bytes over bandwidth (Hockney, Parallel Computing 20(3), 1994).
"""

from __future__ import annotations

from collections.abc import Sequence

from autotune_offload.line import Line, fit
from autotune_offload.records import Cast, Kind, Measurements, Memory, State, SyncCost, Transfer

_OPPOSITE: dict[Kind, Kind] = {"d2h": "h2d", "h2d": "d2h", "h2h": "h2h"}


class Rates:
    """Lines and rates of one host and device, whose memory may be the host's."""

    def __init__(self, measurements: Measurements, *, shares_host_memory: bool) -> None:
        """Fits nothing before it is asked for."""
        self._measurements = measurements
        self.shares_host_memory = shares_host_memory

    @property
    def sync(self) -> SyncCost:
        """What a synchronize costs."""
        return self._measurements.sync

    def line(self, kind: Kind, memory: Memory, state: State = "warm", threads: int = 0) -> Line:
        """The fitted curve; one that was not measured, or at one size only, is replaced by its nearest relative."""
        relatives: tuple[tuple[Kind, Memory, State, int], ...] = (
            (kind, memory, state, threads),
            (kind, memory, "warm", 0),
            (_OPPOSITE[kind], memory, "warm", 0),
            (kind, "pageable", "warm", 0),
            ("d2h", "pageable", "warm", 0),
        )
        curves = [points for relative in relatives if (points := self._points(*relative))]
        curve = next((points for points in curves if len(points) > 1), None)
        if (
            curve is None
        ):  # what copies reach while the other direction is busy tells more than a latency alone
            memories: tuple[Memory, ...] = (memory, "pinned")
            both_ways = next(
                filter(None, (self._points(kind, m, "warm", 0, duplex=True) for m in memories)), ()
            )
            curve = [*(curves[0] if curves else ()), *both_ways]
        return fit((point.bytes, point.median_seconds) for point in curve)

    def measured(self, kind: Kind, memory: Memory) -> bool:
        """Whether this warm curve was measured, and `line` is not a relative's."""
        return bool(self._points(kind, memory, "warm", 0))

    def _points(
        self, kind: Kind, memory: Memory, state: State, threads: int, *, duplex: bool = False
    ) -> Sequence[Transfer]:
        wanted = (kind, memory, state, threads, duplex)
        return [
            t
            for t in self._measurements.transfers
            if (t.kind, t.memory, t.state, t.threads, t.duplex) == wanted
        ]

    def cast_rate(self, where: Cast, threads: int = 0) -> float:
        """fp32 bytes a second; `threads` of a path's own add up until torch's pool's rate is reached."""
        rates = {(c.where, c.threads): c.gbps * 1e9 for c in self._measurements.casts}
        if not rates:
            return self.line("h2h", "pageable").bytes_per_second
        pool = rates.get((where, 0), max(rates.values()))
        if threads == 0 or where == "device":
            return pool
        single = rates.get((where, 1), pool)
        return min(threads * single, max(pool, single))

    def copy_rate(self, threads: int) -> float:
        """h2h bytes a second with this many host threads, as for casts."""
        pool = self.line("h2h", "pageable").bytes_per_second
        if threads == 0:
            return pool
        single = self.line("h2h", "pageable", threads=1).bytes_per_second
        return min(threads * single, max(pool, single))
