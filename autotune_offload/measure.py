"""Timing loops over a Device: bandwidth curves, casts, synchronize and pin costs.

Every number is a median over samples that are kept, with their interquartile range. Buffers rotate
through an arena larger than the last-level cache, and the bytes of each point are checked.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from autotune_offload.device import Device
from autotune_offload.errors import BudgetError, MeasurementError, PinError
from autotune_offload.records import (
    Cast,
    CastRate,
    Kind,
    Measurements,
    Memory,
    PinCost,
    Plan,
    State,
    SyncCost,
    Transfer,
)

Progress = Callable[[str, float], None]
"""Called with what is being measured and how much of the whole is done, 0 to 1."""

_SAMPLE_SECONDS = 50e-6
"""Short operations are repeated until one sample lasts this long: the timer itself costs about 0.1 us."""

_ARENA_SHARE = 0.2
"""Of the measuring time at most for making the buffers."""

_STEADY_SPREAD = 0.10
"""IQR over median up to which a point counts as steady in the verdict (pyperf warns at the same 10 %)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Samples of one timed operation, in seconds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Middle of the samples."""
        return statistics.median(self.seconds)

    @property
    def iqr(self) -> float:
        """Distance between the quartiles; 0 for a single sample."""
        return interquartile_range(self.seconds)


def interquartile_range(seconds: Sequence[float]) -> float:
    """Distance between the quartiles; 0 for fewer than two samples."""
    if len(seconds) < 2:
        return 0.0
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return high - low


def measure(
    device: Device,
    plan: Plan,
    *,
    dtype: torch.dtype,
    cache_bytes: int,
    memory_bytes: int,
    pinnable_bytes: int,
    progress: Progress | None = None,
) -> Measurements:
    """Measure one device and the host beside it within the plan's share of its budget.

    Args:
        device: what to measure; it must be the current one.
        plan: sizes, samples and seconds.
        dtype: low-precision dtype of the casts.
        cache_bytes: last-level cache that buffers rotate beyond.
        memory_bytes: host memory that the buffers may take altogether.
        pinnable_bytes: page-locked memory that may be taken at once.
        progress: told what is being measured.

    Raises:
        MeasurementError: a copy gave wrong bytes, or a synchronize did not wait.
        BudgetError: not even the smallest size could be timed.
    """
    started = device.now()
    seconds = plan.budget_seconds * plan.measure_share
    check_synchronize(device)
    why_not_pinned = device.why_not_pinned()
    pin_bytes = 0 if why_not_pinned else min(plan.pin_cap_bytes, pinnable_bytes)
    with _arenas(device, plan, seconds, cache_bytes, memory_bytes, pin_bytes) as arenas:
        session = _Session(device, plan, arenas, started + seconds, dtype, progress or _silent)
        transfers = session.transfers()
        casts = session.casts()
        sync = sync_cost(device, plan.max_samples)
    pin = pin_cost(device, pin_bytes, why_not_pinned, started + seconds)
    if not transfers:
        raise BudgetError(f"{seconds:.2g} s are too few to time one copy; give at least 1 s with --budget")
    return Measurements(
        transfers=transfers,
        casts=casts,
        sync=sync,
        pin=pin,
        stability=stability(transfers),
        seconds=device.now() - started,
    )


def check_synchronize(device: Device) -> None:
    """Find out whether the device's synchronize waits, by what a read-back costs with and without it.

    Work is queued, then one element is read. After an honest synchronize the read is short; where it
    lasts as long as without one, although the work was queued and not done, nothing was waited for.

    Raises:
        MeasurementError: the synchronize returned before the device was idle.
    """
    if device.synchronous:
        return
    square = device.empty(2048 * 2048, torch.float32).zero_().view(2048, 2048)
    seen = torch.empty(1, dtype=torch.float32, device="cpu")

    def read_after(wait: Callable[[], None]) -> tuple[float, float]:
        result = square
        for _ in range(20):
            result = result @ square
        queued = device.now()
        wait()
        waited = device.now()
        device.d2h(seen, result.view(-1)[:1])
        return waited - queued, device.now() - waited

    read_after(device.synchronize)  # first use loads kernels
    _, unsynchronized = read_after(lambda: None)
    _, synchronized = read_after(device.synchronize)
    if unsynchronized > 1e-3 and synchronized > unsynchronized / 2:
        raise MeasurementError(
            f"synchronize on the {device.identity.kind} device does not wait: a read after it took "
            f"{synchronized * 1e3:.1f} ms, without it {unsynchronized * 1e3:.1f} ms; timings would be wrong"
        )


def sync_cost(device: Device, samples: int) -> SyncCost:
    """Median cost of waiting, by scope, with one tiny copy queued before each."""
    tiny = device.empty(64, torch.float32)
    host = device.host_empty(64, torch.float32)

    def cost(wait: Callable[[], None]) -> float:
        taken = []
        for _ in range(max(samples, 5)):
            device.h2d(tiny, host)
            before = device.now()
            wait()
            taken.append(device.now() - before)
        return statistics.median(taken)

    return SyncCost(
        device_seconds=cost(device.synchronize),
        stream_seconds=cost(device.synchronize_stream),
        event_seconds=cost(lambda: device.record_event().synchronize()),
    )


def pin_cost(device: Device, cap_bytes: int, why_not: str | None, deadline: float) -> PinCost:
    """Pin blocks of doubling size, freeing each, until one fails, the cap is reached or time is up."""
    if why_not is not None:
        return PinCost(seconds_per_gib=None, largest_bytes=0, capped=False, reason=why_not)
    size, largest, per_gib = 1 << 20, 0, None
    reason = None
    while size <= cap_bytes:
        before = device.now()
        try:
            pinned = device.pinned_empty(size, torch.uint8)
        except PinError as error:
            reason = str(error)
            break
        taken = device.now() - before
        device.release_pinned(pinned)
        del pinned
        largest, per_gib = size, taken / size * 2**30
        if device.now() + 2 * taken > deadline:
            break
        size *= 2
    return PinCost(seconds_per_gib=per_gib, largest_bytes=largest, capped=reason is None, reason=reason)


def stability(transfers: Sequence[Transfer]) -> tuple[str, ...]:
    """Whether these curves can be trusted, in sentences with their numbers and what to do next."""
    spreads = [(t.iqr_seconds / t.median_seconds, t) for t in transfers]
    loose = [(spread, t) for spread, t in spreads if spread > _STEADY_SPREAD]
    typical = statistics.median(spread for spread, _ in spreads)
    counted = f"{len(spreads) - len(loose)} of {len(spreads)} points spread by at most {_STEADY_SPREAD:.0%}"
    if len(loose) * 4 <= len(spreads):
        return (f"steady: {counted} (IQR over median), typically {typical:.1%}",)
    worst, point = max(loose, key=lambda pair: pair[0])
    return (
        f"unsteady: only {counted} (IQR over median), typically {typical:.1%}",
        f"the worst is {point.kind} {point.memory} {point.state} of {point.bytes:,} bytes with {worst:.0%}; "
        "stop other work on this host or give a longer --budget",
    )


def _silent(what: str, fraction: float) -> None:
    del what, fraction


# -- buffers --------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Arenas:
    """Buffers of `size` bytes each. All but `target` hold the same pattern."""

    size: int
    source: Tensor
    target: Tensor
    device: Tensor
    pinned: Tensor | None = field(default=None)

    def slots(self, arena: Tensor, size: int) -> Iterator[Tensor]:
        """Views of `size` bytes, round and round."""
        count = max(arena.numel() // size, 1)
        return itertools.cycle([arena[i * size : (i + 1) * size] for i in range(count)])


@contextlib.contextmanager
def _arenas(
    device: Device, plan: Plan, seconds: float, cache_bytes: int, memory_bytes: int, pin_bytes: int
) -> Iterator[_Arenas]:
    size = _arena_bytes(device, plan, seconds, cache_bytes, memory_bytes)
    source = torch.arange(size // 4, dtype=torch.int32, device="cpu").view(torch.uint8)
    target = device.host_empty(size, torch.uint8)
    on_device = device.empty(size, torch.uint8)
    device.h2d(on_device, source)
    arenas = _Arenas(size=size, source=source, target=target, device=on_device)
    if pin_bytes >= plan.smallest_bytes:
        with contextlib.suppress(PinError):
            arenas.pinned = device.pinned_empty(min(size, _power_of_two_below(pin_bytes)), torch.uint8)
            arenas.pinned.copy_(source[: arenas.pinned.numel()])
    try:
        yield arenas
    finally:
        if arenas.pinned is not None:
            device.release_pinned(arenas.pinned)


def _arena_bytes(device: Device, plan: Plan, seconds: float, cache_bytes: int, memory_bytes: int) -> int:
    """As large as the plan's largest size and twice the cache, if time and memory allow: a power of two."""
    probe_bytes = 8 << 20
    before = time.perf_counter()
    device.host_empty(probe_bytes, torch.uint8, touched=False).zero_()
    touched_per_second = probe_bytes / max(time.perf_counter() - before, 1e-9)
    affordable = min(touched_per_second * seconds * _ARENA_SHARE, memory_bytes) / 3
    wanted = max(plan.largest_bytes, 2 * cache_bytes)
    return max(_power_of_two_below(int(min(wanted, affordable))), 1 << 20, plan.smallest_bytes)


def _power_of_two_below(size: int) -> int:
    return 1 << max(size.bit_length() - 1, 12)


@contextlib.contextmanager
def _intraop_threads(count: int) -> Iterator[None]:
    """Torch's own threads inside; 0 leaves them as they are."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -- curves ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    """One curve to measure: what moves from where to where."""

    kind: Kind
    memory: Memory
    state: State
    threads: int = 0


class _Session:
    """One run over all curves, which share the time that is left."""

    def __init__(
        self,
        device: Device,
        plan: Plan,
        arenas: _Arenas,
        deadline: float,
        dtype: torch.dtype,
        progress: Progress,
    ) -> None:
        self.device, self.plan, self.arenas = device, plan, arenas
        self.deadline, self.dtype, self.progress = deadline, dtype, progress

    def transfers(self) -> tuple[Transfer, ...]:
        points: list[Transfer] = []
        curves = list(self._curves())
        for index, curve in enumerate(curves):
            words = f"{curve.kind} {curve.memory} {curve.state}"
            self.progress(words, index / (len(curves) + 1))
            # casts and the duplex points come after: one more share
            share = (self.deadline - self.device.now()) / (len(curves) - index + 1)
            with _intraop_threads(curve.threads):
                points.extend(self._curve(curve, self.device.now() + share))
        points.extend(self._duplex())
        return tuple(points)

    def _curves(self) -> Iterator[_Curve]:
        yield _Curve(kind="d2h", memory="pageable", state="warm")
        yield _Curve(kind="d2h", memory="pageable", state="cold")
        yield _Curve(kind="h2d", memory="pageable", state="warm")
        if self.arenas.pinned is not None:
            yield _Curve(kind="d2h", memory="pinned", state="warm")
            yield _Curve(kind="h2d", memory="pinned", state="warm")
            yield _Curve(kind="h2h", memory="pinned", state="warm")
        yield _Curve(kind="h2h", memory="pageable", state="warm")
        yield _Curve(kind="h2h", memory="pageable", state="warm", threads=1)
        yield _Curve(kind="h2h", memory="pageable", state="cold")

    def _curve(self, curve: _Curve, deadline: float) -> Iterator[Transfer]:
        """Points of growing size, until the next one would not fit into the time that is left."""
        sizes = list(self._sizes(curve))
        last: Transfer | None = None
        for index, size in enumerate(sizes):
            left = deadline - self.device.now()
            if last is not None and last.median_seconds * size / last.bytes * self.plan.min_samples > left:
                return
            share = max(left, 0) / (len(sizes) - index)
            last = self._point(curve, size, self.device.now() + share, warm_up=index == 0)
            yield last

    def _sizes(self, curve: _Curve) -> Iterator[int]:
        room = self.arenas.size
        if curve.memory == "pinned" and self.arenas.pinned is not None:
            room = self.arenas.pinned.numel()
        size = self.plan.smallest_bytes
        while size <= min(self.plan.largest_bytes, room):
            yield size
            size *= self.plan.growth

    def _point(self, curve: _Curve, size: int, deadline: float, *, warm_up: bool) -> Transfer:
        copy = self._copy_cold(curve.kind, size) if curve.state == "cold" else self._copy_warm(curve, size)
        self._check_bytes(curve, size)
        sampled = self.sample(copy, deadline, warm_up=warm_up)
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

    def _copy_warm(self, curve: _Curve, size: int) -> Callable[[int], float]:
        arenas, pinned = self.arenas, self.arenas.pinned
        host_source = pinned if curve.memory == "pinned" and pinned is not None else arenas.source
        host_target = pinned if curve.memory == "pinned" and pinned is not None else arenas.target
        source = arenas.slots(arenas.device if curve.kind == "d2h" else host_source, size)
        target = arenas.slots(arenas.device if curve.kind == "h2d" else host_target, size)
        if curve.kind == "h2h":
            target = arenas.slots(arenas.target, size)
        return lambda count: self._timed(curve, [(next(target), next(source)) for _ in range(count)])

    def _copy_cold(self, kind: Kind, size: int) -> Callable[[int], float]:
        """The destination's pages are new each time; mapping and unmapping them is not timed."""
        arenas = self.arenas
        source = arenas.slots(arenas.device if kind == "d2h" else arenas.source, size)
        curve = _Curve(kind=kind, memory="pageable", state="cold")

        def run(count: int) -> float:
            fresh = [self.device.host_empty(size, torch.uint8, touched=False) for _ in range(count)]
            return self._timed(curve, [(target, next(source)) for target in fresh])

        return run

    def _timed(self, curve: _Curve, pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
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

    def sample(self, run: Callable[[int], float], deadline: float, *, warm_up: bool) -> Sampled:
        """Samples of `run(count)`, per operation, until they agree, are enough, or time is up."""
        plan, now = self.plan, self.device.now
        warm_until = now() + (plan.warmup_seconds if warm_up else 0)
        once = run(1)
        while now() < min(warm_until, deadline):
            once = min(once, run(1))
        count = max(min(int(_SAMPLE_SECONDS / max(once, 1e-9)), 64), 1)
        seconds: list[float] = []
        while len(seconds) < plan.max_samples:
            seconds.append(run(count) / count)
            if len(seconds) < plan.min_samples:
                continue
            steady = interquartile_range(seconds) <= plan.target_spread * statistics.median(seconds)
            if (steady and len(seconds) >= 2 * plan.min_samples) or now() >= deadline:
                break
        return Sampled(seconds=tuple(seconds))

    def _check_bytes(self, curve: _Curve, size: int) -> None:
        """One copy into overwritten memory, compared byte for byte with what was sent."""
        device, arenas = self.device, self.arenas
        expected, seen = arenas.source[:size], arenas.target[:size]
        seen.fill_(0x5A)
        if curve.kind == "h2h":
            device.h2h(seen, expected)
        else:
            host = seen if curve.memory == "pageable" or arenas.pinned is None else arenas.pinned[:size]
            if curve.kind == "h2d":
                host.copy_(expected)
                arenas.device[:size].fill_(0x5A)
                device.h2d(arenas.device[:size], host, non_blocking=curve.memory == "pinned")
                device.record_event().synchronize()
            host.fill_(0x5A)
            device.d2h(host, arenas.device[:size], non_blocking=curve.memory == "pinned")
            device.record_event().synchronize()
            seen = host
        if not torch.equal(seen, expected):
            wrong = int((seen != expected).sum())
            raise MeasurementError(
                f"{curve.kind} {curve.memory} of {size:,} bytes: {wrong:,} bytes differ from what was sent; "
                "this device or its driver is not to be trusted"
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
            sampled = self.sample(run, self.device.now() + max(share, 0), warm_up=False)
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
        return [one, replace(one, kind="h2d")]

    @contextlib.contextmanager
    def _both(
        self, down: tuple[Tensor, Tensor], up: tuple[Tensor, Tensor], *, non_blocking: bool
    ) -> Iterator[Callable[[int], float]]:
        device = self.device
        streams = device.new_stream(), device.new_stream()
        with ThreadPoolExecutor(2) as pool:

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
            with _intraop_threads(threads):
                rates.append(self._cast(where, threads, self.device.now() + max(share, 0)))
        return tuple(rates)

    def _cast(self, where: Cast, threads: int, deadline: float) -> CastRate:
        arenas, device = self.arenas, self.device
        size = min(16 << 20, arenas.size // 2)
        low_bytes = size * self.dtype.itemsize // 4
        sources = arenas.slots(arenas.source, low_bytes)
        targets = arenas.slots(arenas.target, size)
        if where == "device":
            sources = arenas.slots(arenas.device[: arenas.size // 2], low_bytes)
            targets = arenas.slots(device.empty(size, torch.uint8), size)

        def run(count: int) -> float:
            pairs = [
                (next(targets).view(torch.float32), next(sources).view(self.dtype)) for _ in range(count)
            ]
            before = device.now()
            for target, source in pairs:
                if where == "device":
                    device.cast(target, source)
                else:
                    device.h2h(target, source)
            device.record_event().synchronize()
            return device.now() - before

        sampled = self.sample(run, deadline, warm_up=True)
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
