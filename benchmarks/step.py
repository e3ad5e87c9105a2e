"""How long an optimizer step takes in the running ZeRO-3 optimizer: DeepSpeed's own against the compiled pass.

Two engines in one process train the same 67M-parameter bf16 MLP from the same weights on the same data, with
`DeepSpeedCPUAdam` and clipping at 1.0: one is DeepSpeed's own, the other has the pass in its step and the direct path
for its gradients. Their steps alternate, and after every pair all that a step leaves is
compared: fp32 gradients, master weights, both moments, 16-bit weights. Measured: the step phase (`engine.step()`, with
norms and all), the whole training step, and in the same rounds the floor: one pass over the 30 bytes that a parameter
has, by as many threads and without arithmetic to speak of.

    python -m benchmarks.step                           a table
    python -m benchmarks.step --pairs 30 --threads 1
    python -m benchmarks.step --json                    one JSON object and nothing else:
        step_phase_ratio, train_step_ratio              stock over ours, medians of the pairs
        floor_ratio                                     the pass over the floor
        bit_identical                                   everything compared, every pair
        cases                                           every case with medians and spread

The first three are those of the first case, which offloads optimizer and parameters, with gradients within the
clipping, so that DeepSpeed multiplies them by exactly 1. The second offloads the optimizer only; in the third every
gradient is clipped, so that the pass, too, writes it. Needs DeepSpeed's CPU Adam (built once, about a minute). Exits 1
when a bit differs.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autotune_offload.engine.attach import attach
from autotune_offload.engine.step_attach import StepSpec, attach_step
from autotune_offload.engine.trainee import single_process_environment
from autotune_offload.machine import compiled
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.machine.device import Device
from autotune_offload.machine.host import software
from autotune_offload.records import Candidate
from benchmarks.gradient_path import ROWS, Shape, mlp
from benchmarks.output import add_output, reporting
from benchmarks.results import Number, pair

CASES = ("both offloads", "optimizer only", "clipped")
METRICS = ("step_phase", "train_step")
CLIPPED_LOSS_FACTOR = 1e12
"""Makes every gradient norm exceed the clipping."""


def config(case: str) -> dict[str, Any]:
    """ZeRO-3 with DeepSpeed's CPU Adam."""
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    if case != "optimizer only":
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.01}},
        "zero_optimization": zero,
    }


def engine_of(case: str, shape: Shape | None = None) -> Any:
    """With seeded weights."""
    import deepspeed

    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(model=mlp(shape), config=config(case))
    return engine


class Floor:
    """One pass over the bytes of a step, by so many threads."""

    def __init__(self, elements: int, threads: int) -> None:
        """Memory of its own, as large as the job's."""
        library = compiled.library(Path(__file__).with_name("step_floor.c"))
        if isinstance(library, str):
            raise SystemExit(library)
        self._function = library.step_floor
        self._function.argtypes = (*([ctypes.c_void_p] * 5), ctypes.c_ssize_t)
        self._function.restype = None
        self._memory = [torch.zeros(elements) for _ in range(4)] + [
            torch.zeros(elements, dtype=torch.bfloat16)
        ]
        shares = zip(*(t.chunk(threads) for t in self._memory), strict=True)
        self._parts = [[tensor.data_ptr() for tensor in share] for share in shares]
        self._lengths = [part.numel() for part in self._memory[0].chunk(threads)]
        self._pool = ThreadPoolExecutor(threads)

    def seconds(self) -> float:
        """Of one pass."""
        began = time.perf_counter()
        calls = zip(self._parts, self._lengths, strict=True)
        for future in [self._pool.submit(self._function, *part, length) for part, length in calls]:
            future.result()
        return time.perf_counter() - began


class Pass:
    """Host seconds of the step's own work, from scaling to 16-bit weights: what the floor is compared with."""

    def __init__(self, optimizer: Any) -> None:
        """Wraps what is called for each sub-group."""
        self.seconds = 0.0
        for name in (
            "unscale_and_clip_grads",
            "_optimizer_step",
            "_reassign_or_swap_out_partitioned_parameters",
        ):
            setattr(optimizer, name, self._timed(getattr(optimizer, name)))

    def _timed(self, method: Any) -> Any:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def train_step(engine: Any, batch: Tensor, work: Pass, loss_factor: float) -> dict[str, float]:
    """Seconds of one step, by what was timed."""
    began, work.seconds = time.perf_counter(), 0.0
    engine.backward(engine(batch).float().pow(2).mean() * loss_factor)
    before = time.perf_counter()
    engine.step()
    ended = time.perf_counter()
    return {"step_phase": ended - before, "train_step": ended - began, "work": work.seconds}


def left_by(engine: Any) -> Iterator[Tensor]:
    """All that a step leaves."""
    z = engine.optimizer
    for master in z.fp32_partitioned_groups_flat:
        state = z.optimizer.state[master]
        yield from (master.detach(), master.grad, state["exp_avg"], state["exp_avg_sq"])
    yield from z.fp16_partitioned_groups_flat


def same(stock: Any, ours: Any) -> bool:
    """To the last bit."""
    words = {2: torch.int16, 4: torch.int32}
    pairs = zip(left_by(stock), left_by(ours), strict=True)
    return all(
        torch.equal(a.view(words[a.element_size()]), b.view(words[b.element_size()])) for a, b in pairs
    )


@contextmanager
def engines(
    case: str, threads: int, shape: Shape | None = None, device: Device | None = None
) -> Iterator[dict[str, Any]]:
    """One as DeepSpeed has it, one with the pass and the direct path."""
    both = {"stock": engine_of(case, shape), "ours": engine_of(case, shape)}
    spec = StepSpec(step="fused", threads=threads)
    status = attach_step(both["ours"], spec, device, check=False)
    path = Candidate(path="direct", cast="host", buffer_bytes=1 << 22, buffer_count=3, host_threads=0)
    status.why_not = status.why_not or attach(both["ours"], path, device, check=False).why_not
    if status.why_not:
        raise SystemExit(f"nothing was attached: {status.why_not}")
    try:
        yield both
    finally:
        for engine in both.values():
            engine.destroy()
    if status.why_not:
        raise SystemExit(f"the pass was taken out: {status.why_not}")


def run_case(
    case: str,
    threads: int,
    rounds: int,
    warmup: int = 3,
    *,
    shape: Shape | None = None,
    device: Device | None = None,
) -> dict[str, Any]:
    """Alternate both engines over `rounds` pairs of steps; `device` is what pass and path are built on."""
    shape = shape or Shape()
    seconds: dict[str, list[dict[str, float]]] = {"stock": [], "ours": []}
    floors: list[float] = []
    identical, clipped, loss_factor = True, 0, CLIPPED_LOSS_FACTOR if case == "clipped" else 1.0
    with engines(case, threads, shape, device) as both:
        floor = Floor(sum(g.numel() for g in both["ours"].optimizer.fp32_partitioned_groups_flat), threads)
        work = {way: Pass(engine.optimizer) for way, engine in both.items()}
        for round_index in range(-warmup, rounds):
            batch = torch.randn(shape.rows, shape.width).bfloat16().to(both["ours"].device)
            order = ("stock", "ours") if round_index % 2 else ("ours", "stock")
            found = {way: train_step(both[way], batch, work[way], loss_factor) for way in order}
            identical &= same(both["stock"], both["ours"])
            if round_index < 0:
                floor.seconds()
                continue
            clipped += float(both["ours"].get_global_grad_norm()) > 1.0
            floors.append(floor.seconds())
            for way in order:
                seconds[way].append(found[way])
    return summary(case, threads, seconds, floors, identical=identical, clipped=clipped)


def summary(
    case: str, threads: int, seconds: dict[str, list[dict[str, float]]], floors: list[float], *, identical: bool,
    clipped: int,
) -> dict[str, Any]:  # fmt: skip
    """Medians, spread and paired ratios of one case."""
    found: dict[str, Any] = {
        "case": case,
        "threads": threads,
        "pairs": len(floors),
        "clipped_steps": clipped,
        "bit_identical": identical,
        "floor_seconds": statistics.median(floors),
        "floor_ratio": statistics.median(
            ours["work"] / f for ours, f in zip(seconds["ours"], floors, strict=True)
        ),
    }
    for metric in (*METRICS, "work"):
        pairs = zip(seconds["stock"], seconds["ours"], strict=True)
        found[f"{metric}_ratio"] = statistics.median(stock[metric] / ours[metric] for stock, ours in pairs)
        for way, steps in seconds.items():
            raw = [step[metric] for step in steps]
            low, middle, high = statistics.quantiles(raw, n=4, method="inclusive")
            found[f"{metric}_{way}_seconds"] = {"median": middle, "iqr": high - low, "raw": raw}
    return found


def numbers(case: dict[str, Any]) -> Iterator[Number]:
    """One case as numbers to record."""
    for metric, words in zip(METRICS, ("step phase", "training step"), strict=True):
        raw = (case[f"{metric}_{way}_seconds"]["raw"] for way in ("stock", "ours"))
        yield from pair(f"{words}, {case['case']}", *raw)
    yield Number(
        what=f"the pass over the floor, {case['case']}", value=case["floor_ratio"], samples=case["pairs"]
    )


def show(case: dict[str, Any]) -> None:
    """One case as lines."""
    print(
        f"{case['case']}, {case['threads']} host threads, {case['pairs']} pairs, {case['clipped_steps']} of them "
        f"clipped, everything {'identical' if case['bit_identical'] else 'NOT IDENTICAL'}"
    )
    for metric in (*METRICS, "work"):
        stock, ours = case[f"{metric}_stock_seconds"], case[f"{metric}_ours_seconds"]
        print(
            f"  {metric:10s} stock {stock['median'] * 1e3:7.1f} ms (IQR {stock['iqr'] * 1e3:.1f})   "
            f"ours {ours['median'] * 1e3:7.1f} ms (IQR {ours['iqr'] * 1e3:.1f})   {case[f'{metric}_ratio']:.2f}x"
        )
    print(
        f"  floor {case['floor_seconds'] * 1e3:.1f} ms, our work takes {case['floor_ratio']:.2f} times that"
    )


def main() -> int:
    """Run the cases and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_output(parser)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=None, help="host threads of the pass (all CPUs)")
    parser.add_argument("--cases", nargs="*", default=CASES, choices=CASES)
    options = parser.parse_args()
    if options.pairs < 2:
        parser.error(f"--pairs {options.pairs}: quartiles need at least 2")
    with reporting(options) as emit, single_process_environment():
        cases = []
        for name in options.cases:
            cases.append(run_case(name, options.threads or AcceleratorDevice().most_threads(), options.pairs))
            show(cases[-1])
        identical = all(case["bit_identical"] for case in cases)
        emit(
            {
                **{name: cases[0][name] for name in ("step_phase_ratio", "train_step_ratio", "floor_ratio")},
                "bit_identical": identical,
                "deepspeed": software().deepspeed,
                "cases": cases,
            },
            [number for case in cases for number in numbers(case)],
        )
    return 0 if identical else 1


if __name__ == "__main__":
    os.environ.setdefault("DS_LOG_LEVEL", "error")
    sys.exit(main())
