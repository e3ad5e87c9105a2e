"""Whether our host-to-host bandwidth is that of a plain copy loop in the style of STREAM.

    python -m benchmarks.stream [--json] [-n ROUNDS] [--seconds S]

The plain loop is `numpy.copyto` from one array to another, cut into one piece a thread. Its arrays lie in
memory of torch's, as ours do: numpy's own allocator asks for huge pages, which is a question of its own. Ours
is `autotune_offload.measure.measure.curve`, the very code of a probe. Both move blocks of at least four times the
last-level cache between pages touched before, with as many threads as torch uses and again with one.

They run in turn in one process, the order changing from round to round. As in STREAM
(cs.virginia.edu/stream/ref.html, which also gives the four times), a round's rate is that of its best copy:
what another process takes away is not the memory's. A round's ratio is our rate over the plain loop's, and a
case's figure the median over its rounds. `median_ratio` is the same for the rounds' medians, for comparison:
on a quiet machine the two agree, on a busy one a parallel region waits longer for its last thread. No round
is begun after --seconds, which all cases share; each has two at least.

A rate counts the bytes copied once, in 1e9 bytes a second. Output: one line a case; with --json the last line
of stdout is one JSON document {"bytes": ..., "cases": [{"threads": ..., "plain_gbps": ..., "our_gbps": ...,
"ratio": ..., "ratio_iqr": ..., "median_ratio": ..., "within": ..., "raw_plain_gbps": [...],
"raw_our_gbps": [...]}, ...]}. The exit status is 1 where a ratio is outside 0.9 to 1.1.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from autotune_offload.machine import host
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.measure.measure import curve
from autotune_offload.records import Plan
from autotune_offload.spread import interquartile_range
from benchmarks.goals import Goal, judged
from benchmarks.output import add_output, reporting
from benchmarks.results import Number

LOWEST, HIGHEST = 0.9, 1.1
_LEAST_ROUNDS = 2
COPIES = 8
"""Copies a side and round."""

CACHES = 4
"""Size of a block in last-level caches, rounded up to a power of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Both sides with one number of threads; raw rates hold each round's best."""

    threads: int
    plain_gbps: float
    our_gbps: float
    ratio: float
    ratio_iqr: float
    median_ratio: float
    within: bool
    raw_plain_gbps: tuple[float, ...]
    raw_our_gbps: tuple[float, ...]

    def __str__(self) -> str:
        """The case on one line."""
        return (
            f"{self.threads} threads: plain copy {self.plain_gbps:.2f} GB/s, ours {self.our_gbps:.2f} GB/s, "
            f"ratio {self.ratio:.3f} (IQR {self.ratio_iqr:.3f}, {len(self.raw_our_gbps)} rounds; of medians "
            f"{self.median_ratio:.3f})"
        )


def plain_seconds(device: AcceleratorDevice, size: int, threads: int) -> list[float]:
    """`COPIES` copies between two arrays, each thread on its own piece."""
    target, source = (device.host_empty(size, torch.uint8).numpy() for _ in range(2))
    pieces = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))

    def copy() -> float:
        before = time.perf_counter()
        futures = [pool.submit(np.copyto, *piece) for piece in pieces[1:]]
        np.copyto(*pieces[0])
        for future in futures:
            future.result()
        return time.perf_counter() - before

    with ThreadPoolExecutor(threads) as pool:
        copy()  # starts the threads
        return [copy() for _ in range(COPIES)]


def our_seconds(device: AcceleratorDevice, size: int, threads: int, cache_bytes: int) -> tuple[float, ...]:
    """`COPIES` copies of our own measurement."""
    plan = Plan(
        name="stream",
        budget_seconds=60.0,
        measure_share=1.0,
        smallest_bytes=size,
        largest_bytes=size,
        growth=2,
        warmup_seconds=0.0,
        min_samples=COPIES // 2,
        max_samples=COPIES,
        target_spread=0.0,
        pin_cap_bytes=0,
        trial_bytes=0,
        finalists=0,
    )
    [point] = curve(device, plan, kind="h2h", threads=threads, cache_bytes=cache_bytes, memory_bytes=6 * size)
    return point.raw_seconds


def compare(
    device: AcceleratorDevice, size: int, threads: int, cache_bytes: int, rounds: int, seconds: float
) -> Case:
    """Both in turn, the order changing; the first round warms up and is not counted."""
    plain: list[list[float]] = []
    ours: list[tuple[float, ...]] = []
    until = time.perf_counter() + seconds
    for index in range(rounds + 1):
        if len(ours) > _LEAST_ROUNDS and time.perf_counter() > until:
            break
        if index % 2:
            plain.append(plain_seconds(device, size, threads))
        ours.append(our_seconds(device, size, threads, cache_bytes))
        if not index % 2:
            plain.append(plain_seconds(device, size, threads))
    plain, ours = plain[1:], ours[1:]
    ratios = [min(p) / min(o) for p, o in zip(plain, ours, strict=True)]
    medians = [statistics.median(p) / statistics.median(o) for p, o in zip(plain, ours, strict=True)]
    plain_rates = tuple(size / min(p) / 1e9 for p in plain)
    our_rates = tuple(size / min(o) / 1e9 for o in ours)
    ratio = statistics.median(ratios)
    return Case(
        threads=threads,
        plain_gbps=statistics.median(plain_rates),
        our_gbps=statistics.median(our_rates),
        ratio=ratio,
        ratio_iqr=interquartile_range(ratios),
        median_ratio=statistics.median(medians),
        within=LOWEST <= ratio <= HIGHEST,
        raw_plain_gbps=plain_rates,
        raw_our_gbps=our_rates,
    )


def main() -> int:
    """Prints every case; 1 where a ratio is outside."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_output(parser)
    parser.add_argument("-n", type=int, default=11, metavar="ROUNDS", help="counted rounds, 2 or more (11)")
    parser.add_argument("--seconds", type=float, default=140, help="after which no round is begun (140)")
    options = parser.parse_args()
    if options.n < 2:
        parser.error(f"-n {options.n}: quartiles need at least 2 rounds")
    with reporting(options) as emit:
        device, cache_bytes = AcceleratorDevice(), host.facts().last_level_cache_bytes
        size = 1 << (CACHES * cache_bytes - 1).bit_length()
        print(f"copies of {size:,} bytes; last-level cache {cache_bytes:,} bytes", flush=True)
        cases = []
        counts = sorted({1, torch.get_num_threads()})
        for threads in counts:
            seconds = options.seconds / len(counts)
            cases.append(compare(device, size, threads, cache_bytes, options.n, seconds))
            print(cases[-1], flush=True)
        status = judged(
            Goal(
                name=f"our rate over a plain copy's, {case.threads} threads",
                found=case.ratio,
                least=LOWEST,
                most=HIGHEST,
            )
            for case in cases
        )
        emit(
            {"bytes": size, "cases": [dataclasses.asdict(case) for case in cases]},
            [
                Number(
                    what=f"our copy rate over a plain copy's, {case.threads} threads",
                    value=case.ratio,
                    iqr=case.ratio_iqr,
                    samples=len(case.raw_our_gbps),
                    least=LOWEST,
                    most=HIGHEST,
                )
                for case in cases
            ],
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
