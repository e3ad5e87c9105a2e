"""What a path or a key page-locks, against what this process may lock and what was really locked here."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

from autotune_offload.config.layout import PLAIN, Layout
from autotune_offload.machine import limits as machine_limits
from autotune_offload.paths import pinned_blocks
from autotune_offload.paths.accumulation import PINNED_BYTES
from autotune_offload.paths.path import page_locks
from autotune_offload.records import Candidate, Choice, Limits, Path, PinCost, Workload
from autotune_offload.units import gigabytes
from autotune_offload.upstream import NEWEST, SUB_GROUP_ELEMENTS

_MORE_RANKS = "more ranks make it smaller"

MOST_LOCK_SECONDS = 300.0
"""Locking may take so long at each start: half of the ten minutes for which a rank waits for another by default
(torch.distributed: default_pg_timeout for NCCL)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinRules:
    """What page-locking is possible in this process, asked for one path or key at a time."""

    workload: Workload
    pin: PinCost
    limits: Limits
    locks: bool = True
    """False where the accelerator's `pin_memory` locks nothing, as the CPU's own."""
    layout: Layout = PLAIN
    """What the configuration says of stage, devices and sizes."""
    version: str = NEWEST
    """DeepSpeed's, which decides what is page-locked."""

    @property
    def not_on_offer(self) -> str | None:
        """Why nothing can be page-locked at all, if so."""
        if self.limits.pinnable_bytes < mmap.PAGESIZE:
            left = f"the limits leave {self.limits.pinnable_bytes:,} bytes to page-lock"
            return f"{left}{machine_limits.tightest(self.limits.bounds)}"
        return self.pin.reason if not self.pin.largest_bytes else None

    @property
    def sub_group(self) -> int | None:
        """The `sub_group_size` to be written so that each sub-group's block can be locked; None leaves it.

        It divides the fp32 gradients of stage 3 alone, and a size that the user wrote is not ours to change.
        """
        layout = self.layout
        if layout.stage != 3 or layout.optimizer != "cpu" or layout.sub_group_elements is not None:
            return None
        if self.pin.capped or not self.pin.proven_bytes or self._fits(SUB_GROUP_ELEMENTS):
            return None
        return pinned_blocks.fitting_sub_group(self.workload, self.pin.proven_bytes)

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
            why = self._against_blocks([ring], ring, "lower buffer_bytes")
        return why

    def against_host_sums(self, candidate: Candidate) -> str | None:
        """Why adding micro-steps up on the host has no room beside what this path page-locks itself, if so."""
        if not page_locks(candidate.path):
            return None
        ring = [candidate.buffer_bytes * candidate.buffer_count]
        own = ring if candidate.path == "staged" else self.optimizer_blocks
        return self._against_blocks([*own, PINNED_BYTES], max(own), 'set "accumulate" to "device"')

    def against_ring(self, blocks: Sequence[int], beside: Candidate | Choice) -> str | None:
        """Why the step's ring of these blocks cannot be page-locked beside what the gradient path locks, if so."""
        if self.not_on_offer is not None:
            return f"page-locked memory is not on offer: {self.not_on_offer}"
        own: list[int] = []
        if page_locks(beside.path):
            ring = [beside.buffer_bytes * beside.buffer_count]
            own = ring if beside.path == "staged" else self.optimizer_blocks
        return self._against_blocks([*own, *blocks], max(blocks), "fewer threads need fewer buffers")

    def against_optimizer(self) -> str | None:
        """Why what `offload_optimizer.pin_memory` page-locks does not fit, if so."""
        block, way_out = self._hardest_block()
        return self._against_blocks(self.optimizer_blocks, block, way_out, weights_pinned=True)

    def against_parameters(self, *, with_optimizer: bool) -> str | None:
        """Why this rank's parameters do not fit, beside the optimizer's blocks if those are pinned too."""
        blocks = self.optimizer_blocks if with_optimizer else []
        parameters = pinned_blocks.parameter_blocks(self.workload)
        block, way_out = self._hardest_block() if with_optimizer else (0, _MORE_RANKS)
        largest = max(block, *parameters)
        return self._against_blocks([*blocks, *parameters], largest, way_out, weights_pinned=with_optimizer)

    def against_deepspeeds_own(self) -> str | None:
        """Why even what DeepSpeed page-locks whatever is chosen does not fit, if so."""
        if not self.locks or not self.own_blocks:
            return None
        return self._beyond_largest(max(self.own_blocks), _MORE_RANKS) or machine_limits.check_pinned(
            self.own_blocks, self.limits, beside_bytes=pinned_blocks.state_bytes(self.workload, self.layout)
        )

    def against_bounce_buffer(self) -> str | None:
        """Why DeepSpeed's sequence with a bounce buffer cannot be timed here, if so."""
        if not self.locks:
            return None
        bounce = pinned_blocks.bounce_bytes(self.workload)
        return self.not_on_offer or self._against_blocks([bounce], bounce, _MORE_RANKS)

    # -- blocks --

    @property
    def optimizer_blocks(self) -> list[int]:
        """What `offload_optimizer.pin_memory` would page-lock, with the sub-groups that would be written."""
        return pinned_blocks.optimizer_blocks(self.workload, self.layout, self.version, self.sub_group)

    @property
    def own_blocks(self) -> list[int]:
        """What DeepSpeed page-locks whatever is chosen."""
        return pinned_blocks.own_blocks(self.workload, self.layout, self.version)

    @property
    def largest_optimizer_bytes(self) -> int:
        """Of the blocks of `offload_optimizer.pin_memory` the largest, whatever the order of the parameters."""
        blocks = self.optimizer_blocks
        if self.layout.stage != 3 or self.layout.optimizer != "cpu":
            return max(blocks, default=0)
        return max(blocks[0], self._sub_group_bytes(self._sub_group_size()))

    @property
    def untried(self) -> bool:
        """Whether the optimizer's largest block is larger than any that was locked here, and none has failed."""
        return self._untried(self.largest_optimizer_bytes)

    @property
    def untried_parameters(self) -> bool:
        """The same of the largest parameter's block."""
        return self._untried(max(pinned_blocks.parameter_blocks(self.workload)))

    def _untried(self, block: int) -> bool:
        return self.locks and self.pin.capped and block > self.pin.proven_bytes

    def _sub_group_size(self) -> int:
        return self.layout.sub_group_elements or self.sub_group or SUB_GROUP_ELEMENTS

    def _sub_group_bytes(self, size: int) -> int:
        return self.layout.master_bytes * pinned_blocks.largest_sub_group(self.workload, size)

    def _fits(self, size: int) -> bool:
        return self._sub_group_bytes(size) <= self.pin.proven_bytes

    def _hardest_block(self) -> tuple[int, str]:
        """The block of the optimizer's that decides whether all can be locked, and what makes it smaller."""
        largest = self.largest_optimizer_bytes
        divided = self.layout.stage == 3 and self.layout.optimizer == "cpu"
        if not divided:
            return largest, f"sub_group_size does not divide it; {_MORE_RANKS}"
        sums = self.optimizer_blocks[0]
        if sums > self.pin.proven_bytes:
            return (
                sums,
                f"it holds the sums of all gradients, which sub_group_size does not divide; {_MORE_RANKS}",
            )
        fitting = pinned_blocks.fitting_sub_group(self.workload, self.pin.proven_bytes)
        if self.layout.sub_group_elements is not None and fitting is not None:
            return largest, f'lower sub_group_size to {fitting:,}, or make it "auto"'
        return largest, _MORE_RANKS

    # -- what it takes --

    def lock_seconds(self, blocks: Sequence[int]) -> float:
        """What page-locking blocks of these sizes takes at each start, by what it took here."""
        rounded = sum(map(machine_limits.pinned_block_bytes, blocks))
        return (self.pin.seconds_per_gib or 0.0) * rounded / 2**30

    def _too_slow(self, blocks: Sequence[int]) -> str | None:
        seconds = self.lock_seconds(blocks)
        if seconds <= MOST_LOCK_SECONDS:
            return None
        return (
            f"page-locking {gigabytes(sum(blocks))} would take {seconds:,.0f} s at each start "
            f"({self.pin.seconds_per_gib:.3g} s a GiB here), more than the {MOST_LOCK_SECONDS:.0f} s that a start may "
            "take for it; more ranks lock less each"
        )

    # -- against the limits --

    @property
    def _in_any_case(self) -> list[int]:
        """DeepSpeed's own, unless they do not fit: such a run has no `offload_param`, or starts with no choice."""
        return [] if self.against_deepspeeds_own() else self.own_blocks

    def _beyond_largest(self, block: int, way_out: str) -> str | None:
        if self.pin.capped or block <= self.pin.proven_bytes:
            return None
        return (
            f"needs a page-locked block of {block:,} bytes, but the largest that could be "
            f"locked here is {self.pin.proven_bytes:,} ({self.pin.reason}); {way_out}"
        )

    def _against_blocks(
        self, blocks: Sequence[int], largest: int, way_out: str, *, weights_pinned: bool = False
    ) -> str | None:
        return (
            self._beyond_largest(largest, way_out)
            or self._too_slow(blocks)
            or machine_limits.check_pinned(
                blocks,
                self.limits,
                in_any_case_bytes=self._in_any_case,
                beside_bytes=pinned_blocks.state_bytes(
                    self.workload, self.layout, weights_pinned=weights_pinned
                ),
            )
        )


def largest_needed(workload: Workload, limits: Limits, layout: Layout, version: str) -> int:
    """Bytes of the largest block that a run with this model may page-lock; 0 where the limits leave no room to try it.

    It exists twice while it is locked, and the page-locked one is rounded up.
    """
    anything = PinCost(seconds_per_gib=None, largest_bytes=1 << 60, capped=True)
    rules = PinRules(workload=workload, pin=anything, limits=limits, layout=layout, version=version)
    block = max([rules.largest_optimizer_bytes, *rules.own_blocks, *pinned_blocks.parameter_blocks(workload)])
    return 0 if machine_limits.check_pinned([block], limits) else block
