"""Part: the machine as a description, and how far what it predicts is from what was measured.

Two comparisons. Every trial of the probe against the same trial on the described machine, which is given the compute
that was measured, so that copies hide there as they do in a trial. And what each path saves of DeepSpeed's own time in
real backward passes (part `training`, a few rows a batch, so that little hides): a difference, so that what both have
in common, compute and the fetching of parameters, is not in it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import yaml

from autotune_offload.decide.reasons import words
from autotune_offload.described.machine import Machine
from autotune_offload.machine.host import software
from autotune_offload.profiles.environment import release
from autotune_offload.records import Baseline, Candidate, Memory, Workload
from autotune_offload.upstream import stock_sequence
from autotune_offload.workload import from_module
from benchmarks.device.probes import PROFILE
from benchmarks.device.scene import Scene
from benchmarks.device.training import shape_of, ways
from benchmarks.gradient_path import mlp

MACHINE = "machine.yaml"
_SAMPLE_ELEMENTS = 1 << 23


def run(scene: Scene) -> None:
    """Written first, then simulated."""
    from autotune_offload.described import machine as described_machine
    from autotune_offload.described.from_profile import machine_from
    from autotune_offload.profiles.store import Store

    profile = Store().load(scene.folder / PROFILE)
    plain = machine_from(profile, "measured")
    machine = with_compute(plain, scene.told("copies").get("tflops"))
    text = yaml.safe_dump(described_machine.plain(machine), sort_keys=False, width=100)
    (scene.folder / MACHINE).write_text(text, encoding="utf-8")
    scene.keep(file=MACHINE, numbers=len(machine.sources))
    tried: list[Candidate | Baseline] = [*profile.baselines, *profile.candidates]
    timed = [each for each in tried if each.measured_seconds is not None]
    seconds = simulated(machine, profile.workload, timed, _SAMPLE_ELEMENTS)
    trials = zip(timed, seconds, strict=True)
    scene.keep(
        trials=[
            {"way": words(each), "measured_seconds": each.measured_seconds, "predicted_seconds": predicted}
            for each, predicted in trials
            if predicted is not None
        ]
    )
    scene.keep(training=_training(scene, plain))


def with_compute(machine: Machine, tflops: float | None) -> Machine:
    """The same with what matrix products reach; None leaves it as it is."""
    from autotune_offload.described import machine as described_machine

    if tflops is None:
        return machine
    described = described_machine.plain(machine)
    described["compute"] = {"tflops": tflops}
    source = {"field": "compute.tflops", "value": tflops, "kind": "measured", "confidence": "medium"}
    described["sources"] = [*described["sources"], {**source, "url": "python -m benchmarks.device"}]
    return described_machine.parse(described, "the measured machine")


def simulated(
    machine: Machine, workload: Workload, ways: Sequence[Candidate | Baseline], elements: int
) -> list[float | None]:
    """Seconds that each way adds on the described machine; None for one that failed there."""
    from autotune_offload.decide.entrant import Entrant
    from autotune_offload.decide.race import Race
    from autotune_offload.described.simulated import SimulatedDevice
    from autotune_offload.measure.bench import Bench

    device = SimulatedDevice(machine)
    entrants: list[Entrant[Any]] = [Entrant(record=way) for way in ways]
    bench = Bench(device, workload, elements)
    try:
        with Race(device, bench, entrants, deadline=math.inf) as race:
            race.round()
    finally:
        bench.close()
    return [each.median if each.timed else None for each in entrants]


def _training(scene: Scene, machine: Machine) -> list[dict[str, Any]]:
    """What each path saves of DeepSpeed's own time, predicted and as backward passes have shown it."""
    measured = scene.told("training").get("gradients", [])
    rows = min((case["rows"] for case in measured), default=0)
    specs = ways(scene)
    workload = from_module(mlp(shape_of(scene, 1)), dtype="bfloat16")
    found = []
    for case in measured:
        if case["rows"] != rows or case["name"] not in specs:
            continue
        both: list[Candidate | Baseline] = [_own(case["stock_memory"]), specs[case["name"]]]
        stock, ours = simulated(machine, workload, both, workload.elements)
        pairs = zip(case["backward_stock_seconds"]["raw"], case["backward_ours_seconds"]["raw"], strict=True)
        if stock is not None and ours is not None:
            saved = statistics.median(a - b for a, b in pairs)
            found.append(
                {
                    "name": case["name"],
                    "rows": rows,
                    "predicted_stock_seconds": stock,
                    "predicted_seconds": ours,
                    "predicted_saved_seconds": stock - ours,
                    "measured_saved_seconds": saved,
                }
            )
    return found


def _own(memory: Memory) -> Baseline:
    """The installed DeepSpeed's own way into such memory."""
    sequence = stock_sequence(release(software().deepspeed))
    return Baseline(name=sequence.name, versions=sequence.versions, memory=memory, installed=True)
