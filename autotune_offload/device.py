"""The device as the paths and the timing loops see it.

`Device` is the interface; `AcceleratorDevice` implements it on DeepSpeed's own accelerator, so that
memory is allocated, pinned and waited for exactly as DeepSpeed will do it. Importing this module touches
no device; creating an `AcceleratorDevice` asks the accelerator about itself, which starts its runtime.
Tensors are torch tensors of one dimension; counts are elements.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any, Protocol

import torch
from torch import Tensor

from autotune_offload import kernel
from autotune_offload.errors import DeviceError, PinError
from autotune_offload.records import DeviceIdentity, HostFacts, Limits

SYNCHRONOUS_KINDS = frozenset({"cpu"})
"""Kinds whose operations have finished when the call returns: there a no-op synchronize is right."""


_PIN_FAILURES = (RuntimeError, ValueError, OSError, AssertionError, MemoryError)
"""What a failed pin raises; AssertionError is a torch that was built without this device."""


class Event(Protocol):
    """A point in a stream's order that the host can wait for."""

    def record(self, stream: Any) -> None:
        """Put the event behind all that `stream` holds now."""

    def synchronize(self) -> None:
        """Block the host until everything before the event is done."""


class Stream(Protocol):
    """An order of device work; created by `Device.new_stream`."""

    def synchronize(self) -> None:
        """Block the host until everything in the stream is done."""

    def wait_event(self, event: Any) -> None:
        """Hold back later work of this stream until the event is reached."""


class _Completed:
    """The event of a synchronous device: everything before it is done already."""

    def record(self, stream: Any) -> None:
        del stream

    def synchronize(self) -> None:
        return None


class _KeptBlocks:
    """Page-locked blocks that were given back and are handed out again: locking is slow (`pin_cost`).

    What is free is unlocked before a larger block is locked, so that no more is held than was in use at once.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        """The front of the smallest free block that is large enough, or of a new one."""
        size = elements * dtype.itemsize
        self._free.sort(key=lambda block: block.nbytes)
        at = next((i for i, block in enumerate(self._free) if block.nbytes >= size), None)
        if at is None:
            self.unlock()
            block = self._device.lock_pages(size, torch.uint8)
        else:
            self._device.synchronize()  # whoever had it may have failed with a copy under way
            block = self._free.pop(at)
        self._lent[block.data_ptr()] = block
        return block[:size].view(dtype)

    def give_back(self, pinned: Tensor) -> bool:
        """Keep the block, if it is one of these."""
        block = self._lent.pop(pinned.data_ptr(), None)
        if block is not None:
            self._free.append(block)
        return block is not None

    def unlock(self) -> None:
        """What is free."""
        while self._free:
            self._device.unlock_pages(self._free.pop())


class Device(ABC):
    """What can be done with one accelerator and the host memory beside it.

    `synchronous` devices have finished every operation when the call returns. `shares_host_memory`
    says that device memory is host memory (the CPU), so that a copy and a cast can be one pass.
    """

    identity: DeviceIdentity
    synchronous: bool
    shares_host_memory: bool
    checked_elements: int = sys.maxsize
    """Values after which a check of bytes may stop, on a device that is slow at moving them."""

    @abstractmethod
    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised device memory, shape (elements,)."""

    _kept: _KeptBlocks | None = None

    def pinned_empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Page-locked host memory, shape (elements,). Raises PinError when it cannot be had."""
        return self.lock_pages(elements, dtype) if self._kept is None else self._kept.take(elements, dtype)

    def release_pinned(self, pinned: Tensor) -> None:
        """Give back what `pinned_empty` returned; neither it nor a view of it may be used afterwards."""
        if self._kept is None or not self._kept.give_back(pinned):
            self.unlock_pages(pinned)

    @contextlib.contextmanager
    def keeping_pinned(self) -> Iterator[None]:
        """Inside, page-locked memory that is given back is kept and handed out again; all is given back by then."""
        before, kept = self._kept, _KeptBlocks(self)
        self._kept = kept
        try:
            yield
        finally:
            self._kept = before
            kept.unlock()

    def lock_pages(self, elements: int, dtype: torch.dtype) -> Tensor:
        """`pinned_empty` anew, whatever is kept."""
        raise PinError(
            f"page-locking {elements * dtype.itemsize:,} bytes failed: this device locks no memory"
        )

    def unlock_pages(self, pinned: Tensor) -> None:
        """`release_pinned`, for good."""
        del pinned

    @abstractmethod
    def why_not_pinned(self) -> str | None:
        """None where pinned memory is on offer, else the reason in words."""

    def host_empty(self, elements: int, dtype: torch.dtype, *, touched: bool = True) -> Tensor:
        """Pageable host memory, shape (elements,): touched pages, or ones that were never used.

        Untouched memory comes straight from the kernel, since an allocator may hand out pages that it
        kept. It is unmapped when the last tensor on it goes.
        """
        if touched:
            return torch.empty(elements, dtype=dtype, device="cpu").zero_()
        size = max(elements, 1) * dtype.itemsize
        # private, as an allocator's memory is: shared pages belong to a file system with its own costs
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=dtype)[:elements]

    @abstractmethod
    def d2h(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """Copy device to host on the current stream. Dtypes may differ only where torch casts."""

    @abstractmethod
    def h2d(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """Copy host to device on the current stream."""

    @abstractmethod
    def h2h(self, destination: Tensor, source: Tensor) -> None:
        """Copy host to host in the calling thread, casting where the dtypes differ."""

    @abstractmethod
    def cast(self, destination: Tensor, source: Tensor) -> None:
        """Copy within device memory on the current stream, casting where the dtypes differ."""

    def add(self, total: Tensor, addend: Tensor) -> None:
        """Add within device memory on the current stream, in the dtype of `total`."""
        total.add_(addend)

    def host_add(self, total: Tensor, addend: Tensor) -> None:
        """Add within host memory in the calling thread, in the dtype of `total`."""
        total.add_(addend)

    def matmul(self, out: Tensor, left: Tensor, right: Tensor) -> None:
        """Product of two matrices in device memory on the current stream: the stand-in for compute."""
        torch.mm(left, right, out=out)

    @abstractmethod
    def new_stream(self) -> Stream | None:
        """A stream beside the default one; None where the device has none."""

    @abstractmethod
    def on(self, stream: Stream | None) -> contextlib.AbstractContextManager[Any]:
        """Work inside goes to `stream`; None is the current one."""

    @abstractmethod
    def record_event(self) -> Event:
        """An event behind all work that is queued on the current stream."""

    @abstractmethod
    def order_after(self, stream: Stream | None, event: Event) -> None:
        """Later work on `stream` waits for `event`, without blocking the host."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until the whole device is idle."""

    @abstractmethod
    def synchronize_stream(self) -> None:
        """Block the host until the current stream is done."""

    def enter_thread(self) -> None:
        """Make this the current device of the calling thread: which one is current, is per thread."""
        return None

    def widen(self, destination: Tensor, source: Tensor) -> float:
        """Copy host to host as fp32 in the calling thread; the sum of the squares (see `kernel.widen`)."""
        return kernel.widen(destination, source)

    def norm(self, source: Tensor) -> Tensor:
        """2-norm of device memory accumulated in fp64, shape (), on the device, in stream order."""
        norm: Tensor = torch.linalg.vector_norm(source, dtype=torch.float64)
        return norm

    def record_stream(self, tensor: Tensor) -> None:
        """Keep device memory from being used again before the current stream's work is done."""
        del tensor

    def now(self) -> float:
        """Seconds on the clock that this device's work is timed with."""
        return time.perf_counter()

    def intraop_threads(self) -> int:
        """Threads that a host operation in the calling thread may use."""
        return torch.get_num_threads()

    @contextlib.contextmanager
    def intraop(self, count: int) -> Iterator[None]:
        """Host operations inside use so many threads of torch's; 0 leaves them as they are."""
        before = torch.get_num_threads()
        if count:
            torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    # -- what a device that is not there does otherwise --

    @contextlib.contextmanager
    def selected(self) -> Iterator[Device]:
        """Make this the current device inside, and put the former one back."""
        yield self

    def own_threads(self, count: int) -> Executor | None:
        """Who stands for `count` host threads beside the calling one; None is threads of this process."""
        del count
        return None

    def twin(self) -> Device | None:
        """Another one like it, on which an operation that hangs does no harm; None where there is none."""
        return None

    def timed_only(self) -> contextlib.AbstractContextManager[Any]:
        """Only the clock is looked at inside, so that values need not arrive; a real device moves them still."""
        return contextlib.nullcontext()

    def computes(self) -> bool:
        """Whether compute of the device's can run beside its copies."""
        return not self.synchronous

    def host_facts(self) -> HostFacts | None:
        """The host beside it, where that is not the one of this process."""
        return None

    def host_limits(self, max_pinned_bytes: int | None) -> Limits | None:
        """The limits of that host, where it is not the one of this process."""
        del max_pinned_bytes
        return None


class AcceleratorDevice(Device):
    """The accelerator that DeepSpeed chose, through `deepspeed.accelerator.get_accelerator()`.

    Args:
        accelerator: a `DeepSpeedAccelerator`; None asks DeepSpeed, which honours DS_ACCELERATOR.
        index: device index; None takes LOCAL_RANK where a launcher set it, else the current device.
    """

    def __init__(self, accelerator: Any = None, index: int | None = None) -> None:
        """Raises DeviceError where DeepSpeed's choice of accelerator cannot be loaded."""
        self.deepspeeds_own = accelerator is None
        self._accelerator = accelerator if accelerator is not None else _deepspeed_accelerator()
        kind = str(self._accelerator.device_name()).partition(":")[0]
        self.shares_host_memory = kind == "cpu"
        self.synchronous = kind in SYNCHRONOUS_KINDS
        self._mark_step = _mark_step() if kind == "hpu" else _nothing
        self._index = _local_index(self._accelerator, kind) if index is None else index
        self._place = str(self._accelerator.device_name(self._index))
        self.identity = identify(self._accelerator, kind, self._index)

    @contextlib.contextmanager
    def selected(self) -> Iterator[AcceleratorDevice]:
        """Make this the current device inside, and put the former one back."""
        if self.shares_host_memory:
            yield self
            return
        before = self._accelerator.current_device()
        self._accelerator.set_device(self._index)
        try:
            yield self
        finally:
            self._accelerator.set_device(before)

    def enter_thread(self) -> None:
        """Without it a thread's first call would set up a context on device 0, whatever the rank's own is."""
        if not self.shares_host_memory:
            self._accelerator.set_device(self._index)

    # -- memory --

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised device memory, shape (elements,)."""
        return torch.empty(elements, dtype=dtype, device=self._place)

    def lock_pages(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Page-locked host memory through the accelerator's own `pin_memory`, as DeepSpeed does it."""
        try:
            pageable = torch.empty(elements, dtype=dtype, device="cpu")
            pinned: Tensor = self._accelerator.pin_memory(pageable)
        except _PIN_FAILURES as error:
            raise PinError(f"page-locking {elements * dtype.itemsize:,} bytes failed: {error}") from error
        if pinned is pageable or not self.is_pinned(pinned):
            raise PinError(f"the {self.identity.kind} accelerator's pin_memory returned pageable memory")
        return pinned

    def is_pinned(self, tensor: Tensor) -> bool:
        """DeepSpeed's own answer: it knows its native backend too; older ones only have torch's."""
        ask = getattr(self._accelerator, "is_pinned", None)
        try:
            return bool(ask(tensor) if ask is not None else tensor.is_pinned())
        except RuntimeError:
            return False

    def why_not_pinned(self) -> str | None:
        """Tries one page, so that the answer is about this process and not about a name."""
        try:
            self.release_pinned(self.pinned_empty(mmap.PAGESIZE, torch.uint8))
        except PinError as error:
            return str(error)
        return None

    def unlock_pages(self, pinned: Tensor) -> None:
        """Unpin through the accelerator where it has a way to, and empty the cache of torch's allocator.

        The cache would keep the block page-locked, and hand it out again in no time while pinning is timed.
        """
        unpin = getattr(self._accelerator, "unpin_memory", None)
        if unpin is not None:
            unpin(pinned)
        pinned.set_()  # type: ignore[call-overload]  # the caller's reference, too, lets go of the block
        if not self.shares_host_memory:
            _empty_host_cache()

    # -- work --

    def d2h(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """Copy device to host on the current stream."""
        destination.copy_(source, non_blocking=non_blocking)

    def h2d(self, destination: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
        """Copy host to device on the current stream."""
        destination.copy_(source, non_blocking=non_blocking)

    def h2h(self, destination: Tensor, source: Tensor) -> None:
        """Copy host to host in the calling thread, casting where the dtypes differ."""
        destination.copy_(source)

    def cast(self, destination: Tensor, source: Tensor) -> None:
        """Copy within device memory on the current stream, casting where the dtypes differ."""
        destination.copy_(source)

    # -- order --

    def record_stream(self, tensor: Tensor) -> None:
        """Keep device memory from being used again before the current stream's work is done."""
        if not self.synchronous:
            tensor.record_stream(self._accelerator.current_stream())

    def new_stream(self) -> Stream | None:
        """A new stream of the accelerator's; None on the CPU."""
        make = self._accelerator.Stream
        return None if make is None else make()

    def on(self, stream: Stream | None) -> contextlib.AbstractContextManager[Any]:
        """Work inside goes to `stream`; None is the current one."""
        return contextlib.nullcontext() if stream is None else self._on(stream)

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        self._mark_step()  # what was kept back so far belongs to the stream before
        with self._accelerator.stream(stream):
            yield
            self._mark_step()

    def record_event(self) -> Event:
        """An event behind all work that is queued on the current stream."""
        if self.synchronous:
            return _Completed()
        make = self._accelerator.Event
        if make is None:
            raise DeviceError(f"the {self.identity.kind} accelerator offers no events; use path direct")
        self._mark_step()
        event: Event = make()
        event.record(self._accelerator.current_stream())
        return event

    def order_after(self, stream: Stream | None, event: Event) -> None:
        """Later work on `stream` waits for `event`, without blocking the host."""
        target = stream if stream is not None else self._accelerator.current_stream()
        if not self.synchronous and target is not None:
            target.wait_event(event)

    def synchronize(self) -> None:
        """Block the host until the whole device is idle."""
        self._mark_step()
        self._accelerator.synchronize()

    def synchronize_stream(self) -> None:
        """Block the host until the current stream is done."""
        self._mark_step()
        stream = self._accelerator.current_stream()
        if stream is not None:
            stream.synchronize()
        elif not self.synchronous:
            raise DeviceError(f"the {self.identity.kind} accelerator has no current stream to wait for")


def _deepspeed_accelerator() -> Any:
    try:
        from deepspeed.accelerator import get_accelerator

        return get_accelerator()
    except (ImportError, ValueError, RuntimeError) as error:
        raise DeviceError(f"DeepSpeed cannot load its accelerator: {error}") from error


def _nothing() -> None:
    return None


def _empty_host_cache() -> None:
    newer = getattr(getattr(torch, "accelerator", None), "empty_host_cache", None)
    empty = newer or getattr(torch._C, "_host_emptyCache", None)  # torch 2.5 to 2.8 on CUDA
    if empty is not None:
        with contextlib.suppress(RuntimeError):  # no accelerator of torch's own
            empty()


def _mark_step() -> Any:
    """Gaudi's lazy mode keeps operations back until mark_step; in eager mode it does nothing.

    Source: docs.habana.ai, PyTorch/Reference/mark_step.
    """
    try:
        return importlib.import_module("habana_frameworks.torch.core").mark_step
    except ImportError as error:
        raise DeviceError(f"an HPU needs habana_frameworks, which cannot be imported: {error}") from error


def _local_index(accelerator: Any, kind: str) -> int:
    local_rank = _local_rank()
    if kind == "cpu":
        return local_rank or 0
    # One visible device a process is how several launchers isolate ranks.
    if local_rank is None or local_rank >= int(accelerator.device_count()):
        return int(accelerator.current_device())
    return local_rank


def _local_rank() -> int | None:
    text = os.environ.get("LOCAL_RANK", "").strip()
    try:
        return int(text) if text and int(text) >= 0 else None
    except ValueError as error:
        raise DeviceError(
            f'LOCAL_RANK is "{text}"; expected the index of this process on its host, or no such variable'
        ) from error


def identify(accelerator: Any, kind: str, index: int) -> DeviceIdentity:
    """What the accelerator and the vendor's library report; what they do not is None."""
    facts: dict[str, Any] = {
        "kind": kind,
        "name": kind,
        "count": _device_count(accelerator, kind),
        "index": index,
        "memory_bytes": _total_memory(accelerator, kind, index),
        "pin_backend": _pin_backend(accelerator, kind),
    }
    module = getattr(torch, kind, None)
    if kind == "cuda" or hasattr(module, "get_device_properties"):
        facts.update(_torch_properties(module, index))
    elif kind == "hpu":
        facts.update(_hpu_properties(accelerator, index))
    if kind == "cuda" and torch.version.hip is None:
        facts.update(_nvml_facts(module, index))
    return DeviceIdentity(**facts)


def _device_count(accelerator: Any, kind: str) -> int:
    try:
        return int(accelerator.device_count())
    except (OSError, RuntimeError, subprocess.SubprocessError):
        # 0.14.5 to 0.15.4 ask numactl on the CPU, which need not be installed or allowed.
        return 1 if kind == "cpu" else 0


def _total_memory(accelerator: Any, kind: str, index: int) -> int | None:
    if kind == "cpu":
        return None  # the host's, which `host` reads
    try:
        return int(accelerator.total_memory(index))
    except (RuntimeError, AttributeError, KeyError, TypeError, AssertionError):
        return None


def _pin_backend(accelerator: Any, kind: str) -> str:
    """What DS_PIN_MEMORY_BACKEND chooses: "native" from 0.19.6 on, which brought unpin_memory, else torch's."""
    backend = os.environ.get("DS_PIN_MEMORY_BACKEND", "torch").strip().lower()
    if backend != "native" or not hasattr(accelerator, "unpin_memory"):
        return "none" if kind == "cpu" else "torch"
    registered = os.environ.get("DS_PIN_MEMORY_REGISTER_DEVICE", "1").strip().lower()
    if kind != "cpu" and registered in {"0", "false", "no", "off"}:
        return "native, not registered with the device"
    return "native"


def _torch_properties(module: Any, index: int) -> dict[str, Any]:
    try:
        properties = module.get_device_properties(index)
    except (RuntimeError, AssertionError, AttributeError):
        return {}
    facts: dict[str, Any] = {"name": str(properties.name)}
    if hasattr(properties, "major"):
        facts["capability"] = f"{properties.major}.{properties.minor}"
    driver = getattr(properties, "driver_version", None)
    if driver is not None:
        facts["driver"] = str(driver)
    return facts


def _hpu_properties(accelerator: Any, index: int) -> dict[str, Any]:
    with contextlib.suppress(RuntimeError, AttributeError):
        return {"name": str(accelerator.hpu.get_device_name(index))}
    return {}


def _nvml_facts(module: Any, index: int) -> dict[str, Any]:
    """Driver, link and MIG slice from NVML, found by the device's UUID, never by its index.

    An idle card reports a lower link generation than it trains with; the maximum of generation is
    asked for, and the width as it is now, since a card in a half-width slot stays so.
    """
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # absent library, absent driver, or a driver that does not match
        return {}
    try:
        return _nvml_device_facts(nvml, str(module.get_device_properties(index).uuid))
    except Exception:  # a card that NVML does not know, or a query that the driver refuses
        return {}
    finally:
        with contextlib.suppress(Exception):  # what was read stays true
            nvml.nvmlShutdown()


def _nvml_device_facts(nvml: Any, uuid: str) -> dict[str, Any]:
    handle, mig_slice = _nvml_handle(nvml, uuid)
    facts: dict[str, Any] = {"driver": _text(nvml.nvmlSystemGetDriverVersion()), "mig_slice": mig_slice}
    with contextlib.suppress(nvml.NVMLError):
        facts["link_generation"] = int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
    with contextlib.suppress(nvml.NVMLError):
        facts["link_width"] = int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle))
    return facts


def nvml_link(index: int) -> dict[str, int] | None:
    """Width and generation of a CUDA device's link as it is, and the most that the device can do.

    The generation is the most that device and slot can do together, since an idle card lowers the present
    one. None where NVML cannot be asked; a number that it does not have is left out.
    """
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # as in `_nvml_facts`
        return None
    try:
        handle, _ = _nvml_handle(nvml, str(torch.cuda.get_device_properties(index).uuid))
        return _nvml_numbers(nvml, handle)
    except Exception:
        return None
    finally:
        with contextlib.suppress(Exception):
            nvml.nvmlShutdown()


def _nvml_numbers(nvml: Any, handle: Any) -> dict[str, int]:
    found = {}
    for name, query in (
        ("width", "nvmlDeviceGetCurrPcieLinkWidth"),
        ("device_width", "nvmlDeviceGetMaxPcieLinkWidth"),
        ("generation", "nvmlDeviceGetMaxPcieLinkGeneration"),
        ("device_generation", "nvmlDeviceGetGpuMaxPcieLinkGeneration"),
    ):
        with contextlib.suppress(AttributeError, nvml.NVMLError):  # an older library, a card that refuses
            found[name] = int(getattr(nvml, query)(handle))
    return found


def _nvml_handle(nvml: Any, uuid: str) -> tuple[Any, str | None]:
    """The physical card's handle for a torch UUID, with the slice's name where it is a MIG slice."""
    for prefix in ("GPU-", "MIG-"):
        name = uuid if uuid.startswith(prefix) else prefix + uuid
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(name.encode())
        except nvml.NVMLError:
            continue
        if prefix == "GPU-":
            return handle, None
        return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle), _text(
            nvml.nvmlDeviceGetName(handle)
        )
    raise LookupError(uuid)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
