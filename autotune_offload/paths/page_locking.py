"""What a path page-locks, block by block, against what this process may lock."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

from autotune_offload.machine import limits as machine_limits
from autotune_offload.paths.accumulation import PINNED_BYTES
from autotune_offload.paths.path import page_locks
from autotune_offload.records import Candidate, Choice, Limits, Path, PinCost, Workload
from autotune_offload.upstream import SUB_GROUP_ELEMENTS
from autotune_offload.workload import DTYPE_BYTES

# -- limits ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PinRules:
    """What page-locking is possible in this process, asked for one path or key at a time."""

    workload: Workload
    pin: PinCost
    limits: Limits
    locks: bool = True
    """False where the accelerator's `pin_memory` locks nothing, as the CPU's own."""
    bounces: bool = False
    """Whether the installed DeepSpeed pins a bounce buffer whatever is chosen, as 0.15.4 to 0.16.2 do."""

    @property
    def not_on_offer(self) -> str | None:
        """Why nothing can be page-locked at all, if so."""
        if self.limits.pinnable_bytes < mmap.PAGESIZE:
            left = f"the limits leave {self.limits.pinnable_bytes:,} bytes to page-lock"
            return f"{left}{machine_limits.tightest(self.limits.bounds)}"
        return self.pin.reason if not self.pin.largest_bytes else None

    def against_path(self, path: Path) -> str | None:
        """Why no candidate of this path can run, if so."""
        if not page_locks(path):
            return None
        if self.not_on_offer is not None:
            return f"page-locked memory is not on offer: {self.not_on_offer}"
        return self.against_optimizer() if path == "pinned" else None

    def against(self, candidate: Candidate | Choice) -> str | None:
        """Why this candidate, or a choice that was made earlier, cannot run, if so."""
        why = self.against_path(candidate.path)
        if why is None and candidate.path == "staged":
            ring = candidate.buffer_bytes * candidate.buffer_count
            why = self._against_blocks([ring], "lower buffer_bytes")
        return why

    def against_host_sums(self, candidate: Candidate) -> str | None:
        """Why adding micro-steps up on the host has no room beside what this path page-locks itself, if so."""
        if not page_locks(candidate.path):
            return None
        if candidate.path == "staged":
            own = [candidate.buffer_bytes * candidate.buffer_count]
        else:
            own = optimizer_blocks(self.workload)
        return self._against_blocks([*own, PINNED_BYTES], 'set "accumulate" to "device"')

    def against_optimizer(self) -> str | None:
        """Why what `offload_optimizer.pin_memory` page-locks does not fit, if so."""
        return self._against_blocks(optimizer_blocks(self.workload), "lower sub_group_size")

    def against_parameters(self, *, with_optimizer: bool) -> str | None:
        """Why this rank's parameters do not fit, beside the optimizer's blocks if those are pinned too."""
        blocks = optimizer_blocks(self.workload) if with_optimizer else []
        way_out = "lower sub_group_size" if with_optimizer else "more ranks make it smaller"
        return self._against_blocks([*blocks, *parameter_blocks(self.workload)], way_out)

    def against_deepspeeds_own(self) -> str | None:
        """Why even what DeepSpeed page-locks whatever is chosen does not fit, if so."""
        if not self.locks:
            return None
        return machine_limits.check_pinned(
            self._own_blocks, self.limits, beside_bytes=state_bytes(self.workload)
        )

    def against_bounce_buffer(self) -> str | None:
        """Why DeepSpeed's sequence with a bounce buffer cannot be timed here, if so."""
        if not self.locks:
            return None
        return self.not_on_offer or self._against_blocks(
            [bounce_bytes(self.workload)], "more ranks make it smaller"
        )

    @property
    def _own_blocks(self) -> list[int]:
        return flat_blocks(self.workload) + [bounce_bytes(self.workload)] * self.bounces

    @property
    def _in_any_case(self) -> list[int]:
        """DeepSpeed's own, unless they do not fit: such a run has no `offload_param`, or starts with no choice."""
        return [] if self.against_deepspeeds_own() else self._own_blocks

    def _against_blocks(self, blocks: Sequence[int], way_out: str) -> str | None:
        if not self.pin.capped and max(blocks) > self.pin.largest_bytes:
            return (
                f"needs a page-locked block of {max(blocks):,} bytes, but the largest that could be "
                f"locked here is {self.pin.largest_bytes:,} ({self.pin.reason}); {way_out}"
            )
        return machine_limits.check_pinned(
            blocks,
            self.limits,
            in_any_case_bytes=self._in_any_case,
            beside_bytes=state_bytes(self.workload),
        )


def optimizer_blocks(workload: Workload) -> list[int]:
    """Bytes of each block that DeepSpeed pins for `offload_optimizer.pin_memory`, before rounding.

    The flat low-precision accumulation buffer and the fp32 gradients of each sub-group (stage3.py:
    grad_partitions_flat_buffer, initialize_optimizer_states).
    """
    low = DTYPE_BYTES[workload.dtype] * workload.elements
    whole, rest = divmod(workload.elements, SUB_GROUP_ELEMENTS)
    return [low, *[4 * SUB_GROUP_ELEMENTS] * whole, *([4 * rest] if rest else [])]


def parameter_blocks(workload: Workload) -> list[int]:
    """The same for `offload_param.pin_memory`: one for each parameter's slice (partition_parameters.py)."""
    size = DTYPE_BYTES[workload.dtype]
    sizes = workload.parameters
    return [-(-each // workload.world_size) * size for each, count in sizes for _ in range(count)]


def flat_blocks(workload: Workload) -> list[int]:
    """The same for what DeepSpeed pins with `offload_param` whatever `pin_memory` says.

    One flat copy of this rank's trainable parameters (stage3.py: _create_param_groups_fp16_flat_cpu_memory).
    """
    return [DTYPE_BYTES[workload.dtype] * workload.elements]


def bounce_bytes(workload: Workload) -> int:
    """One block for the largest partition, in torch's default dtype (stage3.py of 0.15.4: pinned_grad_buffer)."""
    return 4 * workload.largest_elements


def state_bytes(workload: Workload) -> int:
    """Host memory beside gradients and parameters: fp32 weights and Adam's two moments.

    Source: Rajbhandari et al., arXiv:1910.02054, section 3.1, which counts 12 bytes a parameter for them.
    """
    return 12 * workload.elements
