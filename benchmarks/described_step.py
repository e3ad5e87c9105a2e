"""The optimizer step on described machines, played on the virtual clock: DeepSpeed's own way and the compiled pass.

    python -m benchmarks.described_step [--json]

A model of 7 billion parameters on 1 and on 4 ranks of each shipped machine, its optimizer offloaded, its 16-bit weights
on the device. DeepSpeed's own step is the same code in 0.14.5, 0.16.9 and 0.19.8: it scales the gradients, runs Adam,
casts into a fresh temporary on the host and sends that with a blocking copy. It is played with one host thread, as
torchrun sets it where there are several ranks, and with as many as keep the rank's part of the host's memory busy. Ours
is the pass with as many, through the real ring. Each runs over a sample of 67,108,864 weights. What is derived: Adam
and the pass take as long as their bytes take through memory, and a page fault takes no time.

Output: a Markdown table; with --json one JSON document and nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from autotune_offload import units
from autotune_offload.described import machine as described_machine
from autotune_offload.described.simulated import SimulatedDevice
from autotune_offload.machine import adam
from autotune_offload.paths.pieces import Pieces, Target
from autotune_offload.paths.step_stages import words
from autotune_offload.records import Back, Profile, StepCandidate
from benchmarks.output import add_output, reporting

PARAMETERS = 7_000_000_000
RANKS = (1, 4)
SAMPLE_ELEMENTS = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One machine and number of ranks. Seconds are of one step over a rank's weights."""

    machine: str
    ranks: int
    threads: int
    own_one_thread_seconds: float
    own_seconds: float
    ours_seconds: float


def own_seconds(device: SimulatedDevice, elements: int, *, threads: int, in_place: bool) -> float:
    """DeepSpeed's own step: each pass over memory is a copy of as many bytes."""
    with device.timed_only(), device.intraop(threads):
        master, other = (device.host_empty(elements, torch.float32) for _ in range(2))
        half = device.host_empty(elements, torch.bfloat16)
        rounded = half if in_place else device.empty(elements, torch.bfloat16)
        began = device.now()
        device.h2h(master, other)  # scaling: 4 read, 4 written
        for _ in range(3):  # Adam: 28
            device.h2h(master, other)
        device.h2h(half, half)
        if in_place:
            device.h2h(half, master)
        else:
            temporary = device.host_empty(elements, torch.bfloat16, touched=False)
            device.h2h(temporary, master)
            device.h2d(rounded, temporary)
        device.record_event().synchronize()
        return device.now() - began


def fused_seconds(
    device: SimulatedDevice, elements: int, *, threads: int, back: Back, scale: float = 1.0
) -> float:
    """The compiled pass; what the ring takes to be locked is not counted."""
    values = adam.Constants(scale=scale, scales=scale != 1.0)
    with device.timed_only():
        memory = adam.Memory(
            **{name: device.host_empty(elements, torch.float32) for name in adam.Memory.__struct_fields__}
        )
        to = Target(memory=device.empty(elements, torch.bfloat16), on_host=back == "in place")
        pieces = Pieces(device, page_lock=back == "staged")
        for _ in range(2):
            began = device.now()
            pieces.run(memory, values, to, threads, pieces.progress(elements))
            pieces.drain()
        took = device.now() - began
        pieces.close()
    return took


def played(device: SimulatedDevice, way: StepCandidate, elements: int, *, own_threads: int) -> float:
    """Seconds of one way to make a step over so many weights."""
    if not way.threads:
        return own_seconds(device, elements, threads=own_threads, in_place=way.back == "in place")
    return fused_seconds(device, elements, threads=way.threads, back=way.back)


def regret(profile: Profile, device: SimulatedDevice, elements: int) -> tuple[float, str, str]:
    """How much longer the decided way takes than the best of all that may run; both in words."""
    decided, rates = profile.step, profile.step_rates
    if decided is None or rates is None:
        raise ValueError("this profile holds no step; expected one of stage 3 with its optimizer on the CPU")
    able = [c for c in decided.candidates if c.rejected is None]
    times = {c: played(device, c, elements, own_threads=rates.threads) for c in able}
    best = min(times, key=times.__getitem__)
    return times[decided.chosen] / times[best] - 1, words(decided.chosen), words(best)


def simulated(name: str, ranks: int) -> SimulatedDevice:
    """One rank's device; that bytes arrive is what the tests look at."""
    device = SimulatedDevice(described_machine.load(name), ranks=ranks)
    device.checked_elements = 64
    return device


def rows() -> Iterator[Row]:
    """Every machine that has a device of its own."""
    for name in described_machine.names():
        for ranks in RANKS:
            device = simulated(name, ranks)
            if not device.shares_host_memory:
                yield _row(name, ranks, device.most_threads())


def _row(name: str, ranks: int, threads: int) -> Row:
    whole = PARAMETERS / ranks / SAMPLE_ELEMENTS
    one, own = (
        own_seconds(simulated(name, ranks), SAMPLE_ELEMENTS, threads=n, in_place=False) for n in (1, threads)
    )
    ours = fused_seconds(simulated(name, ranks), SAMPLE_ELEMENTS, threads=threads, back="staged")
    return Row(
        machine=name,
        ranks=ranks,
        threads=threads,
        own_one_thread_seconds=one * whole,
        own_seconds=own * whole,
        ours_seconds=ours * whole,
    )


def table(found: list[Row]) -> str:
    """As the page of machines has it."""
    lines = [
        "| machine | ranks | DeepSpeed's own, 1 thread | its own, n threads | ours, n threads | n | gain |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        times = (row.own_one_thread_seconds, row.own_seconds, row.ours_seconds)
        told = " | ".join(map(units.duration, times))
        gain = units.times(row.own_seconds / row.ours_seconds)
        lines.append(f"| {row.machine} | {row.ranks} | {told} | {row.threads} | {gain} |")
    return "\n".join(lines)


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_output(parser, records=False)
    options = parser.parse_args()
    with reporting(options) as emit:
        found = list(rows())
        print(table(found))
        emit([dataclasses.asdict(row) for row in found])
    return 0


if __name__ == "__main__":
    sys.exit(main())
