"""The stages of each way, held against what the class of the same name does on a device that counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from autotune_offload.decide.candidates import PARAMETERS, effective
from autotune_offload.paths.build import build
from autotune_offload.paths.path import destination_memory
from autotune_offload.paths.rates import Rates
from autotune_offload.paths.stages import Lane, Stages, stages
from autotune_offload.paths.stock import stock_path
from autotune_offload.records import PATHS, Baseline, Candidate, Cast, Memory, Path
from autotune_offload.upstream import STOCK_SEQUENCES, named_sequence
from tests.decide.test_cost_model import WORKLOAD, measurements
from tests.fakes import DeferredDevice, junk

ELEMENTS = 5003
RATES = Rates(measurements([10.0] * 11), shares_host_memory=False)
BYTES = {torch.bfloat16: 2, torch.float32: 4}
each_dtype = pytest.mark.parametrize("dtype", BYTES, ids=str)


class Counting(DeferredDevice):
    """How many operations there were in each lane, and over how many bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Lane] = Counter()
        self.bytes: Counter[Lane] = Counter()

    def note(self, lane: Lane, size_bytes: int) -> None:
        """One more operation."""
        self.calls[lane] += 1
        self.bytes[lane] += size_bytes

    def cast(self, destination: Tensor, source: Tensor) -> None:
        """On the device, as fp32."""
        self.note("device", destination.nbytes)
        super().cast(destination, source)

    def d2h(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """What crosses the link."""
        self.note("link", source.nbytes)
        super().d2h(destination, source, non_blocking=non_blocking)

    def h2d(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """What crosses the link the other way."""
        self.note("link", source.nbytes)
        super().h2d(destination, source, non_blocking=non_blocking)

    def h2h(self, destination: Tensor, source: Tensor) -> None:
        """What is written on the host."""
        self.note("host", destination.nbytes)
        super().h2h(destination, source)

    def widen(self, destination: Tensor, source: Tensor, kept: Tensor | None = None) -> float:
        """As fp32; what is kept is in the same pass."""
        self.note("host", destination.nbytes)
        return super().widen(destination, source, kept)


def candidate(path: Path, cast: Cast, threads: int = 0) -> Candidate:
    """Buffers that no gradient here fits into."""
    return Candidate(path=path, cast=cast, buffer_bytes=4000, buffer_count=2, host_threads=threads)


def said(through: Stages, lane: Lane) -> int:
    """Bytes that pass a lane."""
    each = (*through.before, *through.work)
    return sum(work.element_bytes * ELEMENTS for work in each if work.lane == lane)


def blocks(device: DeferredDevice) -> bool:
    """Whether the copies held the caller, all or none."""
    held = {entry[2] == "blocking" for entry in device.log if entry[0] == "d2h"}
    assert len(held) == 1
    return True in held


@each_dtype
@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("cast", ["device", "host"])
@pytest.mark.parametrize("path", PATHS)
def test_the_stages_of_a_path_are_what_its_class_does(
    path: Path, cast: Cast, threads: int, dtype: torch.dtype
) -> None:
    """As many bytes are cast, cross the link and are written on the host, in as many pieces, and who waits waits."""
    device, load = Counting(), structs.replace(WORKLOAD, dtype=str(dtype).removeprefix("torch."))
    asked = {name: getattr(candidate(path, cast, threads), name) for name in PARAMETERS}
    way = Candidate(**dict(zip(PARAMETERS, effective(device, load, asked), strict=True)))
    pinned = destination_memory(path) == "pinned"
    target = device.pinned_empty(ELEMENTS, torch.float32) if pinned else junk(ELEMENTS, torch.float32)
    kept = device.pinned_empty(ELEMENTS, dtype) if pinned else junk(ELEMENTS, dtype)
    built = build(device, way, dtype)
    built.offload(junk(ELEMENTS, dtype), target, kept)
    built.drain()
    built.close()
    through = stages(way, BYTES[dtype], RATES)
    lanes: tuple[Lane, ...] = ("device", "link", "host")
    assert {lane: said(through, lane) for lane in lanes} == {lane: device.bytes[lane] for lane in lanes}
    pieces = -(-ELEMENTS // through.piece_elements)
    assert device.calls["link"] == pieces + len(through.before)
    assert device.calls["device"] == pieces * any(work.lane == "device" for work in through.work)
    copy = next(work for work in through.work if work.lane == "link")
    assert blocks(device) == (copy.waits and not through.buffers)
    host = [work.waits for work in through.work if work.lane == "host"]
    assert device.calls["host"] == pieces * len(host)
    assert set(host) <= {way.host_threads == 0}


@each_dtype
@pytest.mark.parametrize("memory", ["pageable", "pinned"])
@pytest.mark.parametrize("name", [sequence.name for sequence in STOCK_SEQUENCES])
def test_the_stages_of_deepspeeds_own_are_what_its_class_does(
    name: str, memory: Memory, dtype: torch.dtype
) -> None:
    """The same for its sequences; what torch widens inside of `copy_` is no call of its own."""
    device = Counting()
    own = stock_path(named_sequence(name), device, dtype, ELEMENTS)
    pinned = memory == "pinned"
    target = device.pinned_empty(ELEMENTS, torch.float32) if pinned else junk(ELEMENTS, torch.float32)
    low = device.pinned_empty(ELEMENTS, dtype) if pinned else junk(ELEMENTS, dtype)
    back = own.through_buffer(junk(ELEMENTS, dtype), low)
    device.log.clear()  # what does not wait there is waited for with what does
    own.offload(back, target)
    waited = blocks(device)
    own.drain()
    own.close()
    through = stages(Baseline(name=name, versions="", memory=memory, installed=False), BYTES[dtype], RATES)
    within = name == "implicit_upcast" and dtype != torch.float32
    assert said(through, "device") == device.bytes["device"]
    assert said(through, "link") == device.bytes["link"]
    assert said(through, "host") == (4 * ELEMENTS if within else device.bytes["host"])
    assert {work.waits for work in (*through.before, *through.work)} == {waited}


@pytest.mark.parametrize("way", [candidate("direct", "host"), candidate("pinned", "host", 2)], ids=str)
def test_where_the_device_is_the_host_one_pass_is_all(way: Candidate) -> None:
    """No link is crossed on its own; each thread has the rate of one."""
    rates: Any = Rates(measurements([10.0] * 9 + [20.0, 6.0]), shares_host_memory=True)
    (work,) = stages(way, 2, rates).work
    keeping = 6 / 8  # of the rate: 2 more bytes are written where 2 are read and 4 written
    assert work.line.bytes_per_second == pytest.approx(keeping * 6e9 * max(way.host_threads, 1))


def test_deepspeeds_norm_counts_where_the_device_is_the_host() -> None:
    """Its fresh fp64 temporary is written at the rate of pages that are touched for the first time."""
    rates = Rates(measurements([10.0] * 7 + [1.0] + [10.0] * 3), shares_host_memory=True)
    own = Baseline(name="explicit_upcast", versions="", memory="pageable", installed=True)
    norm, cast, copy = stages(own, 2, rates).work
    assert norm.seconds(1000) == pytest.approx(2 * cast.seconds(1000)) == pytest.approx(8000 / 1e9, rel=1e-6)
    assert copy.line == rates.line("d2h", "pageable")
