"""Part: what is page-locked by our count and by the driver's or the kernel's, and whether all of it comes back.

Engines are made and destroyed one after another. Between them torch's cache of page-locked blocks is emptied, which is
torch's and no leak of anybody's; then everything must be as it was after the first one. On the device, the peak of a
training step with each path is held against DeepSpeed's own and the scratch that docs/paths.md states.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import torch

from autotune_offload.machine.procfs import ROOT, kilobytes
from benchmarks.device.scene import Scene, real_kind
from benchmarks.device.training import choice_of, release, shape_of, trainable
from benchmarks.gradient_path import Placed, Shape, mlp

_ROWS = 64


def run(scene: Scene) -> None:
    """Each way twice over, the first time for what is made once."""
    locks = scene.told("here").get("why_not_pinned") is None
    runs: list[dict[str, Any]] = []
    failed: list[dict[str, str]] = []
    scene.keep(counted_by=host_counter()[0] if real_kind() != "cpu" else None)
    with trainable():
        ways = _ways(scene, locks)
        for name in scene.in_time(ways):
            spec, pinned = ways[name]
            try:
                _life(scene, spec, pinned)
                before = _standing()
                runs.append(
                    {"name": name, "before": before, **_life(scene, spec, pinned), "after": _standing()}
                )
            except Exception as error:
                failed.append({"name": name, "why": f"{type(error).__name__}: {error}"[:300]})
            scene.keep(runs=runs, failed=failed)


def host_counter() -> tuple[str, Any]:
    """Who counts page-locked bytes here besides us, and how it is asked.

    torch's allocator where DeepSpeed page-locks through it: the driver's blocks, rounded up. Else the kernel, whose
    counts hold what drivers lock through it (`VmPin`) and what the process locks itself (`VmLck`).
    """
    stats = getattr(torch.cuda, "host_memory_stats", None)
    native = os.environ.get("DS_PIN_MEMORY_BACKEND", "torch").strip().lower() == "native"
    if stats is not None and torch.cuda.is_available() and not native:
        return "torch.cuda.host_memory_stats", lambda: int(stats().get("allocated_bytes.current", 0))
    status = ROOT / "proc/self/status"
    return "VmLck and VmPin of /proc/self/status", lambda: _of_kernel(status)


def _of_kernel(status: Path) -> int:
    return sum(kilobytes(status, name) or 0 for name in ("VmLck", "VmPin"))


def _ways(scene: Scene, locks: bool) -> dict[str, tuple[Placed | None, bool]]:
    """Each with whether DeepSpeed page-locks its buffers."""
    piece, count = 1 << 20, 3
    found: dict[str, tuple[Placed | None, bool]] = {"DeepSpeed's own": (None, locks)}
    for path in ("pinned", "staged", "direct") if locks else ("direct",):
        spec = Placed(path=path, cast="device", buffer_bytes=piece, buffer_count=count)
        found[path] = (spec, path == "pinned" or (path == "direct" and locks))
    if (chosen := choice_of(scene)) is not None:
        found["the choice"] = (chosen, chosen.path == "pinned")
    return found


def _life(scene: Scene, spec: Placed | None, pinned: bool) -> dict[str, Any]:
    """One engine that trains three steps: what is page-locked while it lives, and the device's peak."""
    import deepspeed

    from autotune_offload.api.page_locked import page_locked
    from autotune_offload.engine.attach import attach
    from autotune_offload.engine.step_attach import attach_step
    from autotune_offload.machine.accelerator import deepspeed_accelerator

    accelerator, shape = deepspeed_accelerator(), shape_of(scene, _ROWS)
    start = _standing()
    engine, *_ = deepspeed.initialize(
        model=mlp(shape), config=_config(pinned, cpu_adam=scene.why_no_cpu_adam() is None)
    )
    try:
        if spec is not None:
            device = scene.attached_device()
            if (why_not := attach(engine, spec, device, check=False).why_not) is not None:
                raise RuntimeError(f"the path was not attached: {why_not}")
            attach_step(engine, None, device)
        peak = 0
        for number in range(3):
            if number == 2:
                accelerator.reset_peak_memory_stats()
            engine.backward(
                engine(torch.randn(_ROWS, shape.width).bfloat16().to(engine.device)).float().mean()
            )
            peak = int(accelerator.max_memory_allocated() or 0) if number == 2 else peak
            engine.step()
        accelerator.synchronize()
        ours = page_locked(engine)
        alive = _standing()
    finally:
        engine.destroy()
        del engine
    return {
        "our_bytes": sum(ours.values()),
        "ours": ours,
        "counted_bytes": alive["host_bytes"] - start["host_bytes"],
        "backward_peak_bytes": peak - start["device_bytes"],
        "scratch_bytes": 0 if spec is None else _scratch(spec, shape),
    }


def _scratch(spec: Placed, shape: Shape) -> int:
    """What docs/paths.md says that the path keeps on the device, with a norm for each partition."""
    from autotune_offload.paths.device_memory import device_memory
    from autotune_offload.workload import from_module

    workload = from_module(mlp(shape), dtype="bfloat16")
    on_cpu = real_kind() == "cpu"
    return device_memory(spec, workload, shares_host_memory=on_cpu).bytes + 8 * shape.layers


def _standing() -> dict[str, int]:
    """What is held now, with all caches emptied."""
    from autotune_offload.machine.accelerator import deepspeed_accelerator, empty_host_cache

    gc.collect()
    release()
    empty_host_cache()
    return {
        "host_bytes": host_counter()[1](),
        "device_bytes": int(deepspeed_accelerator().memory_allocated() or 0),
    }


def _config(pinned: bool, *, cpu_adam: bool) -> dict[str, Any]:
    """Both offloads, so that every kind of buffer is there."""
    section = {"device": "cpu", "pin_memory": pinned}
    parameters = {"lr": 1e-5} | ({} if cpu_adam else {"torch_adam": True})
    return {
        "train_micro_batch_size_per_gpu": _ROWS,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": parameters},
        "zero_optimization": {"stage": 3, "offload_optimizer": section, "offload_param": section},
    }
