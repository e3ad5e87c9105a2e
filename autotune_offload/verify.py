"""Trains for real, variant against variant: what a ds_config does to the step, not to a benchmark.

Every variant gets a ZeRO-3 engine of its own with the same seeded model, all in one process, and the
variants take turns step by step, so that whatever else the machine does meets all of them alike.
"""

from __future__ import annotations

import copy
import gc
import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotune_offload.errors import ConfigError, MeasurementError
from autotune_offload.measure import Progress

Metric = Literal["step", "backward", "gradient_offload"]
METRICS: tuple[Metric, ...] = ("step", "backward", "gradient_offload")
CONTROL = "control"
"""Name of the second engine of the first variant, whose difference from it is pure noise."""
CONFIDENCE = 0.95
FEWEST_STEPS = 6
"""Below this no interval of the median reaches `CONFIDENCE`: with 5 pairs even the whole range has 93.75 %."""


# -- what is trained ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A GPT-style model: `layers` blocks of `width`, fed rows of `length` of `vocabulary` tokens."""

    layers: int = 6
    width: int = 512
    length: int = 64
    vocabulary: int = 256

    def __post_init__(self) -> None:
        """Check what the attention heads need."""
        if self.width % 64 or min(self.layers, self.width, self.length, self.vocabulary) < 1:
            raise ConfigError(
                f"{self}: all fields must be positive and width a multiple of 64, the size of a head"
            )

    def build(self, seed: int = 0) -> nn.Module:
        """The model, with weights that depend on the seed alone; the caller's random state is kept."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return _Model(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What is compared: a complete ds_config, and what is done to the engine that comes of it.

    `prepare` is called with the engine before the first step.
    """

    name: str
    config: dict[str, Any]
    prepare: Callable[[Any], None] | None = None


def stock_config(
    *, micro_batch: int, accumulation_steps: int = 1, dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
) -> dict[str, Any]:
    """Plain ZeRO-3 with optimizer and parameters offloaded: a ds_config that says nothing more.

    The optimizer is torch's AdamW (`torch_adam`), on the host like DeepSpeedCPUAdam and reading the
    same gradients, but with no C++ extension to compile first.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation_steps,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-4, "torch_adam": True}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        },
    }
    return config if dtype == "fp32" else {**config, dtype: {"enabled": True}}


# -- what comes out -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One metric of one variant over the counted steps."""

    median_seconds: float
    iqr_seconds: float
    raw_seconds: tuple[float, ...]

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Median and interquartile range of at least two samples."""
        lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median_seconds=median, iqr_seconds=upper - lower, raw_seconds=tuple(seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Time of the first variant over the time of this one, step by step: above 1 this one is faster.

    `ratio` is the median over the steps. `low` and `high` are order statistics around it that hold the
    true median with at least `confidence`, whatever the distribution (the interval of the sign test).
    """

    ratio: float
    low: float
    high: float
    confidence: float

    @classmethod
    def of(cls, first: Sequence[float], other: Sequence[float]) -> Ratio:
        """Of two series of the same steps, at least `FEWEST_STEPS` long."""
        ratios = sorted(a / b for a, b in zip(first, other, strict=True))
        outside, confidence = _interval_of_the_median(len(ratios))
        low, high = ratios[outside], ratios[-1 - outside]
        return cls(ratio=statistics.median(ratios), low=low, high=high, confidence=confidence)

    def beyond(self, control: Ratio) -> bool:
        """Whether the interval leaves out 1 and the ratio is further from 1 than the control ever got."""
        reach = max(control.high, 1 / control.low)
        return (self.low > 1 or self.high < 1) and not 1 / reach <= self.ratio <= reach


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """How one variant trained: times, ratios to the first variant, the loss of every step, and a verdict."""

    name: str
    step: Timing
    backward: Timing
    gradient_offload: Timing
    ratios: dict[Metric, Ratio]
    losses: tuple[float, ...]
    verdict: str

    def timing(self, metric: Metric) -> Timing:
        """The timing of that metric."""
        timing: Timing = getattr(self, metric)
        return timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The outcome of `verify`. `control` is a second engine of the first variant, in the same rounds."""

    variants: tuple[VariantResult, ...]
    control: VariantResult
    device: str
    parameters: int
    steps: int
    warmup: int
    losses_identical: bool
    verdict: str
    elapsed_seconds: float


def verify(
    variants: Sequence[Variant],
    *,
    model: ModelSpec,
    steps: int,
    warmup: int,
    progress: Progress | None = None,
) -> Verification:
    """Train every variant for `warmup` + `steps` optimizer steps, in turns, and compare them with the first.

    Step: from the first forward of a step to the end of `engine.step()`, the device idle before and
    after. Backward: `engine.backward()`, summed over accumulation steps. Gradient offload: the time inside
    `partition_grads`, summed likewise; on an asynchronous device by events on the stream it works on.
    Warm-up steps count for the losses only.

    Raises:
        ConfigError: fewer than `FEWEST_STEPS` steps, no variant, two of the same name, batches of different
            sizes, a config that is not ZeRO-3 with optimizer offload, or more than one process.
    """
    _check(variants, steps=steps, warmup=warmup)
    began = time.perf_counter()
    report = progress or (lambda doing, share: None)
    runs = [*variants, Variant(name=CONTROL, config=variants[0].config, prepare=variants[0].prepare)]
    with ExitStack() as cleanup:
        cleanup.enter_context(single_process_environment())
        trainees = _start(runs, model, cleanup, report)
        _take_turns(trainees, model, steps=steps, warmup=warmup, report=report)
        results = _compare(trainees, warmup=warmup)
        engine = trainees[0].engine
        device, parameters = str(engine.device), sum(p.ds_numel for p in engine.module.parameters())
        del engine
    return Verification(
        variants=tuple(results[:-1]),
        control=results[-1],
        device=device,
        parameters=parameters,
        steps=steps,
        warmup=warmup,
        losses_identical=all(result.losses == results[0].losses for result in results),
        verdict=" ".join(result.verdict for result in results[1:-1]) or results[0].verdict,
        elapsed_seconds=time.perf_counter() - began,
    )


@contextmanager
def single_process_environment() -> Iterator[None]:
    """What `deepspeed.init_distributed` needs to start as a single process, while inside.

    Where a launcher has set RANK, nothing is touched. Afterwards `os.environ` is as before.
    """
    if "RANK" in os.environ:
        yield
        return
    port = _free_port()
    # LOCAL_SIZE: without it DeepSpeed up to 0.15.4 asks numactl, which may not be installed.
    numbers = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_SIZE": 1, "MASTER_PORT": port}
    before = dict(os.environ)
    os.environ.update({name: str(number) for name, number in numbers.items()}, MASTER_ADDR="127.0.0.1")
    # DeepSpeed builds its extensions with ninja, which is installed next to Python but maybe not on the path.
    os.environ["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        # DeepSpeed's shared-memory op leaves its buffer of 66 MB behind, under a name with the port in it.
        for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{port}_*"):
            buffer.unlink(missing_ok=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


# -- the model ------------------------------------------------------------------------------------


class _Linear(nn.Linear):
    """In fp32 on the CPU: torch's bf16 product is up to 50 times slower there without AVX-512."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return super().forward(x)
        return F.linear(x.float(), self.weight.float(), self.bias.float()).to(x.dtype)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = _Linear(width, 3 * width), _Linear(width, width)
        self.up, self.down = _Linear(width, 4 * width), _Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, 64))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        mlp: Tensor = self.down(F.gelu(self.up(self.norm_mlp(x))))
        return x + mlp


class _Model(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.tokens = nn.Embedding(spec.vocabulary, spec.width)
        self.blocks = nn.Sequential(*(_Block(spec.width) for _ in range(spec.layers)))
        self.norm, self.head = nn.LayerNorm(spec.width), _Linear(spec.width, spec.vocabulary)

    def forward(self, rows: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.tokens(rows[:, :-1]))))
        return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def _counting_rows(spec: ModelSpec, shape: tuple[int, int], step: int) -> Tensor:
    """Rows of shape (*shape, length + 1) that count up from anywhere: easy to learn, so that the loss falls."""
    starts = torch.randint(spec.vocabulary, (*shape, 1), generator=torch.Generator().manual_seed(step))
    return (starts + torch.arange(spec.length + 1)) % spec.vocabulary


# -- training and timing --------------------------------------------------------------------------


_BUILDING_SHARE = 0.3
"""How much of the progress is the making of the engines: a guess, for the bar alone."""


class _Clock:
    """Marks moments on the current stream: events where the device runs on its own, else the host's clock.

    An event marks without stopping anything. Which of the two is DeepSpeed's own rule for its timers.
    """

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self.by_host = bool(accelerator.use_host_timers())

    def mark(self) -> Any:
        if self.by_host:
            return time.perf_counter()
        event = self.accelerator.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, spans: Sequence[tuple[Any, Any]]) -> float:
        """Total of the spans; the device must have finished them."""
        if self.by_host:
            return math.fsum(end - start for start, end in spans)
        return math.fsum(start.elapsed_time(end) for start, end in spans) / 1e3


@dataclass(slots=True)
class _Trainee:
    name: str
    engine: Any
    clock: _Clock
    offload_spans: list[tuple[Any, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: dict[Metric, list[float]] = field(default_factory=lambda: {metric: [] for metric in METRICS})

    def watch_offload(self) -> Callable[[], None]:
        """Time every `partition_grads` of this engine, whoever supplies it; returns what undoes that."""
        optimizer = self.engine.optimizer
        inner, own = optimizer.partition_grads, "partition_grads" in vars(optimizer)

        def partition_grads(*args: Any, **kwargs: Any) -> Any:
            start = self.clock.mark()
            result = inner(*args, **kwargs)
            self.offload_spans.append((start, self.clock.mark()))
            return result

        def undo() -> None:
            if own:
                optimizer.partition_grads = inner
            else:
                del optimizer.partition_grads

        optimizer.partition_grads = partition_grads
        return undo

    def train(self, micro_batches: Tensor) -> None:
        """One optimizer step over micro-batches of shape (accumulation steps, batch, length + 1)."""
        self.offload_spans.clear()
        losses: list[Tensor] = []
        backward_spans: list[tuple[Any, Any]] = []
        self.clock.accelerator.synchronize()
        began = time.perf_counter()
        for rows in micro_batches:
            loss = self.engine(rows)
            start = self.clock.mark()
            self.engine.backward(loss)
            backward_spans.append((start, self.clock.mark()))
            self.engine.step()
            losses.append(loss.detach())
        self.clock.accelerator.synchronize()
        self._record(time.perf_counter() - began, backward_spans)
        self.losses.append(statistics.fmean(loss.item() for loss in losses))

    def _record(self, step_seconds: float, backward_spans: Sequence[tuple[Any, Any]]) -> None:
        if not self.offload_spans:
            raise MeasurementError(
                f"{self.name}: DeepSpeed never called partition_grads in a step, so there is no gradient offload"
                " to time; expected plain ZeRO-3: turn off features that bypass it, such as DeepCompile"
            )
        self.seconds["step"].append(step_seconds)
        self.seconds["backward"].append(self.clock.seconds(backward_spans))
        self.seconds["gradient_offload"].append(self.clock.seconds(self.offload_spans))


def _start(runs: Sequence[Variant], model: ModelSpec, cleanup: ExitStack, report: Progress) -> list[_Trainee]:
    import deepspeed.comm
    from deepspeed.accelerator import get_accelerator

    if not deepspeed.comm.is_initialized():
        cleanup.callback(_leave_process_group)
    cleanup.callback(_release_memory)
    trainees: list[_Trainee] = []
    cleanup.callback(trainees.clear)
    for number, variant in enumerate(runs):
        report(f"building {variant.name}", _BUILDING_SHARE * number / len(runs))
        # A copy: DeepSpeed up to 0.15 takes keys out of the dict it is given.
        engine = deepspeed.initialize(model=model.build(), config=copy.deepcopy(variant.config))[0]
        cleanup.callback(engine.destroy)
        if variant.prepare:
            variant.prepare(engine)
        trainee = _Trainee(name=variant.name, engine=engine, clock=_Clock(get_accelerator()))
        cleanup.callback(trainee.watch_offload())
        trainees.append(trainee)
    return trainees


def _leave_process_group() -> None:
    import deepspeed.comm

    if deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()


def _release_memory() -> None:
    from deepspeed.accelerator import get_accelerator

    gc.collect()
    get_accelerator().empty_cache()


def _take_turns(
    trainees: Sequence[_Trainee], model: ModelSpec, *, steps: int, warmup: int, report: Progress
) -> None:
    """Rounds of one step each. Who starts moves on from round to round, and every other round runs backwards."""
    first = trainees[0].engine
    batch, accumulation = first.train_micro_batch_size_per_gpu(), first.gradient_accumulation_steps()
    for number in range(warmup + steps):
        report("training", _BUILDING_SHARE + (1 - _BUILDING_SHARE) * number / (warmup + steps))
        rows = _counting_rows(model, (accumulation, batch), number).to(first.device)
        for trainee in _order(trainees, number):
            trainee.train(rows)


def _order(trainees: Sequence[_Trainee], number: int) -> Sequence[_Trainee]:
    start = number // 2 % len(trainees)
    rotated = [*trainees[start:], *trainees[:start]]
    return rotated[::-1] if number % 2 else rotated


# -- judging --------------------------------------------------------------------------------------


def _compare(trainees: Sequence[_Trainee], *, warmup: int) -> list[VariantResult]:
    times = [{metric: series[warmup:] for metric, series in t.seconds.items()} for t in trainees]
    ratios = [{metric: Ratio.of(times[0][metric], mine[metric]) for metric in METRICS} for mine in times]
    return [
        VariantResult(
            name=trainee.name,
            step=Timing.of(mine["step"]),
            backward=Timing.of(mine["backward"]),
            gradient_offload=Timing.of(mine["gradient_offload"]),
            ratios=own,
            losses=tuple(trainee.losses),
            verdict=_verdict(trainee.name, trainees[0].name, own, control=ratios[-1])
            + _loss_remark(trainee.losses, trainees[0].losses),
        )
        for trainee, mine, own in zip(trainees, times, ratios, strict=True)
    ]


def _verdict(name: str, first: str, ratios: dict[Metric, Ratio], *, control: dict[Metric, Ratio]) -> str:
    found = [
        _difference(metric, ratios[metric]) for metric in METRICS if ratios[metric].beyond(control[metric])
    ]
    if name == first:
        return f"{name}: what the others are compared with."
    if found:
        return f"{name} against {first}: {', '.join(found)}."
    low, high = ratios["step"].low, ratios["step"].high
    return f"{name} against {first}: no difference beyond the noise (step {low:.2f}x to {high:.2f}x)."


def _loss_remark(losses: Sequence[float], expected: Sequence[float]) -> str:
    """Nothing where every loss is the same to the last bit."""
    for number, (mine, theirs) in enumerate(zip(losses, expected, strict=True), start=1):
        if mine != theirs:
            return f" Its losses differ from step {number} on: {mine:.9g}, not {theirs:.9g}."
    return ""


def _difference(metric: Metric, found: Ratio) -> str:
    name = metric.replace("_", " ")
    if found.ratio > 1:
        return f"{name} {found.ratio:.2f}x faster ({found.low:.2f}x to {found.high:.2f}x)"
    return f"{name} {1 / found.ratio:.2f}x slower ({1 / found.high:.2f}x to {1 / found.low:.2f}x)"


def _interval_of_the_median(count: int) -> tuple[int, float]:
    """How many of `count` sorted values lie outside the interval at each end, and what it then holds.

    The number of values below the true median is binomial with 1/2, so dropping k at each end leaves
    out the median with probability 2 P(X <= k). See David and Nagaraja, Order Statistics, 7.1.
    """
    outside, miss = 0, 2.0 ** (1 - count)
    while (wider := miss + 2.0 ** (1 - count) * math.comb(count, outside + 1)) <= 1 - CONFIDENCE:
        outside, miss = outside + 1, wider
    return outside, 1 - miss


def _check(variants: Sequence[Variant], *, steps: int, warmup: int) -> None:
    if steps < FEWEST_STEPS or warmup < 0:
        raise ConfigError(
            f"steps={steps}, warmup={warmup}: expected at least {FEWEST_STEPS} steps, the fewest that give a"
            f" {CONFIDENCE:.0%} interval, and a warm-up of 0 or more"
        )
    names = [variant.name for variant in variants]
    if not names or len({*names, CONTROL}) <= len(names):
        raise ConfigError(f"variants named {names}: expected one or more, all different and none {CONTROL!r}")
    if (world_size := os.environ.get("WORLD_SIZE", "1")) != "1" and "RANK" in os.environ:
        raise ConfigError(f"WORLD_SIZE={world_size}: verify trains in one process; run it without a launcher")
    for variant in variants:
        _check_config(variant, variants[0])


def _check_config(variant: Variant, first: Variant) -> None:
    zero = variant.config.get("zero_optimization") or {}
    if zero.get("stage") != 3 or (zero.get("offload_optimizer") or {}).get("device", "none") == "none":
        raise ConfigError(
            f"variant {variant.name!r}: expected zero_optimization.stage 3 with offload_optimizer.device set,"
            f" found {zero}; start from stock_config()"
        )
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        mine, expected = variant.config.get(key), first.config.get(key)
        if mine != expected:
            raise ConfigError(
                f"{key} is {mine} in {variant.name!r} and {expected} in {first.name!r}; variants must train the"
                " same batches to be comparable"
            )
