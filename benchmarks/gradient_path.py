"""How long gradients take to leave in the running ZeRO-3 optimizer: DeepSpeed's own code against a path.

One engine in one process trains a 67M-parameter bf16 MLP; its steps alternate between DeepSpeed's own
code and the attached path, so that both meet the same machine. Measured a step: host seconds inside
`partition_grads`, the backward passes, the whole step. Beside them, in the same rounds, the floor: one
pass that copies and casts every gradient partition once; with accumulation, one pass more for each
micro-step that only adds, since its sum has to be in memory when the next one comes. On the CPU the
layers multiply in fp32, since torch needs seconds for a bf16 backward on a processor without AVX-512;
gradients are bf16 all the same.

    python -m benchmarks.gradient_path                  a table
    python -m benchmarks.gradient_path --accumulation 1 --pairs 30
    PYTHONPATH=.cache/matrix/0.16.9 python -m benchmarks.gradient_path      another DeepSpeed, after `make matrix`
    python -m benchmarks.gradient_path --json           one JSON object and nothing else:
        partition_grads_ratio, backward_ratio, step_ratio   stock over ours, medians of the pairs
        floor_ratio                                         ours over the floor
        bit_identical                                       fp32 gradients of both ways, every pair
        cases                                               every case with medians and spread

Needs DeepSpeed's shared-memory op (built once, about 30 s). Exits 1 when a gradient differs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotune_offload.engine.attach import attach, detach
from autotune_offload.engine.trainee import single_process_environment
from autotune_offload.machine.accelerator import deepspeed_accelerator
from autotune_offload.machine.device import Device
from autotune_offload.machine.host import software
from autotune_offload.records import Accumulate, Candidate
from benchmarks.output import add_output, reporting
from benchmarks.results import Number, pair

LAYERS, WIDTH, ROWS = 16, 2048, 4


class Placed(Candidate, frozen=True, kw_only=True):
    """A path, and where micro-steps are added up before it."""

    accumulate: Accumulate = "device"


@dataclass(slots=True, kw_only=True)
class Series:
    """Seconds a step of one way, by what was timed."""

    partition_grads: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)


METRICS = ("partition_grads", "backward", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of the model, layers of `width` by `width`, and of a batch."""

    layers: int = LAYERS
    width: int = WIDTH
    rows: int = ROWS


class Layer(nn.Linear):
    """Without bias; multiplies in fp32 on the CPU."""

    def __init__(self, width: int = WIDTH) -> None:
        """Of shape (width, width)."""
        super().__init__(width, width, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Shape (rows, width) to the same."""
        if rows.device.type != "cpu":
            return super().forward(rows)
        return F.linear(rows.float(), self.weight.float()).to(rows.dtype)


def mlp(shape: Shape | None = None) -> nn.Module:
    """67,108,864 parameters, if nothing else is said."""
    shape = shape or Shape()
    return nn.Sequential(*(Layer(shape.width) for _ in range(shape.layers)))


def config(accumulation_steps: int, pin_memory: bool) -> dict[str, Any]:
    """ZeRO-3 with both offloads and torch's AdamW, which needs no C++ build."""
    section = {"device": "cpu", "pin_memory": pin_memory}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulation_steps,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "offload_optimizer": section, "offload_param": section},
    }


class Watch:
    """Host seconds in `partition_grads`, whoever supplies it."""

    def __init__(self, optimizer: Any) -> None:
        """Wraps nothing yet."""
        self.optimizer = optimizer
        self.seconds = 0.0

    @contextmanager
    def on(self) -> Iterator[None]:
        """Time the method inside, and leave the instance as it was."""
        own = vars(self.optimizer).get("partition_grads")
        self.optimizer.partition_grads = self._timed(self.optimizer.partition_grads)
        try:
            yield
        finally:
            del self.optimizer.partition_grads
            if own is not None:
                self.optimizer.partition_grads = own

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def train_step(
    engine: Any, watch: Watch, accumulation_steps: int, batches: list[Tensor], series: Series
) -> Tensor:
    """One optimizer step, timed; returns a copy of the fp32 gradients as they were before it."""
    synchronize = deepspeed_accelerator().synchronize
    watch.seconds, backward = 0.0, 0.0
    gradients = torch.empty(0)
    began = time.perf_counter()
    copying = 0.0
    for micro_step in range(accumulation_steps):
        loss = engine(batches[micro_step]).float().pow(2).mean()
        synchronize()  # what the forward pass has queued is not the backward pass's
        before = time.perf_counter()
        with watch.on():
            engine.backward(loss)
        backward += time.perf_counter() - before
        if micro_step == accumulation_steps - 1:
            before = time.perf_counter()
            gradients = torch.cat(
                [group.grad.clone() for group in engine.optimizer.fp32_partitioned_groups_flat]
            )
            copying = time.perf_counter() - before
        engine.step()
    series.step.append(time.perf_counter() - began - copying)
    series.backward.append(backward)
    series.partition_grads.append(watch.seconds)
    return gradients


def floor_seconds(
    accumulation_steps: int, sources: list[Tensor], sums: list[Tensor], destination: Tensor
) -> float:
    """The least that must be read and written: each micro-step's sum kept, the last one's widened to fp32."""
    began = time.perf_counter()
    for micro_step in range(accumulation_steps - 1):
        for kept, source in zip(sums, sources, strict=True):
            kept.add_(source) if micro_step else kept.copy_(source)
    offset = 0
    for kept, source in zip(sums, sources, strict=True):
        if accumulation_steps > 1:
            source = kept.add_(source)
        destination[offset : offset + source.numel()].copy_(source)
        offset += source.numel()
    return time.perf_counter() - began


def run_case(
    accumulation_steps: int,
    spec: Placed,
    rounds: int,
    warmup: int,
    *,
    shape: Shape | None = None,
    device: Device | None = None,
) -> dict[str, Any]:
    """Alternate both ways over `rounds` pairs of steps on the same data and weights.

    The learning rate is small and both ways give the same gradients, so the pairs stay comparable; the
    gradients of a pair are compared by undoing the step: weights are restored before the second way. DeepSpeed's own
    code page-locks where the path does. `device` is what the path is built on; None is DeepSpeed's accelerator.
    """
    import deepspeed

    shape = shape or Shape()
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(
        model=mlp(shape), config=config(accumulation_steps, spec.path == "pinned")
    )
    watch = Watch(engine.optimizer)
    ways = {"stock": Series(), "ours": Series()}
    floors: list[float] = []
    identical = True
    elements = sum(group.numel() for group in engine.optimizer.fp32_partitioned_groups_flat)
    sources = [torch.randn(shape.width**2).bfloat16() for _ in range(shape.layers)]
    sums = [torch.zeros_like(source) for source in sources]
    destination = torch.zeros(elements)
    for round_index in range(-warmup, rounds):
        batches = [
            torch.randn(shape.rows, shape.width).bfloat16().to(engine.device)
            for _ in range(accumulation_steps)
        ]
        order = ("stock", "ours") if round_index % 2 else ("ours", "stock")
        seen: dict[str, Tensor] = {}
        with torch.no_grad():
            kept = _weights(engine)
        for way in order:
            _restore(engine, kept)
            if way == "ours":
                status = attach(engine, spec, device, check=False)
                if status.why_not:
                    raise SystemExit(f"the path was not attached: {status.why_not}")
            series = ways[way] if round_index >= 0 else Series()
            seen[way] = train_step(engine, watch, accumulation_steps, batches, series)
            detach(engine)
        identical &= torch.equal(seen["stock"].view(torch.int32), seen["ours"].view(torch.int32))
        if round_index >= 0:
            floors.append(floor_seconds(accumulation_steps, sources, sums, destination))
    engine.destroy()
    return summary(accumulation_steps, spec, ways, floors, identical)


def _weights(engine: Any) -> list[tuple[Tensor, Tensor]]:
    """Copies of the master weights and of what the forward pass reads."""
    z = engine.optimizer
    return [
        (flat, flat.detach().clone())
        for flat in [*z.fp32_partitioned_groups_flat, *(p.ds_tensor for p in engine.module.parameters())]
    ]


def _restore(engine: Any, kept: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for flat, before in kept:
            flat.data.copy_(before)


def summary(
    accumulation_steps: int, spec: Placed, ways: dict[str, Series], floors: list[float], identical: bool
) -> dict[str, Any]:
    """Medians, spread and paired ratios of one case."""
    case: dict[str, Any] = {
        "accumulation_steps": accumulation_steps,
        "path": spec.path,
        "cast": spec.cast,
        "host_threads": spec.host_threads,
        "accumulate": spec.accumulate,
        "pairs": len(floors),
        "bit_identical": identical,
        "floor_seconds": statistics.median(floors),
    }
    for metric in METRICS:
        stock, ours = (getattr(ways[way], metric) for way in ("stock", "ours"))
        case[f"{metric}_ratio"] = statistics.median(a / b for a, b in zip(stock, ours, strict=True))
        for way, seconds in (("stock", stock), ("ours", ours)):
            low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
            case[f"{metric}_{way}_seconds"] = {"median": middle, "iqr": high - low, "raw": seconds}
    case["floor_ratio"] = statistics.median(
        ours / floor for ours, floor in zip(ways["ours"].partition_grads, floors, strict=True)
    )
    return case


def numbers(case: dict[str, Any]) -> Iterator[Number]:
    """One case as numbers to record."""
    told = f"accumulation {case['accumulation_steps']}"
    if (case["path"], case["cast"], case["host_threads"]) != ("direct", "host", 0):
        told += f", {case['path']}, cast on the {case['cast']}, {case['host_threads']} host threads"
    for metric in METRICS:
        raw = (case[f"{metric}_{way}_seconds"]["raw"] for way in ("stock", "ours"))
        yield from pair(f"{metric}, {told}", *raw)
    yield Number(
        what=f"partition_grads over the floor, {told}", value=case["floor_ratio"], samples=case["pairs"]
    )


def show(case: dict[str, Any]) -> None:
    """One case as lines."""
    print(
        f"accumulation {case['accumulation_steps']}, {case['path']} cast on the {case['cast']}, "
        f"{case['host_threads']} host threads, {case['pairs']} pairs, "
        f"gradients {'identical' if case['bit_identical'] else 'DIFFERENT'}"
    )
    for metric in METRICS:
        stock, ours = case[f"{metric}_stock_seconds"], case[f"{metric}_ours_seconds"]
        print(
            f"  {metric:16s} stock {stock['median'] * 1e3:7.1f} ms (IQR {stock['iqr'] * 1e3:.1f})   "
            f"ours {ours['median'] * 1e3:7.1f} ms (IQR {ours['iqr'] * 1e3:.1f})   {case[f'{metric}_ratio']:.2f}x"
        )
    print(f"  floor {case['floor_seconds'] * 1e3:.1f} ms, ours takes {case['floor_ratio']:.2f} times that")


def main() -> int:
    """Run the cases and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_output(parser)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--accumulation", type=int, nargs="*", default=(1, 4), metavar="STEPS")
    parser.add_argument("--threads", type=int, nargs="*", default=None, help="host threads to try; default 0")
    parser.add_argument("--path", default="direct", choices=("direct", "pinned", "staged"))
    parser.add_argument("--cast", default="host", choices=("device", "host"))
    parser.add_argument(
        "--accumulate", default="device", choices=("device", "host"), help="where; on the CPU in place"
    )
    options = parser.parse_args()
    cases = []
    with reporting(options) as emit, single_process_environment():
        for accumulation_steps in options.accumulation:
            for threads in options.threads if options.threads is not None else [0]:
                spec = Placed(
                    path=options.path,
                    cast=options.cast,
                    buffer_bytes=1 << 22,
                    buffer_count=3,
                    host_threads=threads,
                    accumulate=options.accumulate,
                )
                cases.append(run_case(accumulation_steps, spec, options.pairs, warmup=2))
                show(cases[-1])
        identical = all(case["bit_identical"] for case in cases)
        ratios = ("partition_grads_ratio", "backward_ratio", "step_ratio", "floor_ratio")
        emit(
            {
                **{name: cases[0][name] for name in ratios},
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
