"""What `reduce_bucket_size` gains on described machines: when gradients leave during a backward pass.

    python -m benchmarks.bucket [--json] [--model NAME] [--ranks N] [--tflops T ...]

ZeRO-3 collects gradients until a bucket is full, and offloads what is in it while the device computes on. A
backward pass of the model is played on the virtual clock of each machine: matrix products as its
floating-point operations need at T (4 a parameter and token, as in `autotune_offload.measure.compute`), and after
each full bucket its partitions, on a stream beside them. Compared are DeepSpeed's default bucket
(5e8 elements) and the one that a probe there chooses, both with DeepSpeed's own code and with what is
chosen. The reduction itself costs nothing here, so that small buckets look a little better than they are.
T is an assumption: machine files tell no compute rate, and the gain depends on it.

Output: a line a machine and rate; with --json one JSON document and nothing else. The exit status is 1 where
the chosen bucket is slower than the default by more than 1 %. On the CPU nothing overlaps and no bucket is chosen.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from dataclasses import dataclass

import msgspec
import torch

from autotune_offload.api.probe import probe
from autotune_offload.described import machine as described_machine
from autotune_offload.described.simulated import SimulatedDevice
from autotune_offload.measure.bench import Offload, interleaved
from autotune_offload.measure.compute import SQUARE, products
from autotune_offload.paths.build import build
from autotune_offload.paths.path import destination_memory
from autotune_offload.paths.stock import stock_path
from autotune_offload.records import Choice, Memory, Profile, Workload
from autotune_offload.upstream import named_sequence
from benchmarks.goals import Goal, judged
from benchmarks.output import add_output, reporting
from benchmarks.regret import MODELS, described_workload

DEFAULT_ELEMENTS = 500_000_000
SLOWER = 1.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One machine at one compute rate. Seconds of a whole backward pass, compute included."""

    machine: str
    tflops: float
    path: str
    bucket_elements: int
    compute_seconds: float
    stock_default_seconds: float
    stock_chosen_seconds: float
    ours_default_seconds: float
    ours_chosen_seconds: float

    @property
    def over_default(self) -> float:
        """The backward pass with the chosen bucket over that with DeepSpeed's, whichever code offloads."""
        return max(
            self.ours_chosen_seconds / self.ours_default_seconds,
            self.stock_chosen_seconds / self.stock_default_seconds,
        )

    def __str__(self) -> str:
        """As one line."""
        return (
            f"{self.machine:18s} {self.tflops:5g} TFLOP/s  compute {self.compute_seconds * 1e3:6.0f} ms  "
            f"stock {_shown(self.stock_default_seconds, self.stock_chosen_seconds)}  "
            f"{self.path:7s}{_shown(self.ours_default_seconds, self.ours_chosen_seconds)}  "
            f"bucket {self.bucket_elements:,}"
        )


def _shown(default: float, chosen: float) -> str:
    return f"{default * 1e3:6.0f} -> {chosen * 1e3:6.0f} ms ({default / chosen:.2f}x)"


def measure(name: str, workload: Workload, tflops: float) -> Row | None:
    """One machine at one rate; None where no bucket is chosen."""
    machine = msgspec.structs.replace(
        described_machine.load(name), compute=described_machine.Compute(tflops=tflops)
    )
    profile = probe(workload=workload, device=_device(machine, workload))
    chosen = profile.choice.sizes.reduce_bucket_elements
    if chosen is None:
        return None
    sizes = interleaved(dict(workload.partitions))
    seconds = {
        (way, bucket): _backward(machine, workload, profile, way, bucket)
        for way in ("stock", "ours")
        for bucket in (DEFAULT_ELEMENTS, chosen)
    }
    return Row(
        machine=name,
        tflops=tflops,
        path=profile.choice.path,
        bucket_elements=chosen,
        compute_seconds=sum(products(sizes, workload.world_size)) * 2 * SQUARE**3 / (tflops * 1e12),
        stock_default_seconds=seconds["stock", DEFAULT_ELEMENTS],
        stock_chosen_seconds=seconds["stock", chosen],
        ours_default_seconds=seconds["ours", DEFAULT_ELEMENTS],
        ours_chosen_seconds=seconds["ours", chosen],
    )


def _device(machine: described_machine.Machine, workload: Workload) -> SimulatedDevice:
    device = SimulatedDevice(machine, ranks=workload.world_size)
    device.checked_elements = 0  # that bytes arrive is what the tests look at
    return device


def _backward(
    machine: described_machine.Machine, workload: Workload, profile: Profile, way: str, bucket_elements: int
) -> float:
    device = _device(machine, workload)
    dtype: torch.dtype = getattr(torch, workload.dtype)
    path, memory = _offload(device, dtype, workload, profile, way)
    source = device.empty(workload.largest_elements, dtype)
    allocate = device.pinned_empty if memory == "pinned" else device.host_empty
    destination = allocate(workload.largest_elements, torch.float32)
    square = device.empty(SQUARE * SQUARE, dtype).view(SQUARE, SQUARE)
    side, sizes = device.new_stream(), interleaved(dict(workload.partitions))
    waiting: list[int] = []

    def leave() -> None:
        device.order_after(side, device.record_event())
        with device.on(side):
            for size in waiting:
                path.offload_with_norm(source[:size], destination[:size])
        waiting.clear()

    with device.timed_only():
        began = device.now()
        for size, count in zip(sizes, products(sizes, workload.world_size), strict=True):
            if waiting and (sum(waiting) + size) * workload.world_size > bucket_elements:
                leave()
            for _ in range(count):
                device.matmul(square, square, square)
            waiting.append(size)
        leave()
        with device.on(side):
            path.drain()
        device.synchronize()
        seconds = device.now() - began
    path.close()
    return seconds


def _offload(
    device: SimulatedDevice, dtype: torch.dtype, workload: Workload, profile: Profile, way: str
) -> tuple[Offload, Memory]:
    choice: Choice = profile.choice
    if way == "ours" and choice.beats_deepspeed:
        return build(device, choice, dtype), destination_memory(choice.path)
    installed = next(each for each in profile.baselines if each.installed)
    memory: Memory = installed.memory
    if way == "ours":
        memory = "pinned" if choice.pin_optimizer else "pageable"
    return stock_path(named_sequence(installed.name), device, dtype, workload.largest_elements), memory


def main() -> int:
    """Prints every row; 1 where a chosen bucket costs time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_output(parser, records=False)
    parser.add_argument("--model", default="tinyllama-1.1b", choices=tuple(MODELS))
    parser.add_argument("--ranks", type=int, default=1, metavar="N")
    parser.add_argument("--tflops", type=float, nargs="+", default=(50.0, 200.0), metavar="T")
    options = parser.parse_args()
    if options.ranks < 1 or min(options.tflops) <= 0:
        parser.error("expected --ranks of at least 1 and --tflops above 0")
    torch.set_num_threads(1)
    workload = described_workload(options.model, options.ranks, 1)
    rows = []
    with reporting(options) as emit:
        for name in described_machine.names():
            for tflops in options.tflops:
                row = measure(name, workload, tflops)
                if row is None:
                    print(f"{name:18s} no bucket is chosen: nothing overlaps there")
                    break
                rows.append(row)
                print(row, flush=True)
        status = judged(
            Goal(
                name=f"{row.machine} at {row.tflops:g} TFLOP/s, the chosen bucket over the default",
                found=row.over_default,
                most=SLOWER,
            )
            for row in rows
        )
        emit(
            {
                "model": options.model,
                "ranks": options.ranks,
                "rows": [dataclasses.asdict(row) for row in rows],
            }
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
