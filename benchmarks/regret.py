"""How far the choice is from the best there is, on described machines, against exhaustive search.

    python -m benchmarks.regret [--json] [--cases N | --all] [--seconds S] [--noise SIGMA] [--jobs N] [--plan NAME]

A case is a machine, a model (parameter sizes of a published architecture), ranks, accumulation steps, and
what may be page-locked: anything, a little (256 MiB), or nothing. In each case the simulated device is probed
with noise, as `autotune-offload simulate --noise` does. Then every candidate that the limits admit and the
installed DeepSpeed's own code are timed once on the noiseless clock, on a sample twice as large. The
regret is the time of what would run (our path, or DeepSpeed's own code where that is kept) over the least
time of all, less 1. With accumulation a time is that of a whole accumulation, and each of our paths is timed
with its micro-steps added up on the device and on the host. The same is asked of the optimizer step: every number of
threads that was weighed, and DeepSpeed's own step, run over a sample on the noiseless clock.

Without --all the cases are drawn evenly from the whole product with a fixed seed, every machine is among them
from 11 cases on, and no case is begun after --seconds.

Output: one line for the worst cases, then the figures; with --json one JSON document and nothing else
{"worst_regret": ..., "mean_regret": ..., "worst_step_regret": ..., "mean_step_regret": ..., "trials": ...,
"cases": ..., ...}, where `trials` is the mean number of timed passes in a case, `candidates` how many of how many
were timed. The exit status is 1 where a mean is not below 0.01 or a worst not below 0.05.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from autotune_offload import workload
from autotune_offload.api.probe import probe
from autotune_offload.decide.candidates import grid, key
from autotune_offload.decide.reasons import words
from autotune_offload.described import machine as described_machine
from autotune_offload.described.clocked import Faults
from autotune_offload.described.simulated import SimulatedDevice
from autotune_offload.measure.bench import Bench, Window
from autotune_offload.paths.accumulation import Accumulation
from autotune_offload.paths.build import build
from autotune_offload.paths.page_locking import PinRules
from autotune_offload.paths.path import destination_memory, page_locks
from autotune_offload.paths.stock import StockAccumulation, stock_path
from autotune_offload.records import Accumulate, Candidate, Memory, Profile, Settings, Workload
from autotune_offload.upstream import named_sequence
from autotune_offload.workload import TIMED_MICRO_STEPS, middle_elements
from benchmarks import described_step
from benchmarks.goals import Goal, judged
from benchmarks.output import CORES, add_output, reporting
from benchmarks.results import Number

MEAN_LIMIT, WORST_LIMIT = 0.01, 0.05
TRUTH_ELEMENTS = 1 << 25
MOST_TRUTH_ELEMENTS = 1 << 27
"""Of the sample on the noiseless clock: 128 MiB of fp32, twice a probe's, and up to 512 for large partitions."""

STEP_ELEMENTS = 1 << 24
"""Of the sample for a step: 64 pieces of the pass."""

CAP_BYTES = 256 << 20
NOISE = 0.02
RANKS = (1, 4, 8, 64)
ACCUMULATION = (1, 4)
PINNING = ("free", "capped", "forbidden")

# config.json of published models, the keys that sizes follow from
MODELS: dict[str, dict[str, Any]] = {
    "tinystories-1m": {
        "model_type": "gpt_neo",
        "hidden_size": 64,
        "num_layers": 8,
        "num_heads": 16,
        "attention_types": [[["global", "local"], 4]],
        "vocab_size": 50257,
    },
    "pythia-14m": {
        "model_type": "gpt_neox",
        "hidden_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "vocab_size": 50304,
        "tie_word_embeddings": False,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "vocab_size": 50257,
        "n_positions": 1024,
    },
    "tinyllama-1.1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 5632,
        "vocab_size": 32000,
    },
    "llama-3.2-3b": {
        "model_type": "llama",
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "llama-2-7b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
    },
    "llama-2-13b": {
        "model_type": "llama",
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "intermediate_size": 13824,
        "vocab_size": 32000,
    },
    "llama-2-70b": {
        "model_type": "llama",
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "vocab_size": 32000,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is simulated. `pinning` is "free", "capped" or "forbidden"."""

    machine: str
    model: str
    ranks: int
    accumulation_steps: int
    pinning: str

    def __str__(self) -> str:
        """The case in a few words."""
        return (
            f"{self.machine}, {self.model}, {self.ranks} ranks, accumulation {self.accumulation_steps}, "
            f"pinning {self.pinning}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A case and how it went. `trials` counts timed passes, `timed` and `open` candidates."""

    case: Case
    chosen: str
    best: str
    regret: float
    step_regret: float
    trials: int
    timed: int
    open: int


def every_case(names: Sequence[str]) -> list[Case]:
    """The whole product over these machines."""
    product = itertools.product(names, MODELS, RANKS, ACCUMULATION, PINNING)
    return [
        Case(machine=machine, model=model, ranks=ranks, accumulation_steps=steps, pinning=pinning)
        for machine, model, ranks, steps, pinning in product
    ]


def some_cases(names: Sequence[str], count: int) -> list[Case]:
    """`count` of them, as many of each machine as of any other, within one."""
    source = random.Random(0)
    by_machine = [source.sample(cases := every_case([name]), len(cases)) for name in names]
    return [case for row in zip(*by_machine, strict=True) for case in row][:count]


@functools.cache
def described_workload(model: str, ranks: int, accumulation_steps: int) -> Workload:
    """The model's partitions on one rank."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(MODELS[model]), encoding="utf-8")
        return workload.from_hf_config(file, world_size=ranks, accumulation_steps=accumulation_steps)


def evaluate(case: Case, *, noise: float = NOISE, plan: str = "standard") -> Result:
    """Probe one case, and judge what it chose."""
    profile = probe(
        workload=described_workload(case.model, case.ranks, case.accumulation_steps),
        plan=plan,
        max_pinned_bytes=CAP_BYTES if case.pinning == "capped" else None,
        device=_device(case, noise=noise),
    )
    times = truth(profile, _device(case, noise=0.0))
    chosen, best = _in_effect(profile), min(times, key=times.__getitem__)
    regret = times[chosen] / times[best] - 1
    timed = [each for each in profile.candidates if each.samples]
    elements = min(profile.workload.elements, STEP_ELEMENTS)
    step_regret, _, _ = described_step.regret(profile, _device(case, noise=0.0), elements)
    return Result(
        case=case,
        chosen=chosen,
        best=best,
        regret=regret,
        step_regret=step_regret,
        trials=sum(each.samples for each in profile.candidates)
        + sum(each.samples for each in profile.baselines),
        timed=len(timed),
        open=len(times),
    )


def _device(case: Case, *, noise: float) -> SimulatedDevice:
    faults = Faults(pin_fails_above_bytes=0 if case.pinning == "forbidden" else None)
    machine = described_machine.load(case.machine)
    device = SimulatedDevice(machine, ranks=case.ranks, noise=noise, seed=_seed(case), faults=faults)
    device.checked_elements = 64  # that bytes arrive is what the tests look at; a check still allocates
    return device


def _seed(case: Case) -> int:
    return sum(index * byte for index, byte in enumerate(str(case).encode(), start=1))


def truth(profile: Profile, device: SimulatedDevice) -> dict[str, float]:
    """Noiseless seconds of everything that could run: every admitted candidate, and DeepSpeed's own code.

    With accumulation, of a whole one: each path with its micro-steps added up in each place.
    """
    rules = PinRules(workload=profile.workload, pin=profile.pin, limits=profile.limits)
    candidates = [c for c in grid(device, profile.workload, Settings()) if rules.against(c) is None]
    steps = 1 if device.shares_host_memory else min(profile.workload.accumulation_steps, TIMED_MICRO_STEPS)
    typical = middle_elements(profile.workload.partitions)
    elements = min(max(TRUTH_ELEMENTS, 2 * typical), MOST_TRUTH_ELEMENTS)
    bench = Bench(device, profile.workload, elements, parts=1 if steps > 1 else 2)
    times = {}
    for candidate in candidates:
        for place in _places(device, rules, candidate, steps):
            path, memory = build(device, candidate, bench.dtype), destination_memory(candidate.path)
            times[_ours(candidate, place)] = _noiseless(
                bench, path, memory, Accumulation(device, place, page_lock=page_locks(candidate.path)), steps
            )
    for name, memory in _stock(profile, rules):
        stock = stock_path(named_sequence(name), device, bench.dtype, bench.largest_elements)
        times[_own(memory)] = _noiseless(
            bench, stock, memory, StockAccumulation(device, "device", page_lock=False), steps
        )
    bench.close()
    return times


def _noiseless(bench: Bench, path: Any, memory: Memory, accumulation: Accumulation, steps: int) -> float:
    """Seconds of one pass, or of a whole accumulation; the first time, which allocates, does not count."""
    window = Window(path, accumulation, steps)
    try:
        if steps == 1:
            return bench.time(path, memory)
        bench.check_accumulation(window, memory)
        return sum(count * bench.time_micro_step(window, moment, memory) for moment, count in window.moments)
    finally:
        window.close()


def _stock(profile: Profile, rules: PinRules) -> Iterator[tuple[str, Memory]]:
    installed = next(each for each in profile.baselines if each.installed)
    yield installed.name, "pageable"
    if rules.against_path("pinned") is None:
        yield installed.name, "pinned"


def _places(
    device: SimulatedDevice, rules: PinRules, candidate: Candidate, steps: int
) -> tuple[Accumulate, ...]:
    """Where this candidate's micro-steps may be added up: one place where there is nothing to choose."""
    if steps == 1 or device.shares_host_memory or rules.against_host_sums(candidate):
        return ("device",)
    return get_args(Accumulate)


def _own(memory: Memory) -> str:
    return f"DeepSpeed's own code into {memory} memory"


def _ours(candidate: Candidate, place: Accumulate) -> str:
    return words(candidate) if place == "device" else f"{words(candidate)}, added up on the {place}"


def _in_effect(profile: Profile) -> str:
    """What carries the gradients after this decision."""
    choice = profile.choice
    if not choice.beats_deepspeed:
        return _own("pinned" if choice.pin_optimizer else "pageable")
    candidate = next(each for each in profile.candidates if key(each) == key(choice))
    return _ours(candidate, choice.accumulate if profile.workload.accumulation_steps > 1 else "device")


def evaluate_all(
    cases: Sequence[Case], *, noise: float, plan: str, jobs: int, seconds: float
) -> Iterator[Result]:
    """The cases in turn until time is up."""
    until = time.monotonic() + seconds
    work = functools.partial(evaluate, noise=noise, plan=plan)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _one_thread) as pool:
        waiting = iter(cases)
        running = deque(pool.submit(work, case) for case in itertools.islice(waiting, jobs))
        while running:
            yield running.popleft().result()
            following = next(waiting, None) if time.monotonic() < until else None
            if following is not None:
                running.append(pool.submit(work, following))


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """The figures over all cases."""
    regrets = [result.regret for result in results]
    mean, worst = statistics.fmean(regrets), max(regrets)
    steps = [result.step_regret for result in results]
    mean_step, worst_step = statistics.fmean(steps), max(steps)
    return {
        "worst_regret": worst,
        "mean_regret": mean,
        "worst_step_regret": worst_step,
        "mean_step_regret": mean_step,
        "median_regret": statistics.median(regrets),
        "trials": statistics.fmean(result.trials for result in results),
        "candidates_timed": statistics.fmean(result.timed for result in results),
        "candidates_open": statistics.fmean(result.open for result in results),
        "cases": len(results),
        "within": max(mean, mean_step) < MEAN_LIMIT and max(worst, worst_step) < WORST_LIMIT,
        "limits": {"mean_regret": MEAN_LIMIT, "worst_regret": WORST_LIMIT},
    }


def main() -> int:
    """Prints the worst cases and the figures; 1 where they are over their limits."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_output(parser)
    parser.add_argument("--cases", type=int, default=132, metavar="N", help="how many are drawn (132)")
    parser.add_argument("--all", action="store_true", help="the whole product; takes an hour or more")
    parser.add_argument("--seconds", type=float, default=130, help="after which no case is begun (130)")
    parser.add_argument("--noise", type=float, default=NOISE, help=f"of the probes ({NOISE})")
    parser.add_argument("--plan", default="standard", help="of the probes (standard)")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, CORES), help="processes")
    options = parser.parse_args()
    if options.cases < 1 or options.jobs < 1 or options.noise < 0:
        parser.error("expected --cases and --jobs of at least 1, and --noise of at least 0")
    started, names = time.monotonic(), described_machine.names()
    cases = every_case(names) if options.all else some_cases(names, options.cases)
    seconds = math.inf if options.all else options.seconds
    with reporting(options) as emit:
        results = []
        for result in evaluate_all(
            cases, noise=options.noise, plan=options.plan, jobs=options.jobs, seconds=seconds
        ):
            results.append(result)
            print(f"{len(results)} of {len(cases)}: {result.regret:.2%} {result.case}", file=sys.stderr)
        for result in sorted(results, key=lambda each: -each.regret)[:10]:
            print(f"{result.regret:7.2%}  {result.case}: {result.chosen}; best: {result.best}")
        figures = {**summary(results), "seconds": time.monotonic() - started}
        print(
            f"mean regret {figures['mean_regret']:.2%}, worst {figures['worst_regret']:.2%}, "
            f"{figures['cases']} cases, {figures['trials']:.0f} timed passes a case; "
            f"{figures['candidates_timed']:.0f} of {figures['candidates_open']:.0f} candidates timed"
        )
        goals = [
            Goal(name=name, found=figures[key] * 100, most=limit * 100, unit=" %")
            for name, key, limit in (
                ("mean regret", "mean_regret", MEAN_LIMIT),
                ("worst regret", "worst_regret", WORST_LIMIT),
                ("mean regret of a step", "mean_step_regret", MEAN_LIMIT),
                ("worst regret of a step", "worst_step_regret", WORST_LIMIT),
            )
        ]
        per_case = [{**dataclasses.asdict(result.case), **_rest(result)} for result in results]
        numbers = [
            Number(what=goal.name, value=goal.found, unit="%", samples=len(results), most=goal.most)
            for goal in goals
        ]
        emit({**figures, "results": per_case}, numbers)
        return judged(goals)


def _rest(result: Result) -> dict[str, Any]:
    fields = dataclasses.asdict(result)
    del fields["case"]
    return fields


if __name__ == "__main__":
    sys.exit(main())
