"""The gradient paths: exact bits, right waits, one allocation, threads that leave no trace."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autotune_offload.errors import ConfigError, PinError
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.machine.device import Device
from autotune_offload.machine.ranges import PREFIX
from autotune_offload.paths.build import build
from autotune_offload.paths.path import GradientPath, destination_memory, widen_in_place
from autotune_offload.paths.stock import stock_path
from autotune_offload.paths.threads import HostThreads
from autotune_offload.records import PATHS, Cast, Path
from autotune_offload.upstream import STOCK_SEQUENCES, named_sequence, stock_sequence
from tests.fakes import DeferredDevice, junk

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
CASTS: list[Cast] = ["device", "host"]
SIZES = [1, 2, 999, 1000, 1001, 4096, 5003]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a path is built from."""

    path: Path
    cast: Cast = "host"
    buffer_bytes: int = 4000
    buffer_count: int = 2
    host_threads: int = 0


class CpuWithPinned(AcceleratorDevice):
    """The CPU, whose pin_memory locks nothing, with pageable memory in the place of pinned."""

    def pinned_empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Pageable memory."""
        return junk(elements, dtype)

    def release_pinned(self, pinned: Tensor) -> None:
        """Nothing to unlock."""


@pytest.fixture(scope="module")
def cpu() -> Device:
    """The real CPU device, as DeepSpeed has it."""
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu":
        pytest.skip("DeepSpeed's accelerator is not the CPU here")
    return CpuWithPinned()


@contextmanager
def built(device: Device, spec: Spec, dtype: torch.dtype) -> Iterator[GradientPath]:
    """A path that is closed at the end."""
    path = build(device, spec, dtype)
    try:
        yield path
    finally:
        path.close()


def gradients(device: Device, sizes: list[int], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Random gradients in device memory."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    tensors = [device.empty(size, dtype) for size in sizes]
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.numel(), generator=generator, dtype=torch.float32, device="cpu"))
    return tensors


def destinations(device: Device, sizes: list[int], path: Path) -> list[Tensor]:
    """Overwritten fp32 destinations, in the memory that the path wants."""
    pinned = destination_memory(path) == "pinned"
    make = device.pinned_empty if pinned else lambda size, dtype: junk(size, dtype)
    return [make(size, torch.float32) for size in sizes]


def bits(tensor: Tensor) -> Tensor:
    """The raw bits of fp32 values."""
    return tensor.view(torch.int32)


def assert_offloads(
    device: Device, path: GradientPath, spec: Spec, sizes: list[int], dtype: torch.dtype, seed: int
) -> None:
    """One pass; each source is overwritten behind its own offload, as the next bucket would.

    Every other one is to stay in low precision, too, in the kind of memory that its fp32 values have.
    """
    sources = gradients(device, sizes, dtype, seed)
    values = [source.clone() for source in sources]
    targets = destinations(device, sizes, spec.path)
    lows = [target.clone().to(dtype) for target in targets]
    for index, (source, target, low) in enumerate(zip(sources, targets, lows, strict=True)):
        path.offload(source, target, None if index % 2 else low)
        device.cast(source, junk(source.numel(), dtype))
    path.drain()
    for index, (value, target, low) in enumerate(zip(values, targets, lows, strict=True)):
        assert torch.equal(bits(target), bits(value.float()))
        assert index % 2 or torch.equal(low, value)


@pytest.mark.parametrize("threads", [0, 1, 2])
@pytest.mark.parametrize("buffer_bytes", [4, 36, 4000, 1 << 16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["cpu", "deferred"])
def test_every_path_gives_the_bits_of_float(
    kind: str,
    path: Path,
    cast: Cast,
    dtype: torch.dtype,
    buffer_bytes: int,
    threads: int,
    request: pytest.FixtureRequest,
) -> None:
    """Two passes over several partitions, smaller and larger than the buffers, are exact, although each source
    is overwritten on its stream right behind the offload.
    """
    device: Device = DeferredDevice() if kind == "deferred" else request.getfixturevalue("cpu")
    spec = Spec(path=path, cast=cast, buffer_bytes=buffer_bytes, buffer_count=3, host_threads=threads)
    sizes = SIZES if buffer_bytes > 36 else [1, 2, 9, 10, 101]
    with built(device, spec, dtype) as offload:
        assert_offloads(device, offload, spec, sizes, dtype, seed=1)
        assert_offloads(device, offload, spec, sizes[::-1], dtype, seed=2)


@given(
    path=st.sampled_from(PATHS),
    cast=st.sampled_from(CASTS),
    dtype=st.sampled_from(DTYPES),
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=6),
    buffer_bytes=st.integers(16, 20_000),
    buffer_count=st.integers(1, 4),
    threads=st.integers(0, 2),
)
def test_any_sizes_and_buffers_are_exact(
    path: Path,
    cast: Cast,
    dtype: torch.dtype,
    sizes: list[int],
    buffer_bytes: int,
    buffer_count: int,
    threads: int,
) -> None:
    """Partition sizes and buffers need not divide one another."""
    device = DeferredDevice()
    spec = Spec(
        path=path, cast=cast, buffer_bytes=buffer_bytes, buffer_count=buffer_count, host_threads=threads
    )
    with built(device, spec, dtype) as offload:
        assert_offloads(device, offload, spec, sizes, dtype, seed=0)
    assert device.count("synchronize") == 0


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("path", PATHS)
def test_a_path_on_a_side_stream_waits_without_a_device_synchronize(
    path: Path, cast: Cast, threads: int
) -> None:
    """Work on a side stream may be drained from another stream, and the device as a whole is never waited for."""
    device = DeferredDevice()
    side = device.new_stream()
    spec = Spec(path=path, cast=cast, host_threads=threads)
    [source], [target] = gradients(device, [3001], torch.bfloat16), destinations(device, [3001], path)
    expected = source.float()
    values = source.clone()
    source.zero_()
    with built(device, spec, torch.bfloat16) as offload:
        device.cast(source, values)  # the gradient is made on the default stream
        device.order_after(side, device.record_event())
        with device.on(side):
            offload.offload(source, target)
        offload.drain()
    assert torch.equal(bits(target), bits(expected))
    assert device.count("synchronize") == 0


def test_the_deferred_device_shows_a_missing_wait() -> None:
    """The tests above can fail: without the side stream's wait for the gradient, the bytes are wrong."""
    device = DeferredDevice()
    side = device.new_stream()
    [source], [target] = gradients(device, [100], torch.float32), destinations(device, [100], "direct")
    values = source.clone()
    source.zero_()
    with built(device, Spec(path="direct"), torch.float32) as offload:
        device.cast(source, values)
        with device.on(side):
            offload.offload(source, target)
        offload.drain()
    assert not torch.equal(target, values)


@pytest.mark.parametrize("cast", CASTS)
def test_direct_has_its_data_when_the_copy_returns(cast: Cast) -> None:
    """A copy into pageable memory blocks, so nothing is in the air when drain returns."""
    device = DeferredDevice()
    [source], [target] = gradients(device, [2500], torch.float16), destinations(device, [2500], "direct")
    with built(device, Spec(path="direct", cast=cast), torch.float16) as offload:
        offload.offload(source, target)
        assert {entry[2] for entry in device.log if entry[0] == "d2h"} == {"blocking"}
        offload.drain()
        assert torch.equal(bits(target), bits(source.float()))


@pytest.mark.parametrize("cast", CASTS)
def test_pinned_queues_all_before_it_waits(cast: Cast) -> None:
    """Into page-locked memory every copy is queued; the first wait is the drain's."""
    device = DeferredDevice()
    sources = gradients(device, [1000] * 5, torch.bfloat16)
    targets = destinations(device, [1000] * 5, "pinned")
    with built(device, Spec(path="pinned", cast=cast), torch.bfloat16) as offload:
        for source, target in zip(sources, targets, strict=True):
            offload.offload(source, target)
        assert [entry[2] for entry in device.log if entry[0] == "d2h"] == ["queued"] * 5
        assert device.count("event.synchronize") == 0
        offload.drain()
        assert device.count("event.synchronize") > 0


@pytest.mark.parametrize("count", [1, 2, 4])
def test_staged_fills_every_buffer_before_its_first_wait(count: int) -> None:
    """With N buffers, N copies are queued before the first wait, and one more before each later one."""
    device = DeferredDevice()
    [source], [target] = gradients(device, [10 * 500], torch.bfloat16), destinations(device, [5000], "staged")
    spec = Spec(path="staged", buffer_bytes=1000, buffer_count=count)
    with built(device, spec, torch.bfloat16) as offload:
        offload.offload(source, target)
        calls = [entry[0] for entry in device.log if entry[0] in {"d2h", "event.synchronize"}]
        assert calls == ["d2h"] * count + ["event.synchronize", "d2h"] * (10 - count)
        offload.drain()


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("path", PATHS)
def test_buffers_are_allocated_once_and_given_back(path: Path, cast: Cast) -> None:
    """Offloading allocates nothing, and after close no page-locked memory is left, however often it is called."""
    device = DeferredDevice()
    sources = gradients(device, SIZES, torch.bfloat16)
    targets = [junk(size, torch.float32) for size in SIZES]
    device.log.clear()
    offload = build(device, Spec(path=path, cast=cast), torch.bfloat16)
    made = [entry for entry in device.log if entry[0] in {"empty", "pinned_empty"}]
    scratch = [("empty", 1000)] if cast == "device" else []
    ring = [("pinned_empty", 2 * (1000 if cast == "device" else 2000))] if path == "staged" else []
    assert made == scratch + ring
    for _ in range(2):
        for source, target in zip(sources, targets, strict=True):
            offload.offload(source, target)
        offload.drain()
    assert [entry for entry in device.log if entry[0] in {"empty", "pinned_empty"}] == made
    offload.close()
    offload.close()
    assert not device.pinned
    assert device.count("release_pinned") == len(ring)


@pytest.mark.parametrize(
    "wrong", [{"buffer_bytes": 3}, {"buffer_count": 0}, {"host_threads": -1}], ids=lambda w: next(iter(w))
)
def test_impossible_buffers_are_named(wrong: dict[str, Any]) -> None:
    """No buffer, one smaller than an element, or a negative number of threads is a ConfigError."""
    with pytest.raises(ConfigError, match=str(next(iter(wrong.values())))):
        build(DeferredDevice(), Spec(path="staged", **wrong), torch.bfloat16)


def test_a_ring_that_cannot_be_pinned_leaves_no_thread() -> None:
    """PinError reaches the caller, and the path's threads do not outlive it."""
    device = DeferredDevice()
    device.largest_pin_bytes = 100
    with pytest.raises(PinError):
        build(device, Spec(path="staged", host_threads=2), torch.bfloat16)
    assert own_threads() == []


# -- host threads ---------------------------------------------------------------------------------


def own_threads() -> list[threading.Thread]:
    """Host threads of paths that are alive."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("autotune-offload")]


def torch_threads_of_a_new_thread() -> int:
    """What a thread that starts now would use."""
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return seen[0]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_host_threads_are_single_threaded_and_leave_no_trace(count: int) -> None:
    """Each runs torch on one thread; the caller's number, and a later thread's, are what they were."""
    before = torch.get_num_threads()
    assert torch_threads_of_a_new_thread() == before  # no earlier path left a trace
    threads = HostThreads(count)
    try:
        assert len(own_threads()) == count
        assert torch.get_num_threads() == before
        assert torch_threads_of_a_new_thread() == before
        seen: list[int] = []
        for future in [threads.submit(lambda: seen.append(torch.get_num_threads())) for _ in range(20)]:
            assert future is not None
            future.result()
        assert seen == [1] * 20
    finally:
        threads.close()
    assert own_threads() == []
    assert torch.get_num_threads() == before


def test_without_threads_work_is_done_at_once() -> None:
    """A count of 0 starts no thread: the caller does the work itself."""
    threads = HostThreads(0)
    done: list[str] = []
    assert threads.submit(lambda: done.append(threading.current_thread().name)) is None
    assert done == [threading.current_thread().name]
    assert own_threads() == []


def test_host_threads_make_their_device_current() -> None:
    """Which device is current is per thread: every worker enters the device before it works."""

    class Entered(DeferredDevice):
        def enter_thread(self) -> None:
            self.log.append(("enter_thread", threading.current_thread().name))

    device = Entered()
    HostThreads(3, device).close()
    assert len({entry[1] for entry in device.log if entry[0] == "enter_thread"}) == 3


def test_a_device_that_a_thread_cannot_enter_ends_them_all() -> None:
    """What goes wrong in a worker's start reaches the caller; nothing hangs and no thread stays."""

    class Refused(DeferredDevice):
        def enter_thread(self) -> None:
            raise RuntimeError("no such device")

    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="no such device"):
        HostThreads(2, Refused())
    assert own_threads() == []
    assert torch.get_num_threads() == before


class Failing(DeferredDevice):
    """A device whose host copies fail."""

    def h2h(self, destination: Tensor, source: Tensor) -> None:
        """Fails."""
        raise RuntimeError("the host copy failed")


@pytest.mark.parametrize(("path", "threads"), [("staged", 0), ("staged", 2), ("direct", 2), ("pinned", 1)])
def test_a_failure_in_a_thread_reaches_the_caller(path: Path, threads: int) -> None:
    """An exception of the host's part is raised by offload or drain, and the path can still be closed."""
    device = Failing()
    [source], [target] = gradients(device, [3000], torch.bfloat16), destinations(device, [3000], path)
    offload = build(device, Spec(path=path, host_threads=threads), torch.bfloat16)
    try:
        with pytest.raises(RuntimeError, match="the host copy failed"):  # noqa: PT012  # either may raise
            offload.offload(source, target)
            offload.drain()
    finally:
        offload.close()
    assert own_threads() == []


# -- widening in place ----------------------------------------------------------------------------


@given(n=st.integers(0, 20_000), dtype=st.sampled_from(DTYPES[:2]), seed=st.integers(0, 9))
def test_widening_in_place_keeps_the_bits(n: int, dtype: torch.dtype, seed: int) -> None:
    """Any number of any finite values in the upper half of the destination becomes what `.float()` gives."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    codes = torch.randint(-(1 << 15), 1 << 15, (n,), generator=generator, dtype=torch.int16, device="cpu")
    values = codes.view(dtype)
    values = torch.where(values.isnan(), torch.zeros((), dtype=dtype, device="cpu"), values)
    destination = junk(n, torch.float32)
    destination.view(dtype)[n:] = values
    widen_in_place(DeferredDevice(), destination, dtype)
    assert torch.equal(bits(destination), bits(values.float()))


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_every_code_widens_exactly(dtype: torch.dtype, copies: int) -> None:
    """All 65,536 codes: infinities, denormals, both zeros, and the NaNs with their payloads, where torch keeps those
    (its own `.float()` treats fp16 payloads differently in the body and in the tail of one tensor).
    """
    codes = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device="cpu").to(torch.int16)
    values = codes.repeat(copies)[3:].view(dtype)
    n = values.numel()
    destination = junk(n, torch.float32)
    destination.view(dtype)[n:] = values
    widen_in_place(DeferredDevice(), destination, dtype)
    expected = values.float()
    assert torch.equal(destination.isnan(), values.isnan())
    exact = torch.ones_like(codes[:1]).bool() if dtype == torch.bfloat16 else ~values.isnan()
    assert torch.equal(bits(destination) * exact, bits(expected) * exact)


def test_widening_takes_few_steps() -> None:
    """The front half of what is left at a time: the number of copies grows with the logarithm."""
    device = DeferredDevice()
    widen_in_place(device, junk(1 << 20, torch.float32), torch.bfloat16)
    assert device.count("h2h") <= 12


# -- DeepSpeed's own ------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["pageable", "pinned"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sequence", STOCK_SEQUENCES, ids=lambda s: s.name)
@pytest.mark.parametrize("kind", ["cpu", "deferred"])
def test_stock_sequences_give_the_same_bits(
    kind: str, sequence: Any, dtype: torch.dtype, memory: str, request: pytest.FixtureRequest
) -> None:
    """The baselines are exact too, so that their times compare."""
    device: Device = DeferredDevice() if kind == "deferred" else request.getfixturevalue("cpu")
    sources = gradients(device, SIZES, dtype)
    targets = destinations(device, SIZES, "pinned" if memory == "pinned" else "direct")
    expected = [source.float() for source in sources]
    offload = stock_path(sequence, device, dtype, max(SIZES))
    for source, target in zip(sources, targets, strict=True):
        offload.offload(source, target)
    offload.drain()
    offload.close()
    offload.close()
    for target, wanted in zip(targets, expected, strict=True):
        assert torch.equal(bits(target), bits(wanted))


def test_only_the_bounce_buffer_synchronizes_the_device() -> None:
    """One whole-device wait a partition in 0.15.4 to 0.16.2; none in the other sequences."""
    waits = {}
    for sequence in STOCK_SEQUENCES:
        device = DeferredDevice()
        [source], [target] = gradients(device, [100], torch.bfloat16), destinations(device, [100], "direct")
        offload = stock_path(sequence, device, torch.bfloat16, 100)
        for _ in range(3):
            offload.offload(source, target)
        offload.drain()
        waits[sequence.name] = device.count("synchronize")
    assert waits == {
        "implicit_upcast": 0,
        "bounce_buffer": 3,
        "explicit_upcast": 0,
        "explicit_upcast_non_blocking": 0,
    }


def test_a_bounce_buffer_that_cannot_be_pinned_is_pageable() -> None:
    """As with the CPU accelerator, whose pin_memory locks nothing."""
    device = DeferredDevice()
    device.largest_pin_bytes = 0
    [source], [target] = gradients(device, [100], torch.bfloat16), destinations(device, [100], "direct")
    offload = stock_path(named_sequence("bounce_buffer"), device, torch.bfloat16, 100)
    offload.offload(source, target)
    offload.drain()
    offload.close()
    assert torch.equal(target, source.float())
    assert device.count("release_pinned") == 0


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ((0, 9, 0), "implicit_upcast"),
        ((0, 15, 3), "implicit_upcast"),
        ((0, 15, 4), "bounce_buffer"),
        ((0, 16, 2), "bounce_buffer"),
        ((0, 16, 3), "explicit_upcast"),
        ((0, 19, 4), "explicit_upcast"),
        ((0, 19, 5), "explicit_upcast_non_blocking"),
        ((1, 0, 0), "explicit_upcast_non_blocking"),
    ],
)
def test_the_sequence_of_a_version(version: tuple[int, int, int], name: str) -> None:
    """Each range begins and ends where the wheels differ."""
    assert stock_sequence(version).name == name


def test_the_ranges_of_the_sequences_leave_no_gap() -> None:
    """Every version has one sequence, and its words name the range."""
    assert [s.versions for s in STOCK_SEQUENCES] == [
        "0.14.5 to 0.15.3",
        "0.15.4 to 0.16.2",
        "0.16.3 to 0.19.4",
        "0.19.5 and newer",
    ]


def test_a_trace_shows_each_piece_on_its_way_through_a_ring() -> None:
    """Into it, and out of it behind its wait; a buffer is emptied before it is filled again."""
    device, elements = DeferredDevice(), 256
    spec = Spec(path="staged", buffer_bytes=2 * elements, buffer_count=2)
    path = build(device, spec, torch.bfloat16)
    source, destination = torch.ones(3 * elements, dtype=torch.bfloat16), torch.zeros(3 * elements)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        path.offload(source, destination)
        path.drain()
    path.close()
    ours = [e.name.removeprefix(PREFIX) for e in profiler.events() if e.name.startswith(PREFIX)]
    put, out = ["piece into the ring"], ["wait for a piece", "piece out of the ring"]
    assert ours == [*put, *put, *out, *put, *out, *out]
    assert torch.equal(destination, torch.ones(3 * elements))
