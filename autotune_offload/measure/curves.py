"""Bandwidth curves and cast rates, point by point within a deadline."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from msgspec import structs
from torch import Tensor

from autotune_offload.errors import MeasurementError
from autotune_offload.machine.device import Device
from autotune_offload.measure.arenas import Arenas, mapped_bytes, slots
from autotune_offload.measure.sampling import sample
from autotune_offload.records import (
    Cast,
    CastRate,
    Kind,
    Memory,
    Plan,
    Progress,
    State,
    Transfer,
)

_CHECK_COPIES = 6
"""What checking a point's bytes costs, in copies of its size."""


def silent(what: str, fraction: float) -> None:
    """For whoever wants to hear of no progress."""
    del what, fraction


def _expected_seconds(points: Sequence[Transfer], size: int) -> float:
    """What a copy of the next size will take: the last one's time, and the added bytes at the best rate."""
    rate = max(point.bytes / max(point.median_seconds, 1e-12) for point in points)
    return points[-1].median_seconds + (size - points[-1].bytes) / rate


# -- curves ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One curve to measure: what moves from where to where."""

    kind: Kind
    memory: Memory
    state: State
    threads: int = 0


class Session:
    """One run over all curves, which share the time that is left."""

    def __init__(
        self,
        device: Device,
        plan: Plan,
        arenas: Arenas,
        deadline: float,
        dtype: torch.dtype,
        progress: Progress,
    ) -> None:
        self.device, self.plan, self.arenas = device, plan, arenas
        self.deadline, self.dtype, self.progress = deadline, dtype, progress

    def transfers(self) -> tuple[Transfer, ...]:
        """All curves, within the deadline."""
        points: list[Transfer] = []
        curves = list(self._curves())
        for index, curve in enumerate(curves):
            words = f"{curve.kind} {curve.memory} {curve.state}"
            self.progress(words, index / (len(curves) + 1))
            # casts and the duplex points come after: one more share
            share = (self.deadline - self.device.now()) / (len(curves) - index + 1)
            points.extend(self.curve(curve, self.device.now() + share))
        points.extend(self._duplex())
        return tuple(points)

    def _curves(self) -> Iterator[Curve]:
        yield Curve(kind="d2h", memory="pageable", state="warm")
        yield Curve(kind="d2h", memory="pageable", state="cold")
        yield Curve(kind="h2d", memory="pageable", state="warm")
        if self.arenas.pinned is not None:
            yield Curve(kind="d2h", memory="pinned", state="warm")
            yield Curve(kind="h2d", memory="pinned", state="warm")
            yield Curve(kind="h2h", memory="pinned", state="warm")
        yield Curve(kind="h2h", memory="pageable", state="warm")
        yield Curve(kind="h2h", memory="pageable", state="warm", threads=1)
        yield Curve(kind="h2h", memory="pageable", state="cold")

    def curve(self, curve: Curve, deadline: float) -> tuple[Transfer, ...]:
        """The points of one curve, with the threads that it asks for."""
        with self.device.intraop(curve.threads):
            return tuple(self._points(curve, deadline))

    def _points(self, curve: Curve, deadline: float) -> Iterator[Transfer]:
        """Points of growing size, until the next one would not fit into the time that is left."""
        sizes = list(self._sizes(curve))
        points: list[Transfer] = []
        for index, size in enumerate(sizes):
            copies = self.plan.min_samples + _CHECK_COPIES
            if points and _expected_seconds(points, size) * copies > deadline - self.device.now():
                return
            if size <= self.device.checked_elements:
                self._check_bytes(curve, size)
            share = max(deadline - self.device.now(), 0) / (len(sizes) - index)
            points.append(self._point(curve, size, self.device.now() + share, warm_up=index == 0))
            yield points[-1]

    def _sizes(self, curve: Curve) -> Iterator[int]:
        room = self.arenas.size
        if curve.memory == "pinned" and self.arenas.pinned is not None:
            room = self.arenas.pinned.numel()
        size = self.plan.smallest_bytes
        while size <= min(self.plan.largest_bytes, room):
            yield size
            size *= self.plan.growth

    def _point(self, curve: Curve, size: int, deadline: float, *, warm_up: bool) -> Transfer:
        copy = self._copy_cold(curve, size) if curve.state == "cold" else self._copy_warm(curve, size)
        sampled = sample(self.device, self.plan, copy, deadline, warm_up=warm_up)
        return Transfer(
            kind=curve.kind,
            memory=curve.memory,
            state=curve.state,
            threads=curve.threads,
            bytes=size,
            median_seconds=sampled.median,
            iqr_seconds=sampled.iqr,
            samples=len(sampled.seconds),
            gbps=size / sampled.median / 1e9,
            raw_seconds=sampled.seconds,
        )

    def _ends(self, curve: Curve) -> tuple[Tensor, Tensor]:
        """Target and source arenas of a curve."""
        arenas = self.arenas
        pinned = arenas.pinned if curve.memory == "pinned" else None
        if curve.kind == "d2h":
            return (arenas.target if pinned is None else pinned), arenas.device
        target = arenas.device if curve.kind == "h2d" else arenas.target
        return target, (arenas.source if pinned is None else pinned)

    def _copy_warm(self, curve: Curve, size: int) -> Callable[[int], float]:
        pairs = slots(size, *self._ends(curve))
        return lambda count: self._timed(curve, list(itertools.islice(pairs, count)))

    def _copy_cold(self, curve: Curve, size: int) -> Callable[[int], float]:
        """The destination's pages are new each time; mapping and unmapping them is not timed.

        Those that are alive at once fill no more than one arena.
        """
        pairs = slots(size, *self._ends(curve))
        most = max(self.arenas.size // mapped_bytes(size), 1)

        def batch(count: int) -> float:
            sources = [source for _, source in itertools.islice(pairs, count)]
            fresh = [self.device.host_empty(size, torch.uint8, touched=False) for _ in sources]
            return self._timed(curve, list(zip(fresh, sources, strict=True)))

        return lambda count: sum(batch(min(most, count - done)) for done in range(0, count, most))

    def _timed(self, curve: Curve, pairs: Sequence[tuple[Tensor, ...]]) -> float:
        """Seconds for the copies of all pairs, (target, source); asynchronous ones are waited for once."""
        device, pinned = self.device, curve.memory == "pinned"
        if curve.kind == "h2h":
            before = device.now()
            for target, source in pairs:
                device.h2h(target, source)
            return device.now() - before
        copy = device.d2h if curve.kind == "d2h" else device.h2d
        before = device.now()
        for target, source in pairs:
            copy(target, source, non_blocking=pinned)
        device.record_event().synchronize()
        return device.now() - before

    def _check_bytes(self, curve: Curve, size: int) -> None:
        """One copy over other bytes, compared with what was sent; a cold one into new pages."""
        expected = self.arenas.source[:size]
        target, source = (arena[:size] for arena in self._ends(curve))
        if curve.state == "cold":
            target = self.device.host_empty(size, torch.uint8, touched=False)
        else:
            target.fill_(0x5A)
        self._timed(curve, [(target, source)])
        seen = target
        if curve.kind == "h2d":
            seen = self.arenas.target[:size].fill_(0xA5)
            self.device.d2h(seen, target)
        if not torch.equal(seen, expected):
            wrong = int((seen != expected).sum())
            raise MeasurementError(
                f"{curve.kind} {curve.memory} {curve.state} of {size:,} bytes: {wrong:,} bytes differ from "
                "what was sent; do not train on this device before its driver and memory are checked"
            )

    # -- both directions, casts --

    def _duplex(self) -> list[Transfer]:
        """d2h while h2d runs, at one large size: on two streams, or in two threads where there are none."""
        memory: Memory = "pageable" if self.arenas.pinned is None else "pinned"
        host = self.arenas.target if self.arenas.pinned is None else self.arenas.pinned
        size = min(16 << 20, self.plan.largest_bytes, host.numel() // 2, self.arenas.size // 2)
        if size < self.plan.smallest_bytes:
            return []
        self.progress("both directions at once", 0.95)
        down = (host[:size], self.arenas.device[:size])
        up = (self.arenas.device[size : 2 * size], host[size : 2 * size])
        share = (self.deadline - self.device.now()) / 2
        with self._both(down, up, non_blocking=memory == "pinned") as run:
            sampled = sample(self.device, self.plan, run, self.device.now() + max(share, 0), warm_up=False)
        one = Transfer(
            kind="d2h",
            memory=memory,
            state="warm",
            bytes=size,
            median_seconds=sampled.median,
            iqr_seconds=sampled.iqr,
            samples=len(sampled.seconds),
            gbps=size / sampled.median / 1e9,
            duplex=True,
            raw_seconds=sampled.seconds,
        )
        return [one, structs.replace(one, kind="h2d")]

    @contextlib.contextmanager
    def _both(
        self, down: tuple[Tensor, Tensor], up: tuple[Tensor, Tensor], *, non_blocking: bool
    ) -> Iterator[Callable[[int], float]]:
        device = self.device
        streams = device.new_stream(), device.new_stream()
        with device.own_threads(2) or ThreadPoolExecutor(2) as pool:

            def one_way(stream_index: int, pairs: tuple[Tensor, Tensor]) -> None:
                copy = device.h2d if stream_index else device.d2h
                with device.on(streams[stream_index]):
                    copy(*pairs, non_blocking=non_blocking)
                    device.record_event().synchronize()

            def run(count: int) -> float:
                before = device.now()
                for _ in range(count):
                    for future in [pool.submit(one_way, 0, down), pool.submit(one_way, 1, up)]:
                        future.result()
                return device.now() - before

            yield run

    def casts(self) -> tuple[CastRate, ...]:
        """Low precision to fp32: on the device, and on the host by torch's threads and by one."""
        self.progress("casts", 0.97)
        if self.dtype == torch.float32:
            return ()
        cases: tuple[tuple[Cast, int], ...] = (("device", 0), ("host", 0), ("host", 1))
        rates = []
        for index, (where, threads) in enumerate(cases):
            share = (self.deadline - self.device.now()) / (len(cases) - index)
            with self.device.intraop(threads):
                rates.append(self._cast(where, threads, self.device.now() + max(share, 0)))
        return tuple(rates)

    def _cast(self, where: Cast, threads: int, deadline: float) -> CastRate:
        device, arenas = self.device, self.arenas
        size = min(16 << 20, arenas.size // 2)
        low_bytes = size * self.dtype.itemsize // 4
        target, source = arenas.target, arenas.source
        if where == "device":
            target, source = arenas.device[arenas.size // 2 :], arenas.device[: arenas.size // 2]
        targets, sources = slots(size, target), slots(low_bytes, source)
        copy = device.cast if where == "device" else device.h2h

        def run(count: int) -> float:
            pairs = [
                (target.view(torch.float32), source.view(self.dtype))
                for (target,), (source,) in zip(
                    itertools.islice(targets, count), itertools.islice(sources, count), strict=True
                )
            ]
            before = device.now()
            for target, source in pairs:
                copy(target, source)
            if where == "device":
                device.record_event().synchronize()
            return device.now() - before

        sampled = sample(self.device, self.plan, run, deadline, warm_up=True)
        return CastRate(
            where=where,
            dtype=str(self.dtype).removeprefix("torch."),
            bytes=size,
            median_seconds=sampled.median,
            iqr_seconds=sampled.iqr,
            samples=len(sampled.seconds),
            gbps=size / sampled.median / 1e9,
            threads=threads,
            raw_seconds=sampled.seconds,
        )
