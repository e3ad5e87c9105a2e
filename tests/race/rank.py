"""The gradient side of an optimizer as DeepSpeed has it: on the race device, in DeepSpeed's streams, or without one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotune_offload.upstream import LOW_PRECISION
from tests.engine.test_attach import DeepSpeedZeroOptimizer_Stage3, Engine
from tests.race.device import RaceDevice
from tests.race.drawn import SIZES, Draw


class Optimizer(DeepSpeedZeroOptimizer_Stage3):
    """On a device, with DeepSpeed's own sequence and streams (0.19.8), and with the readers that a user calls."""

    device: RaceDevice | None = None
    reduce_and_partition_stream: Any = None
    readers_wait = True
    """As those of the fp32 gradients do; without it, nothing that DeepSpeed's own code sends may be read so early."""

    def partition_grads(self, params: list[Any], gradients: list[Tensor]) -> list[Tensor]:
        """To the buffer and back, the norm, and as fp32 to the host."""
        if self.device is None:
            return super().partition_grads(params, gradients)
        lows = []
        for param, gradient in zip(params, gradients, strict=True):
            low = getattr(self, LOW_PRECISION)[param.ds_id]
            total = self._summed(self.device, gradient, low)
            if self.is_gradient_accumulation_boundary:
                self.norm_for_param_grads[param.ds_id] = self._constant_buffered_norm2(total)
                _, offset, size = self.grad_position[param.ds_id]
                fp32 = self.fp32_partitioned_groups_flat[0].grad.narrow(0, offset, size)
                fp32.copy_(total.float(), non_blocking=True)
            if param.grad is not None:
                self.device.record_stream(param.grad)
            param.grad = None
            lows.append(low)
        return lows

    def _summed(self, device: RaceDevice, gradient: Tensor, low: Tensor) -> Tensor:
        """On the device; a copy of it is on its way to the buffer."""
        total = device.empty(low.numel(), low.dtype)
        if self.micro_step_id == 0:
            device.d2h(low, gradient, non_blocking=gradient.dtype == low.dtype)
            device.h2d(total, low, non_blocking=True)
        else:
            device.h2d(total, low, non_blocking=True)
            device.add(total, gradient.to(low.dtype))
            device.d2h(low, total, non_blocking=True)
        return total

    def independent_gradient_partition_epilogue(self) -> None:
        """The end of a micro-step: DeepSpeed's own waits for the stream."""
        if self.reduce_and_partition_stream is not None:
            self.reduce_and_partition_stream.synchronize()
        super().independent_gradient_partition_epilogue()

    def finalize_gradient_accumulation_boundary(self) -> list[int]:
        """Reads the sums."""
        return self._bits(self.buffer)

    def get_fp32_grad_for_param(self, param: Any) -> list[int]:
        """Reads one gradient."""
        _, offset, size = self.grad_position[param.ds_id]
        return self._bits(self.fp32_partitioned_groups_flat[0].grad.narrow(0, offset, size))

    def set_fp32_grad_for_param(self, value: float, param: Any) -> None:
        """Writes one."""
        if self.reduce_and_partition_stream is not None:
            self.reduce_and_partition_stream.synchronize()
        super().set_fp32_grad_for_param(value, param)

    def _bits(self, host: Tensor) -> list[int]:
        if self.reduce_and_partition_stream is not None and self.readers_wait:
            self.reduce_and_partition_stream.synchronize()
        word = {2: torch.int16, 4: torch.int32}[host.element_size()]
        return host.view(word).tolist()

    def complete_grad_norm_calculation_for_cpu_offload(self, params: Any) -> Tensor:
        """The square root of the sum of squares."""
        total = sum(float(self.norm_for_param_grads[param.ds_id]) ** 2.0 for param in params)
        return torch.tensor(total**0.5)


Optimizer.__module__ = DeepSpeedZeroOptimizer_Stage3.__module__
Optimizer.__name__ = DeepSpeedZeroOptimizer_Stage3.__name__


class Rank(Engine):
    """An engine; with a device, its gradients are there, in the streams that DeepSpeed uses."""

    def __init__(self, dtype: torch.dtype, accumulation: int, device: RaceDevice | None, draw: Draw) -> None:
        self.optimizer: Any = Optimizer(dtype=dtype, sizes=SIZES)
        self.accumulation, self._is_gradient_accumulation_boundary = accumulation, None
        self.device = device
        if device is None:
            return
        self.optimizer.device = device
        self.optimizer.readers_wait = draw.one("readers wait", True)
        self.optimizer.reduce_and_partition_stream = self.stream = device.new_stream()
        if draw.chance("pinned", 0.6):
            for memory in (self.optimizer.fp32_partitioned_groups_flat[0].grad, self.optimizer.buffer):
                device.pinned[memory.data_ptr()] = memory.nbytes

    def reduce(self, numbers: list[int], values: list[Tensor], *, boundary: bool, view: bool) -> None:
        """One bucket: gradients come on the default stream, and are reduced and partitioned on another."""
        z, device = self.optimizer, self.device
        z.is_gradient_accumulation_boundary = boundary
        params = [z.parameters[number] for number in numbers]
        if device is None:
            z.partition_grads(params, [value.clone() for value in values])
            return
        partitions = []
        for param, value in zip(params, values, strict=True):
            param.grad = device.empty(value.numel(), value.dtype)
            device.h2d(param.grad, value, non_blocking=True)
        device.order_after(self.stream, device.record_event())
        with device.on(self.stream):
            for param in params:
                partitions.append(param.grad if view else self._reduced(param.grad))
            z.partition_grads(params, partitions)
        for param in params:
            param.grad = None

    def _reduced(self, gradient: Tensor) -> Tensor:
        assert self.device is not None
        reduced = self.device.empty(gradient.numel(), gradient.dtype)
        self.device.cast(reduced, gradient)
        self.device.record_stream(gradient)
        return reduced

    def left(self) -> dict[str, Any]:
        """Bits of the fp32 gradient and of the buffer."""
        z = self.optimizer
        word = {2: torch.int16, 4: torch.int32}[z.buffer.element_size()]
        return {
            "fp32 gradient": z.fp32_partitioned_groups_flat[0].grad.view(torch.int32).tolist(),
            "accumulation buffer": z.buffer.view(word).tolist(),
        }
