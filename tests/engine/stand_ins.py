"""A ZeRO-3 optimizer's step and DeepSpeed's CPU Adam without DeepSpeed, in the order of their sources (0.19.8)."""

# ruff: noqa: D102, D101  # the methods are those of what each class stands in for
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autotune_offload.machine import adam
from autotune_offload.upstream import LOW_PRECISION


class CpuAdamOperation:
    """`ds_opt_adam`: Adam over all elements, with the powers of beta as the real one keeps them.

    `wrong` may change what a call leaves; `calls` counts those of `adam_update` by number.
    """

    def __init__(self, *, repeats: bool = True) -> None:
        self.repeats = repeats
        self.wrong: Callable[[int, adam.Memory], None] = lambda number, memory: None
        self.calls: dict[int, int] = {}
        self._made: dict[int, tuple[adam.KeptPowers, bool]] = {}

    def create_adam(
        self, number: int, rate: float, beta1: float, beta2: float, epsilon: float, decay: float, decoupled: bool,
        says: bool,
    ) -> int:  # fmt: skip
        del rate, epsilon, decay, says
        self._made[number] = (adam.KeptPowers(beta1, beta2, repeats=self.repeats), decoupled)
        return 0

    def destroy_adam(self, number: int) -> int:
        del self._made[number]
        return 0

    def adam_update(
        self, number: int, step: int, rate: float, beta1: float, beta2: float, epsilon: float, decay: float,
        corrects: bool, *tensors: Tensor,
    ) -> int:  # fmt: skip
        self.calls[number] = self.calls.get(number, 0) + 1
        powers, decoupled = self._made[number]
        setting = adam.Setting(
            step=step, rate=rate, beta1=beta1, beta2=beta2, epsilon=epsilon, weight_decay=decay,
            corrects_bias=corrects,
        )  # fmt: skip
        weights, gradients, first, second = tensors
        memory = adam.Memory(weights=weights, gradients=gradients, first=first, second=second)
        values = adam.constants(setting, powers.at(setting), 1.0, decoupled=decoupled)
        REAL_PIECE_OF(memory, values, None, bytearray(1))(0, memory.elements, 0, None)
        self.wrong(number, memory)
        return 0


REAL_PIECE_OF = adam.piece_of
"""Whatever a test has put in its place."""


class DeepSpeedCPUAdam(torch.optim.Optimizer):
    optimizer_id = 0

    def __init__(self, groups: Any, operation: CpuAdamOperation, *, adamw_mode: bool = True) -> None:
        defaults = {
            "lr": 1e-2,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.0,
            "bias_correction": True,
        }
        super().__init__(groups, defaults)
        self.opt_id = DeepSpeedCPUAdam.optimizer_id
        DeepSpeedCPUAdam.optimizer_id += 1
        self.adam_w_mode, self.fp32_optimizer_states = adamw_mode, True
        self.ds_opt_adam: Any = operation
        operation.create_adam(self.opt_id, 1e-2, 0.9, 0.999, 1e-8, 0.0, adamw_mode, False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p.data), torch.zeros_like(p.data)
                state["step"] += 1
                beta1, beta2 = group["betas"]
                self.ds_opt_adam.adam_update(
                    self.opt_id, state["step"], group["lr"], beta1, beta2, group["eps"], group["weight_decay"],
                    group["bias_correction"], p.data, p.grad.data, state["exp_avg"], state["exp_avg_sq"],
                )  # fmt: skip


class DeepSpeedZeroOptimizer_Stage3:
    """The step of the real one, one rank.

    Args:
        sizes: elements of each sub-group; every other one belongs to a second param group.
        dtype: of the 16-bit weights.
        operation: None makes one.
        clip_grad: as in the configuration.
    """

    def __init__(
        self,
        sizes: tuple[int, ...] = (1000, 77, 4096),
        dtype: torch.dtype = torch.bfloat16,
        operation: CpuAdamOperation | None = None,
        clip_grad: float = 1.0,
        *,
        adamw_mode: bool = True,
    ) -> None:
        random = torch.Generator().manual_seed(0)
        self.offload_optimizer, self.loss_scale, self.clip_grad = True, 1.0, clip_grad
        self.fp16_partitioned_groups_flat = [torch.randn(n, generator=random).to(dtype) for n in sizes]
        self.fp32_partitioned_groups_flat = [flat.float() for flat in self.fp16_partitioned_groups_flat]
        for master in self.fp32_partitioned_groups_flat:
            master.grad = torch.zeros_like(master)
        self.operation = operation or CpuAdamOperation()
        groups = [
            {"params": [], "weight_decay": 0.1},
            {"params": [], "weight_decay": 0.0, "betas": (0.8, 0.99)},
        ]
        for group in groups:
            group["params"] = [torch.zeros(1)]
        self.optimizer = DeepSpeedCPUAdam(groups, self.operation, adamw_mode=adamw_mode)
        for made in self.optimizer.param_groups:
            made["params"] = []
        self.sub_group_to_group_id = {n: n % 2 for n in range(len(sizes))}
        self.subgroup_to_device = dict.fromkeys(range(len(sizes)), "cpu")
        self.unflattened: list[int] = []
        self.posted: list[list[Tensor]] = []
        self.destroyed = 0
        # what else is looked at before anything is attached
        self.grad_position: dict[int, Any] = {}
        self.norm_for_param_grads: dict[int, Any] = {}
        self.gradient_accumulation_dtype = dtype
        self.is_gradient_accumulation_boundary, self.micro_step_id = True, 0
        setattr(self, LOW_PRECISION, {})

    def partition_grads(self) -> None: ...

    def independent_gradient_partition_epilogue(self) -> None: ...

    def complete_grad_norm_calculation_for_cpu_offload(self) -> None: ...

    def _pre_step(self) -> None: ...

    def destroy(self) -> None:
        self.destroyed += 1

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Any) -> None:
        combined_scale: Any = self.loss_scale
        if self.clip_grad > 0.0:
            clip = ((total_norm / self.loss_scale) + 1e-6) / self.clip_grad
            clip = torch.clamp(clip, min=1.0)
            combined_scale = clip * self.loss_scale
        gradients = self.fp32_partitioned_groups_flat[sub_group_id].grad
        assert gradients is not None
        gradients.mul_(1.0 / combined_scale)

    def _optimizer_step(self, sub_group_id: int) -> None:
        group = self.optimizer.param_groups[self.sub_group_to_group_id[sub_group_id]]
        group["params"] = [self.fp32_partitioned_groups_flat[sub_group_id]]
        self.optimizer.step()
        group["params"] = []

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        self.fp16_partitioned_groups_flat[sub_group_id].data.copy_(
            self.fp32_partitioned_groups_flat[sub_group_id].data
        )
        self._unflatten_partitioned_parameters(sub_group_id)

    def _unflatten_partitioned_parameters(self, sub_group_id: int) -> None:
        self.unflattened.append(sub_group_id)

    def _post_step(self, timer_names: Any) -> None:
        del timer_names
        self.posted.append([flat.clone() for flat in self.fp16_partitioned_groups_flat])

    def step(self) -> None:
        gradients = [master.grad for master in self.fp32_partitioned_groups_flat]
        total_norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients if g is not None]))
        for sub_group_id in range(len(self.fp32_partitioned_groups_flat)):
            self.unscale_and_clip_grads(sub_group_id, total_norm)
            self._optimizer_step(sub_group_id)
            self._reassign_or_swap_out_partitioned_parameters(sub_group_id)
        self._post_step(set())

    def leaves(self) -> list[Tensor]:
        """Copies of all that a step leaves, in the order of the sub-groups."""
        left: list[Tensor] = []
        for master, rounded in zip(
            self.fp32_partitioned_groups_flat, self.fp16_partitioned_groups_flat, strict=True
        ):
            state = self.optimizer.state[master]
            assert master.grad is not None
            kept = (master.data, master.grad, state["exp_avg"], state["exp_avg_sq"], rounded)
            left += [tensor.clone() for tensor in kept] + [torch.tensor(float(state["step"]))]
        return left


for _class in (DeepSpeedCPUAdam, DeepSpeedZeroOptimizer_Stage3):
    _class.__module__ = f"deepspeed.stand_in.{_class.__name__}"


class Engine:
    """What is read of DeepSpeed's engine."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
