"""What a rank keeps in host memory by a ds_config, page-locked or not: weights, gradients, optimizer state, buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune_offload.config.sections import (
    as_flag,
    as_number,
    device_of,
    section,
    sixteen_bit_masters,
    stage_of,
)
from autotune_offload.records import Workload
from autotune_offload.upstream import (
    MAX_IN_CPU_ELEMENTS,
    OPTIMIZER_BUFFER_COUNT,
    PARAM_BUFFER_COUNT,
    PARAM_BUFFER_ELEMENTS,
    SUB_GROUP_ELEMENTS,
    ZERO,
)
from autotune_offload.workload import DTYPE_BYTES

_ONE_MOMENT = ("adagrad", "lion", "sgd", "muon")
"""Optimizers that keep one value a parameter, or less; the others are taken for Adam, which keeps two."""


def host_state(config: Mapping[str, Any], workload: Workload) -> dict[str, int]:
    """Bytes of each part in words, as this rank keeps them while it trains; nothing where nothing is offloaded.

    Source: zero/stage3.py, zero/stage_1_and_2.py and runtime/swap_tensor of DeepSpeed 0.14.5 to 0.19.8. What a script
    loads beside it, a second copy of the model for example, is not in it.
    """
    zero = config.get(ZERO)
    if not isinstance(zero, Mapping):
        return {}
    found = _of_optimizer(config, zero, workload) | _of_parameters(zero, workload)
    return {what: count for what, count in found.items() if count}


def _of_optimizer(config: Mapping[str, Any], zero: Mapping[str, Any], workload: Workload) -> dict[str, int]:
    device = device_of(zero, "offload_optimizer")
    if device is None:
        return {}
    optimizer = section(zero, "offload_optimizer")
    elements, low = workload.elements, DTYPE_BYTES[workload.dtype] * workload.elements
    wide = 2 if sixteen_bit_masters(config) else 4
    if device == "nvme":
        count = _whole(optimizer.get("buffer_count"), OPTIMIZER_BUFFER_COUNT)
        largest = min(_whole(zero.get("sub_group_size"), SUB_GROUP_ELEMENTS), elements)
        return {"buffers of the optimizer on NVMe": count * largest * wide, "16-bit gradients": low}
    share = _ratio(optimizer) if stage_of(zero) == 3 else 1.0
    return {
        "master weights": int(wide * elements * share),
        "optimizer state": int(_state_bytes(config) * elements * share),
        "gradients": int(wide * elements * share),
        # stage 3 sums 16-bit gradients up there; stages 1 and 2 cast the weights there on their way back
        "a 16-bit copy": low,
    }


def _of_parameters(zero: Mapping[str, Any], workload: Workload) -> dict[str, int]:
    device = device_of(zero, "offload_param")
    if device is None:
        return {}
    parameters, size = section(zero, "offload_param"), DTYPE_BYTES[workload.dtype]
    own = -(-workload.parameter_elements // workload.world_size)  # frozen ones too
    if device == "cpu":
        return {"16-bit parameters": size * max(own, workload.elements)}
    count = _whole(parameters.get("buffer_count"), PARAM_BUFFER_COUNT)
    buffers = count * _whole(parameters.get("buffer_size"), PARAM_BUFFER_ELEMENTS)
    kept = min(_whole(parameters.get("max_in_cpu"), MAX_IN_CPU_ELEMENTS), own)
    return {"buffers of the parameters on NVMe": size * buffers, "parameters up to max_in_cpu": size * kept}


def _state_bytes(config: Mapping[str, Any]) -> int:
    """Of the optimizer's moments, for each parameter."""
    name = str(section(config, "optimizer").get("type", "")).lower()
    low = as_flag(section(config, "bf16").get("bf16_optimizer_states")) is True
    return (2 if low else 4) * (1 if any(one in name for one in _ONE_MOMENT) else 2)


def _ratio(section: Mapping[str, Any]) -> float:
    """The share of the optimizer's state that is offloaded."""
    ratio = as_number(section.get("ratio", 1.0))
    return ratio if ratio is not None and 0 <= ratio <= 1 else 1.0


def _whole(value: object, default: int) -> int:
    number = as_number(value)
    return int(number) if number is not None and 0 <= number < 2**63 else default
