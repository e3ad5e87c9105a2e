"""The device on fake accelerators: the order of calls, pinning, identity, and explicit places and dtypes."""

from __future__ import annotations

import resource
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune_offload.errors import DeviceError, PinError
from autotune_offload.machine import accelerator
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.measure.measure import measure
from autotune_offload.records import Plan
from tests.fakes import FakeAccelerator, FakeAcceleratorDevice, install_habana


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "LOCAL_SIZE", "DS_PIN_MEMORY_BACKEND", "DS_PIN_MEMORY_REGISTER_DEVICE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cuda() -> FakeAccelerator:
    """An accelerator of kind cuda with four devices."""
    return FakeAccelerator("cuda")


@pytest.fixture
def hpu(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    """An accelerator of kind hpu, with habana_frameworks in place."""
    accelerator = FakeAccelerator("hpu", count=8)
    install_habana(monkeypatch, accelerator.calls)
    return accelerator


# -- which device ---------------------------------------------------------------------------------


def test_importing_touches_no_accelerator() -> None:
    """No context at import: neither DeepSpeed is loaded nor CUDA started by importing the module."""
    code = (
        "import sys, torch, autotune_offload.machine.device; "
        "print('deepspeed' in sys.modules, torch.cuda.is_initialized(), 'pynvml' in sys.modules)"
    )
    child = subprocess.run((sys.executable, "-c", code), check=True, capture_output=True, text=True)
    assert child.stdout.split() == ["False"] * 3


@pytest.mark.parametrize(
    ("local_rank", "current", "expected"),
    [("2", 0, 2), (None, 1, 1), ("", 1, 1), ("-1", 3, 3), ("4", 0, 0), ("7", 2, 2)],
)
def test_the_local_rank_chooses_the_device(
    local_rank: str | None,
    current: int,
    expected: int,
    cuda: FakeAccelerator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LOCAL_RANK is honoured; where it is not set, or names a device that this process does not see, the
    current device is used.
    """
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    cuda.current = current
    assert FakeAcceleratorDevice(cuda).identity.index == expected
    assert cuda.calls == []  # creating a device changes nothing


def test_a_local_rank_that_is_no_number_is_named(
    cuda: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DeviceError says what LOCAL_RANK holds."""
    monkeypatch.setenv("LOCAL_RANK", "node0")
    with pytest.raises(DeviceError, match='LOCAL_RANK is "node0"'):
        FakeAcceleratorDevice(cuda)


def test_the_current_device_is_left_as_found(cuda: FakeAccelerator) -> None:
    """`selected` puts the former device back, after an exception too."""
    cuda.current = 3
    device = FakeAcceleratorDevice(cuda, index=1)
    with device.selected():
        assert cuda.current == 1
    assert cuda.current == 3
    cuda.calls.clear()
    with pytest.raises(ZeroDivisionError), device.selected():
        raise ZeroDivisionError
    assert cuda.calls == [("set_device", 1), ("set_device", 3)]


def test_the_cpu_is_never_selected() -> None:
    """There is only one CPU, and DeepSpeed's set_device does nothing there."""
    cpu = FakeAccelerator("cpu")
    device = FakeAcceleratorDevice(cpu)
    with device.selected():
        device.enter_thread()
    assert cpu.calls == []


def test_a_thread_enters_the_ranks_own_device(cuda: FakeAccelerator) -> None:
    """Otherwise each rank's host threads would set up a context on device 0."""
    FakeAcceleratorDevice(cuda, index=2).enter_thread()
    assert cuda.calls == [("set_device", 2)]


@pytest.mark.parametrize(("kind", "place"), [("cuda", "cuda:1"), ("hpu", "hpu"), ("cpu", "cpu")])
def test_device_memory_is_where_deepspeed_puts_it(
    kind: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device allocations name the place that the accelerator gives for the index, and the dtype."""
    accelerator = FakeAccelerator(kind)
    install_habana(monkeypatch, accelerator.calls)
    seen: list[tuple[Any, ...]] = []
    device = AcceleratorDevice(accelerator, index=1)
    monkeypatch.setattr(torch, "empty", lambda n, *, dtype, device: seen.append((n, dtype, device)))
    device.empty(5, torch.float16)
    assert seen == [(5, torch.float16, place)]


# -- pinned memory --------------------------------------------------------------------------------


def test_pinning_goes_through_the_accelerator(cuda: FakeAccelerator) -> None:
    """`pin_memory` gets the tensor as its only argument, and `unpin_memory` gets it back."""
    device = FakeAcceleratorDevice(cuda)
    pinned = device.pinned_empty(10, torch.float32)
    assert pinned.shape == (10,) and pinned.dtype == torch.float32
    device.release_pinned(pinned)
    assert cuda.calls == [("pin_memory", 40), ("unpin_memory", 40)]
    assert pinned.numel() == 0  # the reference that the caller holds keeps no block alive


@pytest.mark.parametrize(
    ("pinning", "words"),
    [
        ("same object", "returned pageable memory"),
        ("pageable", "returned pageable memory"),
        (
            RuntimeError("CUDA error: invalid argument"),
            "page-locking 40 bytes failed: CUDA error: invalid argument",
        ),
        (AssertionError("Torch not compiled with CUDA enabled"), "not compiled"),
        (OSError("Cannot allocate memory"), "Cannot allocate"),
    ],
)
def test_memory_that_does_not_pin_is_a_pin_error(pinning: Any, words: str) -> None:
    """Whether pin_memory raises, or quietly gives pageable memory, or the very same tensor."""
    device = FakeAcceleratorDevice(FakeAccelerator("cuda", pinning=pinning))
    with pytest.raises(PinError, match=words):
        device.pinned_empty(10, torch.float32)
    assert words in (device.why_not_pinned() or "").replace("4,096", "40")


def test_more_host_memory_than_there_is_is_a_pin_error(cuda: FakeAccelerator) -> None:
    """The pageable block that is pinned may already be too large."""
    with pytest.raises(PinError, match="failed"):
        FakeAcceleratorDevice(cuda).pinned_empty(1 << 60, torch.uint8)


def test_an_accelerator_without_unpin_frees_with_the_last_reference() -> None:
    """DeepSpeed before 0.19.6 has no unpin_memory."""

    class Older(FakeAccelerator):
        def __getattribute__(self, name: str) -> Any:
            if name == "unpin_memory":
                raise AttributeError(name)
            return super().__getattribute__(name)

    cuda = Older("cuda")
    device = FakeAcceleratorDevice(cuda)
    device.release_pinned(device.pinned_empty(4, torch.float32))
    assert cuda.calls == [("pin_memory", 16)]
    assert device.identity.pin_backend == "torch"


def test_released_blocks_leave_torchs_cache(cuda: FakeAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps freed page-locked blocks; they are handed back after, not before, the block is let go."""
    device = FakeAcceleratorDevice(cuda)
    pinned = device.pinned_empty(4, torch.float32)
    left: list[int] = []
    monkeypatch.setattr(
        accelerator, "empty_host_cache", lambda: left.append(pinned.untyped_storage().nbytes())
    )
    device.release_pinned(pinned)
    assert left == [0]


def locks(accelerator: FakeAccelerator) -> list[tuple[Any, ...]]:
    """What was locked and unlocked, in bytes, in order."""
    return [call for call in accelerator.calls if call[0] in ("pin_memory", "unpin_memory")]


def test_kept_blocks_are_handed_out_again(cuda: FakeAccelerator) -> None:
    """A smaller request takes the front of what was given back; nothing is locked for it."""
    device = FakeAcceleratorDevice(cuda)
    with device.keeping_pinned():
        first = device.pinned_empty(64, torch.float32)
        at = first.data_ptr()
        device.release_pinned(first)
        second = device.pinned_empty(32, torch.bfloat16)
        assert (second.data_ptr(), second.shape, second.dtype) == (at, (32,), torch.bfloat16)
        assert [name for name, *_ in locks(cuda)] == ["pin_memory"]
        beside = device.pinned_empty(8, torch.float32)
        assert beside.data_ptr() != at
        device.release_pinned(second)
        device.release_pinned(beside)
    assert [name for name, *_ in locks(cuda)] == ["pin_memory"] * 2 + ["unpin_memory"] * 2


def test_no_more_is_kept_than_was_in_use(cuda: FakeAccelerator) -> None:
    """What is free and too small is unlocked before a larger block is locked: limits hold for the sum."""
    device = FakeAcceleratorDevice(cuda)
    with device.keeping_pinned():
        device.release_pinned(device.pinned_empty(64, torch.uint8))
        larger = device.pinned_empty(128, torch.uint8)
        assert [name for name, *_ in locks(cuda)] == ["pin_memory", "unpin_memory", "pin_memory"]
        device.release_pinned(larger)


def test_a_block_that_outlives_the_keeping_is_unlocked_when_it_is_given_back(cuda: FakeAccelerator) -> None:
    """No page stays locked."""
    device = FakeAcceleratorDevice(cuda)
    with device.keeping_pinned():
        device.release_pinned(device.pinned_empty(64, torch.uint8))
        late = device.pinned_empty(16, torch.uint8)
    device.release_pinned(late)
    assert [name for name, *_ in locks(cuda)] == ["pin_memory", "unpin_memory"]


def test_on_the_real_cpu_nothing_pins() -> None:
    """DeepSpeed's CPU accelerator returns what it was given; the reason says so and nothing raises."""
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu":
        pytest.skip("DeepSpeed's accelerator is not the CPU here")
    device = AcceleratorDevice()
    assert "pageable" in (device.why_not_pinned() or "")
    assert device.synchronous and device.shares_host_memory
    assert device.new_stream() is None
    with device.on(device.new_stream()):
        device.order_after(None, device.record_event())
    device.synchronize_stream()
    assert (device.identity.kind, device.identity.pin_backend) == ("cpu", "none")
    assert device.identity.memory_bytes is None


@pytest.mark.parametrize(
    ("kind", "backend", "registered", "expected"),
    [
        ("cuda", None, None, "torch"),
        ("cuda", "torch", None, "torch"),
        ("cuda", " Native ", None, "native"),
        ("cuda", "native", "1", "native"),
        ("cuda", "native", "off", "native, not registered with the device"),
        ("cuda", "nonsense", None, "torch"),
        ("cpu", None, None, "none"),
        ("cpu", "nonsense", None, "none"),
        ("cpu", "native", None, "native"),
        ("cpu", "native", "0", "native"),
    ],
)
def test_the_pin_backend_is_read_as_deepspeed_reads_it(
    kind: str, backend: str | None, registered: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only "native" is not torch's; on the CPU torch pins nothing, and there is no device to register with."""
    if backend is not None:
        monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", backend)
    if registered is not None:
        monkeypatch.setenv("DS_PIN_MEMORY_REGISTER_DEVICE", registered)
    assert FakeAcceleratorDevice(FakeAccelerator(kind)).identity.pin_backend == expected


# -- order ----------------------------------------------------------------------------------------


def test_streams_and_events_are_the_accelerators(cuda: FakeAccelerator) -> None:
    """An event is recorded on the current stream, another stream is made to wait, and only the host blocks."""
    device = FakeAcceleratorDevice(cuda)
    side = device.new_stream()
    device.order_after(side, device.record_event())
    with device.on(side):
        event = device.record_event()
        device.synchronize_stream()
    event.synchronize()
    device.synchronize()
    assert cuda.calls == [
        ("Stream",),
        ("event.record", "default"),
        ("stream.wait_event", "stream 1"),
        ("enter", "stream 1"),
        ("event.record", "stream 1"),
        ("stream.synchronize", "stream 1"),
        ("leave", "stream 1"),
        ("event.synchronize",),
        ("synchronize",),
    ]


def test_an_hpu_steps_before_every_wait_and_every_change_of_stream(hpu: FakeAccelerator) -> None:
    """Lazy mode keeps operations back: what an event stands behind, and what a stream was given, must be out."""
    device = FakeAcceleratorDevice(hpu)
    side = device.new_stream()
    hpu.calls.clear()
    device.record_event()
    with device.on(side):
        device.record_event()
        device.synchronize_stream()
    device.synchronize()
    assert hpu.calls == [
        ("mark_step",),
        ("event.record", "default"),
        ("mark_step",),
        ("enter", "stream 1"),
        ("mark_step",),
        ("event.record", "stream 1"),
        ("mark_step",),
        ("stream.synchronize", "stream 1"),
        ("mark_step",),
        ("leave", "stream 1"),
        ("mark_step",),
        ("synchronize",),
    ]


def test_an_hpu_without_habana_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings without mark_step would be of work that has not begun."""
    monkeypatch.setitem(sys.modules, "habana_frameworks", None)
    with pytest.raises(DeviceError, match="habana_frameworks"):
        AcceleratorDevice(FakeAccelerator("hpu"))


def test_a_device_without_events_is_a_device_error() -> None:
    """A device that runs beside the host and cannot be waited for is refused, not timed."""

    class Bare(FakeAccelerator):
        Event = None  # type: ignore[assignment]

        def current_stream(self, device_index: int | None = None) -> Any:
            return None

    device = FakeAcceleratorDevice(Bare("mps"))
    with pytest.raises(DeviceError, match="no events"):
        device.record_event()
    with pytest.raises(DeviceError, match="no current stream"):
        device.synchronize_stream()


# -- identity -------------------------------------------------------------------------------------


def test_what_nothing_reports_is_none(cuda: FakeAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a vendor's library the identity holds only what the accelerator says."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    identity = FakeAcceleratorDevice(cuda).identity
    assert (identity.kind, identity.name, identity.count) == ("cuda", "cuda", 4)
    assert identity.memory_bytes == 1 << 36
    assert (identity.capability, identity.driver, identity.mig_slice) == (None, None, None)
    assert (identity.link_generation, identity.link_width) == (None, None)


@pytest.mark.parametrize(
    "error", [FileNotFoundError("numactl"), subprocess.CalledProcessError(1, "numactl"), RuntimeError()]
)
def test_a_cpu_that_cannot_be_counted_is_one(error: Exception) -> None:
    """Older DeepSpeeds ask numactl, which may be absent or refused in a container."""

    class Uncounted(FakeAccelerator):
        def device_count(self) -> int:
            raise error

    assert FakeAcceleratorDevice(Uncounted("cpu")).identity.count == 1


class FakeNvml(types.ModuleType):
    """The part of pynvml that is used; cards by UUID."""

    class NVMLError(Exception):
        """As pynvml's."""

    def __init__(self, cards: dict[str, str], refused: frozenset[str] = frozenset()) -> None:
        super().__init__("pynvml")
        self.cards, self.refused = cards, refused
        self.asked: list[str] = []
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return lambda *args: self._call(name, *args)

    def _call(self, name: str, *args: Any) -> Any:
        self.asked.append(name)
        if name in self.refused:
            raise self.NVMLError(name)
        if name == "nvmlDeviceGetHandleByUUID":
            try:
                return self.cards[args[0].decode()]
            except KeyError as error:
                raise self.NVMLError("not found") from error
        if name in {"nvmlInit", "nvmlShutdown"}:
            self.open += 1 if name == "nvmlInit" else -1
        return {
            "nvmlSystemGetDriverVersion": b"570.1",
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetCurrPcieLinkWidth": 8,
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": "the card",
            "nvmlDeviceGetName": b"NVIDIA H200 MIG 1g.18gb",
        }.get(name)


@contextmanager
def nvidia(patch: pytest.MonkeyPatch, nvml: FakeNvml, uuid: str = "11-22") -> Iterator[None]:
    """A torch and an NVML that know a card."""
    properties = types.SimpleNamespace(name="NVIDIA H200", major=9, minor=0, uuid=uuid)
    patch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    patch.setattr(torch.version, "hip", None)
    patch.setitem(sys.modules, "pynvml", nvml)
    yield
    assert nvml.open == 0 or "nvmlShutdown" in nvml.refused


def test_nvml_finds_the_card_by_its_uuid(cuda: FakeAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's index is not NVML's under CUDA_VISIBLE_DEVICES, so the UUID is asked for."""
    nvml = FakeNvml({"GPU-11-22": "card"})
    with nvidia(monkeypatch, nvml):
        identity = FakeAcceleratorDevice(cuda, index=1).identity
    assert (identity.name, identity.capability, identity.driver) == ("NVIDIA H200", "9.0", "570.1")
    assert (identity.link_generation, identity.link_width, identity.mig_slice) == (5, 8, None)
    assert "nvmlDeviceGetHandleByIndex" not in nvml.asked


@pytest.mark.parametrize("uuid", ["33-44", "MIG-33-44"])
def test_a_mig_slice_is_named(uuid: str, cuda: FakeAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slice has its own UUID; the link is the physical card's."""
    with nvidia(monkeypatch, FakeNvml({"MIG-33-44": "slice"}), uuid):
        identity = FakeAcceleratorDevice(cuda).identity
    assert identity.mig_slice == "NVIDIA H200 MIG 1g.18gb"
    assert identity.link_generation == 5


@pytest.mark.parametrize("refused", ["nvmlInit", "nvmlSystemGetDriverVersion", "nvmlDeviceGetHandleByUUID"])
def test_an_nvml_that_fails_leaves_none(
    refused: str, cuda: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that does not match its library is no reason to stop; torch's own facts stay."""
    with nvidia(monkeypatch, FakeNvml({"GPU-11-22": "card"}, frozenset({refused}))):
        identity = FakeAcceleratorDevice(cuda).identity
    assert (identity.driver, identity.link_generation, identity.mig_slice) == (None, None, None)
    assert identity.capability == "9.0"


@pytest.mark.parametrize(
    ("refused", "generation", "width"),
    [
        ("nvmlDeviceGetMaxPcieLinkGeneration", None, 8),
        ("nvmlDeviceGetCurrPcieLinkWidth", 5, None),
        ("nvmlShutdown", 5, 8),
    ],
)
def test_one_query_that_is_refused_costs_one_field(
    refused: str,
    generation: int | None,
    width: int | None,
    cuda: FakeAccelerator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was read is kept."""
    with nvidia(monkeypatch, FakeNvml({"GPU-11-22": "card"}, frozenset({refused}))):
        identity = FakeAcceleratorDevice(cuda).identity
    assert (identity.link_generation, identity.link_width) == (generation, width)
    assert identity.driver == "570.1"


# -- host allocations -----------------------------------------------------------------------------


def test_untouched_memory_has_no_page_yet(cuda: FakeAccelerator) -> None:
    """Every page of cold memory faults at its first write, each time anew; touched memory does not."""
    device = FakeAcceleratorDevice(cuda)
    pages = 2048

    def faults(tensor: Tensor) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensor.fill_(1)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    size = pages * resource.getpagesize()
    for _ in range(3):
        assert faults(device.host_empty(size, torch.uint8, touched=False)) >= pages * 0.9
    assert faults(device.host_empty(size, torch.uint8)) < pages * 0.1


@pytest.mark.parametrize("touched", [True, False])
@pytest.mark.parametrize("elements", [0, 1, 1000])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_host_memory_has_the_shape_asked_for(
    elements: int, dtype: torch.dtype, touched: bool, cuda: FakeAccelerator
) -> None:
    """Any number of elements, none included, writable."""
    tensor = FakeAcceleratorDevice(cuda).host_empty(elements, dtype, touched=touched)
    tensor.fill_(1)
    assert tensor.shape == (elements,) and tensor.dtype == dtype and tensor.device.type == "cpu"


PLAN = Plan(
    name="tiny",
    budget_seconds=0.2,
    measure_share=0.5,
    smallest_bytes=4096,
    largest_bytes=65536,
    growth=4,
    warmup_seconds=0.0,
    min_samples=2,
    max_samples=4,
    target_spread=0.5,
    pin_cap_bytes=1 << 20,
    trial_bytes=1 << 16,
    finalists=1,
)


@contextmanager
def foreign_defaults() -> Iterator[None]:
    """A user's own default device and dtype, as zero.Init and large-model loaders set them."""
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def test_a_users_default_device_and_dtype_change_nothing(cuda: FakeAccelerator) -> None:
    """Allocating, pinning, measuring and trying paths name their place and dtype themselves."""
    from autotune_offload.measure.bench import Bench
    from autotune_offload.paths.build import build
    from autotune_offload.paths.stock import stock_path
    from autotune_offload.records import Candidate, Workload
    from autotune_offload.upstream import STOCK_SEQUENCES

    workload = Workload(
        partitions=((3000, 2), (7, 3)),
        parameters=((3000, 2),),
        dtype="bfloat16",
        world_size=1,
        accumulation_steps=1,
        source="test",
    )
    device = FakeAcceleratorDevice(cuda)
    cuda_kind = FakeAcceleratorDevice(FakeAccelerator("cpu"))
    with foreign_defaults():
        for tensor in (
            device.host_empty(10, torch.float32),
            device.host_empty(10, torch.float32, touched=False),
            device.pinned_empty(10, torch.float32),
        ):
            assert (tensor.device.type, tensor.dtype) == ("cpu", torch.float32)
        measure(
            cuda_kind,
            PLAN,
            dtype=torch.bfloat16,
            cache_bytes=1 << 16,
            memory_bytes=1 << 26,
            pinnable_bytes=1 << 20,
        )
        bench = Bench(device, workload, 10_000)
        for path in ("direct", "pinned", "staged"):
            for cast in ("device", "host"):
                candidate = Candidate(path=path, cast=cast, buffer_bytes=4096, buffer_count=2, host_threads=1)
                offload = build(device, candidate, torch.bfloat16)
                bench.check(offload, "pinned" if path == "pinned" else "pageable")
                offload.close()
        for sequence in STOCK_SEQUENCES:
            bench.check(stock_path(sequence, device, torch.bfloat16, bench.largest_elements), "pageable")
        bench.close()
