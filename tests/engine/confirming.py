"""Real ZeRO-3 training in which paths take turns, beside the same training with DeepSpeed alone.

    python -m tests.engine.confirming FOLDER

One JSON object on the last line: of each of `results` whether anything that can be seen of the run differs, what was
concluded, and who carried. What an accumulation takes is made up: each carrier's own cost on a clock that stands
still otherwise, so that who wins does not depend on the machine. The stored choice is the slowest by construction.
FOLDER gets what DeepSpeed's CSV monitor writes. With RANK and WORLD_SIZE in the environment it
is one of several ranks, which then draw real delays.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from autotune_offload.api.report import Report
from autotune_offload.engine import attach as engine_attach
from autotune_offload.engine.entrants import Confirm, Told
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.machine.ranges import PREFIX
from autotune_offload.testing import FakeAccelerator
from tests.engine.loops import SPECS, LateDevice
from tests.matrix.driver import HABITS, Case, Trace, start, started

OWN_COST, STORED_COST, BEST_COST, OTHER_COST = 2.0, 3.0, 1.0, 2.5
PATHS = ("cpu device cast", "cpu", "cpu threads")
LATE_PATHS = ("late pinned device cast", "late staged threads", "late staged host sums")
"""The stored choice, the best one, another; see `tests.engine.loops.SPECS`."""

CASES = {
    "bf16": Case(group="", clipping=0.1, steps=30),
    "bf16 accumulated": Case(group="", accumulation=4, clipping=0.1, steps=30, reduce_bucket_size=3000),
    "fp16 overflow": Case(
        group="", dtype="fp16", accumulation=2, clipping=0.1, overflow=True, steps=30, sub_group_size=2000
    ),
    "checkpoint": Case(group="", habit="checkpoint", clipping=0.1, steps=26),
    "late": Case(group="", accumulation=2, clipping=0.1, steps=30, reduce_bucket_size=3000),
}


class Costed:
    """A clock on which a micro-step takes its carrier's cost, and nothing else takes any time."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.costs: tuple[float, ...] = (OWN_COST, STORED_COST, BEST_COST, OTHER_COST)
        self.seconds = 0.0

    def now(self) -> float:
        """Later by the cost of whoever carries."""
        entry = engine_attach._entries.get(self.engine)
        attachment = None if entry is None else entry.attachment()
        if attachment is not None:
            contest = attachment._contest
            self.seconds += self.costs[contest.entrants.index(contest.present)]
        return self.seconds


class CostedDevice(AcceleratorDevice):
    """The CPU with that clock."""

    def __init__(self) -> None:
        super().__init__(FakeAccelerator("cpu"))
        self.clock = Costed()

    def now(self) -> float:
        """Made up."""
        return self.clock.now()


class CostedLateDevice(LateDevice):
    """The one on which copies land late, with that clock."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Costed()

    def now(self) -> float:
        """Made up."""
        return self.clock.now()


def confirmed(case: Case, name: str, told: list[Told]) -> tuple[Trace, Any, list[str]]:
    """A run in which three paths and DeepSpeed's own code take turns; with who carried each step."""
    engine = start(case)
    late = name == "late"
    device: Any = CostedLateDevice() if late else CostedDevice()
    stored, *others = LATE_PATHS if late else PATHS
    device.clock.engine = engine
    try:
        loop = HABITS[case.habit](case, engine)
        confirm = Confirm(others=tuple(SPECS[other] for other in others), seed="agreed")
        status = engine_attach.attach(engine, SPECS[stored], device, confirm=confirm, tell=told.append)
        assert status.why_not is None, status.why_not
        attachment = engine_attach._entries[engine].attachment()
        assert attachment is not None
        carried = []
        for step in range(case.steps):
            carried.append(attachment._contest.present.name)
            loop.step(step)
        return loop.trace, status, carried
    finally:
        engine.destroy()
        del engine
        gc.collect()


def stock(case: Case) -> Trace:
    """The same with DeepSpeed alone."""
    engine = start(case)
    try:
        loop = HABITS[case.habit](case, engine)
        for step in range(case.steps):
            loop.step(step)
        return loop.trace
    finally:
        engine.destroy()
        del engine
        gc.collect()


def compared(name: str) -> dict[str, Any]:
    """One case both ways."""
    case, told = CASES[name], list[Told]()
    expected = stock(case)
    trace, status, carried = confirmed(case, name, told)
    overflows = sum(value is True for what, value in expected.exact if what.startswith("overflow"))
    found = status.confirmed
    return {
        "difference": expected.difference(trace),
        "carried": carried,
        "why_not": status.why_not,
        "left_to_deepspeed": status.left_to_deepspeed,
        "winner": None if found is None else found.entrants[found.conclusion.winner],
        "sentence": "" if found is None else found.sentence(),
        "rounds": None if found is None else found.conclusion.rounds,
        "carriers": list(status.carriers),
        "switches": status.switches,
        "overflows": overflows,
        "wrong": [each.why for each in told[-1].wrong] if told else None,
        "stock_times": len(status.stock_accumulation_seconds),
    }


def watched(folder: Path) -> list[list[str]]:
    """A short run with the CSV monitor: our ranges in its last step, each below those that it lies in.

    As torch's profiler reads them, which nests them by their times.
    """
    import deepspeed

    from tests.matrix.driver import Model, config

    case = Case(group="", accumulation=2)
    torch.manual_seed(0)
    model = Model("none")
    monitor = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config={**config(case), "csv_monitor": monitor},
    )
    device = CostedDevice()
    device.clock.engine, device.clock.costs = engine, (OWN_COST, BEST_COST)
    engine_attach.attach(engine, SPECS["cpu"], device, confirm=Confirm(seed="agreed", most_rounds=2))
    loop = HABITS["plain"](case, engine)
    for step in range(5):
        loop.step(step)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        loop.step(5)
    kept = engine_attach.kept_ranges(engine)
    assert kept is not None
    Report(profile=None, ranges=(kept.number,)).trace(folder / "run.json")
    engine.destroy()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    return list(_ours(profiler.profiler.kineto_results.experimental_event_tree(), ()))


def _ours(events: Any, above: tuple[str, ...]) -> Iterator[list[str]]:
    """Names of our ranges with those above them, in order."""
    for event in events:
        within = (*above, event.name) if event.name.startswith(PREFIX) else above
        if within is not above:
            yield list(within)
        yield from _ours(event.children, within)


def ranks(folder: Path) -> None:
    """One rank that now and then takes long, by its own draw; real clocks."""
    case = Case(group="", accumulation=2, steps=40)
    expected = stock(case)
    engine = start(case)
    draw = random.Random(int(os.environ["RANK"]))
    loop = HABITS["plain"](case, engine)
    confirm = Confirm(others=(SPECS["cpu device cast"],), seed="agreed", most_rounds=5)
    status = engine_attach.attach(
        engine, SPECS["cpu"], AcceleratorDevice(FakeAccelerator("cpu")), confirm=confirm
    )
    inner = engine.optimizer.partition_grads

    def delayed(*arguments: Any) -> Any:
        time.sleep(draw.choice((0.0, 0.0, 0.002, 0.01)))
        return inner(*arguments)

    engine.optimizer.partition_grads = delayed
    for step in range(case.steps):
        loop.step(step)
    found = status.confirmed
    outcome = {
        "why_not": status.why_not,
        "concluded": found is not None,
        "rounds": None if found is None else found.conclusion.rounds,
        "difference": expected.difference(loop.trace),
    }
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(outcome))
    engine.destroy()


def main(arguments: list[str]) -> int:
    """All cases, or those named; with several ranks the job of all of them."""
    folder = Path(arguments[0])
    torch.set_num_threads(1)
    with started():
        if int(os.environ["WORLD_SIZE"]) > 1:
            ranks(folder)
            return 0
        results = {name: compared(name) for name in arguments[1:] or CASES}
        ranges = watched(folder)
    print("\n" + json.dumps({"results": results, "ranges": ranges}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
