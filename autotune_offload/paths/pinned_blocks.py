"""What DeepSpeed page-locks, block by block in bytes before rounding: from the layout, the workload and the release.

The one place where this is counted. Tests hold it against DeepSpeed's own calls of `pin_memory` at stages 1, 2 and 3.
"""

from __future__ import annotations

from autotune_offload.config.layout import PLAIN, Layout
from autotune_offload.records import Workload
from autotune_offload.upstream import (
    HALF_BUFFER_SINCE,
    MASTERS_PINNED_AS_TOLD_SINCE,
    NEWEST,
    SUB_GROUP_ELEMENTS,
    parse_version,
    stock_sequence,
)
from autotune_offload.workload import DTYPE_BYTES

_FP32 = 4
_BOUNCES = "bounce_buffer"


def optimizer_blocks(
    workload: Workload, layout: Layout = PLAIN, version: str = NEWEST, sub_group: int | None = None
) -> list[int]:
    """What `offload_optimizer.pin_memory` page-locks.

    Args:
        workload: the gradients of one rank.
        layout: what the configuration says.
        version: DeepSpeed's.
        sub_group: a `sub_group_size` that is going to be written, where the user gave none.
    """
    low = DTYPE_BYTES[workload.dtype]
    if layout.optimizer is None:
        return []
    if layout.stage in (1, 2):
        return _undivided(workload, layout, version) if layout.optimizer == "cpu" else []
    # stage3.py: grad_partitions_flat_buffer, and initialize_optimizer_states
    sums = (layout.sums_bytes or low) * workload.elements
    if layout.optimizer == "nvme":
        return [sums]
    size = layout.sub_group_elements or sub_group or SUB_GROUP_ELEMENTS
    return [sums, *(layout.master_bytes * elements for elements in sub_groups(workload, size))]


def _undivided(workload: Workload, layout: Layout, version: str) -> list[int]:
    """stage_1_and_2.py: flat blocks that `sub_group_size` does not divide, and one for the largest gradient."""
    low, elements = DTYPE_BYTES[workload.dtype], workload.elements
    release = parse_version(version)
    whole = sorted(_whole_parameters(workload), reverse=True)
    blocks = [layout.master_bytes * elements, low * whole[0]]  # gradients; temp_grad_buffer_for_cpu_offload
    if release >= MASTERS_PINNED_AS_TOLD_SINCE:
        blocks.append(layout.master_bytes * elements)
    if release >= HALF_BUFFER_SINCE:
        blocks.append(low * elements)
    if layout.stage == 2 and workload.accumulation_steps > 1 and layout.master_bytes == _FP32:
        blocks += [low * each for each in whole]  # accumulated_grads_in_cpu
    return blocks


def _whole_parameters(workload: Workload) -> list[int]:
    """Whole trainable parameters whose gradients one rank keeps at stages 1 and 2: its share of each size."""
    ranks = workload.world_size
    return [size * ranks for size, count in workload.partitions for _ in range(-(-count // ranks))]


def sub_groups(workload: Workload, size: int) -> list[int]:
    """Elements of each sub-group (stage3.py: _create_fp16_sub_groups): whole partitions until `size` is reached.

    In which order a model has them is not known here; the largest first is taken.
    """
    if size >= workload.elements:
        return [workload.elements]
    groups, open_elements = [], 0
    for elements, count in workload.partitions:
        left = count
        while left:
            needed = -(-(size - open_elements) // elements)
            if needed > left:
                open_elements += left * elements
                break
            if open_elements == 0 and left // needed > 1:
                groups += [needed * elements] * (left // needed)
                left -= left // needed * needed
            else:
                groups.append(open_elements + needed * elements)
                left -= needed
                open_elements = 0
    return groups + [open_elements] * (open_elements > 0)


def largest_sub_group(workload: Workload, size: int) -> int:
    """Elements that a sub-group has at most, whatever the order."""
    return min(workload.elements, size - 1 + workload.largest_elements)


def fitting_sub_group(workload: Workload, most_bytes: int) -> int | None:
    """The largest `sub_group_size` whose every block has `most_bytes` at most; None where no size has."""
    size = most_bytes // _FP32 - workload.largest_elements + 1
    return size if size >= 1 else None


def parameter_blocks(workload: Workload) -> list[int]:
    """What `offload_param.pin_memory` page-locks: one for each parameter's slice (partition_parameters.py)."""
    size = DTYPE_BYTES[workload.dtype]
    sizes = workload.parameters
    return [-(-each // workload.world_size) * size for each, count in sizes for _ in range(count)]


def own_blocks(workload: Workload, layout: Layout = PLAIN, version: str = NEWEST) -> list[int]:
    """What DeepSpeed page-locks whatever `pin_memory` says.

    With `offload_param` one flat copy of this rank's trainable parameters (stage3.py:
    _create_param_groups_fp16_flat_cpu_memory); the bounce buffer of some releases; the weights of stages 1 and 2 of
    older ones.
    """
    blocks = []
    release = parse_version(version)
    if layout.stage == 3 and layout.parameters is not None:
        blocks += flat_blocks(workload, layout)
    if layout.stage == 3 and layout.optimizer is not None and bounces(version):
        blocks.append(bounce_bytes(workload))
    if layout.stage in (1, 2) and layout.optimizer == "cpu" and release < MASTERS_PINNED_AS_TOLD_SINCE:
        blocks.append(layout.master_bytes * workload.elements)
    return blocks


def flat_blocks(workload: Workload, layout: Layout = PLAIN) -> list[int]:
    """That flat copy; of parameters on NVMe, as many elements as `max_in_cpu` keeps."""
    most = workload.elements if layout.parameters != "nvme" else layout.max_in_cpu_elements
    kept = min(most, workload.elements)
    return [DTYPE_BYTES[workload.dtype] * kept] if kept else []


def bounces(version: str) -> bool:
    """Whether this release pins a bounce buffer whatever is chosen, as 0.15.4 to 0.16.2 do."""
    parsed = parse_version(version)
    return stock_sequence((parsed.major, parsed.minor, parsed.micro)).name == _BOUNCES


def bounce_bytes(workload: Workload) -> int:
    """One block for the largest partition, in torch's default dtype (stage3.py of 0.15.4: pinned_grad_buffer)."""
    return _FP32 * workload.largest_elements


def state_bytes(workload: Workload, layout: Layout = PLAIN, *, weights_pinned: bool = False) -> int:
    """Pageable host memory beside those blocks: fp32 weights and Adam's two moments, where they are kept in memory.

    Source: Rajbhandari et al., arXiv:1910.02054, section 3.1, which counts 12 bytes a parameter for them. At stages 1
    and 2 the weights may be among what is page-locked.
    """
    if layout.optimizer != "cpu":
        return 0
    return (8 if weights_pinned and layout.stage in (1, 2) else 12) * workload.elements
