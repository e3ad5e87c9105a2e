"""Part: one backward pass and one step of each way under the device's own profiler, as a trace file, and read.

The optimizer alone is offloaded, so that what goes to the host in a backward pass are gradients and norms, and what
comes to the device in a step are weights. Hidden is the part of the copies' time in which, in a backward pass, a
kernel was running, and in a step the host was computing the optimizer's update.
"""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.device.scene import Scene, real_kind
from benchmarks.device.traces import Trace, over_link
from benchmarks.device.training import release, shape_of, trainable, ways
from benchmarks.gradient_path import Placed, mlp

BACKWARD, STEP, UPDATE = "benchmark: backward", "benchmark: step", "benchmark: update"
_FEW_ROWS = 4
_WARM_UP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What moves the gradients: DeepSpeed's own code where there is no path."""

    name: str
    pinned: bool
    spec: Placed | None = None

    def __str__(self) -> str:
        """Its name."""
        return self.name


def run(scene: Scene) -> None:
    """A way that fails is told, and the next one goes on."""
    found: list[dict[str, Any]] = []
    failed: list[dict[str, str]] = []
    with trainable():
        for way in scene.in_time(list(_ways(scene))):
            try:
                found.append(profiled(scene, way))
            except Exception as error:
                failed.append({"name": way.name, "why": f"{type(error).__name__}: {error}"[:300]})
            scene.keep(ways=found, failed=failed)
            release()


def _ways(scene: Scene) -> list[Way]:
    specs = ways(scene)
    stock = [Way(name="DeepSpeed's own, unpinned", pinned=False)]
    if scene.told("here").get("why_not_pinned") is None:
        stock.append(Way(name="DeepSpeed's own, pinned", pinned=True))
    ours = [Way(name=name, pinned=spec.path == "pinned", spec=spec) for name, spec in specs.items()]
    return [*stock, *ours]


def profiled(scene: Scene, way: Way) -> dict[str, Any]:
    """Trains some steps, the last one under the profiler."""
    import deepspeed

    from autotune_offload.engine.attach import attach, status
    from autotune_offload.engine.step_attach import StepSpec, attach_step

    rows = scene.sizes.rows if real_kind() != "cpu" else _FEW_ROWS
    shape = shape_of(scene, rows)
    builds = scene.why_no_cpu_adam() is None
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(model=mlp(shape), config=_config(rows, way.pinned, cpu_adam=builds))
    try:
        device, step_why_not = scene.attached_device(), "DeepSpeed's own"
        if way.spec is not None:
            if (why_not := attach(engine, way.spec, device, check=False).why_not) is not None:
                raise RuntimeError(f"the path was not attached: {why_not}")
            spec = StepSpec(step="fused", threads=scene.device().most_threads())
            step_why_not = attach_step(engine, spec, device, check=False).why_not or ""
        batch = torch.randn(rows, shape.width).bfloat16().to(engine.device)
        for _ in range(_WARM_UP):
            _train(engine, batch)
        before = status(engine)
        counted = (before.link_bytes, before.stock_link_bytes) if before is not None else (0, 0)
        file = scene.folder / f"trace-{_slug(way.name)}.json"
        _traced(engine, batch, file)
        after = status(engine)
        reported = None if after is None else after.link_bytes - counted[0]
        reported_stock = None if after is None else after.stock_link_bytes - counted[1]
        elements = sum(group.numel() for group in engine.optimizer.fp32_partitioned_groups_flat)
    finally:
        engine.destroy()
        del engine
        gc.collect()
    return {
        "name": way.name,
        "path": None if way.spec is None else way.spec.path,
        "cast": None if way.spec is None else way.spec.cast,
        "host_threads": 0 if way.spec is None else way.spec.host_threads,
        "elements": elements,
        "rows": rows,
        "reported_link_bytes": reported,
        "reported_stock_link_bytes": reported_stock,
        "step": "the pass" if way.spec is not None and not step_why_not else step_why_not,
        "file": file.name,
        **read(Trace.read(file)),
    }


def read(trace: Trace) -> dict[str, Any]:
    """What one trace tells of its backward pass and its step."""
    [backward], [step] = trace.ranges(BACKWARD), trace.ranges(STEP)
    gradients, weights = trace.copies(backward), trace.copies(step)
    kernels, updates = trace.kernels(backward), trace.ranges(UPDATE)
    return {
        "backward_seconds": backward[1] - backward[0],
        "step_seconds": step[1] - step[0],
        "kernels": len(kernels),
        "gradients_to_host": over_link(gradients, "d2h", kernels),
        "sums_to_device": over_link(gradients, "h2d", kernels),
        "weights_to_device": over_link(weights, "h2d", updates),
        "to_host_in_step": over_link(weights, "d2h", updates),
    }


def _train(engine: Any, batch: torch.Tensor) -> None:
    """The device is idle at the ends of backward pass and step, so that all they have queued is within them."""
    from autotune_offload.machine.accelerator import deepspeed_accelerator

    synchronize = deepspeed_accelerator().synchronize
    loss = engine(batch).float().pow(2).mean()
    synchronize()
    with torch.profiler.record_function(BACKWARD):
        engine.backward(loss)
        synchronize()
    with torch.profiler.record_function(STEP):
        engine.step()
        synchronize()


def _traced(engine: Any, batch: torch.Tensor, file: Path) -> None:
    update = engine.optimizer._optimizer_step

    def named(*given: Any) -> Any:
        with torch.profiler.record_function(UPDATE):
            return update(*given)

    engine.optimizer._optimizer_step = named
    activities = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]  # the same everywhere
    with torch.profiler.profile(activities=activities) as profiler:
        _train(engine, batch)
    profiler.export_chrome_trace(str(file))
    nameless(file)


def nameless(file: Path) -> None:
    """Take this host's name and the file's place out of a trace, so that it can be shown."""
    document = json.loads(file.read_text(encoding="utf-8"))
    document.update({key: "HOST" for key in ("host_name",) if key in document})
    document.update({key: file.name for key in ("traceName",) if key in document})
    file.write_text(json.dumps(document), encoding="utf-8")


def _config(rows: int, pinned: bool, *, cpu_adam: bool) -> dict[str, Any]:
    parameters = {"lr": 1e-5} | ({} if cpu_adam else {"torch_adam": True})
    return {
        "train_micro_batch_size_per_gpu": rows,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": parameters},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": pinned},
        },
    }


def _slug(name: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower().replace("'", "")).split())
