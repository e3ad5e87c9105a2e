"""The host's part of one gradient partition, standing alone: the compiled pass against torch's operations.

    python -m benchmarks.host_pass [--json] [--rounds N]

Over ELEMENTS values of each dtype, in turn in one process with one torch thread, each way once a round:
the floor (torch's `copy_` to fp32, no norm), the compiled pass (fp32 and the fp64 sum of squares), the same that
also keeps the values as they are, torch's operations in pieces, and DeepSpeed's own way (a fresh fp64 temporary
for the norm, a fresh fp32 one for the copy). Prints medians with their quartiles; with --json one JSON document
and nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from autotune_offload.machine import host_pass
from benchmarks.output import add_output, reporting
from benchmarks.results import Number, median, pair

ELEMENTS = 1 << 24


def ways(destination: Tensor, source: Tensor) -> dict[str, Callable[[], object]]:
    """Name to one pass over the whole source."""
    low = torch.empty_like(source)

    def deepspeed() -> object:
        norm = source.to(torch.float64).norm(2)
        destination.copy_(source.float())
        return norm

    return {
        "floor": lambda: destination.copy_(source),
        "compiled": lambda: host_pass.widen(destination, source),
        "keeping": lambda: host_pass.widen(destination, source, low),
        "pieces": lambda: host_pass.in_pieces(destination, source),
        "deepspeed": deepspeed,
    }


def measure(dtype: torch.dtype, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round by way; the first round warms up and is not counted."""
    source, destination = torch.randn(ELEMENTS).to(dtype), torch.zeros(ELEMENTS)
    passes = ways(destination, source)
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for round_index in range(rounds + 1):
        for name, one_pass in passes.items():
            began = time.perf_counter()
            one_pass()
            if round_index:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def numbers(document: dict[str, dict[str, list[float]]]) -> Iterator[Number]:
    """Every dtype as numbers to record."""
    for dtype, ways_ in document.items():
        yield from pair(f"one pass, {dtype}", ways_["deepspeed"], ways_["compiled"])
        yield median(f"one pass that keeps the values, {dtype}", ways_["keeping"], of="ours", scale=1e3)
        yield median(
            f"one pass by torch's operations in pieces, {dtype}", ways_["pieces"], of="ours", scale=1e3
        )
        yield median(f"torch's copy to fp32 alone, {dtype}", ways_["floor"], scale=1e3)


def main() -> int:
    """Print every way of every dtype."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_output(parser)
    parser.add_argument("--rounds", type=int, default=15, help="2 or more (15)")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: quartiles need at least 2")
    with reporting(options) as emit:
        torch.set_num_threads(1)
        document = {}
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            name = str(dtype).removeprefix("torch.")
            document[name] = measure(dtype, options.rounds)
            print(
                f"{name}, {ELEMENTS:,} values"
                + f" ({host_pass.why_not_fused(dtype) or 'compiled pass in use'})"
            )
            for way, seconds in document[name].items():
                low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
                print(f"  {way:10s} {median * 1e3:7.2f} ms (quartiles {low * 1e3:.2f} to {high * 1e3:.2f})")
        emit(document, numbers(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
