"""Part: the cases of `tests.matrix` on the installed DeepSpeed, with overlap on and streams held up where they can be.

Every case trains twice, by DeepSpeed's own code and by ours, and after each step all that can be seen is compared to
the bit. Sleeps of drawn lengths stand before our copies, casts, sums and events, and in the compute stream, so that a
wait that is missing somewhere lets somebody read memory before its values are there. A case's number is its seed. As a
control DeepSpeed's own code trains twice: where that differs, the device computes otherwise from run to run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.device.scene import Job, Scene, real_kind
from benchmarks.device.sleeps import SleepyDevice, hold_up_backward, sleeper
from benchmarks.device.training import trainable
from tests.matrix import driver
from tests.matrix import step as with_adam
from tests.matrix.driver import LARGE, SMALL_BUCKET, SMALL_SUB_GROUP, Case, Spec

_CONTROL_STEPS = 50
_LEAST_STEPS = 20
_WITH_OVERFLOW = 12
"""A step case overflows in its step 10."""


def run(scene: Scene) -> None:
    """Case by case, as many as there is time for; the first ones cover all that is claimed."""
    results: list[dict[str, Any]] = []
    sleep = sleeper(real_kind()) if scene.fake is None else None
    scene.keep(
        steps=scene.sizes.steps,
        sleeps="before copies, casts, sums, events and in the compute stream" if sleep else None,
        cases=results,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    with trainable():
        scene.keep(control=control(scene))
        left_out = []
        for job in list(_cases(scene)):
            steps = affordable(scene, results)
            if steps is None:
                left_out.append(job.name)
                continue
            held = _Held(scene, sleep, len(results))
            found = job.work(steps, held.prepare)
            results.append({**found, "name": job.name, "steps": steps, "sleeps": held.slept})
            scene.keep(cases=results)
        scene.keep(left_out=left_out)


def affordable(scene: Scene, results: list[dict[str, Any]]) -> int | None:
    """Steps of the next case: all, or as many as half of the time is enough for, or None for too few.

    Going by the case that took longest a step so far, which is a whole one; so later cases are shorter, not left out.
    """
    every = scene.sizes.steps
    least = min(every, _LEAST_STEPS)
    step_seconds = max((each["seconds"] / each["steps"] for each in results), default=0.0)
    if step_seconds * every <= scene.left_seconds / 2:
        return every
    steps = int(scene.left_seconds / 2 / step_seconds)
    return steps if steps >= least else None


def control(scene: Scene) -> str | None:
    """DeepSpeed's own code against itself: what differs there is nothing that a path has done."""
    case = dataclasses.replace(
        next(chosen(locks=False)), steps=min(scene.sizes.steps, _CONTROL_STEPS), overlap=True
    )
    return driver.train(case, None).difference(driver.train(case, None))


class _Held:
    """The device of one case, and how often it slept."""

    def __init__(self, scene: Scene, sleep: Callable[[int], None] | None, seed: int) -> None:
        self._scene, self._sleep, self._seed = scene, sleep, seed
        self._device: SleepyDevice | None = None

    def prepare(self, engine: Any) -> Any:
        """Hooks into the engine's layers; the device for the path."""
        if self._sleep is None:
            return self._scene.attached_device()
        self._device = SleepyDevice(self._sleep, self._seed)
        hold_up_backward(engine.module, self._device)
        return self._device

    @property
    def slept(self) -> int:
        """Sleeps that were queued."""
        return 0 if self._device is None else self._device.slept


def _cases(scene: Scene) -> Iterator[Job]:
    """Paths first, then a step, overflow, checkpoint, adding up on the host; after these whatever time allows."""
    locks = scene.told("here").get("why_not_pinned") is None
    gradients = [Job(name=case.name, work=_gradients(case, locks)) for case in chosen(locks=locks)]
    built = scene.why_no_cpu_adam() is None
    steps = [Job(name=f"step: {each.name}", work=_step(each)) for each in steps_chosen()] if built else []
    yield from (*gradients[:3], *steps[:1], *gradients[3:6], *steps[1:2], *gradients[6:], *steps[2:])


def _gradients(case: Case, locks: bool) -> Callable[..., dict[str, Any]]:
    def work(steps: int, prepare: Callable[[Any], Any]) -> dict[str, Any]:
        return driver.compare(dataclasses.replace(case, steps=steps, overlap=True, pin_memory=locks), prepare)

    return work


def _step(case: with_adam.StepCase) -> Callable[..., dict[str, Any]]:
    def work(steps: int, prepare: Callable[[Any], Any]) -> dict[str, Any]:
        whole = dataclasses.replace(case, steps=max(steps, _WITH_OVERFLOW), overlap=True)
        return with_adam.compare(whole, prepare)

    return work


def chosen(*, locks: bool) -> Iterator[Case]:
    """The cases of gradients, the most telling first; `locks`: whether page-locked memory is on offer."""
    ring = Spec(path="staged", cast="host", host_threads=1, buffer_bytes=1 << 10)
    pinned = Spec(path="pinned", cast="device", buffer_bytes=1 << 10)
    for spec in (Spec(), pinned, ring) if locks else (Spec(), Spec(host_threads=2)):
        yield Case(group="device", accumulation=2, clipping=0.1, reduce_bucket_size=SMALL_BUCKET, spec=spec)
    first = pinned if locks else Spec()
    yield Case(group="device", dtype="fp16", accumulation=2, overflow=True, clipping=0.1, spec=first)
    yield Case(group="device", habit="checkpoint", clipping=0.1, spec=first)
    on_host = dataclasses.replace(ring if locks else Spec(), accumulate="host")
    yield Case(group="device", accumulation=4, clipping=0.1, sub_group_size=SMALL_SUB_GROUP, spec=on_host)
    yield Case(group="device", habit="coming_and_going", accumulation=2, clipping=0.1, spec=first)
    yield Case(group="device", checkpointing="non-reentrant", accumulation=2, spec=first)
    for cast in ("host", "device"):
        for path in ("staged", "pinned", "direct") if locks else ("direct",):
            yield Case(
                group="device", dtype="fp32" if path == "direct" else "bf16", unused=True, clipping=0.1,
                reduce_bucket_size=SMALL_BUCKET if cast == "host" else LARGE,
                spec=Spec(path=path, cast=cast, buffer_bytes=1 << 10, buffer_count=3),
            )  # fmt: skip


def steps_chosen() -> Iterator[with_adam.StepCase]:
    """The cases of an optimizer step, the most telling first."""
    yield with_adam.StepCase("step", offload_param=False, sub_group_size=with_adam.SMALL)
    yield with_adam.StepCase("step", "fp16", accumulation=4, habit="with_path", overflow=True)
    yield with_adam.StepCase("step", habit="checkpoint", sub_group_size=with_adam.SMALL)
    yield with_adam.StepCase("step", accumulation=4, habit="with_path", offload_param=False)
