"""A `Device` on a virtual clock, driven by a machine description.

Every operation takes the time that the description gives it, on the resource that does it: a host thread, a
stream, a direction of the link, the host's memory. Nothing sleeps. Values really move, as late as streams and
events allow, so that a path which forgets to wait meets memory without its values.

A time is worked out when the operation is issued. So what is issued later does not slow down what was issued
before: it gets what the earlier one leaves of a shared link, and at least its part of the host's memory.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from autotune_offload.described.machine import Line, Machine
from autotune_offload.described.virtual_time import (
    Busy,
    Clock,
    SimulatedEvent,
    SimulatedStream,
    SimulatedThreads,
)
from autotune_offload.errors import ConfigError, DeviceError, PinError
from autotune_offload.machine import host_pass, limits
from autotune_offload.machine.device import Device
from autotune_offload.records import DeviceIdentity, HostFacts, Limit, Limits, Memory

Direction = Literal["d2h", "h2d"]

UNTOLD_RAM_BYTES = 1 << 40
"""Taken for a host's memory where the description does not tell: it bounds next to nothing."""

_LEAST_SHARE = 0.1
"""Of its own rate that a transfer keeps, however busy a shared link is."""

_NOISE_SECONDS = 2e-3
"""For so long a disturbance lasts: what else a host does comes in bursts."""

_JUNK = 0x5A

_COPY_TRAFFIC = 2.0
_CAST_TRAFFIC = 1.5
_ADD_TRAFFIC = 3.0
"""Bytes through memory for a byte that is written: a copy reads one, a cast from 16 bits half of one, adding two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong on a simulated device; nothing by default."""

    pin_fails_above_bytes: int | None = None
    """Larger blocks cannot be page-locked; 0 fails always."""
    pinned_copy_hangs_above_bytes: int | None = None
    """Larger copies to or from page-locked memory never complete; whoever waits gets a DeviceError."""
    slow_rank: int | None = None
    """This rank of all takes `slow_factor` times as long for everything."""
    slow_factor: float = 4.0
    slow_start_seconds: float = 0.0
    """For so long from the start everything takes `slow_start_factor` times as long."""
    slow_start_factor: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What one of `ranks` ranks gets while all do the same, in bytes a second."""

    link: dict[tuple[Direction, Memory], float]
    cold: float
    both_ways: float
    memory: float
    copy_one: float
    copy_all: float
    cast_one: float
    cast_all: float
    device_cast: float

    def threads(self, one: float, everyone: float, count: int) -> float:
        """What `count` threads reach together, of a rate that one thread and all of them reach."""
        return min(count * one, max(everyone, one))


def speeds(machine: Machine, ranks: int) -> Speeds:
    """The description's rates, divided among the ranks of one host where they share what is behind them."""
    here = min(ranks, machine.ranks_per_host)
    on_link = min(machine.link_shared_by_ranks, here)
    on_memory = min(machine.host.shared_by_ranks or here, here)
    memory = machine.host.mem_gbps * 1e9 / on_memory
    node = (machine.link.total_gbps or math.inf) * 1e9 / here
    link: dict[tuple[Direction, Memory], float] = {}
    lines: tuple[tuple[Direction, Line, Line], ...] = (
        ("d2h", machine.d2h.pinned, machine.d2h.pageable),
        ("h2d", machine.h2d.pinned, machine.h2d.pageable),
    )
    for direction, pinned, pageable in lines:
        most = max(pinned.bandwidth_gbps, pageable.bandwidth_gbps) * 1e9 / on_link
        link[direction, "pinned"] = min(pinned.bandwidth_gbps * 1e9, most, node, memory)
        link[direction, "pageable"] = min(pageable.bandwidth_gbps * 1e9, most, node, memory)
    copy, cast = machine.h2h.bandwidth_gbps * 1e9, machine.cast.host_gbps * 1e9
    together = machine.h2h.threads_gbps * 1e9 / on_memory
    return Speeds(
        link=link,
        cold=min(machine.d2h.pageable_cold.bandwidth_gbps * 1e9, *link.values()),
        both_ways=machine.duplex.total_gbps * 1e9 / on_link,
        memory=memory,
        copy_one=min(copy, memory / _COPY_TRAFFIC),
        copy_all=min(together, memory / _COPY_TRAFFIC),
        cast_one=min(cast, memory / _CAST_TRAFFIC),
        cast_all=min(max(together, cast), memory / _CAST_TRAFFIC),
        device_cast=machine.cast.device_gbps * 1e9,
    )


# -- the device -----------------------------------------------------------------------------------


class SimulatedDevice(Device):
    """One rank's device on a described machine, while all ranks of its host do the same.

    Args:
        machine: what it is.
        noise: relative spread of every duration, log-normal; 0 repeats exactly.
        seed: of the noise.
        ranks: how many ranks there are; those of one host share its link and memory.
        rank: which of them this is; it matters for `Faults.slow_rank` only.
        faults: what goes wrong.

    Raises:
        ConfigError: a negative noise, or ranks that do not exist.
    """

    checked_elements = 1 << 18

    def __init__(
        self,
        machine: Machine,
        *,
        noise: float = 0.0,
        seed: int = 0,
        ranks: int = 1,
        rank: int = 0,
        faults: Faults | None = None,
    ) -> None:
        if not 0 <= noise < math.inf or ranks < 1 or not 0 <= rank < ranks:
            raise ConfigError(
                f"noise {noise}, rank {rank} of {ranks}: expected noise of at least 0 and a rank that there is"
            )
        self.machine, self.ranks, self.faults = machine, ranks, faults or Faults()
        self._rank = rank
        self.shares_host_memory = self.synchronous = machine.kind == "cpu"
        self.speeds = speeds(machine, ranks)
        self.identity = DeviceIdentity(
            kind=machine.kind,
            name=machine.title,
            count=machine.ranks_per_host,
            index=rank % machine.ranks_per_host,
            memory_bytes=machine.limits.device_memory_bytes,
            pin_backend="none" if self.synchronous else "torch",
        )
        self._slow = self.faults.slow_factor if self.faults.slow_rank == rank else 1.0
        self._noise, self._random = noise, random.Random(seed)
        self._burst, self._burst_ends = 1.0, 0.0
        self._streams: list[SimulatedStream] = []
        self.default = self.new_stream()
        self._thread = Clock(0.0, self.default)
        self._intraop = machine.host.intraop_threads
        self._busy: dict[Direction, Busy] = {"d2h": Busy(), "h2d": Busy()}
        self._memory_busy = Busy()
        self._pinned: dict[int, int] = {}
        self._cold: dict[int, list[int]] = {}
        self._timed_only = False
        self._call_seconds = machine.h2h.latency_us * 1e-6
        both_host = max(self.speeds.copy_all, self.speeds.copy_one) * _COPY_TRAFFIC
        both_links = self.speeds.link["d2h", "pinned"] + self.speeds.link["h2d", "pinned"]
        self._memory_binds = both_host + both_links > self.speeds.memory
        self._nothing = torch.zeros((), dtype=torch.float64, device="cpu")

    def twin(self) -> SimulatedDevice:
        """The same machine with the same faults, on a clock of its own and without noise."""
        return SimulatedDevice(self.machine, ranks=self.ranks, rank=self._rank, faults=self.faults)

    # -- the clock --

    def now(self) -> float:
        """Virtual seconds of the calling thread."""
        return self._thread.now

    def wait(self, until: float, cost_us: float) -> None:
        """The calling thread waits until a moment, at a cost.

        Raises:
            DeviceError: that moment never comes.
        """
        if until == math.inf:
            raise DeviceError("waited for a copy that never completes; this fault was asked for")
        self._thread.now = max(self._thread.now, until) + self._lasting(cost_us * 1e-6)

    def _lasting(self, seconds: float) -> float:
        """What takes so long by the description, with noise and faults."""
        if self._thread.now < self.faults.slow_start_seconds:
            seconds *= self.faults.slow_start_factor
        return seconds * self._slow * (self._disturbance() if self._noise else 1.0)

    def _disturbance(self) -> float:
        """Half of the noise's variance comes in bursts, half with each operation alone."""
        each = self._noise / math.sqrt(2)
        if self._thread.now >= self._burst_ends:
            self._burst = math.exp(self._random.gauss(0.0, each))
            self._burst_ends = self._thread.now + _NOISE_SECONDS
        return self._burst * math.exp(self._random.gauss(0.0, each))

    @contextlib.contextmanager
    def running_in(self, thread: Clock) -> Iterator[None]:
        """Work inside is that of another host thread."""
        before = self._thread
        self._thread = thread
        try:
            yield
        finally:
            self._thread = before

    def own_threads(self, count: int) -> Executor:
        """Host threads on the same clock."""
        return SimulatedThreads(self, count)

    @contextlib.contextmanager
    def intraop(self, count: int) -> Iterator[None]:
        """Host operations inside use so many threads; 0 leaves them as they are."""
        before = self._intraop
        self._intraop = count or before
        try:
            yield
        finally:
            self._intraop = before

    def intraop_threads(self) -> int:
        """Threads that a host operation in the calling thread uses."""
        return 1 if self._thread.own else self._intraop

    @contextlib.contextmanager
    def timed_only(self) -> Iterator[None]:
        """Values stay where they are inside, so that a long sample costs no real time."""
        before = self._timed_only
        self._timed_only = True
        try:
            yield
        finally:
            self._timed_only = before

    # -- the host beside it --

    def host_facts(self) -> HostFacts:
        """The described host."""
        cores = math.ceil(self.machine.h2h.threads_gbps / self.machine.h2h.bandwidth_gbps)
        return HostFacts(
            name=self.machine.name,
            platform="simulated",
            cpu_model=f"described: {self.machine.title}",
            cpu_count=cores,
            affinity_cpus=cores,
            ram_bytes=self._ram_bytes,
            swap_bytes=0,
            numa_nodes=1,
            numa_bound=True,
            last_level_cache_bytes=0,
            page_bytes=4096,
            wsl=False,
        )

    @property
    def _ram_bytes(self) -> int:
        told = self.machine.host.ram_bytes
        return UNTOLD_RAM_BYTES if told is None else told

    def host_limits(self, max_pinned_bytes: int | None) -> Limits:
        """What this rank may allocate and page-lock, by the description and by `max_pinned_bytes`."""
        machine = self.machine
        told = f"machine {machine.name}, host.ram_bytes"
        untold = f"machine {machine.name} does not tell its memory"
        ram = Limit(
            name="ram",
            bytes=self._ram_bytes,
            source=told if machine.host.ram_bytes is not None else untold,
            raise_by="use a host with more memory",
        )
        own = []
        if machine.limits.memlock_bytes is not None:
            memlock = Limit(
                name="memlock",
                bytes=machine.limits.memlock_bytes,
                source=f"machine {machine.name}, limits.memlock_bytes",
                raise_by="ulimit -l unlimited, or docker run --ulimit memlock=-1",
            )
            own.append(memlock)
        here = min(self.ranks, machine.ranks_per_host)
        return limits.bounded([ram], own, ranks_per_host=here, max_pinned_bytes=max_pinned_bytes)

    # -- memory --

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Device memory; where that is host memory, its pages are touched for the first time by a write."""
        tensor = torch.empty(elements, dtype=dtype, device="cpu")
        self._fresh(tensor, cold=self.shares_host_memory)
        return tensor

    def host_empty(self, elements: int, dtype: torch.dtype, *, touched: bool = True) -> Tensor:
        """Pageable host memory; untouched memory is cold until it has been written once."""
        tensor = torch.empty(elements, dtype=dtype, device="cpu")
        self._fresh(tensor, cold=not touched)
        return tensor

    def _fresh(self, tensor: Tensor, *, cold: bool) -> None:
        """New memory holds junk, as far as checks look: not by chance what was there before."""
        tensor.view(torch.uint8)[: 4 * self.checked_elements].fill_(_JUNK)
        begin = tensor.data_ptr()
        for old in [
            b for b, (size, _) in self._cold.items() if b < begin + tensor.nbytes and begin < b + size
        ]:
            del self._cold[old]  # memory that was given back and is handed out again
        if cold and tensor.nbytes:
            self._cold[begin] = [tensor.nbytes, 0]

    def _is_cold(self, destination: Tensor) -> bool:
        """Whether these pages are written for the first time; they are not cold any more afterwards."""
        if not self._cold:
            return False
        at = destination.data_ptr()
        for begin, block in self._cold.items():
            if begin <= at < begin + block[0]:
                block[1] += destination.nbytes
                if block[1] >= block[0]:
                    del self._cold[begin]
                return True
        return False

    def lock_pages(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Page-locked host memory, at the cost of locking it."""
        size = elements * dtype.itemsize
        why = self._why_no_pin(size)
        if why is not None:
            raise PinError(f"page-locking {size:,} bytes failed: {why}")
        self._thread.now += self._lasting(self.machine.pin.ms_per_gib * 1e-3 * size / 2**30)
        tensor = torch.empty(elements, dtype=dtype, device="cpu")
        self._fresh(tensor, cold=False)
        self._pinned[tensor.data_ptr()] = size
        return tensor

    def _why_no_pin(self, size: int) -> str | None:
        if self.synchronous:
            return "the cpu accelerator's pin_memory returns pageable memory"
        largest, fails = self.machine.pin.largest_bytes, self.faults.pin_fails_above_bytes
        bounds = [bound for bound in (largest, fails, self.machine.limits.memlock_bytes) if bound is not None]
        if bounds and size > min(bounds):
            return f"invalid argument: no more than {min(bounds):,} bytes lock in one block"
        return None

    def try_lock(self, size: int, copied: int) -> None:
        """The time that locking takes, and no memory of this host: a described one may have more."""
        why = self._why_no_pin(size)
        if why is not None:
            raise PinError(f"page-locking {size:,} bytes failed: {why}")
        self._thread.now += self._lasting(self.machine.pin.ms_per_gib * 1e-3 * size / 2**30)

    def why_not_pinned(self) -> str | None:
        """None where a page can be locked."""
        return self._why_no_pin(4096)

    def unlock_pages(self, pinned: Tensor) -> None:
        """Forget that it was page-locked."""
        self._pinned.pop(pinned.data_ptr(), None)

    def _memory_of(self, tensor: Tensor) -> Memory:
        at = tensor.data_ptr()
        for begin, size in self._pinned.items():
            if begin <= at < begin + size:
                return "pinned"
        return "pageable"

    # -- work --

    def d2h(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """Copy device to host; where dtypes differ as torch does it (see `_copy_and_cast`)."""
        if destination.dtype != source.dtype:
            self._copy_and_cast(destination, source, non_blocking)
            return
        memory = self._memory_of(destination)
        rate = self.speeds.link["d2h", memory]
        latency = self.machine.d2h.pinned if memory == "pinned" else self.machine.d2h.pageable
        if self._is_cold(destination):
            rate, latency = min(self.speeds.cold, rate), self.machine.d2h.pageable_cold
        self._transfer("d2h", memory, destination.nbytes, rate, latency, non_blocking)
        self._land(destination, source, at_once=memory == "pageable" or not non_blocking)

    def _copy_and_cast(self, destination: Tensor, source: Tensor, non_blocking: bool) -> None:
        """A blocking copy casts on the host, through a temporary of the source's dtype whose pages are new.

        Source: `copy_requires_temporaries` and `copy_kernel_cuda` in aten/src/ATen/native/cuda/Copy.cu;
        with `non_blocking` the cast is done on the device.
        """
        if self.shares_host_memory:
            self.h2h(destination, source)
        elif non_blocking:
            wide = torch.empty_like(source, dtype=destination.dtype)
            self.cast(wide, source)
            self.d2h(destination, wide, non_blocking=True)
        else:
            cold = self.machine.d2h.pageable_cold
            rate = min(self.speeds.cold, self.speeds.link["d2h", "pageable"])
            self._transfer("d2h", "pageable", source.nbytes, rate, cold, False)
            self._on_host(destination, casts=True)
            self._land(destination, source, at_once=True)

    def h2d(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """Copy host to device."""
        memory = self._memory_of(source)
        latency = self.machine.h2d.pinned if memory == "pinned" else self.machine.h2d.pageable
        self._is_cold(destination)
        rate = self.speeds.link["h2d", memory]
        self._transfer("h2d", memory, source.nbytes, rate, latency, non_blocking)
        self._land(destination, source, at_once=memory == "pageable" or not non_blocking)

    def _transfer(
        self, direction: Direction, memory: Memory, size: int, rate: float, line: Line, non_blocking: bool
    ) -> None:
        """Time on the link, on the current stream; pageable memory blocks in any case (CUDA's rule)."""
        thread, stream = self._thread, self._thread.stream
        asynchronous = non_blocking and memory == "pinned" and not self.synchronous
        if asynchronous:
            thread.now += self._lasting(self._call_seconds)
        begin = max(thread.now, stream.free) + self._lasting(line.latency_us * 1e-6)
        end = self._shared(direction, begin, self._lasting(size / rate), size)
        hangs = self.faults.pinned_copy_hangs_above_bytes
        if memory == "pinned" and hangs is not None and size > hangs:
            end = math.inf
        stream.free = end
        if not asynchronous:
            self.wait(end, 0.0)

    def _shared(self, direction: Direction | None, begin: float, seconds: float, size: int) -> float:
        """When a transfer ends that takes `seconds` alone, beside what else uses link and memory.

        `direction` None is work of the host alone; `size` counts bytes through the host's memory.
        """
        if seconds <= 0:
            return begin
        other = self._busy["h2d" if direction == "d2h" else "d2h"] if direction else None
        memory = self._memory_busy if self._memory_binds else None
        rate = size / seconds
        end = self._end(begin, size, rate, other, memory)
        if direction:
            self._busy[direction].take(begin, end, rate)
        if memory is not None:
            memory.take(begin, end, rate)
        return end

    def _end(self, begin: float, size: float, rate: float, other: Busy | None, memory: Busy | None) -> float:
        rivals = [each for each in self._rivals(begin, other, memory) if each[0].spans]
        moment = begin
        while rivals:
            allowed = rate
            for busy, total, fair in rivals:
                used = busy.used(moment)
                least = total / (rate + used) if fair else _LEAST_SHARE
                allowed = min(allowed, max(total - used, rate * least))
            change = min(busy.next_change(moment) for busy, *_ in rivals)
            if moment + size / allowed <= change:
                return moment + size / allowed
            size -= (change - moment) * allowed
            moment = change
        return moment + size / rate

    def _rivals(
        self, begin: float, other: Busy | None, memory: Busy | None
    ) -> Iterator[tuple[Busy, float, bool]]:
        """What is shared with whom, how much there is, and whether the later one gets a fair part of it.

        A link gives the later direction what the earlier leaves (nvbandwidth#53); memory serves both.
        """
        past = min(begin, self._thread.now)
        if other is not None:
            other.forget_before(past)
            yield other, self.speeds.both_ways, False
        if memory is not None:
            memory.forget_before(past)
            yield memory, self.speeds.memory, True

    def _land(self, destination: Tensor, source: Tensor, *, at_once: bool) -> None:
        if self._timed_only:
            return
        if self.synchronous:
            destination.copy_(source)
            return
        stream = self._thread.stream
        stream.add(lambda: destination.copy_(source))
        if at_once:
            stream.run_to(stream.put)

    def h2h(self, destination: Tensor, source: Tensor) -> None:
        """Copy host to host in the calling thread, casting where the dtypes differ."""
        self._on_host(destination, casts=destination.dtype != source.dtype)
        if not self._timed_only:
            destination.copy_(source)

    def host_add(self, total: Tensor, addend: Tensor) -> None:
        """Add within host memory in the calling thread: as fast as a copy that moves as many bytes."""
        slower = _COPY_TRAFFIC / _ADD_TRAFFIC
        speeds = self.speeds.copy_one * slower, self.speeds.copy_all * slower
        self._in_memory(total, *speeds, _ADD_TRAFFIC)
        if not self._timed_only:
            total.add_(addend)

    def _on_host(self, destination: Tensor, *, casts: bool) -> None:
        """Time in the calling thread for a copy or a cast."""
        speeds = self.speeds
        if casts:
            self._in_memory(destination, speeds.cast_one, speeds.cast_all, _CAST_TRAFFIC)
        else:
            self._in_memory(destination, speeds.copy_one, speeds.copy_all, _COPY_TRAFFIC)

    def _in_memory(self, destination: Tensor, one: float, everyone: float, traffic: float) -> None:
        """Time in the calling thread; a path's own threads divide among them what all of them reach."""
        speeds, thread = self.speeds, self._thread
        count = thread.beside if thread.own else self._intraop
        rate = speeds.threads(one, everyone, count)
        if thread.own:
            rate /= count
        if self._is_cold(destination):
            rate = min(rate, speeds.cold)
        begin = thread.now + self._lasting(self._call_seconds)
        seconds = self._lasting(destination.nbytes / rate)
        thread.now = self._shared(None, begin, seconds, int(destination.nbytes * traffic))

    def cast(self, destination: Tensor, source: Tensor) -> None:
        """Copy within device memory on the current stream, casting where the dtypes differ."""
        if self.shares_host_memory:
            self.h2h(destination, source)
            return
        self._kernel((destination.nbytes + source.nbytes) / (_CAST_TRAFFIC * self.speeds.device_cast))
        self._land(destination, source, at_once=False)

    def add(self, total: Tensor, addend: Tensor) -> None:
        """Add within device memory on the current stream."""
        if self.shares_host_memory:
            self.host_add(total, addend)
            return
        self._kernel((2 * total.nbytes + addend.nbytes) / (_CAST_TRAFFIC * self.speeds.device_cast))
        if not self._timed_only:
            self._thread.stream.add(lambda: total.add_(addend))

    def _kernel(self, seconds: float) -> None:
        """Device work on the current stream, after one call of the host's."""
        thread, stream = self._thread, self._thread.stream
        thread.now += self._lasting(self._call_seconds)
        stream.free = max(thread.now, stream.free) + self._lasting(seconds)

    def matmul(self, out: Tensor, left: Tensor, right: Tensor) -> None:
        """Time only: nobody reads the product."""
        flops = 2 * left.shape[0] * left.shape[1] * right.shape[1]
        compute = self.machine.compute
        self._kernel(flops / (compute.tflops * 1e12) if compute else 0.0)

    def computes(self) -> bool:
        """Whether the description tells how fast matrix products are."""
        return self.machine.compute is not None

    def widen(self, destination: Tensor, source: Tensor) -> float:
        """Copy host to host as fp32; the sum of the squares."""
        self._on_host(destination, casts=True)
        return 0.0 if self._timed_only else host_pass.widen(destination, source)

    def norm(self, source: Tensor) -> Tensor:
        """2-norm of device memory in fp64: one read of it."""
        if self.shares_host_memory:
            self._thread.now += self._lasting(self._call_seconds + source.nbytes / self.speeds.copy_one / 2)
            return self._nothing if self._timed_only else super().norm(source)
        self._kernel(source.nbytes / (_CAST_TRAFFIC * self.speeds.device_cast))
        if self._timed_only:
            return self._nothing
        norm = torch.full((), math.nan, dtype=torch.float64, device="cpu")
        self._thread.stream.add(lambda: norm.copy_(torch.linalg.vector_norm(source, dtype=torch.float64)))
        return norm

    # -- order --

    def new_stream(self) -> SimulatedStream:
        """A stream beside the others."""
        stream = SimulatedStream(self)
        self._streams.append(stream)
        return stream

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Work of the calling thread inside goes to `stream`; None is the current one."""
        thread, before = self._thread, self._thread.stream
        thread.stream = before if stream is None else stream
        try:
            yield
        finally:
            thread.stream = before

    def record_event(self) -> SimulatedEvent:
        """An event behind all work that is queued on the current stream."""
        return SimulatedEvent(self._thread.stream)

    def order_after(self, stream: Any, event: Any) -> None:
        """Later work on `stream` waits for `event`."""
        (stream or self._thread.stream).wait_event(event)

    def synchronize(self) -> None:
        """Block the calling thread until the whole device is idle."""
        self.wait(max(stream.free for stream in self._streams), self.machine.sync.device_us)
        for stream in self._streams:
            stream.run_to(stream.put)

    def synchronize_stream(self) -> None:
        """Block the calling thread until the current stream is done."""
        self._thread.stream.synchronize()
