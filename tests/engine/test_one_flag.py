"""One flag for all gradients of stages 1 and 2: what is found is what DeepSpeed's own code finds."""

from __future__ import annotations

import contextlib
import logging
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autotune_offload.engine import one_flag
from autotune_offload.engine.one_flag import CHECKED, FlagStatus, attach_flag, detach_flag
from autotune_offload.upstream import TRACKERS
from tests.fakes import DeferredDevice


class Shared(DeferredDevice):
    """A device whose memory is the host's, as the CPU's is."""

    synchronous = True
    shares_host_memory = True


class DeepSpeedZeroOptimizer:
    """The part of DeepSpeed's that tracks overflows, as in 0.18.9 and newer."""

    __module__ = "deepspeed.runtime.zero.stage_1_and_2"
    cpu_offload, overlap_comm = True, False

    def __init__(self) -> None:
        self.local_overflow = False
        self.looked = 0

    def _has_inf_or_nan(self, gradient: Tensor) -> Tensor:
        self.looked += 1
        values = gradient.to_dense().float()
        return values.isnan().logical_or(values.isinf()).any()

    def update_offload_overflow_tracker(self, gradient: Tensor | None) -> None:
        """As DeepSpeed's."""
        if gradient is not None and gradient.numel() and self._has_inf_or_nan(gradient):
            self.local_overflow = True

    def get_param_gradient_attribute(self, param: Any) -> Tensor | None:
        """As DeepSpeed's."""
        gradient: Tensor | None = param.grad
        return gradient

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """As DeepSpeed's, on one rank."""
        del partition_gradients
        return self.local_overflow

    def reset_cpu_buffers(self) -> None:
        """As DeepSpeed's."""
        self.local_overflow = False

    def destroy(self) -> None:
        """As DeepSpeed's."""


class Older(DeepSpeedZeroOptimizer):
    """As up to 0.16.9, where the tracker takes the parameter."""

    __module__ = "deepspeed.runtime.zero.stage_1_and_2"
    update_offload_overflow_tracker = property()  # no such attribute

    def update_overflow_tracker_for_param_grad(self, param: Any) -> None:
        """As DeepSpeed's."""
        gradient = self.get_param_gradient_attribute(param)
        if gradient is not None and self._has_inf_or_nan(gradient):
            self.local_overflow = True


Older.__name__ = "DeepSpeedZeroOptimizer"


class Engine:
    """What `attach_flag` looks at."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def attached(optimizer: Any) -> tuple[Engine, FlagStatus]:
    """With the flag in it."""
    engine = Engine(optimizer)
    return engine, attach_flag(engine, Shared())


VALUES = st.sampled_from([0.0, 1.0, -3.0, 65504.0, -65504.0, math.inf, -math.inf, math.nan])
GRADIENTS = st.lists(st.lists(VALUES, max_size=5), max_size=6)
DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])


@given(
    steps=st.lists(GRADIENTS, min_size=1, max_size=4), dtype=DTYPES, checked=st.sampled_from([0, 3, CHECKED])
)
def test_every_step_finds_what_deepspeeds_own_code_finds(
    steps: list[list[list[float]]], dtype: torch.dtype, checked: int
) -> None:
    """Any values in any order, over several steps; what is found in one does not reach the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_flag, "CHECKED", checked)
        stock, ours = DeepSpeedZeroOptimizer(), DeepSpeedZeroOptimizer()
        engine, status = attached(ours)
        for gradients in steps:
            for values in gradients:
                gradient = torch.tensor(values, dtype=dtype)
                stock.update_offload_overflow_tracker(gradient)
                ours.update_offload_overflow_tracker(gradient)
            assert ours.has_overflow() is stock.has_overflow()
            assert ours.has_overflow() is stock.has_overflow()  # asked again
            stock.reset_cpu_buffers()
            ours.reset_cpu_buffers()
        assert status.why_not is None
        assert detach_flag(engine) and not detach_flag(engine)


def test_deepspeed_looks_at_the_first_gradients_only() -> None:
    """Afterwards nothing is asked that would wait."""
    optimizer = DeepSpeedZeroOptimizer()
    _, status = attached(optimizer)
    for _ in range(CHECKED + 10):
        optimizer.update_offload_overflow_tracker(torch.ones(3))
    assert optimizer.looked == CHECKED and (status.checked, status.gradients) == (CHECKED, 10)


def test_what_was_found_without_being_read_is_not_lost_when_it_is_taken_out() -> None:
    """By `destroy`, or by us; then the methods are DeepSpeed's."""
    for take_out in (lambda engine: engine.optimizer.destroy(), detach_flag):
        optimizer = DeepSpeedZeroOptimizer()
        engine, _ = attached(optimizer)
        for _ in range(CHECKED):
            optimizer.update_offload_overflow_tracker(torch.ones(3))
        optimizer.update_offload_overflow_tracker(torch.tensor([1.0, math.nan]))
        assert not optimizer.local_overflow
        take_out(engine)
        assert optimizer.local_overflow and optimizer.has_overflow()
        assert not set(TRACKERS) & set(vars(optimizer))


def test_a_parameter_is_asked_for_its_gradient_in_older_releases() -> None:
    """One without any is left out."""
    optimizer = Older()
    _, status = attached(optimizer)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer.update_overflow_tracker_for_param_grad(weight)
    weight.grad = torch.tensor([math.inf, 0.0])
    optimizer.update_overflow_tracker_for_param_grad(weight)
    assert status.checked == 1 and optimizer.has_overflow()


def test_gradients_of_another_kind_are_left_to_deepspeed() -> None:
    """Sparse ones, and empty ones."""
    optimizer = DeepSpeedZeroOptimizer()
    _, status = attached(optimizer)
    optimizer.update_offload_overflow_tracker(torch.empty(0))
    optimizer.update_offload_overflow_tracker(torch.tensor([0.0, math.nan]).to_sparse())
    assert (status.checked, status.gradients, optimizer.looked) == (0, 0, 1) and optimizer.has_overflow()


def test_another_answer_takes_it_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one warning; DeepSpeed's finding counts."""
    optimizer = DeepSpeedZeroOptimizer()
    _, status = attached(optimizer)
    monkeypatch.setattr(torch, "aminmax", lambda gradient: (torch.zeros(()), torch.zeros(())))
    with caplog.at_level(logging.WARNING, "autotune_offload"):
        optimizer.update_offload_overflow_tracker(torch.tensor([math.inf]))
        optimizer.update_offload_overflow_tracker(torch.tensor([1.0]))
    assert len(caplog.records) == 1 and "an overflow, ours did not" in str(status.why_not)
    assert optimizer.has_overflow() and optimizer.looked == 2


def test_an_operation_that_fails_leaves_it_to_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is looked at all the same."""
    optimizer = DeepSpeedZeroOptimizer()
    _, status = attached(optimizer)

    def fails(gradient: Tensor) -> Any:
        raise RuntimeError("not implemented")

    monkeypatch.setattr(torch, "aminmax", fails)
    optimizer.update_offload_overflow_tracker(torch.tensor([math.nan]))
    assert optimizer.has_overflow() and "not implemented" in str(status.why_not)


def test_other_optimizers_are_left_alone() -> None:
    """Another class, one that is not offloaded, one that somebody has changed."""

    class DeepSpeedZeroOptimizer_ZenFlow(DeepSpeedZeroOptimizer):
        """Another."""

    on_device, changed = DeepSpeedZeroOptimizer(), DeepSpeedZeroOptimizer()
    on_device.cpu_offload = False
    changed.has_overflow = lambda partition_gradients=True: False  # type: ignore[method-assign]
    for optimizer, word in (
        (DeepSpeedZeroOptimizer_ZenFlow(), "not exactly"),
        (on_device, "not offloaded"),
        (changed, "replaced by somebody else"),
    ):
        assert word in str(attached(optimizer)[1].why_not)


@pytest.mark.parametrize("overlap", [True, False])
def test_it_is_read_on_the_stream_that_gradients_are_reduced_on(
    monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """Whoever asks before the epilogue has waited for that stream gets the answer all the same."""
    optimizer, device, used = DeepSpeedZeroOptimizer(), Shared(), list[Any]()
    optimizer.overlap_comm = overlap
    optimizer.reduction_stream = stream = object()  # type: ignore[attr-defined]

    def on(which: Any) -> Any:
        used.append(which)
        return contextlib.nullcontext()

    monkeypatch.setattr(device, "on", on)
    attach_flag(Engine(optimizer), device)
    for _ in range(CHECKED + 1):
        optimizer.update_offload_overflow_tracker(torch.ones(3))
    optimizer.has_overflow()
    assert used == [stream if overlap else None]
