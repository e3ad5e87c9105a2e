"""Micro-steps added up on the host: the bits of DeepSpeed's own sum, each piece once, whatever fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.paths import accumulation as module
from autotune_offload.paths.accumulation import Accumulation, Moment
from tests.fakes import DeferredDevice, FakeAccelerator

FIRST, MIDDLE, LAST = Moment(True, False), Moment(False, False), Moment(False, True)
SIZES = (5, 300, 1000)
PIECE_ELEMENTS = 64


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that every gradient takes many pieces, and a buffer is used again and again."""
    monkeypatch.setattr(module, "_PIECE_BYTES", 2 * PIECE_ELEMENTS)


def gradients(seed: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """One a partition, some of them beyond what fp16 holds in a sum."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, generator=generator) * 3e4).to(dtype) for size in SIZES]


class Rank:
    """One rank's accumulation buffer and fp32 gradients, with what happens to them."""

    def __init__(
        self, place: Any = "host", dtype: torch.dtype = torch.bfloat16, *, pinned: bool = False
    ) -> None:
        self.device = DeferredDevice()
        self.accumulation = Accumulation(self.device, place, page_lock=True)
        self.low = [torch.full((size,), math.nan, dtype=dtype) for size in SIZES]
        self.fp32 = [torch.full((size,), math.nan) for size in SIZES]
        for low in self.low if pinned else []:
            self.device.pinned[low.data_ptr()] = low.nbytes

    def micro_step(self, values: list[Tensor], moment: Moment) -> dict[int, float]:
        """All partitions once, as an attached path does it; the bucket is filled anew after the pass."""
        sources = [value.clone() for value in values]
        for key, source in enumerate(sources):
            if not self.accumulation.adds_on_host(moment):
                total = self.accumulation.value(source, self.low[key], moment)
                self.accumulation.keep(total, self.low[key])
                if moment.boundary:
                    self.device.d2h(self.fp32[key], total)
                continue
            sums, sent = self.accumulation.on_host(source, self.low[key])
            if moment.boundary:
                sums.add(sent, self.low[key], self.fp32[key], key)
            else:
                sums.add(sent, self.low[key])
        self.device._queue("reuse", lambda: [source.fill_(math.nan) for source in sources])
        return self.accumulation.drain()


def summed(dtype: torch.dtype, *steps: list[Tensor]) -> list[Tensor]:
    """In fp32, and rounded after every addition: what adding in 16 bits means."""
    totals = [value.to(dtype) for value in steps[0]]
    for step in steps[1:]:
        totals = [(a.float() + b.to(dtype).float()).to(dtype) for a, b in zip(totals, step, strict=True)]
    return totals


def same_bits(ours: list[Tensor], expected: list[Tensor]) -> bool:
    """Where both are NaN, the payload is free."""
    pairs = zip(ours, expected, strict=True)
    return all(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) and
               torch.equal(a.isnan(), b.isnan()) for a, b in pairs)  # fmt: skip


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("micro_steps", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("place", ["host", "device"])
def test_both_places_give_the_same_sum(
    place: str, dtype: torch.dtype, micro_steps: int, pinned: bool
) -> None:
    """In the buffer and in fp32, with overflow to infinity in fp16, though every copy runs late."""
    rank = Rank(place, dtype, pinned=pinned)
    steps = [gradients(number, dtype) for number in range(micro_steps)]
    moments = [FIRST, *[MIDDLE] * (micro_steps - 2), LAST]
    for values, moment in zip(steps, moments, strict=True):
        norms = rank.micro_step(values, moment)
    rank.device.synchronize()
    expected = summed(dtype, *steps)
    assert dtype != torch.float16 or any(bool(total.isinf().any()) for total in expected)
    assert same_bits(rank.low, expected)
    assert same_bits(rank.fp32, [total.float() for total in expected])
    if place == "host":
        for key, total in enumerate(expected):
            norm = float(total.double().norm())
            assert norms[key] == pytest.approx(norm, rel=1e-13, nan_ok=True)


@given(st.lists(st.tuples(st.integers(0, 0xFFFF), st.integers(0, 0xFFFF)), min_size=1, max_size=64))
def test_a_sum_of_any_two_values_is_rounded_once(pairs: list[tuple[int, int]]) -> None:
    """bf16 and fp16, subnormal and infinite ones too: added in fp32, then to the nearest, ties to even."""
    ones = torch.tensor([a - (a >> 15 << 16) for a, _ in pairs], dtype=torch.int16)
    others = torch.tensor([b - (b >> 15 << 16) for _, b in pairs], dtype=torch.int16)
    device = DeferredDevice()
    for dtype in (torch.bfloat16, torch.float16):
        low, addend = ones.view(dtype).clone(), others.view(dtype)
        sums, sent = Accumulation(device, "host", page_lock=False).on_host(addend, low)
        sums.add(sent, low)
        sums.drain()
        assert same_bits([low], summed(dtype, [ones.view(dtype)], [addend]))
        sums.close()


@pytest.mark.parametrize(
    ("low", "gradient"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("place", ["host", "device"])
def test_a_gradient_of_another_dtype_is_rounded_as_deepspeed_rounds_it(
    place: str, low: torch.dtype, gradient: torch.dtype
) -> None:
    """Before it is added; on the host a narrower one crosses the link as it is."""
    rank = Rank(place, low)
    steps = [gradients(number, gradient) for number in range(3)]
    for values, moment in zip(steps, (FIRST, MIDDLE, LAST), strict=True):
        rank.micro_step(values, moment)
    rank.device.synchronize()
    assert same_bits(rank.low, summed(low, *steps))
    sent = rank.accumulation.link_bytes(steps[0][1], rank.low[1], MIDDLE)
    assert sent == SIZES[1] * (2 * low.itemsize if place == "device" else 2)


def test_on_the_host_a_gradient_crosses_the_link_once() -> None:
    """Two bytes a parameter and micro-step; on the device the sum goes there and back, and at last there alone:
    the path takes it back.
    """
    for place, middle, last in (("host", 2, 2), ("device", 4, 2)):
        rank = Rank(place)
        gradient, low = gradients(1)[2], rank.low[2]
        crossing = [rank.accumulation.link_bytes(gradient, low, m) for m in (FIRST, MIDDLE, LAST)]
        assert crossing == [2 * SIZES[2], middle * SIZES[2], last * SIZES[2]]


def test_where_memory_is_shared_the_buffer_accumulates_in_place() -> None:
    """Whatever place was asked for: nothing is allocated, and the sum is where it was."""
    device = AcceleratorDevice(FakeAccelerator("cpu"))
    accumulation = Accumulation(device, "host", page_lock=False)
    low, (gradient, *_) = torch.zeros(SIZES[0], dtype=torch.bfloat16), gradients(1)
    for moment in (FIRST, MIDDLE, LAST):
        assert not accumulation.adds_on_host(moment)
        accumulation.keep(accumulation.value(gradient, low, moment), low)
    assert same_bits([low], summed(low.dtype, [gradient], [gradient], [gradient]))


def test_the_same_sum_twice_in_one_pass_is_added_to_twice() -> None:
    """One after the other, and the norm is that of the last."""
    rank, values = Rank(), gradients(1)
    rank.micro_step(values, FIRST)
    sums, sent = rank.accumulation.on_host(values[2], rank.low[2])
    for _ in range(2):
        sums.add(sent, rank.low[2], rank.fp32[2], key=2)
    norms = rank.accumulation.drain()
    expected = summed(torch.bfloat16, *[[values[2]]] * 3)[0]
    assert same_bits([rank.low[2], rank.fp32[2]], [expected, expected.float()])
    assert norms == {2: pytest.approx(float(expected.double().norm()), rel=1e-13)}


def test_buffers_are_page_locked_only_where_the_path_page_locks() -> None:
    """And where the host lets us; they are given back, and the threads end."""
    for path, limit, pinned in (("pinned", None, True), ("direct", None, False), ("staged", 1, False)):
        device = DeferredDevice()
        device.largest_pin_bytes = limit
        accumulation = Accumulation(device, "host", page_lock=path != "direct")
        accumulation.on_host(gradients(1)[0], gradients(2)[0])
        assert bool(device.pinned) is pinned
        accumulation.close()
        assert device.pinned == {}


def test_the_queue_costs_every_partition_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: twice as many are looked at twice as often, no more."""
    looked: list[int] = []
    right = vars(module._Partition)["landed"].fget

    def landed(partition: Any) -> bool:
        looked.append(len(partition.pieces))
        done: bool = right(partition)
        return done

    monkeypatch.setattr(module._Partition, "landed", property(landed))
    counts = []
    for number in (20, 40):
        looked.clear()
        accumulation = Accumulation(DeferredDevice(), "host", page_lock=True)
        lows = [torch.zeros(SIZES[1], dtype=torch.bfloat16) for _ in range(number)]
        for low in lows:
            sums, sent = accumulation.on_host(gradients(1)[1], low)
            sums.add(sent, low)
        accumulation.drain()
        counts.append(sum(looked))
        accumulation.close()
    assert counts[1] == 2 * counts[0] > 0


# -- failures -------------------------------------------------------------------------------------


def fail_at(patch: pytest.MonkeyPatch, owner: object, name: str, number: int) -> None:
    """The `number`-th call of a method raises, and only that one."""
    right: Callable[..., Any] = getattr(owner, name)
    calls = iter(range(1, 10_000))

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            raise RuntimeError("bus error")
        return right(*args, **kwargs)

    patch.setattr(owner, name, failing)


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("number", [1, 2, 6, 9, 13, 20, 22])
@pytest.mark.parametrize("operation", ["d2h", "record_event", "host_add", "widen"])
@pytest.mark.parametrize("last", [True, False])
def test_whatever_fails_every_piece_is_added_once(
    monkeypatch: pytest.MonkeyPatch, operation: str, number: int, threads: int, last: bool
) -> None:
    """Those that were added, those in a buffer, and those that were still on the device."""
    if operation == "widen" and not last:
        pytest.skip("nothing is widened before the last micro-step")
    monkeypatch.setattr(module, "_THREADS", threads)
    rank, steps = Rank(), [gradients(1), gradients(2)]
    rank.micro_step(steps[0], FIRST)
    moment = LAST if last else MIDDLE
    fail_at(monkeypatch, rank.device, operation, number)
    sources, failed = [value.clone() for value in steps[1]], False
    for key, source in enumerate(sources):
        sums, sent = rank.accumulation.on_host(source, rank.low[key])
        try:
            if last:
                sums.add(sent, rank.low[key], rank.fp32[key], key)
            else:
                sums.add(sent, rank.low[key])
        except RuntimeError:
            failed = True
        if failed:
            break
    count = key + 1
    norms: dict[int, float] = {}
    try:
        norms |= rank.accumulation.drain()
    except RuntimeError:
        failed = True
    assert failed
    rank.device.synchronize()
    norms |= rank.accumulation.recover()
    expected = summed(torch.bfloat16, *steps)[:count]
    assert same_bits(rank.low[:count], expected)
    if moment.boundary:
        assert same_bits(rank.fp32[:count], [total.float() for total in expected])
        assert norms == {
            key: pytest.approx(float(total.double().norm()), rel=1e-12) for key, total in enumerate(expected)
        }
    rank.accumulation.close()
