"""What is read of a live ZeRO-3 optimizer and of the optimizer inside it, for its step."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autotune_offload.engine import stage3
from autotune_offload.engine.step_adam import Factor
from autotune_offload.machine import adam
from autotune_offload.machine.device import Device
from autotune_offload.paths.pieces import Target
from autotune_offload.upstream import (
    CPU_ADAM,
    CPU_ADAM_OPERATION,
    NEEDED_BY_STEP,
    POST_STEP,
    REASSIGN,
    SCHEDULER_MARKS,
    STAGE3,
    UNSCALE,
)

Ours = Callable[[object], bool]


def why_not_attachable(engine: Any, is_ours: Ours) -> str | None:
    """None where a multiplication by exactly 1 may be left out of this engine's step, else what stands against it."""
    optimizer = getattr(engine, "optimizer", None)
    if (found := stage3.why_not_attachable(engine, lambda _: True)) is not None:
        return found
    missing = [name for name in NEEDED_BY_STEP if not hasattr(optimizer, name)]
    if missing:
        return f"this DeepSpeed's {STAGE3} has no {', '.join(missing)}"
    own = vars(optimizer)
    others = [n for n in (UNSCALE, REASSIGN, POST_STEP, "step") if n in own and not is_ours(own[n])]
    return f"{', '.join(others)} of this optimizer was replaced by somebody else" if others else None


def why_not_fused(optimizer: Any, is_ours: Ours) -> str | None:
    """None where the compiled pass may make the step of an attachable optimizer, else why DeepSpeed's own does."""
    inner = optimizer.optimizer
    if type(inner).__name__ != CPU_ADAM or not type(inner).__module__.startswith("deepspeed."):
        return f"the optimizer inside is {type(inner).__name__}, not exactly {CPU_ADAM}"
    if not hasattr(inner, CPU_ADAM_OPERATION) or not hasattr(inner, "opt_id"):
        return f"this DeepSpeed's {CPU_ADAM} has no {CPU_ADAM_OPERATION}"
    operation = getattr(inner, CPU_ADAM_OPERATION)
    missing = [n for n in ("create_adam", "adam_update", "destroy_adam") if not hasattr(operation, n)]
    if missing and not is_ours(operation):
        return f"this DeepSpeed's {CPU_ADAM_OPERATION} has no {', '.join(missing)}"
    if not getattr(inner, "fp32_optimizer_states", True):
        return "the moments are not kept in fp32"
    if getattr(optimizer, "swap_optimizer", False):
        return "the optimizer is offloaded to NVMe"
    if getattr(optimizer, "torch_autocast_gradscaler", None) is not None:
        return "torch's gradient scaler makes the step"
    devices = getattr(optimizer, "subgroup_to_device", {}).values()
    if any(device != "cpu" for device in devices):
        return "with a ratio below 1, some sub-groups are stepped on the device"
    return adam.why_not_compiled()


def why_not_now(optimizer: Any) -> str | None:
    """What has come since that would see a difference in the middle of a step; None where nothing would."""
    inner = optimizer.optimizer
    hooks = [f"_optimizer_step_{when}_hooks" for when in ("pre", "post")]
    everybodys = importlib.import_module("torch.optim.optimizer")  # torch deletes the attribute of that name
    all_hooks = [f"_global_optimizer_{when}_hooks" for when in ("pre", "post")]
    if any(getattr(inner, n, None) for n in hooks) or any(getattr(everybodys, n, None) for n in all_hooks):
        return "hooks of the optimizer may look at gradients and weights in the middle of a step"
    step = vars(inner).get("step")
    if step is not None and not any(_marked(step, mark) for mark in SCHEDULER_MARKS):
        return f"the step of this {CPU_ADAM} was replaced by somebody else"
    if adam.flushes_subnormals():
        return "this thread flushes subnormal numbers, which the pass's threads would not"
    return None


def _marked(step: object, mark: str) -> bool:
    return hasattr(step, mark) or hasattr(getattr(step, "__func__", None), mark)


def unscaling_factor(optimizer: Any, total_norm: Any) -> Factor:
    """What DeepSpeed's `unscale_and_clip_grads` multiplies gradients by, by its own expression."""
    scale: Factor = optimizer.loss_scale
    if optimizer.clip_grad > 0.0:
        clip = ((total_norm / optimizer.loss_scale) + 1e-6) / optimizer.clip_grad
        scale = torch.clamp(clip, min=1.0) * optimizer.loss_scale
    factor: Factor = 1.0 / scale
    return factor


def gradient(optimizer: Any, sub_group: int) -> Tensor | None:
    """The fp32 gradient of a sub-group in host memory; None where it is not such."""
    found: Tensor | None = optimizer.fp32_partitioned_groups_flat[sub_group].grad
    host = found is not None and found.device.type == "cpu" and found.dtype == torch.float32
    return found if host else None


def target(optimizer: Any, sub_group: int, device: Device) -> Target | None:
    """Where rounded weights of a sub-group go; None where DeepSpeed must bring them there."""
    rounded: Tensor | None = optimizer.fp16_partitioned_groups_flat[sub_group]
    master: Tensor = optimizer.fp32_partitioned_groups_flat[sub_group]
    if rounded is None or rounded.data_ptr() == master.data_ptr():
        return None
    whole = rounded.dim() == 1 and rounded.is_contiguous() and rounded.numel() == master.numel()
    if not whole or adam.why_not_compiled(rounded.dtype) is not None:
        return None
    return Target(memory=rounded.data, on_host=device.shares_host_memory or rounded.device.type == "cpu")
