"""Whether the choice is the best there is: its time against an exhaustive measured sweep.

    python -m benchmarks.choice [--json] [--repeat N] [--seconds S] [--budget SECONDS] [--rounds ROUNDS]

Each repeat probes this host as `autotune-offload probe` does, then times every candidate that the host's
limits admit, those that the cost model would not have tried included, in interleaved rounds on the same
sample and with the same code. Where there are more than forty, as with page-locked memory on offer, all are timed
twice on a small sample first, a few at a time, since their buffers lock memory; the fastest of these, the probe's own
choice among them, then run in the rounds. The figure of a repeat is the chosen candidate's time over that of the one
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
from collections.abc import Collection
from dataclasses import dataclass

from autotune_offload.api.probe import load_plan, measuring, probe
from autotune_offload.decide.candidates import grid, key
from autotune_offload.decide.decide import sample_elements
from autotune_offload.decide.entrant import Entrant
from autotune_offload.decide.race import Race
from autotune_offload.decide.reasons import words
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.machine.device import Device
from autotune_offload.measure.bench import Bench
from autotune_offload.paths.page_locking import PinRules
from autotune_offload.records import Candidate, Profile, Settings, Workload
from benchmarks.goals import Goal, judged
from benchmarks.output import add_output, reporting
from benchmarks.results import median

LIMIT = 1.05
_LEAST_ROUNDS = 2
_MOST, _LEADING, _AT_A_TIME = 40, 16, 8
_SMALL_ELEMENTS = 1 << 22


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


def sweep(
    profile: Profile,
    rounds: int,
    device: Device,
    until: float = math.inf,
    also: Collection[str] = (),
    most_elements: int = sys.maxsize,
) -> list[Entrant[Candidate]]:
    """Every candidate that the limits of the profile admit, timed `rounds` times in turn, or the leading ones.

    After `until`, on the device's clock, no further round is begun, but for the first two. `also` names, in words,
    those that run in the rounds whatever became of them on the small sample. No sample is larger than `most_elements`.
    """
    workload = profile.workload
    rules = PinRules(workload=workload, pin=profile.pin, limits=profile.limits)
    admitted = [c for c in grid(device, workload, Settings()) if rules.against(c) is None]
    entrants = [Entrant(record=c) for c in admitted]
    with measuring(device):
        if len(entrants) > _MOST:
            entrants = _leading(profile, device, entrants, {words(_chosen(profile, entrants)), *also})
        bench = Bench(device, workload, min(_elements(profile, device), most_elements))
        try:
            with Race(device, bench, entrants, deadline=math.inf) as race:
                for number in range(rounds):
                    if number < _LEAST_ROUNDS or device.now() < until:
                        race.round()
        finally:
            bench.close()
    return [e for e in entrants if e.timed]


def _leading(
    profile: Profile, device: Device, entrants: list[Entrant[Candidate]], sure: set[str]
) -> list[Entrant[Candidate]]:
    """The fastest on a small sample, and those that are sure to run."""
    bench = Bench(device, profile.workload, _SMALL_ELEMENTS)
    try:
        for first in range(0, len(entrants), _AT_A_TIME):
            batch = entrants[first : first + _AT_A_TIME]
            with Race(device, bench, batch, deadline=math.inf) as race:
                for _ in range(_LEAST_ROUNDS):
                    race.round()
    finally:
        bench.close()
    ranked = sorted((e for e in entrants if e.timed), key=lambda e: min(e.seconds))
    others = [e for e in ranked[_LEADING:] if words(e.record) in sure]
    return [Entrant(record=e.record) for e in (*ranked[:_LEADING], *others)]


def _chosen(profile: Profile, entrants: list[Entrant[Candidate]]) -> Candidate:
    return next(e.record for e in entrants if key(e.record) == key(profile.choice))


def _elements(profile: Profile, device: Device) -> int:
    """The sample that the probe would take with all the time in the world."""
    plan, cache_bytes = load_plan(profile.plan), profile.host.last_level_cache_bytes
    memory_bytes = profile.limits.measuring_bytes
    return sample_elements(
        device, plan, profile.measurements, profile.workload, cache_bytes, memory_bytes, math.inf
    )


def repeat(
    budget_seconds: float | None,
    rounds: int,
    device: Device | None = None,
    seconds: float = math.inf,
    workload: Workload | None = None,
    also: Collection[str] = (),
    most_elements: int = sys.maxsize,
) -> Repeat:
    """One probe, and the sweep that judges it, which begins no round after so many seconds.

    On DeepSpeed's accelerator if `device` is None, of a probe's own default if `workload` is None; `also` and
    `most_elements` are those of `sweep`.
    """
    device = device or AcceleratorDevice()
    until = device.now() + seconds
    profile = probe(budget_seconds=budget_seconds, device=device, workload=workload)
    ranked = sorted(sweep(profile, rounds, device, until, also, most_elements), key=lambda e: e.median)
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
