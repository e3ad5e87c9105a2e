"""The gradient paths, written once against `Device`, and DeepSpeed's own sequences beside them.

A path takes a low-precision gradient partition from device memory to the fp32 gradient in host
memory. `offload` queues one partition on the current stream; `drain` returns when every destination
holds its values; `close` gives the path's buffers back. The code that is timed in a trial is this.

Where a cast is due, fp32 values are exact: bf16 and fp16 are subsets of fp32, so every path gives the
same bits. Only the payload of an fp16 NaN is left to torch, whose own `.float()` gives it differently in
the body and in the tail of one tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from autotune_offload.machine.device import Device
from autotune_offload.paths.threads import HostThreads
from autotune_offload.records import Cast, Memory, Path

_TAIL_ELEMENTS = 1024
"""Below this, an in-place upcast goes through a copy: halving further costs more than it saves."""


_PINS: dict[Path, int] = {"direct": 0, "staged": 1, "pinned": 2}


def pins(path: Path) -> int:
    """The place of a path by how much it page-locks: a near tie goes to the least. One from outside locks nothing."""
    return _PINS.get(path, 0)


class Spec(Protocol):
    """What a path is built from; candidates and choices have these fields."""

    @property
    def path(self) -> Path:
        """Which of our paths."""
        ...

    @property
    def cast(self) -> Cast:
        """Where low precision becomes fp32."""
        ...

    @property
    def buffer_bytes(self) -> int:
        """Of one piece, or of one buffer of the ring."""
        ...

    @property
    def buffer_count(self) -> int:
        """Buffers in the ring."""
        ...

    @property
    def host_threads(self) -> int:
        """Threads of the path's own; 0 is torch's pool in the calling thread."""
        ...


def destination_memory(path: Path) -> Memory:
    """The kind of host memory in which this path wants the fp32 gradient."""
    return "pinned" if path == "pinned" else "pageable"


def page_locks(path: Path) -> bool:
    """Whether this path takes page-locked memory at all."""
    return path in ("pinned", "staged")


class GradientPath(ABC):
    """One way from a gradient partition on the device to its fp32 destination on the host."""

    def __init__(self, device: Device, spec: Spec, dtype: torch.dtype) -> None:
        """Allocates nothing; subclasses allocate their buffers, and start the threads when they have them."""
        self.device = device
        self.dtype = dtype
        self.casts_on_device = spec.cast == "device" and dtype != torch.float32
        self.buffer_elements = spec.buffer_bytes // 4
        self.threads = HostThreads(0)

    @property
    def pinned_bytes(self) -> int:
        """Page-locked for the path's own buffers."""
        return 0

    @abstractmethod
    def offload(self, source: Tensor, destination: Tensor, low: Tensor | None = None) -> None:
        """Queue one partition on the current stream, which is the same one until the next drain.

        Whoever offloads to the same memory again drains before.

        Args:
            source: device memory, shape (n,), of the path's dtype; unchanged until the path drains or
                later work on the same stream, whichever is first.
            destination: host memory, shape (n,), float32, contiguous.
            low: host memory, shape (n,), of the path's dtype, where the values are to stay as they are;
                where device memory is host memory it may be `source` itself.
        """

    def offload_with_norm(self, source: Tensor, destination: Tensor, low: Tensor | None = None) -> Tensor:
        """Queue one partition as `offload` does, and return its 2-norm.

        Returns:
            Shape (), float64, accumulated in fp64; on the device in stream order, or on the host.
        """
        norm = self.device.norm(source)
        self.offload(source, destination, low)
        return norm

    @abstractmethod
    def drain(self) -> None:
        """Return when every destination that was given to `offload` holds its values.

        The current stream does not matter here. What a host thread of the path's raised is raised here
        or by the next `offload`.
        """

    @abstractmethod
    def recover(self) -> None:
        """After a failure: return when no host thread is at work any more and every `low` holds its values.

        Every copy that was queued must have been waited for. Destinations are left to the caller, and to be
        filled from there.
        """

    def close(self) -> None:
        """End the host threads and give back the buffers; the path must have been drained, or have recovered."""
        self.threads.close()


def widen_in_place(device: Device, destination: Tensor, dtype: torch.dtype) -> None:
    """Turn low-precision values in the upper half of `destination`'s bytes into fp32 over all of it.

    Each step widens the front half of what is left: its fp32 values end where the values still to be
    read begin. A last short piece is copied out first.

    Args:
        device: does the copies, in the calling thread.
        destination: host memory, shape (n,), float32, contiguous; bytes 2n to 4n hold n values.
        dtype: bfloat16 or float16.
    """
    total = destination.numel()
    low = destination.view(dtype)[total:]
    done = 0
    while (half := (total - done) // 2) >= _TAIL_ELEMENTS:
        device.h2h(destination[done : done + half], low[done : done + half])
        done += half
    device.h2h(destination[done:], low[done:].clone())


def moved_bytes(spec: Spec, gradient: Tensor) -> int:
    """Bytes of one partition that cross the link on the path of `spec`, `low` included, where there is a link."""
    itemsize = gradient.element_size()
    if spec.path != "staged" and (spec.cast == "device" or itemsize == 4):
        return gradient.numel() * (itemsize + 4)
    return gradient.numel() * (4 if spec.cast == "device" else itemsize)


def chunks(source: Tensor, destination: Tensor, elements: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of pieces of `elements` elements, the last one shorter."""
    for start in range(0, source.numel(), elements):
        yield source[start : start + elements], destination[start : start + elements]
