"""What transparent huge pages are worth to an offloaded training step: the same job with and without, in turn.

torch asks the kernel for huge pages where THP_MEM_ALLOC_ENABLE=1 is set when a process starts (c10's allocator of host
memory; blocks of 2 MiB and more). `autotune-offload run` sets it. Every round starts `python -m benchmarks.step` twice,
with and without it, in changing order; each trains DeepSpeed's own engine and one with the pass and the direct path.

    python -m benchmarks.pages [--rounds 3] [--pairs 5] [--json]

Printed are medians over the rounds, by whose step it is, and the ratio of the rounds' pairs: without over with.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from autotune_offload.cli.run import HUGE_PAGES
from benchmarks.output import add_output, reporting
from benchmarks.results import median

CASE = "both offloads"
METRICS = ("step_phase", "train_step")
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def measured(pairs: int, *, huge: bool) -> dict[str, float]:
    """Median seconds of one process, by metric and way."""
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.step", "--json", "--pairs", str(pairs), "--cases", CASE],
        env={**os.environ, HUGE_PAGES: str(int(huge))},
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        raise SystemExit(found.stderr[-2000:])
    case = json.loads(found.stdout)["cases"][0]
    return {
        f"{metric} {way}": case[f"{metric}_{way}_seconds"]["median"]
        for metric in METRICS
        for way in ("stock", "ours")
    }


def summary(without: list[dict[str, float]], with_them: list[dict[str, float]]) -> dict[str, Any]:
    """By metric and way: medians of the rounds and the ratios' median, least and greatest."""
    found = {}
    for name in without[0]:
        ratios = [a[name] / b[name] for a, b in zip(without, with_them, strict=True)]
        found[name] = {
            "without_seconds": statistics.median(each[name] for each in without),
            "with_seconds": statistics.median(each[name] for each in with_them),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
        }
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_output(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=5, help="steps of each way in a process")
    options = parser.parse_args()
    with reporting(options) as emit:
        runs: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for index in range(options.rounds):
            for huge in (False, True) if index % 2 else (True, False):
                runs[huge].append(measured(options.pairs, huge=huge))
        found = summary(runs[False], runs[True])
        kernel = ENABLED.read_text().strip() if ENABLED.exists() else "not there"
        print(f"transparent huge pages: {kernel}; {options.rounds} rounds, {CASE}")
        for name, each in found.items():
            low, high = min(each["ratios"]), max(each["ratios"])
            print(
                f"  {name:17s} without {each['without_seconds'] * 1e3:7.1f} ms   "
                f"with {each['with_seconds'] * 1e3:7.1f} ms   {each['ratio']:.2f}x ({low:.2f} to {high:.2f})"
            )
        numbers = [
            median(f"{name.replace('_', ' ')}, without huge pages over with", each["ratios"], unit="")
            for name, each in found.items()
        ]
        emit({"kernel": kernel, "case": CASE, **found}, numbers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
