"""The check for an overflow in one pass: DeepSpeed's own answer whatever the buffer holds, and nothing else changed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune_offload.engine.overflow import by_extremes

LENGTH = 1031


def deepspeeds(optimizer: Any, partition_gradients: bool = True) -> bool:
    """What `has_overflow` asks of the buffer."""
    optimizer.asked.append(partition_gradients)
    buffer: Tensor = optimizer.grad_partitions_flat_buffer
    return bool(torch.isinf(buffer).any() or torch.isnan(buffer).any())


def an_optimizer(buffer: Any) -> Any:
    """With this accumulation buffer."""
    return SimpleNamespace(grad_partitions_flat_buffer=buffer, asked=[])


def asked(optimizer: Any, **arguments: Any) -> bool:
    """In one pass."""
    return bool(by_extremes(optimizer, lambda **given: deepspeeds(optimizer, **given), **arguments))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_found_at_every_place(value: float, dtype: torch.dtype) -> None:
    """In the body and in the tail of a vectorized loop, at both ends, and beside its opposite."""
    for place in range(LENGTH):
        buffer = torch.randn(LENGTH).to(dtype)
        buffer[place] = value
        if place:
            buffer[place // 2] = -value
        assert asked(an_optimizer(buffer))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_largest_finite_values_are_no_overflow(dtype: torch.dtype) -> None:
    """However many: nothing is added up. Subnormal numbers and zeros of both signs are none either."""
    for value in (
        torch.finfo(dtype).max,
        torch.finfo(dtype).min,
        torch.finfo(dtype).smallest_normal / 2,
        -0.0,
    ):
        assert not asked(an_optimizer(torch.full((LENGTH,), value, dtype=dtype)))


def test_the_buffer_is_there_again_afterwards() -> None:
    """The same object, also when DeepSpeed's own raises; its arguments are passed on."""
    buffer = torch.zeros(LENGTH)
    optimizer = an_optimizer(buffer)
    asked(optimizer, partition_gradients=False)
    assert optimizer.grad_partitions_flat_buffer is buffer and optimizer.asked == [False]

    def raising() -> bool:
        assert optimizer.grad_partitions_flat_buffer.numel() == 2
        raise RuntimeError("a rank has failed")

    with pytest.raises(RuntimeError, match="a rank has failed"):
        by_extremes(optimizer, raising)
    assert optimizer.grad_partitions_flat_buffer is buffer


@pytest.mark.parametrize("buffer", [None, torch.zeros(0), torch.ones(2), torch.zeros(8, device="meta")])
def test_what_is_no_buffer_in_host_memory_is_left_to_deepspeed(buffer: Any) -> None:
    """Taken away by `offload_states`, empty, or on a device: asked as it is."""
    optimizer = an_optimizer(buffer)
    seen = []
    by_extremes(optimizer, lambda: seen.append(optimizer.grad_partitions_flat_buffer))
    assert seen[0] is buffer
