"""The ZeRO-3 sizes that follow from the curves and the workload, in elements, each with a sentence about its key."""

from __future__ import annotations

from autotune_offload.config.keys import NAMES
from autotune_offload.decide.cost_model import CostModel
from autotune_offload.line import Line
from autotune_offload.machine.device import Device
from autotune_offload.paths.device_memory import DEVICE_MEMORY_SHARE, UNKNOWN_MEMORY_BYTES
from autotune_offload.paths.page_locking import PinRules
from autotune_offload.records import Memory, Workload, ZeroSizes
from autotune_offload.upstream import (
    PERSISTENCE_ELEMENTS,
    PREFETCH_BUCKET_ELEMENTS,
    REDUCE_BUCKET_ELEMENTS,
)
from autotune_offload.workload import DTYPE_BYTES

_BUCKETS_A_BACKWARD = 16
"""So many times do gradients leave in a backward pass, if the link's latency allows."""

_EFFICIENCY = 0.95
"""Share of the link's bandwidth that a bucket should reach."""


def zero_sizes(model: CostModel, workload: Workload, device: Device, rules: PinRules) -> ZeroSizes:
    """The ZeRO-3 sizes for this device, workload and link.

    Where nothing runs beside the host there is nothing to overlap, and DeepSpeed's own values stay.
    """
    values: dict[str, tuple[int | None, str]] = {"sub_group_elements": _sub_group(rules)}
    if device.synchronous:
        kept = f"stays DeepSpeed's own, since nothing overlaps on the {device.identity.kind}"
        names = ("reduce_bucket_elements", "prefetch_bucket_elements", "persistence_threshold_elements")
        values |= dict.fromkeys(names, (None, kept))
    else:
        low = DTYPE_BYTES[workload.dtype]
        memory: Memory = "pinned" if rules.pin.largest_bytes else "pageable"
        down, up = model.rates.line("d2h", memory), model.rates.line("h2d", memory)
        bucket_bytes = (device.identity.memory_bytes or UNKNOWN_MEMORY_BYTES) * DEVICE_MEMORY_SHARE
        room = max(int(bucket_bytes) // low, 1)
        values |= {
            "reduce_bucket_elements": _reduce_bucket(down, workload, room),
            "prefetch_bucket_elements": _prefetch_bucket(up, workload, low, room),
            "persistence_threshold_elements": _persistence(up, low, room),
        }
    return ZeroSizes(
        **{name: value for name, (value, _) in values.items()},
        reasons={name: f"{NAMES[name]} {reason}" for name, (_, reason) in values.items()},
    )


def _reduce_bucket(link: Line, workload: Workload, room: int) -> tuple[int, str]:
    """Whole parameters fill a bucket; each rank offloads its share of it as fp32."""
    efficient = int(link.bytes_at_efficiency(_EFFICIENCY) / 4) * workload.world_size
    wanted = max(efficient, workload.parameter_elements // _BUCKETS_A_BACKWARD)
    value = _power_of_two(wanted, min(room, REDUCE_BUCKET_ELEMENTS))
    return value, (
        f"is {value:,} elements: gradients leave about {max(workload.parameter_elements // value, 1)} times in a "
        f"backward pass; below {efficient:,} the link's latency of {link.latency_seconds * 1e6:.3g} us would cost "
        f"over {1 - _EFFICIENCY:.0%}; the bucket takes {DEVICE_MEMORY_SHARE:.0%} of the device's memory at most"
    )


def _prefetch_bucket(link: Line, workload: Workload, low: int, room: int) -> tuple[int, str]:
    efficient = int(link.bytes_at_efficiency(_EFFICIENCY) / low) * workload.world_size
    largest = workload.parameters[0][0]
    wanted = max(efficient, min(largest, PREFETCH_BUCKET_ELEMENTS))
    value = _power_of_two(wanted, room)
    return value, (
        f"is {value:,} elements: the power of two that holds {wanted:,}, or {DEVICE_MEMORY_SHARE:.0%} of the device's "
        f"memory where that is less. That is the larger of two: the largest parameter ({largest:,}), which counts "
        f"up to DeepSpeed's own {PREFETCH_BUCKET_ELEMENTS:,}, and the {efficient:,} at which h2d reaches "
        f"{_EFFICIENCY:.0%} of its {link.bytes_per_second / 1e9:.3g} GB/s"
    )


def _persistence(link: Line, low: int, room: int) -> tuple[int, str]:
    half = int(link.bytes_at_efficiency(0.5) / low)
    value = max(min(half, PERSISTENCE_ELEMENTS, room), 1)
    return value, (
        f"is {value:,} elements: up to {half:,} a fetch is mostly latency ({link.latency_seconds * 1e6:.3g} us), and "
        f"DeepSpeed's own {PERSISTENCE_ELEMENTS:,} bounds the memory"
    )


def _sub_group(rules: PinRules) -> tuple[int | None, str]:
    """Only a block that cannot be locked asks for smaller tiles; DeepSpeed page-locks one a sub-group."""
    own = "stays DeepSpeed's own"
    if rules.not_on_offer is not None:
        return None, f"{own}: nothing is page-locked here, so no sub-group is too large for it"
    value, largest = rules.sub_group, rules.pin.proven_bytes
    if value is None:
        kept = "it page-locks one block a sub-group, and none was too large here"
        if not rules.pin.capped and rules.largest_optimizer_bytes > largest:
            kept = (
                f"no other makes all that offload_optimizer page-locks fit into blocks of {largest:,} bytes"
            )
        return None, f"{own}: {kept}"
    if rules.against_optimizer() is not None:
        return None, f"{own}: offload_optimizer cannot be page-locked here, whatever its size"
    return value, (
        f"is {value:,} elements: the largest block that pins here has {largest:,} bytes, and a sub-group may be "
        "larger than its size by one partition"
    )


def _power_of_two(elements: int, most: int) -> int:
    """The next power of two, or `most` where that is less; at least 1."""
    return max(min(1 << max(elements - 1, 0).bit_length(), most), 1)
