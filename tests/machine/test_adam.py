"""The compiled pass of the step: DeepSpeed's own bits, in the cut that leaves its scalar loop to it."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autotune_offload.machine import adam, compiled

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WORDS = {2: torch.int16, 4: torch.int32}


def equal(mine: Tensor, other: Tensor) -> bool:
    """To the last bit; a NaN is a NaN."""
    word = WORDS[mine.element_size()]
    differ = (mine.view(word) != other.view(word)) & ~(mine.isnan() & other.isnan())
    return not bool(differ.any())


def memory(elements: int, seed: int = 0, *, wild: bool = False) -> adam.Memory:
    """Weights and gradients of many magnitudes; with `wild` also subnormal, infinite and no numbers."""
    random = torch.Generator().manual_seed(seed)

    def values() -> Tensor:
        powers = torch.empty(elements).uniform_(-30 if wild else -6, 3, generator=random)
        return torch.randn(elements, generator=random) * 10**powers

    weights, gradients, first = values(), values(), values()
    second = values().abs()
    if wild and elements > 8:
        gradients[:4] = torch.tensor([float("inf"), float("-inf"), float("nan"), 1e-45])
        weights[4:8] = torch.tensor([float("nan"), float("inf"), -1e-42, 3.4e38])
    return adam.Memory(weights=weights, gradients=gradients, first=first, second=second)


def copied(of: adam.Memory) -> adam.Memory:
    """The same values elsewhere."""
    weights, gradients, first, second = (tensor.clone() for tensor in of.tensors())
    return adam.Memory(weights=weights, gradients=gradients, first=first, second=second)


def setting(step: int = 1, **changes: Any) -> adam.Setting:
    """Of one call."""
    plain = {
        "step": step, "rate": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8,
        "weight_decay": 0.01, "corrects_bias": True,
    }  # fmt: skip
    return adam.Setting(**{**plain, **changes})


def run(
    on: adam.Memory, values: adam.Constants, dtype: torch.dtype | None, piece_elements: int = 1 << 20
) -> Tensor | None:
    """The pass over all of it; the rounded weights."""
    rounded = None if dtype is None else torch.empty(on.elements, dtype=dtype)
    done = bytearray(-(-on.elements // piece_elements))
    piece = adam.piece_of(on, values, dtype, done)
    for number in range(len(done)):
        begin, end = number * piece_elements, min((number + 1) * piece_elements, on.elements)
        piece(begin, end, number, None if rounded is None else rounded[begin:end])
    assert done == b"\1" * len(done)
    return rounded


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rounding_is_that_of_copy(dtype: torch.dtype) -> None:
    """A rate of 0 leaves weights as they are: all 65,536 upper halves with the lower halves around a tie."""
    high = torch.arange(1 << 16, dtype=torch.int64).unsqueeze(1) << 16
    low = torch.tensor([0x0000, 0x0001, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    weights = (high | low).flatten().to(torch.int32).view(torch.float32)
    found = adam.Memory(
        weights=weights.clone(), gradients=torch.zeros_like(weights), first=torch.zeros_like(weights),
        second=torch.zeros_like(weights),
    )  # fmt: skip
    values = adam.constants(setting(rate=0.0, weight_decay=0.0), (0.9, 0.999), 1.0, decoupled=True)
    rounded = run(found, values, dtype)
    assert rounded is not None and equal(rounded, torch.empty_like(rounded).copy_(found.weights))


@given(scale=st.floats(2.0**-20, 1.0, width=32), elements=st.integers(0, 300))
@settings(max_examples=40, deadline=None)
def test_gradients_are_left_as_mul_leaves_them(scale: float, elements: int) -> None:
    """Scaled in memory, and untouched by a scale of exactly 1."""
    found = memory(elements, wild=True)
    expected = found.gradients.clone()
    if scale != 1.0:
        expected.mul_(scale)
    run(found, adam.constants(setting(), (0.9, 0.999), scale, decoupled=True), None)
    assert equal(found.gradients, expected)


@pytest.mark.parametrize("flags", [("-mno-avx512f",), ("-fno-tree-vectorize",), ("-O1",)], ids=str)
@pytest.mark.parametrize("decoupled", [True, False])
def test_vectors_of_any_width_give_the_same_bits(flags: tuple[str, ...], decoupled: bool) -> None:
    """AVX2 in place of AVX-512, and none at all."""
    other = compiled.library(adam.SOURCE, *adam.FLAGS, *flags)
    if isinstance(other, str) and flags == ("-mno-avx512f",):
        pytest.skip(f"this compiler has no {flags[0]}: {other}")
    assert isinstance(other, ctypes.CDLL), other
    mine = memory(5000, wild=True)
    theirs = copied(mine)
    values = adam.constants(setting(7), (0.4782969, 0.993), 0.37, decoupled=decoupled)
    rounded = run(mine, values, torch.bfloat16)
    assert rounded is not None
    elsewhere, done = torch.empty_like(rounded), ctypes.c_uint8(0)
    starts = [ctypes.c_void_p(t.data_ptr()) for t in (*theirs.tensors(), elsewhere)]
    other.adam_to_bfloat16(*starts, ctypes.c_ssize_t(5000), ctypes.byref(values), ctypes.byref(done))
    assert done.value == 1 and equal(rounded, elsewhere)
    assert all(equal(a, b) for a, b in zip(mine.tensors(), theirs.tensors(), strict=True))


@pytest.mark.parametrize("piece_elements", [128, 1024, 4096])
def test_pieces_are_like_the_whole(piece_elements: int) -> None:
    """Whatever their number and wherever they end."""
    whole, pieces = memory(9999), memory(9999)
    values = adam.constants(setting(3), (0.729, 0.997), 0.5, decoupled=True)
    rounded, others = run(whole, values, torch.float16), run(pieces, values, torch.float16, piece_elements)
    assert rounded is not None and others is not None and equal(rounded, others)
    assert all(equal(a, b) for a, b in zip(whole.tensors(), pieces.tensors(), strict=True))


def test_powers_are_multiplied_from_call_to_call_and_raised_after_a_jump() -> None:
    """In float, as DeepSpeed keeps them; beta1^3 differs by its last bit between the two."""
    powers = adam.KeptPowers(0.9, 0.999, repeats=True)
    for step in (1, 2, 3):
        product = powers.at(setting(step))
    jumped = adam.KeptPowers(0.9, 0.999, repeats=True).at(setting(3))
    assert product != jumped
    assert jumped[0] == ctypes.c_float(ctypes.c_float(0.9).value ** 3).value
    assert powers.at(setting(3)) == product


def test_older_operations_raise_anew_in_a_further_call_of_a_step() -> None:
    """So that the second sub-group of a step gets other powers than the first, and the next step starts from them."""
    powers = adam.KeptPowers(0.9, 0.999, repeats=False)
    for step in (1, 2, 3):
        first, second = powers.at(setting(step)), powers.at(setting(step))
    assert first != second
    assert second == adam.KeptPowers(0.9, 0.999, repeats=False).at(setting(3))


def test_other_betas_are_raised_to_the_step() -> None:
    """As after a change in the middle of training."""
    powers = adam.KeptPowers(0.9, 0.999, repeats=True)
    powers.at(setting(1))
    found = powers.at(setting(5, beta1=0.8))
    assert found[0] == ctypes.c_float(ctypes.c_float(0.8).value ** 5).value


@pytest.mark.parametrize("odd", ["length", "strided", "dtype"])
def test_memory_that_is_not_as_expected_is_refused(odd: str) -> None:
    """Before anything is written past its end."""
    found = memory(256)
    weights = {
        "length": found.weights[:128], "strided": torch.empty(512)[::2], "dtype": found.weights.double()
    }[odd]  # fmt: skip
    wrong = adam.Memory(weights=weights, gradients=found.gradients, first=found.first, second=found.second)
    values = adam.constants(setting(), (0.9, 0.999), 1.0, decoupled=True)
    with pytest.raises(ValueError, match="cannot be made"):
        adam.piece_of(wrong, values, None, bytearray(1))
    piece = adam.piece_of(found, values, torch.bfloat16, bytearray(1))
    for begin, end, number, to in ((0, 257, 0, 257), (0, 128, 1, 128), (0, 128, 0, 127)):
        with pytest.raises(ValueError, match="piece"):
            piece(begin, end, number, torch.empty(to, dtype=torch.bfloat16))


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason names what was tried."""
    monkeypatch.setenv("CC", "/nonexistent/cc")
    compiled.library.cache_clear()
    try:
        assert "/nonexistent/cc" in str(adam.why_not_compiled(torch.bfloat16))
        with pytest.raises(RuntimeError, match="nonexistent"):
            adam.flushes_subnormals()
    finally:
        compiled.library.cache_clear()


def test_a_dtype_without_a_rounding_is_said() -> None:
    """And fp32, bf16 and fp16 are there."""
    assert [adam.why_not_compiled(dtype) for dtype in (None, *DTYPES)] == [None] * 4
    assert "float64" in str(adam.why_not_compiled(torch.float64))


def test_a_thread_that_flushes_subnormals_is_known() -> None:
    """The pass's own threads would not."""
    assert not adam.flushes_subnormals()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        assert adam.flushes_subnormals()
    finally:
        torch.set_flush_denormal(False)


# -- beside DeepSpeed's own operation -------------------------------------------------------------


@pytest.fixture(scope="module")
def operation() -> Any:
    """DeepSpeed's CPU Adam, compiled once."""
    builder = pytest.importorskip("deepspeed.ops.op_builder").CPUAdamBuilder()
    return builder.load(verbose=False)


@pytest.mark.long
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("dtype", DTYPES)
def test_deepspeeds_bits_over_many_steps(
    operation: Any, dtype: torch.dtype, weight_decay: float, decoupled: bool
) -> None:
    """Params, moments, gradients and rounded weights, with another scale, rate, correction or pair of betas a step."""
    number, elements = 1 << 20, 128 * 300
    stock, ours = memory(elements, wild=True), memory(elements, wild=True)
    for moments in (stock, ours):
        moments.first.zero_(), moments.second.zero_()
    operation.create_adam(number, 1e-3, 0.9, 0.999, 1e-8, weight_decay, decoupled, False)
    powers = adam.KeptPowers(0.9, 0.999, repeats=True)
    try:
        for step in (*range(1, 9), 50, 51):
            fresh = memory(elements, seed=step).gradients
            stock.gradients.copy_(fresh), ours.gradients.copy_(fresh)
            scale = 1.0 if step % 3 == 0 else 1 / (1 + 0.37 * step)
            beta1 = 0.9 if step != 6 else 0.8
            now = setting(
                step, rate=1e-3 * step, beta1=beta1, weight_decay=weight_decay, corrects_bias=step % 4 != 0
            )
            stock.gradients.mul_(scale)
            operation.adam_update(
                number, step, now.rate, beta1, 0.999, 1e-8, weight_decay, now.corrects_bias, *stock.tensors()
            )
            rounded = run(ours, adam.constants(now, powers.at(now), scale, decoupled=decoupled), dtype)
            assert rounded is not None and equal(rounded, torch.empty_like(rounded).copy_(stock.weights))
            assert all(equal(a, b) for a, b in zip(ours.tensors(), stock.tensors(), strict=True))
    finally:
        operation.destroy_adam(number)


@pytest.mark.long
def test_a_cut_at_whole_blocks_changes_none_of_deepspeeds_bits(operation: Any) -> None:
    """For every tail of 1 to 127 elements: the pass before it and DeepSpeed's operation from there on."""
    number = 1 << 20
    operation.create_adam(number, 1e-3, 0.9, 0.999, 1e-8, 0.01, True, False)
    try:
        powers = adam.KeptPowers(0.9, 0.999, repeats=True)
        for step, tail in enumerate(range(1, 128), start=1):
            stock, ours, now = memory(512 + tail, tail), memory(512 + tail, tail), setting(step)
            given = (number, step, 1e-3, 0.9, 0.999, 1e-8, 0.01, True)
            operation.adam_update(*given, *stock.tensors())
            run(ours.part(0, 512), adam.constants(now, powers.at(now), 1.0, decoupled=True), None)
            operation.adam_update(*given, *ours.part(512, 512 + tail).tensors())
            assert all(equal(a, b) for a, b in zip(ours.tensors(), stock.tensors(), strict=True)), tail
    finally:
        operation.destroy_adam(number)
