"""What each way of offloading should cost, from the measured curves.

Every transfer is latency plus bytes over bandwidth (Hockney, Parallel Computing 20(3), 1994). The
model only orders candidates and prunes; trials decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune_offload.line import Line, fit
from autotune_offload.records import Cast, Kind, Measurements, Memory, Path, State, Transfer, Workload
from autotune_offload.workload import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """A path's time by who spends it, over the whole workload.

    `device_seconds` on the device's stream, `host_seconds` in host threads. `waits` says that the
    calling thread waits for the stream; `apart` that the host's part runs in threads of its own;
    `rest_seconds` is what is left after the last gradient is there, even if all else hides.
    """

    device_seconds: float
    host_seconds: float
    waits: bool
    apart: bool
    rest_seconds: float


class CostModel:
    """Predicts the time that offloading a workload adds to one backward pass.

    Args:
        measurements: curves and costs of the host.
        workload: what is offloaded.
        shares_host_memory: device memory is host memory.
        synchronous: nothing runs beside the calling thread.
        compute_seconds: device compute of one backward that copies can hide behind.
    """

    def __init__(
        self,
        measurements: Measurements,
        workload: Workload,
        *,
        shares_host_memory: bool,
        synchronous: bool,
        compute_seconds: float = 0.0,
    ) -> None:
        """Fits a line to each curve."""
        self.measurements, self.workload = measurements, workload
        self.shares_host_memory, self.synchronous = shares_host_memory, synchronous
        self.compute_seconds = compute_seconds
        self.low_bytes = DTYPE_BYTES[workload.dtype]

    def line(self, kind: Kind, memory: Memory, state: State = "warm", threads: int = 0) -> Line:
        """The fitted curve; a curve that was not measured is replaced by its nearest relative."""
        points = self._points(kind, memory, state, threads)
        for relative in (
            (kind, memory, "warm", 0),
            (kind, "pageable", "warm", 0),
            ("d2h", "pageable", "warm", 0),
        ):
            points = points or self._points(*relative)
        return fit((point.bytes, point.median_seconds) for point in points)

    def measured(self, kind: Kind, memory: Memory) -> bool:
        """Whether this warm curve was measured, and `line` is not a relative's."""
        return bool(self._points(kind, memory, "warm", 0))

    def _points(self, kind: Kind, memory: Memory, state: State, threads: int) -> Sequence[Transfer]:
        wanted = (kind, memory, state, threads, False)
        return [
            t
            for t in self.measurements.transfers
            if (t.kind, t.memory, t.state, t.threads, t.duplex) == wanted
        ]

    def cast_rate(self, where: Cast, threads: int = 0) -> float:
        """fp32 bytes a second; `threads` of a path's own add up until torch's pool's rate is reached."""
        rates = {(c.where, c.threads): c.gbps * 1e9 for c in self.measurements.casts}
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

    # -- predictions --

    def path_seconds(
        self, path: Path, cast: Cast, buffer_bytes: int, buffer_count: int, host_threads: int
    ) -> float:
        """One of our paths."""
        if path == "staged":
            return self._added(self._staged(cast, buffer_bytes, buffer_count, host_threads))
        return self._added(self._destination(path, cast, buffer_bytes, host_threads))

    def stock_seconds(self, name: str, memory: Memory) -> float:
        """One of DeepSpeed's own sequences (see `paths.STOCK_SEQUENCES`)."""
        return self._added(self._stock(name, memory))

    def _added(self, parts: _Parts) -> float:
        both = parts.device_seconds + parts.host_seconds
        busy = max(parts.device_seconds, parts.host_seconds) if parts.apart else both
        if self.synchronous:
            return both
        if parts.waits:
            return max(busy, parts.rest_seconds)
        if parts.apart:
            return max(busy - self.compute_seconds, parts.rest_seconds)
        return max(parts.device_seconds - self.compute_seconds, parts.rest_seconds) + parts.host_seconds

    @property
    def _fp32_bytes(self) -> int:
        return 4 * self.workload.elements

    @property
    def _partitions(self) -> int:
        return sum(count for _, count in self.workload.partitions)

    def _pieces(self, buffer_elements: int) -> int:
        return sum(-(-size // buffer_elements) * count for size, count in self.workload.partitions)

    def _destination(self, path: Path, cast: Cast, buffer_bytes: int, threads: int) -> _Parts:
        memory: Memory = "pinned" if path == "pinned" else "pageable"
        link, fp32 = self.line("d2h", memory), self._fp32_bytes
        host = 0.0
        if self.low_bytes == 4:
            stream = link.seconds(fp32, self._partitions)
        elif cast == "device":
            pieces = self._pieces(buffer_bytes // 4)
            stream = link.seconds(fp32, 2 * pieces) + fp32 / self.cast_rate("device")
        elif self.shares_host_memory:  # one fused pass in each thread, the caller's or the path's own
            stream = self._partitions * link.latency_seconds + fp32 / self.cast_rate("host", max(threads, 1))
        else:
            stream = link.seconds(fp32 * self.low_bytes / 4, self._partitions)
            host = fp32 / self.cast_rate("host", threads)
        return _Parts(
            device_seconds=stream,
            host_seconds=host,
            waits=path == "direct",
            apart=threads > 0 or host == 0,
            rest_seconds=(stream + host) * self.workload.largest_elements / self.workload.elements,
        )

    def _staged(self, cast: Cast, buffer_bytes: int, buffer_count: int, threads: int) -> _Parts:
        link, fp32 = self.line("d2h", "pinned"), self._fp32_bytes
        on_device = cast == "device" and self.low_bytes < 4
        link_bytes = fp32 if on_device or self.low_bytes == 4 else fp32 * self.low_bytes / 4
        pieces = self._pieces(buffer_bytes // (4 if on_device else self.low_bytes))
        stream = link.seconds(link_bytes, pieces) + (fp32 / self.cast_rate("device") if on_device else 0)
        emptying = (
            self.copy_rate(threads) if on_device or self.low_bytes == 4 else self.cast_rate("host", threads)
        )
        host = fp32 / emptying + pieces * self.measurements.sync.event_seconds
        fill = buffer_bytes / link.bytes_per_second + buffer_bytes / emptying
        if threads or self.synchronous:
            return _Parts(
                device_seconds=stream, host_seconds=host, waits=False, apart=True, rest_seconds=fill
            )
        # the calling thread empties buffers while the device fills the others; one buffer cannot overlap
        both = stream + host if buffer_count == 1 else max(stream, host)
        return _Parts(device_seconds=both, host_seconds=fill, waits=True, apart=False, rest_seconds=fill)

    def _stock(self, name: str, memory: Memory) -> _Parts:
        fp32, count = self._fp32_bytes, self._partitions
        # fresh temporaries: on the CPU their pages are touched for the first time
        fresh = self.cast_rate("device")
        if self.shares_host_memory:
            fresh = min(fresh, self.line("h2h", "pageable", "cold").bytes_per_second)
        norm = 2 * fp32 / fresh if self.shares_host_memory else 0.0  # in fp64; on a device next to nothing
        upcast = norm + (fp32 / fresh if self.low_bytes < 4 else 0.0)
        link, host, waits = self.line("d2h", memory), 0.0, True
        if name == "implicit_upcast" and self.low_bytes < 4:
            if self.shares_host_memory:
                stream = norm + count * link.latency_seconds + fp32 / self.cast_rate("host")
            else:
                stream = self.line("d2h", "pageable", "cold").seconds(fp32 * self.low_bytes / 4, count)
                host = fp32 / self.cast_rate("host")
        elif name == "bounce_buffer":
            stream = upcast + self.line("d2h", "pinned").seconds(fp32, count)
            host = (
                self.line("h2h", "pageable").seconds(fp32, count)
                + count * self.measurements.sync.device_seconds
            )
        else:
            stream = upcast + link.seconds(fp32, count)
            waits = memory == "pageable" or name != "explicit_upcast_non_blocking"
        rest = stream * self.workload.largest_elements / self.workload.elements
        return _Parts(
            device_seconds=stream, host_seconds=host, waits=waits, apart=host == 0, rest_seconds=rest
        )
