"""`autotune-offload verify`: real training steps, DeepSpeed's own configuration against the tuned one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune_offload import units
from autotune_offload.cli import options
from autotune_offload.cli.output import console, emit_json, stdout_set_aside
from autotune_offload.cli.progress import Reporter
from autotune_offload.cli.stored import find_profile, fitting_profile, open_store
from autotune_offload.errors import ConfigError
from autotune_offload.spread import FEWEST

if TYPE_CHECKING:
    from rich.console import Console

    from autotune_offload.config.tune import Tuned
    from autotune_offload.engine.toy_model import ModelSpec
    from autotune_offload.engine.trainee import Timing
    from autotune_offload.engine.verify import VariantResult, Verification
    from autotune_offload.records import Choice, Profile, StepDecision


_MICRO_BATCH = 2
_WIDTH_OVER_LAYERS = 85
"""Shape of the model made from a count, as in `ModelSpec`'s default and in small published GPTs."""

_BYTES_A_PARAMETER = 20
"""fp32 weight, two moments and gradient, 16-bit weight and gradient: what one engine keeps on the host."""


@click.command("verify", short_help="Train for real: DeepSpeed's own configuration against the tuned one.")
@click.option(
    "--steps", type=click.IntRange(min=FEWEST), default=20, show_default=True, help="Steps that count."
)
@click.option(
    "--warmup", type=click.IntRange(min=0), default=3, show_default=True, help="Steps before those."
)
@click.option(
    "--params",
    type=options.parameter_count,
    metavar="COUNT",
    help="Size of the GPT-style model that is trained [default: 19M].",
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A ds_config whose zero_optimization is compared [default: plain ZeRO-3 offload].",
)
@click.option(
    "--cpu-adam",
    is_flag=True,
    help="Train with DeepSpeedCPUAdam, whose C++ op DeepSpeed builds once, and with the decided step.",
)
@click.option("--profile", metavar="PROFILE", help="A file or the start of a key [default: this host's].")
@options.cache_option
@options.json_option
def command(
    *,
    steps: int,
    warmup: int,
    params: int | None,
    config: Path | None,
    cpu_adam: bool,
    profile: str | None,
    cache: Path | None,
    as_json: bool,
) -> None:
    """Train a small ZeRO-3 model for real and compare: as configured, and with the stored choice.

    The variants take turns step by step in one process, and a second engine of the first shows the
    noise. The tuned one has the keys that `apply` writes, and the chosen path in its optimizer where
    that beats DeepSpeed's own code. With --cpu-adam it has the decided optimizer step as well.
    """
    with stdout_set_aside():
        store = open_store(cache)
        found, path = find_profile(store, profile) if profile else fitting_profile(store)
        tuned, outcome = _train(found, config, params, cpu_adam=cpu_adam, steps=steps, warmup=warmup)
    if as_json:
        from autotune_offload.records import to_plain

        emit_json({**to_plain(outcome), "changes": to_plain(tuned.changes), "profile": str(path)})
    else:
        _print(console(), outcome, tuned)


def _train(
    profile: Profile, config: Path | None, params: int | None, *, cpu_adam: bool, steps: int, warmup: int
) -> tuple[Tuned, Verification]:
    from autotune_offload.config import tune
    from autotune_offload.engine.toy_model import ModelSpec
    from autotune_offload.engine.trainee import Variant
    from autotune_offload.engine.verify import verify
    from autotune_offload.machine import host, limits

    model = ModelSpec() if params is None else model_of(params)
    _check_memory(params or 0, limits.limits().available_bytes)
    own = _own_config(config, cpu_adam=cpu_adam)
    decided = profile.step if cpu_adam else None
    choice = profile.choice
    carried = choice.beats_deepspeed
    tuned = tune.tune(own, choice, version=host.software().deepspeed, carried=carried)
    with Reporter("training") as report:
        outcome = verify(
            [
                Variant(name="deepspeed", config=own),
                Variant(
                    name="tuned",
                    config=tuned.config,
                    prepare=partial(_carry_out, choice if carried else None, decided),
                ),
            ],
            model=model,
            steps=steps,
            warmup=warmup,
            progress=report,
        )
    return tuned, outcome


def _carry_out(choice: Choice | None, step: StepDecision | None, engine: Any) -> None:
    """Put path and step into the engine; where that cannot be, what is compared would not be the choice."""
    from autotune_offload.engine.attach import attach
    from autotune_offload.engine.step_attach import StepSpec, attach_step

    if choice is not None and (why_not := attach(engine, choice).why_not) is not None:
        raise ConfigError(f"the {choice.path} path cannot be verified with this configuration: {why_not}")
    if step is None or step.way == "deepspeed":
        return
    spec = StepSpec(step="fused", threads=step.threads, page_lock=step.back != "direct")
    if (why_not := attach_step(engine, spec, check=False).why_not) is not None:
        raise ConfigError(f"the decided step cannot be verified with this configuration: {why_not}")


def _own_config(config: Path | None, *, cpu_adam: bool = False) -> dict[str, Any]:
    """What is trained without us: plain ZeRO-3, or the ZeRO section of the user's file in its place."""
    from autotune_offload.config import reading
    from autotune_offload.engine.trainee import stock_config

    stock = stock_config(micro_batch=_MICRO_BATCH, torch_adam=not cpu_adam)
    if config is None:
        return stock
    zero = reading.read(config).get("zero_optimization")
    if not isinstance(zero, Mapping):
        raise ConfigError(f"{config} has no zero_optimization section; expected one with stage 3")
    return {**stock, "zero_optimization": dict(zero)}


def model_of(params: int) -> ModelSpec:
    """A model of about `params` parameters: 12 x layers x width squared, in the default's shape."""
    from autotune_offload.engine.toy_model import ModelSpec

    width = max(round((params * _WIDTH_OVER_LAYERS / 12) ** (1 / 3) / 64), 1) * 64
    return ModelSpec(layers=max(round(params / (12 * width**2)), 1), width=width)


def _check_memory(params: int, available_bytes: int) -> None:
    engines = 3  # both variants and the control
    needed = engines * _BYTES_A_PARAMETER * params
    if needed > available_bytes:
        raise ConfigError(
            f"three engines of {units.count(params)} parameters need about {units.size(needed)} of host memory, "
            f"and {units.size(available_bytes)} is available; give a smaller --params"
        )


def _print(out: Console, outcome: Verification, tuned: Tuned) -> None:
    from autotune_offload.cli.readable import heading, table

    out.print(
        f"{units.count(outcome.parameters)} parameters on {outcome.device}, {outcome.steps} steps after "
        f"{outcome.warmup} of warm-up, {units.duration(outcome.elapsed_seconds)}"
    )
    heading(out, "Median a step (spread: interquartile range over median)")
    grid = table("variant", right=("step", "backward", "gradient offload"))
    for result in (*outcome.variants, outcome.control):
        cells = (_timing(result.timing(metric)) for metric in ("step", "backward", "gradient_offload"))
        grid.add_row(result.name, *cells)
    out.print(grid)
    _print_phases(out, outcome)
    heading(out, "Times as fast as the first (interval of the median)")
    _print_ratios(out, [*outcome.variants[1:], outcome.control])
    heading(out, "Verdict")
    out.print(outcome.verdict)
    same = "the same in every step" if outcome.losses_identical else "not the same: see losses in --json"
    out.print(f"Losses: {same}.")
    _print_changes(out, tuned)


def _print_phases(out: Console, outcome: Verification) -> None:
    from autotune_offload.cli.readable import heading, table
    from autotune_offload.engine.trainee import PHASES

    heading(out, "Within the optimizer step, host time (spread)")
    grid = table("variant", right=("unscale", "Adam", "copy back"))
    for result in (*outcome.variants, outcome.control):
        grid.add_row(result.name, *(_timing(result.phases[phase]) for phase in PHASES))
    out.print(grid)
    out.print("With one compiled pass all three are done in the second.")


def _print_ratios(out: Console, results: list[VariantResult]) -> None:
    from autotune_offload.cli.readable import table

    grid = table("variant", right=("step", "backward", "gradient offload"))
    for result in results:
        ratios = (result.ratios[metric] for metric in ("step", "backward", "gradient_offload"))
        grid.add_row(
            result.name, *(f"{each.ratio:.2f}x ({each.low:.2f} to {each.high:.2f})" for each in ratios)
        )
    out.print(grid)
    out.print("control: a second engine of the first variant; what it differs by is noise")


def _print_changes(out: Console, tuned: Tuned) -> None:
    from autotune_offload.cli.apply import written
    from autotune_offload.cli.readable import bullets, heading

    heading(out, "Changed keys")
    bullets(
        out,
        (f"{written(change)}: {change.reason}" for change in tuned.changes) if tuned.changes else ("none",),
    )


def _timing(timing: Timing) -> str:
    spread = timing.iqr_seconds / timing.median_seconds if timing.median_seconds else None
    return f"{units.duration(timing.median_seconds)} ({units.percent(spread)})"
