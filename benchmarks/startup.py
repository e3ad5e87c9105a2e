"""What the package costs before any work is done.

    python -m benchmarks.startup [--json] [-n ROUNDS]

Each case runs a command in a child process, in turn with its baseline, so that a change in the machine's
load meets both; a case's figure is the median over the rounds of the difference, with the quartiles. Reported
beside it: what `import autotune_offload` loads. The first round warms the caches and is not counted.

The last case is a second start with a stored profile: a child that has torch and DeepSpeed loaded calls
`autotune_offload.initialize` on a small ZeRO-3 model, and reports the time in it, the import of this package
included, less the time that `deepspeed.initialize` itself took inside. Its first round, not counted, measures
and stores the profile.

Output: one line a figure; with --json one JSON document and nothing else with all of them. The exit
status is 1 where a figure is over its limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from autotune_offload.engine.trainee import single_process_environment, stock_config
from benchmarks.goals import Goal, judged
from benchmarks.output import add_output, reporting
from benchmarks.results import median

IMPORT = "import autotune_offload"
SCRIPT = Path(sys.executable).with_name("autotune-offload")


SECOND_START = """
import json, sys, time, torch, deepspeed
inside = []
plain = deepspeed.initialize
def timed(*args, **kwargs):
    began = time.perf_counter()
    try:
        return plain(*args, **kwargs)
    finally:
        inside.append(time.perf_counter() - began)
timed.__signature__ = __import__("inspect").signature(plain)
deepspeed.init_distributed()
deepspeed.initialize = timed
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
assert not any(name.startswith("autotune_offload") for name in sys.modules)
began = time.perf_counter()
import autotune_offload
engine, *_ = autotune_offload.initialize(model=model, config=json.loads(sys.argv[1]))
whole = time.perf_counter() - began
engine.destroy()
print()
print(whole - sum(inside))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command whose wall time counts, less that of its baseline where it has one.

    With `reports`, what counts is the number of seconds on the last line that the command prints.
    """

    name: str
    command: tuple[str, ...]
    baseline: tuple[str, ...] | None = None
    reports: bool = False
    most_rounds: int = 100
    limit_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A case's result over its rounds; `raw_seconds` holds every round."""

    name: str
    median_seconds: float
    lower_quartile_seconds: float
    upper_quartile_seconds: float
    samples: int
    limit_seconds: float
    within: bool
    raw_seconds: tuple[float, ...]

    def __str__(self) -> str:
        """The figure and its spread in milliseconds."""
        low, high = self.lower_quartile_seconds, self.upper_quartile_seconds
        return (
            f"{self.name}: {self.median_seconds * 1e3:.1f} ms (quartiles {low * 1e3:.1f} to {high * 1e3:.1f}, "
            f"{self.samples} rounds)"
        )


CASES = [
    Case(
        name="import autotune_offload, over the bare interpreter",
        command=(sys.executable, "-c", IMPORT),
        baseline=(sys.executable, "-c", "pass"),
        limit_seconds=0.050,
    ),
    Case(
        name="autotune-offload --help",
        command=(str(SCRIPT), "--help"),
        limit_seconds=0.300,
    ),
    Case(
        name="autotune_offload.initialize with a stored profile, over deepspeed.initialize",
        command=(sys.executable, "-c", SECOND_START, json.dumps(stock_config(micro_batch=1))),
        reports=True,
        most_rounds=5,
        limit_seconds=0.100,
    ),
]


def wall_seconds(command: tuple[str, ...]) -> float:
    """Wall time of one run, from start to exit; CalledProcessError where it fails."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def reported_seconds(command: tuple[str, ...]) -> float:
    """What the command's last line of output says; CalledProcessError where it fails."""
    child = subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return float(child.stdout.split()[-1])


def measure(case: Case, rounds: int) -> Figure:
    """Runs a case `rounds` times, and once more beforehand, each time next to its baseline."""
    rounds = min(rounds, case.most_rounds)
    time_one = reported_seconds if case.reports else wall_seconds
    raw = [
        time_one(case.command) - (wall_seconds(case.baseline) if case.baseline else 0.0)
        for _ in range(rounds + 1)
    ][1:]
    low, median, high = statistics.quantiles(raw, n=4, method="inclusive")
    return Figure(
        name=case.name,
        median_seconds=median,
        lower_quartile_seconds=low,
        upper_quartile_seconds=high,
        samples=rounds,
        limit_seconds=case.limit_seconds,
        within=median <= case.limit_seconds,
        raw_seconds=tuple(raw),
    )


def modules_loaded() -> list[str]:
    """Modules that `import autotune_offload` loads and a bare interpreter does not."""
    script = f"import sys; before = set(sys.modules); {IMPORT}; print(*sorted(set(sys.modules) - before))"
    child = subprocess.run((sys.executable, "-c", script), check=True, capture_output=True, text=True)
    return child.stdout.split()


def main() -> int:
    """Prints every figure; 1 where one is over its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_output(parser)
    parser.add_argument("-n", type=int, default=15, metavar="ROUNDS", help="counted rounds, 2 or more (15)")
    options = parser.parse_args()
    if options.n < 2:
        parser.error(f"-n {options.n}: quartiles need at least 2 rounds")
    with reporting(options) as emit:
        figures = []
        with tempfile.TemporaryDirectory() as cache:
            os.environ["AUTOTUNE_OFFLOAD_CACHE"] = cache
            # an installed package has its bytecode; where writing it is switched off, every start would compile
            os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
            with single_process_environment():
                for case in CASES:
                    figures.append(measure(case, options.n))
                    print(figures[-1], flush=True)
        modules = modules_loaded()
        print(f"modules that {IMPORT} loads: {len(modules)}")
        status = judged(
            Goal(
                name=figure.name,
                found=figure.median_seconds * 1e3,
                most=figure.limit_seconds * 1e3,
                unit=" ms",
            )
            for figure in figures
        )
        numbers = [
            median(figure.name, figure.raw_seconds, scale=1e3, most=figure.limit_seconds * 1e3)
            for figure in figures
        ]
        emit({"figures": [dataclasses.asdict(figure) for figure in figures], "modules": modules}, numbers)
    return status


if __name__ == "__main__":
    sys.exit(main())
