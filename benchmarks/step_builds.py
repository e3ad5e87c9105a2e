"""The pass of the optimizer step, built for narrower and wider vectors, against the floor of memory.

    python -m benchmarks.step_builds [--elements 33554432] [--rounds 15] [--json]

Builds: what `-march=native` makes of it (used), the same with 512-bit vectors preferred, and AVX2 with fused
multiply-add (x86-64-v3). Each runs the whole pass (scale, AdamW, bf16) over memory of its own by as many threads as
there are cores, in turn in changing order; all leave the same bits, which is checked. What this processor cannot run is
left out.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from autotune_offload.machine import adam, compiled
from autotune_offload.machine.accelerator import AcceleratorDevice
from benchmarks.output import add_output, reporting
from benchmarks.results import median
from benchmarks.step import Floor

BUILDS = {
    "native": (),
    "native, 512-bit": ("-mprefer-vector-width=512",),
    "AVX2": ("-march=x86-64-v3",),
}
NEEDS = {"native": "fma", "native, 512-bit": "avx512f", "AVX2": "avx2"}
SETTING = adam.Setting(
    step=7, rate=1e-3, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01, corrects_bias=True
)


class Build:
    """One build of the pass over memory of its own."""

    def __init__(self, flags: tuple[str, ...], elements: int, threads: int) -> None:
        library = compiled.library(adam.SOURCE, *adam.FLAGS, *flags)
        if isinstance(library, str):
            raise SystemExit(library)
        self._function = library.adam_to_bfloat16
        self._function.argtypes = (*([ctypes.c_void_p] * 5), ctypes.c_ssize_t, *([ctypes.c_void_p] * 2))
        self._function.restype = None
        generator = torch.Generator().manual_seed(0)
        self.memory = [torch.randn(elements, generator=generator) for _ in range(4)]
        self.memory[3].abs_()
        self.memory.append(torch.empty(elements, dtype=torch.bfloat16))
        self._values = adam.constants(SETTING, (0.478, 0.993), 0.5, decoupled=True)
        self._parts: list[list[Tensor]] = [
            list(parts) for parts in zip(*(m.chunk(threads) for m in self.memory), strict=True)
        ]
        self._pool = ThreadPoolExecutor(threads)

    def seconds(self) -> float:
        """Of one pass."""
        done = (ctypes.c_uint8 * 1)()
        began = time.perf_counter()
        running = [
            self._pool.submit(
                self._function,
                *(t.data_ptr() for t in part),
                part[0].numel(),
                ctypes.byref(self._values),
                ctypes.addressof(done),
            )
            for part in self._parts
        ]
        for each in running:
            each.result()
        return time.perf_counter() - began


def flags_of_processor() -> frozenset[str]:
    """What the kernel says that it can do."""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        return frozenset(word for line in lines if line.startswith("flags") for word in line.split())


def same(builds: list[Build]) -> bool:
    """Whether all have left the same bits."""
    words = {2: torch.int16, 4: torch.int32}
    first = builds[0].memory
    return all(
        torch.equal(a.view(words[a.element_size()]), b.view(words[b.element_size()]))
        for other in builds[1:]
        for a, b in zip(first, other.memory, strict=True)
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_output(parser)
    parser.add_argument("--elements", type=int, default=1 << 25)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with reporting(options) as emit:
        threads, able = AcceleratorDevice().most_threads(), flags_of_processor()
        builds: dict[str, Any] = {
            name: Build(flags, options.elements, threads)
            for name, flags in BUILDS.items()
            if NEEDS[name] in able
        }
        floor = Floor(options.elements, threads)
        taken: dict[str, list[float]] = {name: [] for name in (*builds, "floor")}
        for index in range(-2, options.rounds):
            names = [*taken]
            turn = index % len(names)
            for name in names[turn:] + names[:turn]:
                seconds = (floor if name == "floor" else builds[name]).seconds()
                if index >= 0:
                    taken[name].append(seconds)
        identical = same([*builds.values()])
        print(f"{options.elements:,} elements, {threads} threads, {options.rounds} rounds, "
              f"bits {'identical' if identical else 'NOT IDENTICAL'}")  # fmt: skip
        found = {}
        for name, each in taken.items():
            low, middle, high = statistics.quantiles(each, n=4, method="inclusive")
            ratio = statistics.median(a / b for a, b in zip(each, taken["floor"], strict=True))
            found[name] = {"median_seconds": middle, "iqr_seconds": high - low, "floor_ratio": ratio}
            print(
                f"  {name:16s} {middle * 1e3:6.1f} ms (IQR {(high - low) * 1e3:.1f})   {ratio:.2f} of the floor"
            )
        numbers = [median(f"the pass, {name}", each, scale=1e3) for name, each in taken.items()]
        emit({"threads": threads, "identical": identical, "builds": found}, numbers)
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())
