"""What is really page-locked for one engine, DeepSpeed's and ours, by what it is for."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from autotune_offload.engine.attach import pinned_bytes
from autotune_offload.engine.step_attach import step_pinned_bytes


def page_locked(engine: Any) -> dict[str, int]:
    """Bytes by buffer, where there are any. What several names share counts once, under the first of them."""
    seen: set[int] = set()
    found = {name: sum(_new_bytes(tensors, seen)) for name, tensors in _deepspeeds(engine)}
    found |= pinned_bytes(engine) | {"the step's buffers": step_pinned_bytes(engine)}
    return {name: count for name, count in found.items() if count}


def _deepspeeds(engine: Any) -> Iterator[tuple[str, list[Any]]]:
    """The buffers of DeepSpeed's that may be page-locked, over its stages and releases."""
    z = getattr(engine, "optimizer", None)
    weights = [*_all(z, "fp32_partitioned_groups_flat"), *_all(z, "single_partition_of_fp32_groups")]
    sums = getattr(z, "accumulated_grads_in_cpu", None) or {}
    yield (
        "gradient accumulation",
        [
            *_one(z, "grad_partitions_flat_buffer", "lp_grad_partitions_flat_pin_buffers"),
            *list(sums.values()),
        ],
    )
    yield "fp32 gradients", [weight.grad for weight in weights]
    yield (
        "16-bit parameters",
        [
            *_one(z, "lp_param_buffer", "lp_param_contiguous_pin_buffer"),
            *_all(z, "param_groups_fp16_flat_cpu_memory"),
            *_all(z, "param_buffer_of_bit16_for_cpu_offload_groups"),
            *_partitions(engine),
        ],
    )
    yield "fp32 weights", [*weights, *_all(z, "hp_params_pin_buffers")]
    yield "one gradient", _one(z, "temp_grad_buffer_for_cpu_offload", "pinned_grad_buffer")
    yield "optimizer state", _state(getattr(z, "optimizer", None))


def _one(owner: Any, *names: str) -> list[Any]:
    return [getattr(owner, name, None) for name in names]


def _all(owner: Any, name: str) -> list[Any]:
    return list(getattr(owner, name, None) or [])


def _partitions(engine: Any) -> Iterator[Any]:
    """This rank's slice of every parameter, frozen ones too."""
    parameters = getattr(getattr(engine, "module", None), "parameters", tuple)
    for parameter in parameters():
        yield from _one(parameter, "ds_tensor", "ds_secondary_tensor")


def _state(optimizer: Any) -> list[Any]:
    states = list((getattr(optimizer, "state", None) or {}).values())
    return [value for state in states if isinstance(state, dict) for value in list(state.values())]


def _new_bytes(tensors: Iterable[Any], seen: set[int]) -> Iterator[int]:
    """Of the page-locked ones among them, whose memory was not counted before."""
    for tensor in tensors:
        if getattr(getattr(tensor, "device", None), "type", None) != "cpu" or not tensor.numel():
            continue
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in seen and _is_pinned(tensor):
            seen.add(memory.data_ptr())
            yield int(memory.nbytes())


def _is_pinned(tensor: Any) -> bool:
    """By torch, or by DeepSpeed itself, which may page-lock without it (DS_PIN_MEMORY_BACKEND)."""
    accelerators = sys.modules.get("deepspeed.accelerator")
    return bool(
        tensor.is_pinned() or (accelerators is not None and accelerators.get_accelerator().is_pinned(tensor))
    )
