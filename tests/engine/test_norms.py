"""Norms of partitions have their own last bits, and never show them."""

from __future__ import annotations

import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autotune_offload.engine.norms import Norms
from autotune_offload.engine.stage3 import Stage3
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.testing import FakeAccelerator
from autotune_offload.upstream import LOW_PRECISION

CPU = AcceleratorDevice(FakeAccelerator("cpu"))


class Rank:
    """Partitions with norms of ours, in an optimizer that counts how often it computes one itself."""

    def __init__(self, values: list[Tensor], norms: list[float] | None = None) -> None:
        self.values, self.computed = values, 0
        self.params = [SimpleNamespace(ds_id=10 + n) for n in range(len(values))]
        self.optimizer: Any = SimpleNamespace(
            get_param_id=lambda param: param.ds_id - 10,
            norm_for_param_grads={},
            _constant_buffered_norm2=self.compute,
            **{LOW_PRECISION: {10 + n: value for n, value in enumerate(values)}},
        )
        self.norms = Norms(Stage3(self.optimizer), CPU)
        for number, (param, value) in enumerate(zip(self.params, values, strict=True)):
            ours = stock_norm(value) if norms is None else torch.tensor(norms[number], dtype=torch.float64)
            self.norms.give(param, ours, value.numel())

    def compute(self, value: Tensor) -> Tensor:
        """What DeepSpeed's `_constant_buffered_norm2` does."""
        self.computed += 1
        return stock_norm(value)

    def total(self) -> float:
        """As DeepSpeed rounds it."""
        self.norms.make_exact_where_it_shows(self.params)
        return fp32(sum(float(norm) ** 2 for norm in self.optimizer.norm_for_param_grads.values()))


def stock_norm(value: Tensor) -> Tensor:
    """In torch's own order."""
    norm: Tensor = (value.double().norm(2) ** 2.0) ** 0.5
    return norm


def fp32(value: float) -> float:
    """Rounded."""
    return float(torch.tensor([value], dtype=torch.float32))


def at_a_rounding(seed: int) -> Tensor:
    """Values whose squares add up, exactly, to what lies in the middle between two fp32 numbers."""
    values = torch.randn(3000, generator=torch.Generator().manual_seed(seed)).bfloat16()
    total = sum(Fraction(float(value)) ** 2 for value in values.tolist())
    above = torch.nextafter(torch.tensor(fp32(float(total))), torch.tensor(math.inf))
    further = torch.nextafter(above, torch.tensor(math.inf))
    rest = (Fraction(float(above)) + Fraction(float(further))) / 2 - total
    more = []
    for power in range(20, -60, -1):
        while rest >= Fraction(4) ** power:
            more.append(2.0**power)
            rest -= Fraction(4) ** power
    return torch.cat([values, torch.tensor(more).bfloat16()])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("off", [-3e-16, 3e-16])
def test_at_a_rounding_the_norms_are_computed_in_deepspeeds_order(seed: int, off: float) -> None:
    """Where the last bits of ours would have given another fp32 sum."""
    value = at_a_rounding(seed)
    exact = float(stock_norm(value))
    rank = Rank([value], [exact * (1 + off)])
    assert rank.total() == fp32(exact**2)
    assert rank.computed == 1
    assert float(rank.optimizer.norm_for_param_grads[0]) == exact


@pytest.mark.parametrize("seed", range(8))
def test_without_that_some_would_be_another_sum(seed: int) -> None:
    """Last bits that two orders may differ in are enough there; otherwise the test above would prove nothing."""
    exact = float(stock_norm(at_a_rounding(seed)))
    assert {fp32((exact * (1 + off)) ** 2) for off in (-3e-16, 3e-16)} != {fp32(exact**2)}


def test_elsewhere_ours_stay() -> None:
    """Computing them again would cost as much as DeepSpeed's own norms."""
    rank = Rank([torch.full((1000,), 0.5), torch.full((24,), 1.0)], [math.sqrt(250.0), math.sqrt(24.0)])
    assert rank.total() == fp32(274.0)
    assert rank.computed == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=4), st.integers(0, 10**6))
def test_the_sum_in_fp32_is_deepspeeds_whatever_the_last_bits(sizes: list[int], seed: int) -> None:
    """Ours are as far off as two orders of summation may be."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(size, generator=generator).bfloat16() for size in sizes]
    exact = [float(stock_norm(value)) for value in values]
    ours = [norm * (1 + size * 2.0**-53) for norm, size in zip(exact, sizes, strict=True)]
    assert Rank(values, ours).total() == Rank(values, exact).total()


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_overflow_is_one_in_any_order(value: float) -> None:
    """Nothing has to be computed again for it."""
    rank = Rank([torch.tensor([1.0, value])])
    assert not math.isfinite(rank.total())
    assert rank.computed == 0


def test_a_norm_that_somebody_set_is_left_alone() -> None:
    """`safe_set_local_grad` gives the norm of what it sets; the step forgets all of them."""
    value = at_a_rounding(1)
    rank = Rank([value])
    theirs = torch.tensor(float(stock_norm(value)), dtype=torch.float64)
    rank.optimizer.norm_for_param_grads[0] = theirs
    rank.total()
    rank.norms.make_all_exact()
    assert rank.optimizer.norm_for_param_grads[0] is theirs and rank.computed == 0
    rank.optimizer.norm_for_param_grads = {}
    rank.norms.make_all_exact()
    assert rank.optimizer.norm_for_param_grads == {}


def test_before_the_values_change_their_norm_is_made_exact() -> None:
    """A pass before the next boundary adds to the buffer and leaves the norm of the last boundary."""
    value = torch.randn(100, generator=torch.Generator().manual_seed(3))
    exact = float(stock_norm(value))
    rank = Rank([value], [exact * (1 + 1e-15)])
    rank.norms.make_exact(rank.params[0])
    value.add_(1)
    rank.total()
    assert float(rank.optimizer.norm_for_param_grads[0]) == exact and rank.computed == 1


def test_a_rank_that_counts_but_some_partitions_computes_all() -> None:
    """With model parallelism DeepSpeed leaves out what another rank counts; no sum of ours says what shows."""
    rank = Rank([torch.full((4,), 0.5)])
    rank.optimizer.model_parallel_rank = 1
    rank.total()
    assert rank.computed == 1
