"""What a gradient path keeps in device memory, and the most of it that may be.

Gradients themselves are never kept: a copy reads them in the order of its stream, in which their memory is used again.
What is on its way to sums on the host lies in buffers in host memory (see `accumulation`).
"""

from __future__ import annotations

from autotune_offload.records import Candidate, Choice, Record, Workload
from autotune_offload.units import gigabytes
from autotune_offload.workload import DTYPE_BYTES

DEVICE_MEMORY_SHARE = 0.02
"""Of the device's memory at most for one bucket of gradients, or for the scratch of a path."""

UNKNOWN_MEMORY_BYTES = 8 << 30
"""Taken where the device does not tell its memory: the least that offloading is used with."""


class DeviceMemory(Record, frozen=True, kw_only=True):
    """Scratch that a path keeps from its first use to its end; beside it, 8 bytes a partition for norms."""

    cast_bytes: int
    """fp32 values of one piece on their way, where casts are made on the device."""
    sums_bytes: int
    """The largest partition, where micro-steps are added up on the device."""

    @property
    def bytes(self) -> int:
        """Both."""
        return self.cast_bytes + self.sums_bytes


def device_memory(
    choice: Candidate | Choice, workload: Workload, *, shares_host_memory: bool
) -> DeviceMemory:
    """What a path keeps on the device.

    Args:
        choice: the path, its buffers and, with several micro-steps, the place where they are added up.
        workload: the gradients; their dtype is taken for that of the sums.
        shares_host_memory: device memory is host memory, where sums are made in place.
    """
    casts = choice.cast == "device" and workload.dtype != "float32"
    place = getattr(choice, "accumulate", "device")  # of a candidate, both places are tried
    sums = workload.accumulation_steps > 1 and place == "device" and not shares_host_memory
    return DeviceMemory(
        cast_bytes=choice.buffer_bytes // 4 * 4 if casts else 0,
        sums_bytes=DTYPE_BYTES[workload.dtype] * workload.largest_elements if sums else 0,
    )


def stock_bytes(workload: Workload) -> int:
    """What DeepSpeed's own code takes for the largest partition while it moves it: the sum, and its copy in fp32.

    Source: partition_grads in zero/stage3.py of 0.16.3 to 0.19.8; older releases take the sum alone.
    """
    return (DTYPE_BYTES[workload.dtype] + 4) * workload.largest_elements


def against_device_memory(
    candidate: Candidate | Choice, workload: Workload, memory_bytes: int | None, *, shares_host_memory: bool
) -> str | None:
    """Why the scratch of this path takes too much of the device, if so.

    It may take `DEVICE_MEMORY_SHARE` of it, and whatever it has, as much as DeepSpeed's own code takes.
    """
    if shares_host_memory:
        return None
    needed = device_memory(candidate, workload, shares_host_memory=False).bytes
    share = int((memory_bytes or UNKNOWN_MEMORY_BYTES) * DEVICE_MEMORY_SHARE)
    if needed <= max(share, stock_bytes(workload)):
        return None
    return (
        f"needs {gigabytes(needed)} of device memory for scratch, but a path may take {gigabytes(share)}, "
        f"{DEVICE_MEMORY_SHARE:.0%} of the device's memory; lower buffer_bytes"
    )
