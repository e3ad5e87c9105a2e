"""Whether the choice is the best there is: its time against an exhaustive measured sweep.

    python -m benchmarks.choice [--json] [--repeat N] [--seconds S] [--budget SECONDS] [--rounds ROUNDS]

Each repeat probes this host as `autotune-offload probe` does, then times every candidate that the host's
limits admit, those that the cost model would not have tried included, in interleaved rounds on the same
sample and with the same code. The figure of a repeat is the chosen candidate's time over that of the one
with the least median in the sweep, as the median over the rounds: 1 is the best possible, and noise alone
makes it a little more. No repeat is begun after --seconds.

Output: one line a repeat, then the median with its range and how often each path was chosen; with --json
the last line of stdout is one JSON document with all of it. The exit status is 1 where the median is over
its limit of 1.05.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import math
import statistics
import sys
import time
from dataclasses import dataclass

from autotune_offload.api.probe import load_plan, measuring, probe
from autotune_offload.decide.candidates import grid, key
from autotune_offload.decide.decide import sample_elements
from autotune_offload.decide.entrant import Entrant
from autotune_offload.decide.race import Race
from autotune_offload.decide.reasons import words
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.measure.bench import Bench
from autotune_offload.paths.page_locking import PinRules
from autotune_offload.records import Candidate, Profile, Settings
from benchmarks.goals import Goal, judged
from benchmarks.output import add_output, reporting
from benchmarks.results import median

LIMIT = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """One probe and the sweep after it. `sweep_seconds` holds every candidate's median, fastest first."""

    path: str
    tie: bool
    chosen: str
    best: str
    chosen_seconds: float
    best_seconds: float
    ratio: float
    sweep_seconds: dict[str, float]

    def __str__(self) -> str:
        """Both candidates with their times in the sweep, and the ratio."""
        return (
            f"chosen: {self.chosen}, {self.chosen_seconds * 1e3:.1f} ms; best of {len(self.sweep_seconds)}: "
            f"{self.best}, {self.best_seconds * 1e3:.1f} ms; ratio {self.ratio:.3f}"
        )


def sweep(profile: Profile, rounds: int) -> list[Entrant[Candidate]]:
    """Every candidate that the limits of the profile admit, timed `rounds` times in turn."""
    device, workload = AcceleratorDevice(), profile.workload
    rules = PinRules(workload=workload, pin=profile.pin, limits=profile.limits)
    admitted = [c for c in grid(device, workload, Settings()) if rules.against(c) is None]
    entrants = [Entrant(record=c) for c in admitted]
    with measuring(device):
        bench = Bench(device, workload, _elements(profile, device))
        try:
            with Race(device, bench, entrants, deadline=math.inf) as race:
                for _ in range(rounds):
                    race.round()
        finally:
            bench.close()
    return [e for e in entrants if e.timed]


def _elements(profile: Profile, device: AcceleratorDevice) -> int:
    """The sample that the probe would take with all the time in the world."""
    plan, cache_bytes = load_plan(profile.plan), profile.host.last_level_cache_bytes
    memory_bytes = profile.limits.measuring_bytes
    return sample_elements(
        device, plan, profile.measurements, profile.workload, cache_bytes, memory_bytes, math.inf
    )


def repeat(budget_seconds: float | None, rounds: int) -> Repeat:
    """One probe, and the sweep that judges it."""
    profile = probe(budget_seconds=budget_seconds)
    ranked = sorted(sweep(profile, rounds), key=lambda e: e.median)
    chosen = next(e for e in ranked if key(e.record) == key(profile.choice))
    return Repeat(
        path=profile.choice.path,
        tie=profile.choice.tie,
        chosen=words(chosen.record),
        best=words(ranked[0].record),
        chosen_seconds=chosen.median,
        best_seconds=ranked[0].median,
        ratio=statistics.median(
            mine / max(best, 1e-12) for mine, best in zip(chosen.seconds, ranked[0].seconds, strict=True)
        ),
        sweep_seconds={words(e.record): e.median for e in ranked},
    )


def main() -> int:
    """Prints every repeat and the median; 1 where that is over its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_output(parser)
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="probes and sweeps (5)")
    parser.add_argument("--seconds", type=float, default=100, help="after which no repeat is begun (100)")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="of a probe (the standard plan's 5)")
    parser.add_argument("--rounds", type=int, default=15, help="of the sweep (15)")
    options = parser.parse_args()
    if options.repeat < 1 or options.rounds < 1:
        parser.error(f"--repeat {options.repeat}, --rounds {options.rounds}: expected at least 1")
    with reporting(options) as emit:
        repeats: list[Repeat] = []
        until = time.monotonic() + options.seconds
        while len(repeats) < options.repeat and (not repeats or time.monotonic() < until):
            repeats.append(repeat(options.budget, options.rounds))
            print(repeats[-1], flush=True)
        ratios = [each.ratio for each in repeats]
        middle = statistics.median(ratios)
        paths = collections.Counter(each.path + (" (a tie)" if each.tie else "") for each in repeats)
        print(
            f"chosen over best: median {middle:.3f} ({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} repeats); "
            f"paths: {', '.join(f'{path} {count} times' for path, count in paths.most_common())}"
        )
        status = judged([Goal(name="chosen over best", found=middle, most=LIMIT)])
        summary = {"median_ratio": middle, "limit": LIMIT, "within": middle <= LIMIT, "paths": dict(paths)}
        numbers = [median("the choice over the best of a sweep", ratios, unit="", most=LIMIT)]
        emit({**summary, "repeats": [dataclasses.asdict(each) for each in repeats]}, numbers)
    return status


if __name__ == "__main__":
    sys.exit(main())
