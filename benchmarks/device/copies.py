"""Part: copies between device and host, by a plain loop and by our own measurement, in turn in one process.

The plain loop uses torch and nothing of ours: a copy, timed by the host's clock from the call to the end of a device
synchronize, and by two events of the device around it, where it has such. The time of the call alone is kept as well:
it tells whether the host was blocked. Ours is the very code of a probe, which waits for an event and may send several
copies before it does; so the best of each is compared, at the largest size, where waiting counts least.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autotune_offload.machine.device import Device
from autotune_offload.measure.compute import SQUARE
from autotune_offload.records import Kind, Memory, Plan
from benchmarks.device.scene import Scene

REPEATS = 12
_PRODUCTS = 20
_KINDS: tuple[Kind, ...] = ("d2h", "h2d")
_MEMORIES: tuple[Memory, ...] = ("pinned", "pageable")


def run(scene: Scene) -> None:
    """The largest size first, since it tells the most."""
    device = scene.device()
    with device.selected():
        kept: list[dict[str, Any]] = []
        left_out = device.why_not_pinned()
        scene.keep(pinned_left_out=left_out, tflops=tflops(device) if device.computes() else None)
        cases = [
            (size, kind, memory)
            for size in sorted(scene.sizes.copies, reverse=True)
            for kind in _KINDS
            for memory in _MEMORIES
            if memory == "pageable" or left_out is None
        ]
        for size, kind, memory in scene.in_time(cases):
            kept.append(compared(device, size, kind, memory))
            scene.keep(copies=kept)


def compared(device: Device, size: int, kind: Kind, memory: Memory) -> dict[str, Any]:
    """One size, direction and kind of memory."""
    plain = list(plain_loop(device, size, kind, memory))
    ours = _ours(device, size, kind, memory)
    host = [each["host_seconds"] for each in plain]
    by_device = [each["device_seconds"] for each in plain if each["device_seconds"]]
    return {
        "bytes": size,
        "kind": kind,
        "memory": memory,
        "plain_gbps": size / statistics.median(host) / 1e9,
        "plain_best_gbps": size / min(host) / 1e9,
        "plain_device_gbps": size / statistics.median(by_device) / 1e9 if by_device else None,
        "call_share": statistics.median(each["call_seconds"] / each["host_seconds"] for each in plain),
        "our_gbps": size / statistics.median(ours) / 1e9,
        "our_best_gbps": size / min(ours) / 1e9,
        "ratio": min(host) / min(ours),
        "plain": plain,
        "raw_our_seconds": ours,
    }


def plain_loop(device: Device, size: int, kind: Kind, memory: Memory) -> Iterator[dict[str, Any]]:
    """`REPEATS` copies, after two that do not count; seconds by both clocks, and of the call."""
    on_device = device.empty(size, torch.uint8)
    in_host = torch.zeros(size, dtype=torch.uint8)
    pinned = device.pinned_empty(size, torch.uint8) if memory == "pinned" else None
    on_host = in_host if pinned is None else pinned
    on_device.copy_(in_host)
    target, source = (on_host, on_device) if kind == "d2h" else (on_device, on_host)
    try:
        for number in range(-2, REPEATS):
            found = _one(device, target, source)
            if number >= 0:
                yield found
    finally:
        if pinned is not None:
            device.release_pinned(pinned)


def _one(device: Device, target: Tensor, source: Tensor) -> dict[str, Any]:
    events = _events(device)
    device.synchronize()
    began = time.perf_counter()
    if events is not None:
        events[0].record()
    target.copy_(source, non_blocking=True)
    called = time.perf_counter()
    if events is not None:
        events[1].record()
    device.synchronize()
    ended = time.perf_counter()
    return {
        "host_seconds": ended - began,
        "call_seconds": called - began,
        "device_seconds": None if events is None else events[0].elapsed_time(events[1]) / 1e3,
    }


def _events(device: Device) -> tuple[Any, Any] | None:
    """Two that keep the device's time; None where it has none."""
    if device.identity.kind not in {"cuda", "xpu"} or not hasattr(torch, device.identity.kind):
        return None
    make = getattr(torch, device.identity.kind).Event
    try:
        return make(enable_timing=True), make(enable_timing=True)
    except (RuntimeError, AssertionError, NotImplementedError):  # a torch that was built without the device
        return None


def tflops(device: Device) -> float:
    """1e12 operations a second of the matrix products that stand for compute in a probe's trials."""
    square, out = (device.empty(SQUARE**2, torch.bfloat16).zero_().view(SQUARE, SQUARE) for _ in range(2))
    seconds = []
    for _ in range(REPEATS):
        device.synchronize()
        began = time.perf_counter()
        for _ in range(_PRODUCTS):
            device.matmul(out, square, square)
        device.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * SQUARE**3 * _PRODUCTS / statistics.median(seconds) / 1e12


def _ours(device: Device, size: int, kind: Kind, memory: Memory) -> list[float]:
    from autotune_offload.measure.measure import curve

    plan = Plan(
        name="copies",
        budget_seconds=10.0,
        measure_share=1.0,
        smallest_bytes=size,
        largest_bytes=size,
        growth=2,
        warmup_seconds=0.0,
        min_samples=REPEATS,
        max_samples=REPEATS,
        target_spread=0.0,
        pin_cap_bytes=size,
        trial_bytes=0,
        finalists=0,
    )
    points = curve(device, plan, kind=kind, memory=memory, cache_bytes=size, memory_bytes=8 * size)
    return list(points[0].raw_seconds)
