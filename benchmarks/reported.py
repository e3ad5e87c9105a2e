"""What DeepSpeed's threads report about this problem, from the machine files alone.

    python -m benchmarks.reported [--json]

Three reports are replayed on the virtual clock, each with DeepSpeed's own sequences of that time, and then with
what this package chooses there:

* DeepSpeed PR 6962: a 3B model on a GH200, backward 25603 ms before PR 6670, 1174 ms after it, 309 ms with the
  explicit upcast;
* DeepSpeed PR 6670: LLaMA-7B on 4 GH200, the backward at the boundary 4 times shorter;
* the same PR's thread: a small BERT on 8 Gaudi2, where the bounce buffer makes `partition_grads` about twice as
  slow as a direct copy.

Some numbers of the machine files were fitted to these very reports; their kind is "calibrated" and they are
named in the output. The backward itself, without offloading, is no machine's number: that of PR 6962 is its
third row less what the explicit upcast takes here, so only the first two rows are predictions.

Output: a Markdown table a report; with --json one JSON document and nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from dataclasses import dataclass

from autotune_offload import workload
from autotune_offload.api.probe import probe
from autotune_offload.described import machine as described_machine
from autotune_offload.described.simulated import SimulatedDevice
from autotune_offload.measure.bench import Bench
from autotune_offload.paths.stock import stock_path
from autotune_offload.records import Profile, Workload, histogram
from autotune_offload.upstream import STOCK_SEQUENCES
from benchmarks.output import add_output, reporting

REPORTED_SECONDS = {"implicit_upcast": 25.6033, "bounce_buffer": 1.17431, "explicit_upcast": 0.3092}
"""Backward of the 3B model, PR 6962."""

SAMPLE_ELEMENTS = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One report replayed. Seconds are what offloading adds to a backward pass, into pageable memory."""

    machine: str
    model: str
    ranks: int
    calibrated: tuple[str, ...]
    stock_seconds: dict[str, float]
    chosen: str
    chosen_seconds: float

    def ratio(self, slower: str, faster: str) -> float:
        """How many times as long one sequence takes as another."""
        return self.stock_seconds[slower] / self.stock_seconds[faster]

    def backward_seconds(self, name: str) -> float:
        """A whole backward of PR 6962: what offloading adds, and the rest of the row with the explicit upcast."""
        rest = REPORTED_SECONDS["explicit_upcast"] - self.stock_seconds["explicit_upcast"]
        return rest + self.stock_seconds.get(name, self.chosen_seconds)


def gh200_3b() -> Report:
    """PR 6962; the 3B model is taken to be on one rank, as its numbers are in the machine file's notes."""
    return _replayed("gh200", "3B", workload.from_parameter_count(3_000_000_000))


def gh200_llama_7b() -> Report:
    """PR 6670 on 4 ranks."""
    return _replayed("gh200", "LLaMA-7B", workload.from_parameter_count(6_738_415_616, world_size=4))


def gaudi2_bert() -> Report:
    """The regression on HPU, on 8 ranks."""
    return _replayed("gaudi2", "BERT, hidden 512, 4 layers", bert(512, 4, ranks=8))


def bert(hidden: int, layers: int, *, ranks: int) -> Workload:
    """A BERT encoder with its pooler (google-research/bert: vocabulary 30522, 512 positions)."""
    norm = [hidden, hidden]
    attention = [hidden * hidden, hidden] * 4 + norm
    feed_forward = [4 * hidden * hidden, 4 * hidden, 4 * hidden * hidden, hidden, *norm]
    sizes = [30522 * hidden, 512 * hidden, 2 * hidden, *norm]
    sizes += (attention + feed_forward) * layers + [hidden * hidden, hidden]
    return Workload(
        partitions=histogram(-(-size // ranks) for size in sizes),
        parameters=histogram(sizes),
        dtype="bfloat16",
        world_size=ranks,
        accumulation_steps=1,
        source=f"BERT of {sum(sizes):,} parameters",
    )


def _replayed(name: str, model: str, load: Workload) -> Report:
    machine = described_machine.load(name)
    profile = probe(workload=load, device=SimulatedDevice(machine, ranks=load.world_size))
    path, seconds = chosen(profile)
    return Report(
        machine=name,
        model=model,
        ranks=load.world_size,
        calibrated=machine.sourced("calibrated"),
        stock_seconds=_stock(SimulatedDevice(machine, ranks=load.world_size), load),
        chosen=path,
        chosen_seconds=seconds,
    )


def _stock(device: SimulatedDevice, load: Workload) -> dict[str, float]:
    device.checked_elements = 0
    bench = Bench(device, load, SAMPLE_ELEMENTS)
    times = {}
    for sequence in STOCK_SEQUENCES:
        path = stock_path(sequence, device, bench.dtype, bench.largest_elements)
        times[sequence.name] = bench.time(path, "pageable")
        path.close()
    bench.close()
    return times


def chosen(profile: Profile) -> tuple[str, float]:
    """What a profile chose, and its time."""
    choice = profile.choice
    same = ("path", "cast", "buffer_bytes", "buffer_count", "host_threads")
    for each in profile.candidates:
        if all(getattr(each, name) == getattr(choice, name) for name in same):
            assert each.measured_seconds is not None  # a choice was timed
            return f"{choice.path}, cast on the {choice.cast}", each.measured_seconds
    raise LookupError(choice.path)


def _table(report: Report, *, whole: bool) -> str:
    head = " backward (ms) | reported (ms) |" if whole else ""
    lines = [
        f"{report.model} on {report.ranks} ranks of {report.machine} "
        f"(calibrated: {', '.join(report.calibrated) or 'nothing'})",
        "",
        f"| way | offloading adds (ms) |{head}",
        "|---|---|" + "---|---|" * whole,
    ]
    rows = {**report.stock_seconds, f"**ours**: {report.chosen}": report.chosen_seconds}
    for name, seconds in rows.items():
        row = f"| {name} | {_ms(seconds)} |"
        if whole:
            reported = REPORTED_SECONDS.get(name)
            row += f" {_ms(report.backward_seconds(name))} | {_ms(reported) if reported else ''} |"
        lines.append(row)
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{0 if seconds >= 0.1 else 1}f}"


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_output(parser, records=False)
    options = parser.parse_args()
    with reporting(options) as emit:
        reports = [gh200_3b(), gh200_llama_7b(), gaudi2_bert()]
        for report in reports:
            print(_table(report, whole=report.model == "3B"), end="\n\n")
        emit([dataclasses.asdict(report) for report in reports])
    return 0


if __name__ == "__main__":
    sys.exit(main())
