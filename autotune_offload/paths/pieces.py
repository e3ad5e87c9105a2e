"""The optimizer's pass in pieces: shared by host threads, and on to the device while later pieces are computed."""

from __future__ import annotations

import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from autotune_offload.errors import PinError
from autotune_offload.machine import adam
from autotune_offload.machine.device import Device, Event
from autotune_offload.machine.ranges import named
from autotune_offload.paths.step_stages import PIECE_ELEMENTS, QUEUED, ring_buffers
from autotune_offload.records import Record


def thread_counts(most: int) -> tuple[int, ...]:
    """Powers of two, and `most` itself."""
    counts = [1]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    return tuple(sorted({*counts, max(most, 1)}))


class Progress:
    """Which pieces of a run are whole; the compiled pass itself says so, whatever happens to its caller."""

    def __init__(self, elements: int, piece_elements: int) -> None:
        """`piece_elements` is a multiple of `adam.BLOCK_ELEMENTS`."""
        self.elements, self.piece_elements = elements, piece_elements
        self.done = bytearray(-(-elements // piece_elements))

    def bounds(self, number: int) -> tuple[int, int]:
        """First element of a piece, and the one after its last."""
        begin = number * self.piece_elements
        return begin, min(begin + self.piece_elements, self.elements)

    @property
    def first_undone(self) -> int:
        """The first element that was not computed; all of them, where every piece is whole."""
        number = self.done.find(0)
        return self.elements if number < 0 else number * self.piece_elements

    def later(self, *, done: bool) -> list[tuple[int, int]]:
        """Bounds of the pieces from the first undone on that are whole, or that are not."""
        first = self.done.find(0)
        numbers = range(first, len(self.done)) if first >= 0 else ()
        return [self.bounds(number) for number in numbers if bool(self.done[number]) is done]


class Target(Record, frozen=True, kw_only=True):
    """Where rounded weights go: contiguous memory of one dimension, the host's or the device's."""

    memory: Tensor
    on_host: bool

    def part(self, begin: int, end: int) -> Target:
        """Some elements of it."""
        return Target(memory=self.memory[begin:end], on_host=self.on_host)


class Pieces:
    """Runs the compiled pass over one sub-group after the other.

    Rounded weights in host memory are written by the pass itself. On a device they arrive through a ring of
    host buffers, page-locked where that is to be had, copied on the current stream in the order of the pieces.
    """

    def __init__(self, device: Device, *, page_lock: bool, piece_elements: int = PIECE_ELEMENTS) -> None:
        """Starts no thread and locks no memory yet."""
        self.device = device
        self.piece_elements = piece_elements
        self._page_lock = page_lock
        self._pools: dict[int, Executor] = {}
        self._running: list[Future[None]] = []
        self._rings: dict[torch.dtype, _Ring] = {}

    def progress(self, elements: int) -> Progress:
        """Of a run over so many elements that is yet to come."""
        return Progress(elements, self.piece_elements)

    def run(
        self, memory: adam.Memory, values: adam.Constants, to: Target | None, threads: int, progress: Progress
    ) -> None:
        """The whole pass by `threads` host threads, the calling one among them where it only computes.

        When it returns or raises, no piece is being computed. Copies to the device may still be under way.

        Args:
            memory: as many elements as `progress` has.
            values: what is computed with.
            to: where rounded weights go, as many; None is nowhere.
            threads: at least 1.
            progress: says which pieces are whole, also when this raises.
        """
        rounded = None if to is None else to.memory.dtype
        piece = self.device.optimizer_pass(memory, values, rounded, progress.done)
        try:
            if to is None or to.on_host:
                self._in_place(piece, None if to is None else to.memory, threads, progress)
            else:
                self._through_ring(piece, to.memory, threads, progress)
        finally:
            self._settle()
            self._running.clear()

    # -- straight into host memory --

    def _in_place(self, piece: adam.Piece, rounded: Tensor | None, threads: int, progress: Progress) -> None:
        if self.device.keeps_time:
            self._dealt_out(piece, rounded, threads, progress)
            return
        numbers, stopped = itertools.count(), threading.Event()

        def share() -> None:
            try:
                while not stopped.is_set() and (number := next(numbers)) < len(progress.done):
                    begin, end = progress.bounds(number)
                    with named(self.device, "piece of the step"):
                        piece(begin, end, number, None if rounded is None else rounded[begin:end])
            except BaseException:
                stopped.set()
                raise

        workers = min(threads, len(progress.done)) - 1
        others = [self._submit(share, workers) for _ in range(workers)]
        share()
        self._settle()
        for future in others:
            if not future.cancelled():
                future.result()

    def _dealt_out(self, piece: adam.Piece, rounded: Tensor | None, threads: int, progress: Progress) -> None:
        """Where time is the device's own, whoever asks for one piece after the other would take all at once."""
        for number in range(len(progress.done)):
            begin, end = progress.bounds(number)
            slot = None if rounded is None else rounded[begin:end]
            self._submit(functools.partial(piece, begin, end, number, slot), threads)
        for future in self._running:
            future.result()

    # -- through a ring to the device --

    def _through_ring(self, piece: adam.Piece, rounded: Tensor, threads: int, progress: Progress) -> None:
        ring = self._ring(rounded.dtype, threads)
        under_way: deque[tuple[int, Future[None]]] = deque()

        def hand_over() -> None:
            number, future = under_way.popleft()
            with named(self.device, "wait for a piece of the step"):
                future.result()
            begin, end = progress.bounds(number)
            ring.send(number, rounded[begin:end])

        for number in range(len(progress.done)):
            if len(under_way) == threads + QUEUED:
                hand_over()
            begin, end = progress.bounds(number)
            slot = ring.free(number)[: end - begin]
            work = functools.partial(piece, begin, end, number, slot)
            under_way.append((number, self._submit(work, threads)))
        while under_way:
            hand_over()

    def _ring(self, dtype: torch.dtype, threads: int) -> _Ring:
        ring, count = self._rings.get(dtype), ring_buffers(threads)
        if ring is None or len(ring) < count:
            if ring is not None:
                ring.close()
            ring = _Ring(self.device, count, self.piece_elements, dtype, page_lock=self._page_lock)
            self._rings[dtype] = ring
        return ring

    # -- threads --

    def _submit(self, work: Callable[[], None], threads: int) -> Future[None]:
        """Hand it to one of so many threads, who are kept for the next run."""
        if threads not in self._pools:
            own = self.device.own_threads(threads)
            self._pools[threads] = own or ThreadPoolExecutor(threads, "autotune-offload-step")
        future = self._pools[threads].submit(work)
        self._running.append(future)
        return future

    def _settle(self) -> None:
        """Wait for every thread, also through an interruption."""
        for future in self._running:
            future.cancel()
        wait(self._running)

    # -- the end of a step, and of all --

    def drain(self) -> None:
        """Return when all rounded weights are on the device."""
        for ring in self._rings.values():
            ring.drain()

    @property
    def pinned_bytes(self) -> int:
        """Page-locked for what goes to the device."""
        return sum(ring.pinned_bytes for ring in tuple(self._rings.values()))

    def close(self) -> None:
        """End the threads and give the buffers back."""
        pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.shutdown()
        rings, self._rings = self._rings, {}
        for ring in rings.values():
            ring.close()


class _Ring:
    """Host buffers in turn: filled by a thread, copied to the device, free again when the copy is done."""

    def __init__(
        self, device: Device, count: int, elements: int, dtype: torch.dtype, *, page_lock: bool
    ) -> None:
        self._device = device
        self._slots: list[Tensor] = []
        self._events: list[Event | None] = [None] * count
        self._locked = page_lock and device.why_not_pinned() is None
        try:
            self._fill(count, elements, dtype)
        except PinError:  # then copies are not asynchronous, and nothing else is different
            self.close()
            self._locked = False
            self._fill(count, elements, dtype)

    def _fill(self, count: int, elements: int, dtype: torch.dtype) -> None:
        make = self._device.pinned_empty if self._locked else self._device.host_empty
        while len(self._slots) < count:
            self._slots.append(make(elements, dtype))

    def __len__(self) -> int:
        return len(self._events)

    @property
    def pinned_bytes(self) -> int:
        return sum(slot.nbytes for slot in tuple(self._slots)) if self._locked else 0

    def free(self, number: int) -> Tensor:
        """The buffer of piece `number`, when what it held is on the device."""
        at = number % len(self)
        event, self._events[at] = self._events[at], None
        if event is not None:
            with named(self._device, "wait for 16-bit weights"):
                event.synchronize()
        return self._slots[at]

    def send(self, number: int, destination: Tensor) -> None:
        """Copy the buffer of piece `number`, without waiting for it."""
        at = number % len(self)
        with named(self._device, "16-bit weights to the device"):
            self._device.h2d(destination, self._slots[at][: destination.numel()], non_blocking=True)
            self._events[at] = self._device.record_event()

    def drain(self) -> None:
        """Return when every copy is done."""
        for number in range(len(self)):
            self.free(number)

    def close(self) -> None:
        """Give the buffers back, once nothing reads them."""
        self._device.synchronize()
        slots, self._slots = self._slots, []
        if self._locked:
            for slot in slots:
                self._device.release_pinned(slot)
