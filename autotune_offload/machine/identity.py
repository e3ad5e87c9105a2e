"""What the accelerator says of itself: name, memory, driver, link."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
from typing import Any

import torch

from autotune_offload.machine import allocator
from autotune_offload.records import DeviceIdentity


def identify(accelerator: Any, kind: str, index: int) -> DeviceIdentity:
    """What the accelerator and the vendor's library report; what they do not is None."""
    facts: dict[str, Any] = {
        "kind": kind,
        "name": kind,
        "count": _device_count(accelerator, kind),
        "index": index,
        "memory_bytes": _total_memory(accelerator, kind, index),
        "pin_backend": _pin_backend(accelerator, kind),
        "settings": "" if kind == "cpu" else allocator.settings(),
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
    facts: dict[str, Any] = {"driver": text_of(nvml.nvmlSystemGetDriverVersion()), "mig_slice": mig_slice}
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
        return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle), text_of(
            nvml.nvmlDeviceGetName(handle)
        )
    raise LookupError(uuid)


def text_of(value: Any) -> str:
    """NVML gives bytes or text by version."""
    return value.decode() if isinstance(value, bytes) else str(value)
