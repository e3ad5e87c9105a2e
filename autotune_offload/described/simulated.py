"""A `Device` on a virtual clock, driven by a machine description.

Every operation takes the time that the description gives it, on the resource that does it: a host thread, a
stream, a direction of the link, the host's memory. Nothing sleeps. Values really move, as late as streams and
events allow, so that a path which forgets to wait meets memory without its values.

A time is worked out when the operation is issued. So what is issued later does not slow down what was issued
before: it gets what the earlier one leaves of a shared link, and at least its part of the host's memory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autotune_offload.described.blocks import Blocks
from autotune_offload.described.clocked import ClockedDevice, Faults
from autotune_offload.described.host_side import facts_of, limits_of
from autotune_offload.described.machine import Machine
from autotune_offload.described.speeds import (
    ADD_TRAFFIC,
    CAST_TRAFFIC,
    COLD_NARROWING,
    COPY_TRAFFIC,
    PASS_TRAFFIC,
    SCALING_TRAFFIC,
    Direction,
    speeds,
)
from autotune_offload.described.traffic import Traffic
from autotune_offload.errors import PinError
from autotune_offload.line import Line
from autotune_offload.machine import adam, host_pass
from autotune_offload.records import DeviceIdentity, HostFacts, Limits, Memory

# -- the device -----------------------------------------------------------------------------------


class SimulatedDevice(ClockedDevice):
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
        super().__init__(machine, noise=noise, seed=seed, ranks=ranks, rank=rank, faults=faults)
        self.speeds = speeds(machine, ranks)
        self.identity = DeviceIdentity(
            kind=machine.kind,
            name=machine.title,
            count=machine.ranks_per_host,
            index=rank % machine.ranks_per_host,
            memory_bytes=machine.limits.device_memory_bytes,
            pin_backend="none" if self.synchronous else "torch",
        )
        self._traffic = Traffic(self.speeds)
        self._blocks = Blocks(4 * self.checked_elements)
        self._nothing = torch.zeros((), dtype=torch.float64, device="cpu")
        self._call_seconds = machine.h2h.latency_us * 1e-6

    def twin(self) -> SimulatedDevice:
        """The same machine with the same faults, on a clock of its own and without noise."""
        return SimulatedDevice(self.machine, ranks=self.ranks, rank=self._rank, faults=self.faults)

    # -- the host beside it --

    def host_facts(self) -> HostFacts:
        """The described host."""
        return facts_of(self.machine)

    def host_limits(self, max_pinned_bytes: int | None) -> Limits:
        """What this rank may allocate and page-lock, by the description and by `max_pinned_bytes`."""
        return limits_of(self.machine, self.ranks, max_pinned_bytes)

    # -- memory --

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Device memory; where that is host memory, its pages are touched for the first time by a write."""
        tensor = torch.empty(elements, dtype=dtype, device="cpu")
        self._blocks.fresh(tensor, cold=self.shares_host_memory)
        return tensor

    def host_empty(self, elements: int, dtype: torch.dtype, *, touched: bool = True) -> Tensor:
        """Pageable host memory; untouched memory is cold until it has been written once."""
        tensor = torch.empty(elements, dtype=dtype, device="cpu")
        self._blocks.fresh(tensor, cold=not touched)
        return tensor

    def lock_pages(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Page-locked host memory, at the cost of locking it."""
        size = elements * dtype.itemsize
        why = self._why_no_pin(size)
        if why is not None:
            raise PinError(f"page-locking {size:,} bytes failed: {why}")
        self._thread.now += self._lasting(self.machine.pin.ms_per_gib * 1e-3 * size / 2**30)
        tensor = torch.empty(elements, dtype=dtype, device="cpu")
        self._blocks.fresh(tensor, cold=False)
        self._blocks.lock(tensor)
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
        self._blocks.unlock(pinned)

    # -- work --

    def d2h(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """Copy device to host; where dtypes differ as torch does it (see `_copy_and_cast`)."""
        if destination.dtype != source.dtype:
            self._copy_and_cast(destination, source, non_blocking)
            return
        memory = self._blocks.memory_of(destination)
        rate = self.speeds.link["d2h", memory]
        latency = self.machine.d2h.pinned if memory == "pinned" else self.machine.d2h.pageable
        if self._blocks.is_cold(destination):
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
        memory = self._blocks.memory_of(source)
        latency = self.machine.h2d.pinned if memory == "pinned" else self.machine.h2d.pageable
        self._blocks.is_cold(destination)
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
        end = self._traffic.shared(direction, begin, self._lasting(size / rate), size, thread.now)
        hangs = self.faults.pinned_copy_hangs_above_bytes
        if memory == "pinned" and hangs is not None and size > hangs:
            end = math.inf
        stream.free = end
        if not asynchronous:
            self.wait(end, 0.0)

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
        if destination.itemsize < source.itemsize:
            self._narrow(destination, source)
        else:
            self._on_host(destination, casts=destination.dtype != source.dtype)
        if not self._timed_only:
            destination.copy_(source)

    def _narrow(self, destination: Tensor, source: Tensor) -> None:
        """As fast as widening; into new pages slower by what the kernel and the processor then move beside it."""
        speeds, slower = self.speeds, COLD_NARROWING if self._blocks.is_cold(destination) else 1.0
        one, everyone = speeds.cast_one / slower, speeds.cast_all / slower
        self._through_memory(source.nbytes, one, everyone, CAST_TRAFFIC * slower)

    # -- the optimizer's pass --

    def threads_of_deepspeeds_step(self) -> int:
        """What launchers set where they start several ranks on a host; one alone has all of its CPUs."""
        return self.most_threads() if self.ranks == 1 else self.intraop_threads()

    def most_threads(self) -> int:
        """As many as the rank's part of the host's memory keeps busy."""
        return math.ceil(max(self.speeds.copy_all / self.speeds.copy_one, 1))

    def why_no_pass(self, rounded: torch.dtype | None) -> str | None:
        """None: a described host has a compiler, and fused multiply-adds."""
        del rounded
        return None

    def optimizer_pass(
        self, memory: adam.Memory, values: adam.Constants, rounded: torch.dtype | None, done: bytearray
    ) -> adam.Piece:
        """Each piece takes the time that its bytes take through memory; the values come where they are looked at."""
        traffic = PASS_TRAFFIC + SCALING_TRAFFIC * bool(values.scales) + (rounded.itemsize if rounded else 0)
        real = None if self._timed_only else adam.piece_of(memory, values, rounded, done)

        def piece(begin: int, end: int, number: int, to: Tensor | None) -> None:
            size = int((end - begin) * traffic / COPY_TRAFFIC)
            self._through_memory(size, self.speeds.copy_one, self.speeds.copy_all, COPY_TRAFFIC)
            if real is not None:
                real(begin, end, number, to)
            done[number] = 1

        return piece

    def host_add(self, total: Tensor, addend: Tensor) -> None:
        """Add within host memory in the calling thread: as fast as a copy that moves as many bytes."""
        slower = COPY_TRAFFIC / ADD_TRAFFIC
        speeds = self.speeds.copy_one * slower, self.speeds.copy_all * slower
        self._in_memory(total, *speeds, ADD_TRAFFIC)
        if not self._timed_only:
            total.add_(addend)

    def _on_host(self, destination: Tensor, *, casts: bool) -> None:
        """Time in the calling thread for a copy or a cast."""
        speeds = self.speeds
        if casts:
            self._in_memory(destination, speeds.cast_one, speeds.cast_all, CAST_TRAFFIC)
        else:
            self._in_memory(destination, speeds.copy_one, speeds.copy_all, COPY_TRAFFIC)

    def _in_memory(self, destination: Tensor, one: float, everyone: float, traffic: float) -> None:
        """Time in the calling thread to write there; pages that are new have their own rate."""
        most = self.speeds.cold if self._blocks.is_cold(destination) else math.inf
        self._through_memory(destination.nbytes, one, everyone, traffic, most)

    def _through_memory(
        self, size: int, one: float, everyone: float, traffic: float, most: float = math.inf
    ) -> None:
        """Time in the calling thread; a path's own threads divide among them what all of them reach."""
        thread = self._thread
        count = thread.beside if thread.own else self._intraop
        rate = self.speeds.threads(one, everyone, count)
        if thread.own:
            rate /= count
        begin = thread.now + self._lasting(self._call_seconds)
        seconds = self._lasting(size / min(rate, most))
        thread.now = self._traffic.shared(None, begin, seconds, int(size * traffic), thread.now)

    def cast(self, destination: Tensor, source: Tensor) -> None:
        """Copy within device memory on the current stream, casting where the dtypes differ."""
        if self.shares_host_memory:
            self.h2h(destination, source)
            return
        self._kernel((destination.nbytes + source.nbytes) / (CAST_TRAFFIC * self.speeds.device_cast))
        self._land(destination, source, at_once=False)

    def add(self, total: Tensor, addend: Tensor) -> None:
        """Add within device memory on the current stream."""
        if self.shares_host_memory:
            self.host_add(total, addend)
            return
        self._kernel((2 * total.nbytes + addend.nbytes) / (CAST_TRAFFIC * self.speeds.device_cast))
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

    def widen(self, destination: Tensor, source: Tensor, kept: Tensor | None = None) -> float:
        """Copy host to host as fp32, and as it is to `kept` in the same pass; the sum of the squares."""
        traffic = CAST_TRAFFIC + (0.0 if kept is None else kept.nbytes / destination.nbytes)
        slower = CAST_TRAFFIC / traffic
        self._in_memory(destination, self.speeds.cast_one * slower, self.speeds.cast_all * slower, traffic)
        return 0.0 if self._timed_only else host_pass.widen(destination, source, kept)

    def norm(self, source: Tensor) -> Tensor:
        """2-norm of device memory in fp64: one read of it."""
        if self.shares_host_memory:
            self._thread.now += self._lasting(self._call_seconds + source.nbytes / self.speeds.copy_one / 2)
            return self._nothing if self._timed_only else super().norm(source)
        self._kernel(source.nbytes / (CAST_TRAFFIC * self.speeds.device_cast))
        if self._timed_only:
            return self._nothing
        norm = torch.full((), math.nan, dtype=torch.float64, device="cpu")
        self._thread.stream.add(lambda: norm.copy_(torch.linalg.vector_norm(source, dtype=torch.float64)))
        return norm
