"""Timing loops over a Device: bandwidth curves, casts, synchronize and pin costs.

Every number is a median over samples that are kept, with their interquartile range. Buffers rotate
through an arena larger than the last-level cache where time and memory allow, and the bytes of each
point are checked.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import statistics
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
from autotune_offload.rehearsal import Rehearsed

Progress = Callable[[str, float], None]
"""Called with what is being measured and how much of the whole is done, 0 to 1."""

_SAMPLE_SECONDS = 50e-6
"""Short operations are repeated until one sample lasts this long: the timer itself costs about 0.1 us."""

_SLOW_SAMPLE = 20
"""A sample this many times too long had the host taken away; the next ones repeat less, to end in time."""

_PIN_SHARE = 0.15
"""Of the measuring time at most for pinning ever larger blocks."""

_ARENA_SHARE = 0.2
"""Of the measuring time at most for making the buffers."""

_CHECK_COPIES = 6
"""What checking a point's bytes costs, in copies of its size."""

_TELLING_SECONDS = 2e-3
"""Work queued for at least this long tells a synchronize that waits from one that does not."""

_SQUARE = 2048
"""Side of the matrices that are multiplied for it: 17 GFLOP in fp32."""

_STEADY_SPREAD = 0.10
"""IQR over median up to which a point counts as steady in the verdict (pyperf warns at the same 10 %)."""

_TELLING_SAMPLES = 3
"""A point with fewer says nothing about its spread."""


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
    rehearsed: Rehearsed | None = None,
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
        rehearsed: how far page-locking went where it was tried before; it goes no further here.
        progress: told what is being measured.

    Raises:
        MeasurementError: a copy gave wrong bytes, or a synchronize did not wait.
        BudgetError: not even the smallest size could be timed.
    """
    started = device.now()
    seconds = plan.budget_seconds * plan.measure_share
    check_synchronize(device)
    pin_bytes = pin_cap_bytes(plan, pinnable_bytes, memory_bytes)
    why_not_pinned = _why_not_pinned(device, pin_bytes, rehearsed)
    pin = pin_cost(device, pin_bytes, why_not_pinned, device.now() + seconds * _PIN_SHARE, rehearsed)
    with _arenas(device, plan, seconds, cache_bytes, memory_bytes, pin.largest_bytes) as arenas:
        session = _Session(device, plan, arenas, started + seconds, dtype, progress or _silent)
        transfers = session.transfers()
        casts = session.casts()
        sync = sync_cost(device, plan.max_samples)
    if not transfers:
        raise BudgetError(
            f"no copy of {plan.smallest_bytes:,} bytes could be timed: expected a plan whose sizes begin "
            f"below its largest, {plan.largest_bytes:,} bytes"
        )
    return Measurements(
        transfers=transfers,
        casts=casts,
        sync=sync,
        pin=pin,
        stability=stability(transfers),
        seconds=device.now() - started,
    )


def pin_cap_bytes(plan: Plan, pinnable_bytes: int, memory_bytes: int) -> int:
    """What is page-locked at most: half of the memory, since pin_memory copies, so that there are two blocks."""
    return min(plan.pin_cap_bytes, pinnable_bytes, memory_bytes // 2)


def curve(
    device: Device,
    plan: Plan,
    *,
    kind: Kind,
    memory: Memory = "pageable",
    state: State = "warm",
    threads: int = 0,
    cache_bytes: int,
    memory_bytes: int,
) -> tuple[Transfer, ...]:
    """One curve alone, as `measure` measures it, within the plan's share of its budget.

    Raises:
        MeasurementError: a copy gave wrong bytes.
        BudgetError: the memory is too little for the plan's smallest size.
    """
    seconds = plan.budget_seconds * plan.measure_share
    deadline = device.now() + seconds
    pin_bytes = min(plan.pin_cap_bytes, memory_bytes // 2) if memory == "pinned" else 0
    with _arenas(device, plan, seconds, cache_bytes, memory_bytes, pin_bytes) as arenas:
        session = _Session(device, plan, arenas, deadline, torch.float32, _silent)
        return session.curve(_Curve(kind=kind, memory=memory, state=state, threads=threads), deadline)


def check_synchronize(device: Device) -> None:
    """Find out whether the device's synchronize waits, by what a read-back costs with and without it.

    Work is queued, then one element is read. After an honest synchronize the read is short; where it
    lasts as long as without one, although the work was queued and not done, nothing was waited for.

    Raises:
        MeasurementError: the synchronize returned before the device was idle.
    """
    if device.synchronous:
        return
    left = device.empty(_SQUARE * _SQUARE, torch.float32).zero_().view(_SQUARE, _SQUARE)
    out = device.empty(_SQUARE * _SQUARE, torch.float32).view(_SQUARE, _SQUARE)
    seen = torch.empty(1, dtype=torch.float32, device="cpu")

    def read_after(wait: Callable[[], None], products: int) -> float:
        for _ in range(products):
            device.matmul(out, left, left)
        wait()
        before = device.now()
        device.d2h(seen, out.view(-1)[:1])
        return device.now() - before

    read_after(device.synchronize, 1)  # the first use loads kernels
    products, without = 4, 0.0
    while without < _TELLING_SECONDS and products < 1024:
        products *= 2
        without = read_after(_nothing, products)
    # the shortest of each, since a busy host makes reads longer and never shorter
    without = min([without, *(read_after(_nothing, products) for _ in range(2))])
    after = min(read_after(device.synchronize, products) for _ in range(3))
    if without >= _TELLING_SECONDS / 2 and after > without / 2:
        raise MeasurementError(
            f"synchronize on the {device.identity.kind} device does not wait: a read after it took "
            f"{after * 1e3:.1f} ms, without it {without * 1e3:.1f} ms; timings would be wrong. Update the "
            "device's driver or its DeepSpeed accelerator"
        )


def _nothing() -> None:
    return None


def sync_cost(device: Device, samples: int) -> SyncCost:
    """Median cost of waiting, by scope, with one tiny operation queued before each."""
    tiny = device.empty(64, torch.float32)
    other = device.empty(64, torch.float32)

    def cost(wait: Callable[[], None]) -> float:
        taken = []
        for _ in range(max(samples, 5)):
            device.cast(tiny, other)
            before = device.now()
            wait()
            taken.append(device.now() - before)
        return statistics.median(taken)

    return SyncCost(
        device_seconds=cost(device.synchronize),
        stream_seconds=cost(device.synchronize_stream),
        event_seconds=cost(lambda: device.record_event().synchronize()),
    )


def _why_not_pinned(device: Device, pin_bytes: int, rehearsed: Rehearsed | None) -> str | None:
    """Limits first: DeepSpeed's native backend ends the process where a lock goes over memlock."""
    if rehearsed is not None and not rehearsed.largest_bytes and rehearsed.reason is not None:
        return rehearsed.reason
    if pin_bytes < mmap.PAGESIZE:
        return f"the limits leave {pin_bytes:,} bytes to page-lock; expected at least {mmap.PAGESIZE:,}"
    return device.why_not_pinned()


def pin_cost(
    device: Device,
    cap_bytes: int,
    why_not: str | None,
    deadline: float,
    rehearsed: Rehearsed | None = None,
) -> PinCost:
    """Pin blocks of doubling size, freeing each, until one fails, the cap is reached or time is up."""
    if why_not is not None:
        return PinCost(seconds_per_gib=None, largest_bytes=0, capped=False, reason=why_not)
    size, largest, per_gib = mmap.PAGESIZE, 0, None
    reason = None
    while size <= cap_bytes:
        if rehearsed is not None and rehearsed.reason is not None and size > rehearsed.largest_bytes:
            reason = rehearsed.reason
            break
        before = device.now()
        try:
            pinned = device.pinned_empty(size, torch.uint8)
        except PinError as error:
            reason = str(error)
            break
        largest, per_gib = size, (device.now() - before) / size * 2**30
        device.release_pinned(pinned)
        del pinned
        taken = device.now() - before
        if device.now() + 2 * taken > deadline:
            break
        size *= 2
    if rehearsed is not None and rehearsed.reason is not None and reason is None:  # time was up before
        largest, reason = max(largest, rehearsed.largest_bytes), rehearsed.reason
    return PinCost(seconds_per_gib=per_gib, largest_bytes=largest, capped=reason is None, reason=reason)


def stability(transfers: Sequence[Transfer]) -> tuple[str, ...]:
    """Whether these curves can be trusted, in sentences with their numbers and what to do next."""
    told = [(_spread(t), t) for t in transfers if t.samples >= _TELLING_SAMPLES]
    loose = [(spread, t) for spread, t in told if spread > _STEADY_SPREAD]
    steady = len(told) - len(loose)
    typical = f", typically {statistics.median(s for s, _ in told):.1%}" if told else ""
    counted = f"{steady} of {len(transfers)} points spread by at most {_STEADY_SPREAD:.0%}"
    if steady * 4 >= len(transfers) * 3:
        return (f"steady: {counted} (IQR over median){typical}",)
    verdict = [f"unsteady: only {counted} (IQR over median){typical}"]
    if loose:
        worst, point = max(loose, key=lambda pair: pair[0])
        verdict.append(
            f"the worst is {point.kind} {point.memory} {point.state} of {point.bytes:,} bytes with "
            f"{worst:.0%}; stop other work on this host"
        )
    if len(told) < len(transfers):
        few = f"{len(transfers) - len(told)} points have fewer than {_TELLING_SAMPLES} samples"
        verdict.append(f"{few}; give a longer --budget")
    return tuple(verdict)


def _spread(point: Transfer) -> float:
    return point.iqr_seconds / max(point.median_seconds, 1e-12)


def _silent(what: str, fraction: float) -> None:
    del what, fraction


# -- buffers --------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Arenas:
    """Buffers of `size` bytes each, `pinned` perhaps fewer. All but `target` hold the same pattern."""

    size: int
    source: Tensor
    target: Tensor
    device: Tensor
    pinned: Tensor | None = field(default=None)


def _slots(size: int, *arenas: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of `size` bytes at the same place in every arena, round and round."""
    count = max(min(arena.numel() for arena in arenas) // size, 1)
    for index in itertools.cycle(range(count)):
        yield tuple(arena[index * size : (index + 1) * size] for arena in arenas)


@contextlib.contextmanager
def _arenas(
    device: Device, plan: Plan, seconds: float, cache_bytes: int, memory_bytes: int, pin_bytes: int
) -> Iterator[_Arenas]:
    size = _arena_bytes(device, plan, seconds, cache_bytes, memory_bytes)
    source = device.host_empty(size, torch.uint8)
    checked = min(size, device.checked_elements)
    torch.arange(checked // 4, dtype=torch.int32, device="cpu", out=source[:checked].view(torch.int32))
    target = device.host_empty(size, torch.uint8)
    on_device = device.empty(size, torch.uint8)
    device.h2d(on_device[:checked], source[:checked])
    arenas = _Arenas(size=size, source=source, target=target, device=on_device)
    if pin_bytes >= plan.smallest_bytes:
        with contextlib.suppress(PinError):  # the curves then show that nothing pins at this size
            arenas.pinned = device.pinned_empty(min(size, _power_of_two_below(pin_bytes)), torch.uint8)
            arenas.pinned[:checked].copy_(source[: arenas.pinned[:checked].numel()])
    try:
        yield arenas
    finally:
        if arenas.pinned is not None:
            device.release_pinned(arenas.pinned)


def _arena_bytes(device: Device, plan: Plan, seconds: float, cache_bytes: int, memory_bytes: int) -> int:
    """As large as the plan's largest size and twice the cache, if time and memory allow: a power of two.

    Raises:
        BudgetError: the memory does not hold buffers of the plan's smallest size.
    """
    # source, target and pinned stay, a cold copy's target or what is being pinned comes and goes
    parts = 5 if device.shares_host_memory else 4
    share = memory_bytes // parts
    if share < max(plan.smallest_bytes, 4096):
        raise BudgetError(
            f"{memory_bytes:,} bytes of host memory for measuring; expected at least {parts} buffers of "
            f"{max(plan.smallest_bytes, 4096):,} bytes"
        )
    affordable = _touched_per_second(device, min(8 << 20, share)) * seconds * _ARENA_SHARE / 3
    wanted = max(plan.largest_bytes, 2 * cache_bytes)
    least = max(plan.smallest_bytes, 1 << 20)
    return _power_of_two_below(min(wanted, share, max(int(affordable), least)))


def _touched_per_second(device: Device, size: int) -> float:
    fresh = device.host_empty(size, torch.uint8, touched=False)
    before = device.now()
    fresh.zero_()
    return size / max(device.now() - before, 1e-9)


def _power_of_two_below(size: int) -> int:
    return 1 << max(size.bit_length() - 1, 0)


def _expected_seconds(points: Sequence[Transfer], size: int) -> float:
    """What a copy of the next size will take: the last one's time, and the added bytes at the best rate."""
    rate = max(point.bytes / max(point.median_seconds, 1e-12) for point in points)
    return points[-1].median_seconds + (size - points[-1].bytes) / rate


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
            points.extend(self.curve(curve, self.device.now() + share))
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

    def curve(self, curve: _Curve, deadline: float) -> tuple[Transfer, ...]:
        """The points of one curve, with the threads that it asks for."""
        with self.device.intraop(curve.threads):
            return tuple(self._points(curve, deadline))

    def _points(self, curve: _Curve, deadline: float) -> Iterator[Transfer]:
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

    def _sizes(self, curve: _Curve) -> Iterator[int]:
        room = self.arenas.size
        if curve.memory == "pinned" and self.arenas.pinned is not None:
            room = self.arenas.pinned.numel()
        size = self.plan.smallest_bytes
        while size <= min(self.plan.largest_bytes, room):
            yield size
            size *= self.plan.growth

    def _point(self, curve: _Curve, size: int, deadline: float, *, warm_up: bool) -> Transfer:
        copy = self._copy_cold(curve, size) if curve.state == "cold" else self._copy_warm(curve, size)
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

    def _ends(self, curve: _Curve) -> tuple[Tensor, Tensor]:
        """Target and source arenas of a curve."""
        arenas = self.arenas
        pinned = arenas.pinned if curve.memory == "pinned" else None
        if curve.kind == "d2h":
            return (arenas.target if pinned is None else pinned), arenas.device
        target = arenas.device if curve.kind == "h2d" else arenas.target
        return target, (arenas.source if pinned is None else pinned)

    def _copy_warm(self, curve: _Curve, size: int) -> Callable[[int], float]:
        pairs = _slots(size, *self._ends(curve))
        return lambda count: self._timed(curve, list(itertools.islice(pairs, count)))

    def _copy_cold(self, curve: _Curve, size: int) -> Callable[[int], float]:
        """The destination's pages are new each time; mapping and unmapping them is not timed."""
        pairs = _slots(size, *self._ends(curve))

        def run(count: int) -> float:
            sources = [source for _, source in itertools.islice(pairs, count)]
            fresh = [self.device.host_empty(size, torch.uint8, touched=False) for _ in sources]
            return self._timed(curve, list(zip(fresh, sources, strict=True)))

        return run

    def _timed(self, curve: _Curve, pairs: Sequence[tuple[Tensor, ...]]) -> float:
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
        """Samples of `run(count)`, per operation, until they agree, are enough, or time is up.

        There is always one; for the least number the deadline may be passed by as long as it was away.
        Another process on a core can make an operation a thousand times longer (a parallel region waits
        for its last thread), so time is looked at after every sample.
        """
        with self.device.timed_only():
            return self._sampled(run, deadline, warm_up=warm_up)

    def _sampled(self, run: Callable[[int], float], deadline: float, *, warm_up: bool) -> Sampled:
        plan, started = self.plan, self.device.now()
        once = self._warm(run, min(started + plan.warmup_seconds, deadline) if warm_up else started)
        count = max(min(int(_SAMPLE_SECONDS / max(once, 1e-9)), 64), 1)
        seconds: list[float] = []
        while True:
            taken = run(count)
            seconds.append(taken / count)
            late = self.device.now() - deadline
            enough = len(seconds) >= plan.min_samples or late >= deadline - started
            if len(seconds) >= plan.max_samples or (late >= 0 and enough) or self._agree(seconds):
                return Sampled(seconds=tuple(seconds))
            if taken > _SLOW_SAMPLE * _SAMPLE_SECONDS:
                count = max(count // 4, 1)

    def _warm(self, run: Callable[[int], float], until: float) -> float:
        """The shortest of the runs until then; there is always one."""
        once = run(1)
        while self.device.now() < until:
            once = min(once, run(1))
        return once

    def _agree(self, seconds: Sequence[float]) -> bool:
        if len(seconds) < 2 * self.plan.min_samples:
            return False
        return interquartile_range(seconds) <= self.plan.target_spread * statistics.median(seconds)

    def _check_bytes(self, curve: _Curve, size: int) -> None:
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
        targets, sources = _slots(size, target), _slots(low_bytes, source)
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
