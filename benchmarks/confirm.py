"""What a confirmation on real steps costs, and how often it comes to another choice than the probe.

Cost: two engines in one process train the same 67M-parameter bf16 MLP on the same data, step by step in turn. In one a
path, two others and DeepSpeed's own code take turns until the fastest is known; the other has the fastest of them fixed
from the start. What the first takes longer until it has committed, over 200 steps of the second, is the cost: from then
on both run the same code, and what they differ by is shown as the noise of it.

Flips: a start is a probe of one second, then a confirmation of its choice on a smaller model of the same layers.
Counted is how often another carries in the end than the probe chose, on a quiet host and with a busy process on each
core. The two may differ within the noise, and do no harm there: the time of the probe's choice over that of the
confirmed one, in the confirmation's own rounds, says what the flips were worth.

    python -m benchmarks.confirm                        lines, and the goal
    python -m benchmarks.confirm --steps 200 --starts 10 --seconds 600
    python -m benchmarks.confirm --json                 one JSON object and nothing else:
        cost                                            share of 200 steps
        noise                                           half the interval of the step ratios after the commitment
        quiet, loaded                                   starts, flips, what they were worth

Ends after three minutes with what it has by then (`--seconds`). Exits 1 where the cost is above 1 %.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from autotune_offload import workload as workloads
from autotune_offload.api.confirming import planned
from autotune_offload.api.probe import probe
from autotune_offload.engine.attach import attach, detach
from autotune_offload.engine.entrants import Confirm
from autotune_offload.engine.status import Status
from autotune_offload.engine.trainee import single_process_environment
from autotune_offload.profiles.outcomes import Outcome, Way
from autotune_offload.records import Candidate, Settings
from autotune_offload.spread import noise
from benchmarks.goals import Goal, judged
from benchmarks.gradient_path import LAYERS, ROWS, WIDTH, Layer, config
from benchmarks.output import CORES, add_output, reporting
from benchmarks.results import Number, median

COUNTED_STEPS = 200
MOST_COST = 0.01
PROBE_SECONDS = 1.0
FLIP_LAYERS = 2
MOST_FLIPS = {"quiet": 0.2, "loaded": 0.5}
"""Share of the starts. A busy host may differ from what it was while it was probed: hence the confirmation."""

MOST_WORTH = 1.05
"""What the probe's choice may take over the confirmed one, in the median of the starts: as in `choice`."""

COST_SHARE = 0.5
"""Of the time, for the cost; the starts share the rest."""


def path(cast: str, host_threads: int = 0) -> Candidate:
    """`direct` in pieces of 4 MiB."""
    return Candidate(
        path="direct",
        cast=cast,  # type: ignore[arg-type]
        buffer_bytes=1 << 22,
        buffer_count=1,
        host_threads=host_threads,
    )


BEST, OTHERS = path("host"), (path("host", 2), path("device"))


def engine_of(layers: int, accumulation: int) -> Any:
    """Seeded, so that two have the same weights."""
    import deepspeed

    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(layers)))
    return deepspeed.initialize(model=model, config=config(accumulation, pin_memory=False))[0]


def step(engine: Any, batches: list[Tensor]) -> float:
    """Seconds of one optimizer step."""
    began = time.perf_counter()
    for rows in batches:
        engine.backward(engine(rows).float().pow(2).mean())
        engine.step()
    return time.perf_counter() - began


def batches_of(number: int, accumulation: int) -> list[Tensor]:
    """The same for both engines."""
    draw = torch.Generator().manual_seed(number)
    return [torch.randn(ROWS, WIDTH, generator=draw).bfloat16() for _ in range(accumulation)]


def cost(layers: int, accumulation: int, steps: int, deadline: float) -> dict[str, Any]:
    """Pairs of steps until there are so many, or time is up."""
    confirming, fixed = (engine_of(layers, accumulation) for _ in range(2))
    status = attach(confirming, BEST, confirm=Confirm(others=OTHERS, seed="benchmark"))
    attach(fixed, BEST, check=False)
    pairs: list[tuple[float, float]] = []
    committed = 0
    while len(pairs) < steps and (time.monotonic() < deadline or not committed):
        batches = batches_of(len(pairs), accumulation)
        order = (confirming, fixed) if len(pairs) % 2 else (fixed, confirming)
        seconds = {id(engine): step(engine, batches) for engine in order}
        pairs.append((seconds[id(confirming)], seconds[id(fixed)]))
        if status.confirmed is not None and not committed:
            committed = len(pairs)
    for engine in (confirming, fixed):
        engine.destroy()
    return _cost(pairs, committed, status)


def _cost(pairs: list[tuple[float, float]], committed: int, status: Status) -> dict[str, Any]:
    exploring, after = pairs[:committed], pairs[committed:]
    usual = statistics.median(fixed for _, fixed in pairs)
    more = sum(ours - fixed for ours, fixed in exploring)
    found = status.confirmed
    assert found is not None
    ratios = [ours / fixed for ours, fixed in after]
    return {
        "steps": len(pairs),
        "committed_after": committed,
        "winner": found.entrants[found.conclusion.winner],
        "confirmed": found.sentence(),
        "step_seconds": usual,
        "more_seconds": more,
        "cost": more / (COUNTED_STEPS * usual),
        "after_ratio": statistics.median(ratios) if ratios else None,
        "noise": noise(ratios) if len(ratios) > 2 else None,
        "raw_seconds": pairs,
    }


@contextlib.contextmanager
def loaded(busy: bool) -> Iterator[None]:
    """With a busy process on each core, or with none."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(CORES if busy else 0)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def flips(layers: int, accumulation: int, starts: int, deadline: float, *, busy: bool) -> dict[str, Any]:
    """Starts until there are so many, or time is up."""
    found: list[dict[str, Any]] = []
    engine = engine_of(layers, accumulation)
    with loaded(busy):
        while len(found) < starts and time.monotonic() < deadline:
            found.append(_start(engine, accumulation, str(len(found))))
    engine.destroy()
    worth = [each["worth"] for each in found if each["flipped"] and each["worth"] is not None]
    return {
        "starts": len(found),
        "flips": sum(each["flipped"] for each in found),
        "worth": statistics.median(worth) if worth else None,
        "each": found,
    }


def _start(engine: Any, accumulation: int, seed: str) -> dict[str, Any]:
    """A probe and a confirmation of what it chose."""
    load = workloads.from_module(engine.module, dtype="bfloat16", accumulation_steps=accumulation)
    profile = probe(workload=load, budget_seconds=PROBE_SECONDS)
    choice = profile.choice
    plan = planned(profile, Settings(), Outcome(choice=Way.of(choice)), None, seed)
    assert plan.choice is not None and plan.confirm is not None
    status = attach(engine, plan.choice, confirm=plan.confirm)
    number = 0
    while status.confirmed is None:
        step(engine, batches_of(number, accumulation))
        number += 1
    detach(engine)
    conclusion, names = status.confirmed.conclusion, status.confirmed.entrants
    chosen = 1 if choice.beats_deepspeed else 0
    before, after = conclusion.seconds[chosen], conclusion.seconds[conclusion.winner]
    return {
        "probe": names[chosen],
        "confirmed": names[conclusion.winner],
        "flipped": conclusion.winner != chosen,
        "worth": before / after if before is not None and after is not None else None,
        "rounds": conclusion.rounds,
    }


def show(name: str, found: dict[str, Any]) -> None:
    """One condition as a line."""
    worth = "" if found["worth"] is None else f", the confirmed {found['worth']:.2f}x as fast at the median"
    print(
        f"{name} host: {found['flips']} of {found['starts']} starts came to another choice{worth}", flush=True
    )


def flip_numbers(name: str, found: dict[str, Any]) -> Iterator[Number]:
    """One condition as numbers to record."""
    if not found["starts"]:
        return
    yield Number(
        what=f"starts that came to another choice, {name} host",
        value=100 * found["flips"] / found["starts"],
        unit="%",
        samples=found["starts"],
        most=100 * MOST_FLIPS[name],
    )
    worth = [each["worth"] for each in found["each"] if each["worth"] is not None]
    if worth:
        yield median(
            f"the probe's choice over the confirmed one, {name} host", worth, unit="", most=MOST_WORTH
        )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_output(parser)
    parser.add_argument("--steps", type=int, default=COUNTED_STEPS, help="pairs of steps at most")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of 4.2M parameters each")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--starts", type=int, default=10, help="of each kind of host")
    parser.add_argument("--seconds", type=float, default=180.0, help="for all of it")
    options = parser.parse_args()
    began = time.monotonic()
    deadline = began + options.seconds
    with reporting(options) as emit, single_process_environment():
        found = cost(
            options.layers, options.accumulation, options.steps, began + COST_SHARE * options.seconds
        )
        print(
            f"{found['steps']} pairs of steps of {found['step_seconds'] * 1e3:.0f} ms, accumulation "
            f"{options.accumulation}; committed after {found['committed_after']}: {found['confirmed']}"
        )
        if found["noise"] is not None:
            print(f"afterwards {found['after_ratio']:.3f} times the fixed one (noise {found['noise']:.1%})")
        results: dict[str, Any] = {}
        for index, name in enumerate(("quiet", "loaded")):
            until = time.monotonic() + (deadline - time.monotonic()) / (2 - index)
            layers = min(FLIP_LAYERS, options.layers)
            results[name] = flips(layers, options.accumulation, options.starts, until, busy=name == "loaded")
            show(name, results[name])
        goal = Goal(
            name=f"cost over {COUNTED_STEPS} steps",
            found=100 * found["cost"],
            most=100 * MOST_COST,
            unit=" %",
        )
        numbers = [
            Number(what=goal.name, value=goal.found, unit="%", most=goal.most),
            *(number for name, each in results.items() for number in flip_numbers(name, each)),
        ]
        emit({"cost": found["cost"], "noise": found["noise"], "detail": found, **results}, numbers)
        return judged([goal])


if __name__ == "__main__":
    os.environ.setdefault("DS_LOG_LEVEL", "error")
    sys.exit(main())
