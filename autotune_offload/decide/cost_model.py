"""What each way of offloading should cost: the stages of one gradient, added up over the workload.

The model only orders candidates and prunes; trials decide.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from autotune_offload.paths.rates import Rates
from autotune_offload.paths.stages import Stages, Work, stages
from autotune_offload.records import Baseline, Candidate, Measurements, Workload
from autotune_offload.workload import DTYPE_BYTES


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
        """Fits no line yet."""
        self.rates = Rates(measurements, shares_host_memory=shares_host_memory)
        self.workload, self.synchronous, self.compute_seconds = workload, synchronous, compute_seconds

    def seconds(self, way: Candidate | Baseline) -> float:
        """What one of our paths, or one of DeepSpeed's own sequences, adds to a backward pass."""
        through = stages(way, DTYPE_BYTES[self.workload.dtype], self.rates)
        streamed = [work for work in through.work if work.lane != "host"]
        on_host = [work for work in through.work if work.lane == "host"]
        device = self._spent(through.before) + self._spent(streamed, through.piece_elements)
        host = self._spent(on_host, through.piece_elements)
        if self.synchronous:
            return device + host
        works_itself = any(work.waits for work in on_host)
        hidden = 0.0 if any(work.waits for work in streamed) else self.compute_seconds
        if through.buffers:
            fill = _one_buffer(through)
            if not works_itself:
                return max(max(device, host) - hidden, fill)
            # the calling thread empties buffers while the device fills the others; one cannot overlap
            return (device + host if through.buffers == 1 else max(device, host)) + fill
        last = self.workload.largest_elements / self.workload.elements
        if works_itself:  # and hides behind nothing
            return max(device - hidden, device * last) + host
        return max(max(device, host) - hidden, (device + host) * last)

    def _spent(self, work: Sequence[Work], most: int = sys.maxsize) -> float:
        """Seconds of this part of the stages over the whole workload, in pieces of so many elements at most."""
        elements = self.workload.elements
        pieces = sum(-(-size // most) * count for size, count in self.workload.partitions)
        return sum(each.seconds(elements, pieces) for each in work)


def _one_buffer(through: Stages) -> float:
    """One buffer's way through a ring: what is left when the last gradient is there, even if all else hides."""
    link = next(work for work in through.work if work.lane == "link")
    held_bytes = link.element_bytes * through.piece_elements
    return sum(held_bytes / work.line.bytes_per_second for work in through.work if work.lane != "device")
