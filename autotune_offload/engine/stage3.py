"""What is read of a live `DeepSpeedZeroOptimizer_Stage3`, over the versions of DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autotune_offload.upstream import EPILOGUE, LOW_PRECISION, NEEDED, PARTITION, STAGE3


def why_not_attachable(engine: Any, is_ours: Callable[[object], bool] = lambda _: False) -> str | None:
    """None where the paths do exactly what this engine's own code does, else what stands against it.

    Args:
        engine: what `deepspeed.initialize` returned.
        is_ours: whether a method that replaces one of DeepSpeed's is ours.
    """
    optimizer = getattr(engine, "optimizer", None)
    if optimizer is None:
        return "the engine has no optimizer"
    if type(optimizer).__name__ != STAGE3 or not type(optimizer).__module__.startswith("deepspeed."):
        return f"the optimizer is {type(optimizer).__name__}, not exactly {STAGE3}"
    return _unsuitable(optimizer) or _replaced_by_others(optimizer, is_ours) or _compiled(engine)


def _unsuitable(optimizer: Any) -> str | None:
    if not getattr(optimizer, "offload_optimizer", False):
        return "the optimizer is not offloaded"
    if getattr(optimizer, "zenflow", False):
        return "ZenFlow offloads gradients in its own way"
    if getattr(optimizer, "use_muon", False):
        return "Muon rewrites the gradients between backward and step"
    if (dtype := getattr(optimizer, "master_weights_and_grads_dtype", torch.float32)) != torch.float32:
        return f"the master gradients are {dtype}, not fp32"
    missing = [name for name in NEEDED if not hasattr(optimizer, name)]
    return f"this DeepSpeed's {STAGE3} has no {', '.join(missing)}" if missing else None


def _replaced_by_others(optimizer: Any, is_ours: Callable[[object], bool]) -> str | None:
    own = vars(optimizer)
    others = [name for name in (PARTITION, EPILOGUE) if name in own and not is_ours(own[name])]
    return f"{', '.join(others)} of this optimizer was replaced by somebody else" if others else None


def _compiled(engine: Any) -> str | None:
    enabled = getattr(engine, "is_deepcompile_enabled", None)
    if enabled is not None and enabled():
        return "DeepCompile reduces gradients past partition_grads"
    return None


class Stage3:
    """The gradient side of one optimizer; `optimizer` is DeepSpeed's own object."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    # -- where one partition's gradient lies --

    def destination(self, param: Any, gradient: Tensor) -> Tensor | None:
        """This partition's fp32 gradient in host memory; None where it goes to NVMe or stays on the device."""
        z = self.optimizer
        group, offset, _ = z.grad_position[z.get_param_id(param)]
        if z._swappable_optimizer_subgroup(group):
            return None
        fp32: Tensor | None = z.fp32_partitioned_groups_flat[group].grad
        if fp32 is None or fp32.device.type != "cpu":
            return None
        return fp32.narrow(0, offset, gradient.numel())

    def buffer(self, param: Any, gradient: Tensor) -> Tensor:
        """This partition in DeepSpeed's accumulation buffer."""
        return self.buffers[param.ds_id].narrow(0, 0, gradient.numel())

    @property
    def buffers(self) -> dict[int, Tensor]:
        """The accumulation buffer's views by ds_id; `offload_states` takes them away."""
        views: dict[int, Tensor] = getattr(self.optimizer, LOW_PRECISION)
        return views

    @property
    def norms(self) -> dict[int, Tensor]:
        """Of the partitions at the last boundary, by parameter id: all on one device, since they are added up."""
        norms: dict[int, Tensor] = self.optimizer.norm_for_param_grads
        return norms

    def norm(self, param: Any) -> Tensor:
        """Of one of them."""
        return self.norms[self.optimizer.get_param_id(param)]

    def holds_data(self, param: Any) -> bool:
        """Whether this rank's partition lies within the parameter (the last ranks' may be padding)."""
        z = self.optimizer
        rank_of = getattr(z, "_get_param_partition_rank", None)  # 0.19.4 and newer
        rank = rank_of(param) if rank_of is not None else torch.distributed.get_rank(z.dp_process_group)
        return bool(param.partition_numel() * rank < param.ds_numel)

    def saw(self, param: Any) -> None:
        """What 0.19.5 and newer note of a parameter that got a gradient, for unmanaged accumulation."""
        if hasattr(self.optimizer, "_offload_boundary_param_ids"):
            self.optimizer._offload_boundary_param_ids.add(param.ds_id)

    @property
    def deferred(self) -> list[Tensor]:
        """The sums that unmanaged accumulation takes to fp32 only at the step, in 0.19.5 and newer."""
        seen = getattr(self.optimizer, "_offload_boundary_param_ids", ())
        return [self.buffers[ds_id] for ds_id in seen if ds_id in self.buffers]

    # -- where in an accumulation it is --

    @property
    def at_boundary(self) -> bool:
        """An attribute up to 0.19.4, a method from 0.19.5."""
        boundary = self.optimizer.is_gradient_accumulation_boundary
        return bool(boundary() if callable(boundary) else boundary)

    @property
    def at_first(self) -> bool:
        """Whether gradients are copied into the accumulation buffer, and not added."""
        return bool(self.optimizer.micro_step_id == 0)

    @property
    def stream(self) -> Any:
        """The one that gradients are reduced on; None where the device has none."""
        return getattr(self.optimizer, "reduce_and_partition_stream", None)


def accumulation_steps(engine: Any) -> int:
    """Of a step, as the engine counts them now; 0 where it is gone."""
    return 0 if engine is None else int(engine.gradient_accumulation_steps())


def boundary_by_hand(engine: Any) -> bool:
    """Whether the user has set the boundary, and has not given it back to the engine."""
    return engine is not None and engine._is_gradient_accumulation_boundary is not None
