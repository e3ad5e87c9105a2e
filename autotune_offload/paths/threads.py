"""Who does a path's work on the host: the calling thread, or threads of the path's own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from threading import Barrier

import torch
from torch import Tensor

from autotune_offload.machine.device import Device


class HostThreads:
    """Who does a path's work on the host: the calling thread, or `count` threads of its own.

    With a count of 0, an operation runs at once in the calling thread on torch's intra-op pool. Each
    thread of its own runs single-threaded torch operations, so that none waits for a parallel region.
    """

    def __init__(self, count: int, device: Device | None = None) -> None:
        """Starts the threads, on `device`; the caller's own number of torch threads stays as it was."""
        self.count = count
        self._pool: Executor | None = device.own_threads(count) if count and device is not None else None
        if count and self._pool is None:
            threads = ThreadPoolExecutor(count, thread_name_prefix="autotune-offload")
            self._start(threads, device)
            self._pool = threads

    def _start(self, pool: ThreadPoolExecutor, device: Device | None) -> None:
        before = torch.get_num_threads()
        together = Barrier(self.count + 1)  # so that each of them takes one
        try:
            started = [pool.submit(_single_threaded, together, device) for _ in range(self.count)]
            together.wait()
            for future in started:
                future.result()
        except BaseException:
            together.abort()
            pool.shutdown()
            raise
        finally:
            # set_num_threads is per thread, but also what threads that start later begin with
            torch.set_num_threads(before)

    def submit(self, work: Callable[[], None]) -> Future[None] | None:
        """Run `work`: now and here (None), or soon in a thread of its own."""
        if self._pool is None:
            work()
            return None
        return self._pool.submit(work)

    def copy(self, device: Device, destination: Tensor, source: Tensor) -> None:
        """One copy, casting where dtypes differ, shared by all threads; returns when it is done."""
        if self._pool is None:
            device.h2h(destination, source)
            return
        pieces = zip(destination.chunk(self.count), source.chunk(self.count), strict=True)
        for future in [self._pool.submit(device.h2h, to, of) for to, of in pieces]:
            future.result()

    def widen(self, device: Device, destination: Tensor, source: Tensor, kept: Tensor | None = None) -> float:
        """One pass to fp32, and as it is to `kept`, shared by all threads; the sum of the squares."""
        if self._pool is None:
            return device.widen(destination, source, kept)
        places = [destination, source] if kept is None else [destination, source, kept]
        pieces = zip(*(place.chunk(self.count) for place in places), strict=True)
        return sum(
            future.result() for future in [self._pool.submit(device.widen, *piece) for piece in pieces]
        )

    def close(self) -> None:
        """End the threads after what was submitted."""
        if self._pool is not None:
            self._pool.shutdown()


def _single_threaded(together: Barrier, device: Device | None) -> None:
    try:
        torch.get_num_threads()  # a thread that was never asked takes the process's number at its first operation
        torch.set_num_threads(1)
        if device is not None:
            device.enter_thread()
    finally:
        together.wait()
