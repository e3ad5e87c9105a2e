"""Part: `benchmarks.gradient_path` and `benchmarks.step` on the accelerator: DeepSpeed's own, each path, the choice.

DeepSpeed's own code runs in turn with each path in the same engine, page-locked where the path page-locks. On an
accelerator twice: with batches whose compute copies can hide behind, and with a few rows, behind which nothing hides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from benchmarks import gradient_path, step
from benchmarks.device.probes import PROFILE
from benchmarks.device.scene import Job, Scene, real_kind
from benchmarks.gradient_path import Placed, Shape

_FEW_ROWS = 4
_PIECE_BYTES, _BUFFERS = 1 << 22, 3
_WAYS = (
    ("direct", "host"),
    ("pinned", "device"),
    ("staged", "host"),
    ("pinned", "host"),
    ("staged", "device"),
    ("direct", "device"),
)
_STEP = "step, "
_STEP_CASES = ("optimizer only", "both offloads")


def run(scene: Scene) -> None:
    """What tells the most comes first; a comparison that fails is told, and the next one goes on."""
    found: dict[str, list[dict[str, Any]]] = {"gradients": [], "steps": [], "failed": []}
    with trainable():
        for job in scene.in_time(list(jobs(scene))):
            kind = "steps" if job.name.startswith(_STEP) else "gradients"
            try:
                found[kind].append({"name": job.name, **job.work()})
            except (Exception, SystemExit) as error:  # the benchmarks exit where nothing could be attached
                found["failed"].append({"name": job.name, "why": f"{type(error).__name__}: {error}"[:300]})
            scene.keep(**found)
            release()


def jobs(scene: Scene) -> Iterator[Job]:
    """Everything that is compared: the choice, a step, then what tells less and less."""
    many = scene.sizes.rows if real_kind() != "cpu" else None
    first = many or _FEW_ROWS
    gradients = [_gradients(scene, name, spec, first) for name, spec in ways(scene).items()]
    steps = [_step(scene, case) for case in _STEP_CASES]
    yield from (*gradients[:1], *steps[:1], *gradients[1:3], *steps[1:], *gradients[3:])
    for name, spec in ways(scene).items() if many else ():
        yield _gradients(scene, name, spec, _FEW_ROWS)


def ways(scene: Scene) -> dict[str, Placed]:
    """The choice of the first probe, then each path with either cast; page-locking ones where that is on offer."""
    found = {} if (chosen := choice_of(scene)) is None else {"the choice": chosen}
    locks = scene.told("here").get("why_not_pinned") is None
    for path, cast in _WAYS:
        if path == "direct" or locks:
            found[f"{path}, cast on the {cast}"] = Placed(
                path=path,
                cast=cast,  # type: ignore[arg-type]  # the same
                buffer_bytes=_PIECE_BYTES,
                buffer_count=_BUFFERS,
            )
    return found


def choice_of(scene: Scene) -> Placed | None:
    """What the first probe chose; None where there was none."""
    from autotune_offload.errors import ProfileError
    from autotune_offload.profiles.store import Store

    try:
        choice = Store().load(scene.folder / PROFILE).choice
    except ProfileError:
        return None
    return Placed(
        path=choice.path,
        cast=choice.cast,
        buffer_bytes=choice.buffer_bytes,
        buffer_count=choice.buffer_count,
        host_threads=choice.host_threads,
        accumulate=choice.accumulate,
    )


def shape_of(scene: Scene, rows: int) -> Shape:
    """Of the model, with so many rows a batch."""
    return Shape(layers=scene.sizes.layers, width=scene.sizes.width, rows=rows)


def _gradients(scene: Scene, name: str, spec: Placed, rows: int) -> Job:
    def work() -> dict[str, Any]:
        found = gradient_path.run_case(
            1, spec, scene.sizes.pairs, 2, shape=shape_of(scene, rows), device=scene.attached_device()
        )
        return {"rows": rows, "stock_memory": "pinned" if spec.path == "pinned" else "pageable", **found}

    return Job(name=name, work=work)


def _step(scene: Scene, case: str) -> Job:
    def work() -> dict[str, Any]:
        if (why_not := scene.why_no_cpu_adam()) is not None:
            raise RuntimeError(f"DeepSpeed's CPU Adam cannot be built here: {why_not}")
        rows = scene.sizes.rows if real_kind() != "cpu" else _FEW_ROWS
        device = scene.attached_device()
        threads = scene.device().most_threads()
        return step.run_case(case, threads, scene.sizes.pairs, 2, shape=shape_of(scene, rows), device=device)

    return Job(name=f"{_STEP}{case}", work=work)


@contextlib.contextmanager
def trainable() -> Iterator[None]:
    """DeepSpeed ready in this process, one rank; nothing is compiled for its messages."""
    from autotune_offload.engine.trainee import single_process_environment
    from tests.matrix.driver import started

    with single_process_environment(), started():
        yield


def release() -> None:
    """What engines that are gone still hold in caches."""
    from autotune_offload.engine.trainee import release_memory

    release_memory()
