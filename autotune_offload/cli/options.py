"""Options that several verbs share, and the values that they accept."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from autotune_offload.records import Workload

Command = TypeVar("Command", bound=Callable[..., Any])

_COUNT = re.compile(
    r"(?P<number>\d+(_\d+)*(\.\d+)?(e\+?\d{1,3})?)\s*(?P<unit>[kmbt]?)", re.IGNORECASE | re.ASCII
)
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_LARGEST_COUNT = 10**15

_SIZE = re.compile(r"(?P<number>\d+(_\d+)*(\.\d+)?)\s*(?P<unit>[a-z]*)", re.IGNORECASE | re.ASCII)
_SIZE_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}ib": 2 ** (10 * power) for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}b": 10 ** (3 * power) for power, letter in enumerate("kmgt", start=1)},
}

LEAST_BUDGET_SECONDS = 0.2
"""As in `autotune_offload.api.probe`, which is slow to import; a test holds them together."""

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""The spelling of the command line, which is DeepSpeed's, to torch's."""


def parameter_count(text: str) -> int:
    """A number of parameters: 7b, 7e9, 125M, 350_000_000. A usage error says what was expected."""
    expected = "expected a whole number of parameters such as 7b, 125M, 7e9 or 350_000_000"
    found = _COUNT.fullmatch(text.strip())
    if found is None:
        raise click.BadParameter(f"{text!r} is not a count; {expected}")
    number = Decimal(found["number"]) * _COUNT_UNITS[found["unit"].lower()]
    if not 1 <= number <= _LARGEST_COUNT or number != number.to_integral_value():
        raise click.BadParameter(f"{text!r} is not a whole number from 1 to 1e15; {expected}")
    return int(number)


def byte_size(text: str) -> int:
    """A size in bytes: 4GiB, 512MiB, 2GB (1e9 bytes each), 1048576."""
    found = _SIZE.fullmatch(text.strip())
    unit = _SIZE_UNITS.get(found["unit"].lower()) if found else None
    if found is None or unit is None:
        raise click.BadParameter(f"{text!r} is not a size; expected bytes such as 4GiB, 512MiB or 1048576")
    return int(Decimal(found["number"]) * unit)


def positive_seconds(text: str) -> float:
    """A time in seconds: finite and above 0."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise click.BadParameter(f"{text!r} is not a time; expected seconds above 0 such as 5 or 2.5")
    return seconds


def budget_seconds(text: str) -> float:
    """A time to measure for: at least what `api.probe` takes for possible, told before anything is imported."""
    seconds = positive_seconds(text)
    if seconds < LEAST_BUDGET_SECONDS:
        raise click.BadParameter(
            f"{text} s is too short to measure anything; expected at least {LEAST_BUDGET_SECONDS:g} s"
        )
    return seconds


json_option = click.option(
    "--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else."
)

cache_option = click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder of the stored profiles [default: $AUTOTUNE_OFFLOAD_CACHE or the platform's cache folder].",
)

profile_argument = click.argument("profile", required=False)


def workload(
    params: int | None,
    model: Path | None,
    world_size: int | None,
    accumulation_steps: int | None,
    dtype: str | None,
) -> Workload | None:
    """What the options describe, or None where they leave it all to the probe."""
    if (params, model, world_size, accumulation_steps, dtype) == (None,) * 5:
        return None
    from autotune_offload import workload as workloads

    ranks, steps, torch_name = world_size or 1, accumulation_steps or 1, DTYPES[dtype or "bf16"]
    if model is not None:
        return workloads.from_hf_config(model, world_size=ranks, accumulation_steps=steps, dtype=torch_name)
    count = params or workloads.DEFAULT_PARAMETERS
    return workloads.from_parameter_count(count, world_size=ranks, accumulation_steps=steps, dtype=torch_name)


def workload_options(ranks: str) -> Callable[[Command], Command]:
    """The options that describe a workload, in the order of the help; `ranks` names the one for their number."""
    described = (
        click.option(
            "--params", type=parameter_count, metavar="COUNT", help="Parameters of the model: 7b, 125M, 7e9."
        ),
        click.option(
            "--model",
            type=click.Path(exists=True, path_type=Path),
            metavar="PATH",
            help="A Hugging Face config.json, or the folder that holds it.",
        ),
        click.option(ranks, type=click.IntRange(min=1), help="Ranks that share the model [default: 1]."),
        click.option(
            "--accumulation-steps", type=click.IntRange(min=1), help="Micro-steps a step [default: 1]."
        ),
        click.option("--dtype", type=click.Choice(list(DTYPES)), help="Gradients' dtype [default: bf16]."),
    )

    def decorate(command: Command) -> Command:
        for option in reversed(described):
            command = option(command)
        return command

    return decorate
