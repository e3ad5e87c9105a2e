"""The self-check: what is carried was compared, whatever its size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autotune_offload.engine import self_check as module
from autotune_offload.engine.attach import detach
from autotune_offload.engine.delivery import Delivery
from autotune_offload.paths.destination import DestinationPath
from tests.engine.test_attach import (
    SIZES,
    Engine,
    Streamed,
    assert_same,
    attached,
    candidate,
    gradients,
    on_host,
    warnings_of,
)
from tests.fakes import DeferredDevice

LIMIT, PIECE = 1000, 256
LARGE = max(SIZES)
"""More than the limit: the only one of `SIZES`."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition of a few thousand elements is a large one, of many pieces."""
    monkeypatch.setattr(module, "_CHECKED_ELEMENTS", LIMIT)
    monkeypatch.setattr(module, "_PIECE_ELEMENTS", PIECE)


def both(engine: Engine, stock: Engine, seed: int, *, boundary: bool = True) -> None:
    """The same backward pass."""
    for one in (engine, stock):
        one.backward(gradients(seed), boundary)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("where", ["host", "device", "sums on the host"])
def test_a_large_partition_is_compared_piece_by_piece(where: str, accumulation: int) -> None:
    """Whatever the path does, and to whatever it adds; DeepSpeed's results stay."""
    stock = Engine(accumulation)
    if where == "host":
        engine = Engine(accumulation)
        found = attached(engine)
    else:
        engine = streamed = Streamed(DeferredDevice(), accumulation)
        spec = candidate(path="staged", host_threads=1)
        found = attached(engine, spec if where == "device" else on_host(spec), streamed.device)
    for step in range(3):
        for micro_step in range(accumulation):
            both(engine, stock, 10 * step + micro_step, boundary=micro_step == accumulation - 1)
        if where != "host":
            streamed.settled()
        assert_same(engine, stock)
        for one in (engine, stock):
            one.optimizer.step()
    assert found.check is not None and found.check.mismatch is None and found.why_not is None
    assert (found.check.partitions, found.check.elements) == (len(SIZES), sum(SIZES))
    assert found.left_to_deepspeed == 0
    compared = found.tally.since_start.compared
    assert (compared.partitions, compared.bytes) == (len(SIZES), 2 * sum(SIZES))
    if where != "host":
        assert found.stock_link_bytes == 2 * sum(SIZES) * (accumulation * 4 + 4)
    detach(engine)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("at", [0, PIECE - 1, PIECE, 1234, LARGE - 1])
@pytest.mark.parametrize("what", ["fp32 gradient", "accumulation buffer"])
def test_one_bit_anywhere_in_a_large_partition_is_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str, at: int, accumulation: int
) -> None:
    """Before the path has carried it once."""
    right, size = DestinationPath.offload_with_norm, {"fp32 gradient": 4, "accumulation buffer": 2}[what]
    engine, stock = Engine(accumulation), Engine(accumulation)
    place = engine.optimizer.fp32_partitioned_groups_flat[0].grad if size == 4 else engine.optimizer.buffer
    start = sum(SIZES) - LARGE

    def wrong(path: DestinationPath, source: Tensor, destination: Tensor, low: Tensor) -> Tensor:
        norm = right(path, source, destination, low)
        hit = place[start + at :].data_ptr()
        spoilt = destination if size == 4 else low
        if spoilt.data_ptr() <= hit < spoilt.data_ptr() + spoilt.nbytes:
            word = torch.int32 if size == 4 else torch.int16
            spoilt.view(word)[(hit - spoilt.data_ptr()) // size] ^= 1
        return norm

    monkeypatch.setattr(DestinationPath, "offload_with_norm", wrong)
    found = attached(engine)
    with warnings_of(caplog) as warned:
        for step in range(3):
            for micro_step in range(accumulation):
                both(engine, stock, 10 * step + micro_step, boundary=micro_step == accumulation - 1)
            assert_same(engine, stock)
            for one in (engine, stock):
                one.optimizer.step()
    pieces = -(-LARGE // PIECE)
    assert len(warned) == 1 and f"1 of {pieces} pieces of one partition's {what} differ" in warned[0]
    assert found.check is not None and str(found.check.mismatch) in warned[0]


def test_a_wrong_norm_of_a_large_partition_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of all pieces together."""
    right = DestinationPath.offload_with_norm
    monkeypatch.setattr(
        DestinationPath,
        "offload_with_norm",
        lambda path, source, destination, low: (
            right(path, source, destination, low) * (1 + 1e-6 * (source.numel() == PIECE))
        ),
    )
    engine = Engine()
    found = attached(engine)
    engine.backward(gradients(1))
    assert found.check is not None and "norm" in str(found.check.mismatch)


def test_not_a_number_is_no_difference_in_a_large_partition() -> None:
    """Nor are infinities, which a first loss scale gives."""
    engine, stock = Engine(), Engine()
    found = attached(engine)
    for one in (engine, stock):
        values = gradients(1)
        values[2][7], values[2][PIECE], values[2][PIECE + 1] = float("nan"), float("inf"), float("-inf")
        one.backward(values)
    assert found.check is not None and found.check.mismatch is None and found.check.elements == sum(SIZES)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("number", [2, 3, 9])
@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("name", ["prepare", "drain"])
def test_whatever_ends_a_comparison_leaves_the_partition_whole(
    monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException, number: int, accumulation: int
) -> None:
    """As DeepSpeed's own code makes it, also where it adds to what was there."""
    engine, stock = Engine(accumulation), Engine(accumulation)
    found = attached(engine)
    for micro_step in range(accumulation - 1):
        both(engine, stock, micro_step, boundary=False)
    right, calls = getattr(Delivery, name), iter(range(1, 1000))

    def failing(*args: object) -> object:
        if next(calls) == number:
            raise error
        return right(*args)

    monkeypatch.setattr(Delivery, name, failing)
    for one in (engine, stock):
        z = one.optimizer
        z.is_gradient_accumulation_boundary = True
        try:
            z.partition_grads([z.parameters[2]], [gradients(7)[2].clone()])
        except KeyboardInterrupt:
            assert isinstance(error, KeyboardInterrupt)
    monkeypatch.undo()
    assert_same(engine, stock)
    assert (found.why_not is None) is isinstance(error, KeyboardInterrupt)


@given(st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=40), st.data())
def test_digests_tell_any_two_values_apart(bits: list[int], data: st.DataObject) -> None:
    """One that differs, and two that have changed places; but all NaN are alike."""
    values = torch.tensor([b - (b >> 15 << 16) for b in bits], dtype=torch.int16)
    at = data.draw(st.integers(0, len(bits) - 1))
    other = data.draw(st.integers(0, 0xFFFF))
    changed = values.clone()
    changed[at] = other - (other >> 15 << 16)
    swapped = values.flip(0)
    for one in (changed, swapped):
        a, b = values.view(torch.bfloat16), one.view(torch.bfloat16)
        same = bool(((values == one) | (a.isnan() & b.isnan())).all())
        assert (module._digest(a) == module._digest(b)) is same
