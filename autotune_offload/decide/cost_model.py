"""What each way of offloading should cost: the stages of one gradient, added up over the workload.

The model only orders candidates and prunes; trials decide.
"""

from __future__ import annotations

from autotune_offload.paths.rates import Rates
from autotune_offload.paths.stages import Stages, stages
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
        device, host = self._spent(through, on_host=False), self._spent(through, on_host=True)
        if self.synchronous:
            return device + host
        waits = any(work.waits for work in through.work if work.lane != "host")
        waits_for_host = any(work.waits for work in through.work if work.lane == "host")
        hidden = 0.0 if waits else self.compute_seconds
        if through.buffers:
            fill = _one_buffer(through)
            if not waits:
                return max(max(device, host) - hidden, fill)
            # the calling thread empties buffers while the device fills the others; one cannot overlap
            return (device + host if through.buffers == 1 else max(device, host)) + fill
        rest = (device + host) * self.workload.largest_elements / self.workload.elements
        if waits_for_host and not waits:
            return max(device - hidden, rest) + host
        busy = device + host if waits_for_host else max(device, host)
        return max(busy - hidden, rest)

    def _spent(self, through: Stages, *, on_host: bool) -> float:
        """By the device's stream, or on the host, over the whole workload."""
        most = through.piece_elements
        pieces = sum(-(-size // most) * count for size, count in self.workload.partitions)
        elements = self.workload.elements
        return sum(
            work.seconds(elements, pieces) for work in through.work if (work.lane == "host") is on_host
        )


def _one_buffer(through: Stages) -> float:
    """What is left of a ring after the last gradient is there, even if all else hides: one buffer."""
    link = next(work for work in through.work if work.lane == "link")
    held_bytes = link.element_bytes * through.piece_elements
    return sum(held_bytes / work.line.bytes_per_second for work in through.work if work.lane != "device")
