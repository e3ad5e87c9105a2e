"""Trains for real, variant against variant: what a ds_config does to the step, not to a benchmark.

Every variant gets a ZeRO-3 engine of its own with the same seeded model, all in one process, and the
variants take turns step by step, so that whatever else the machine does meets all of them alike.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from autotune_offload.config.sections import section
from autotune_offload.engine.toy_model import ModelSpec
from autotune_offload.engine.trainee import (
    BUILDING_SHARE,
    METRICS,
    Metric,
    Phase,
    Timing,
    Trainee,
    Variant,
    counting_rows,
    single_process_environment,
    start_trainees,
)
from autotune_offload.errors import ConfigError
from autotune_offload.records import Progress
from autotune_offload.spread import CONFIDENCE, FEWEST, interval_of_median

CONTROL = "control"
"""Name of the second engine of the first variant, whose difference from it is pure noise."""


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
        """Of two series of the same steps, at least `FEWEST` long."""
        ratios = [a / b for a, b in zip(first, other, strict=True)]
        around = interval_of_median(ratios)
        return cls(
            ratio=statistics.median(ratios), low=around.low, high=around.high, confidence=around.confidence
        )

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
    phases: dict[Phase, Timing]
    """Of the optimizer step: host time within it. What the end of a step waits for is in none of them."""

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
    after. Backward: `engine.backward()`, summed over accumulation steps. Gradient offload: as `clock` counts it,
    from the first `partition_grads` to the end of the epilogue and of what it waits for, summed likewise.
    Warm-up steps count for the losses only.

    Raises:
        ConfigError: fewer than `FEWEST` steps, no variant, two of the same name, batches of different
            sizes, a config that is not ZeRO-3 with optimizer offload, or more than one process.
    """
    _check(variants, steps=steps, warmup=warmup)
    began = time.perf_counter()
    report = progress or (lambda doing, share: None)
    runs = [*variants, Variant(name=CONTROL, config=variants[0].config, prepare=variants[0].prepare)]
    with ExitStack() as cleanup:
        cleanup.enter_context(single_process_environment())
        trainees = start_trainees(runs, model, cleanup, report)
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


def _take_turns(
    trainees: Sequence[Trainee], model: ModelSpec, *, steps: int, warmup: int, report: Progress
) -> None:
    """Rounds of one step each. Who starts moves on from round to round, and every other round runs backwards."""
    first = trainees[0].engine
    batch, accumulation = first.train_micro_batch_size_per_gpu(), first.gradient_accumulation_steps()
    for number in range(warmup + steps):
        report("training", BUILDING_SHARE + (1 - BUILDING_SHARE) * number / (warmup + steps))
        rows = counting_rows(model, (accumulation, batch), number).to(first.device)
        for trainee in _order(trainees, number):
            trainee.train(rows)


def _order(trainees: Sequence[Trainee], number: int) -> Sequence[Trainee]:
    start = number // 2 % len(trainees)
    rotated = [*trainees[start:], *trainees[:start]]
    return rotated[::-1] if number % 2 else rotated


# -- judging --------------------------------------------------------------------------------------


def _compare(trainees: Sequence[Trainee], *, warmup: int) -> list[VariantResult]:
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
            phases={phase: Timing.of(series[warmup:]) for phase, series in trainee.phases.items()},
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


def _check(variants: Sequence[Variant], *, steps: int, warmup: int) -> None:
    if steps < FEWEST or warmup < 0:
        raise ConfigError(
            f"steps={steps}, warmup={warmup}: expected at least {FEWEST} steps, the fewest that give a"
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
    zero = section(variant.config, "zero_optimization")
    if zero.get("stage") != 3 or section(zero, "offload_optimizer").get("device", "none") == "none":
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
