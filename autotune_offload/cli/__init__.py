"""The command line: one small module a verb, and the only place that prints.

The verbs' modules are light: they load click and nothing heavier, so `--help` is quick. torch, deepspeed
and rich load inside the functions that need them.
"""

from __future__ import annotations

import click

import autotune_offload
from autotune_offload.cli import (
    apply,
    doctor,
    explain,
    fleet,
    probe,
    profiles,
    report,
    run,
    schema,
    show,
    simulate,
    verify,
)
from autotune_offload.cli.outcome import Verbs
from autotune_offload.cli.output import end_of_results

EPILOG = """\b
Results go to stdout, progress and notices to stderr; with --json stdout holds
exactly one JSON document. Exit 0: done, 1: could not, 2: bad usage.
AUTOTUNE_OFFLOAD_CACHE names the folder of the stored profiles;
AUTOTUNE_OFFLOAD=0 leaves every run untuned; NO_COLOR turns colour off."""


def _print_version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"autotune-offload {autotune_offload.__version__}")
        ctx.exit()


@click.group(cls=Verbs, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
@click.option(
    "--local_rank", "--local-rank", type=int, hidden=True, expose_value=False
)  # DeepSpeed's launcher
def cli() -> None:
    """Measure how fast this machine moves ZeRO-3 offload data, and set DeepSpeed up accordingly."""


for _verb in (probe, show, explain, apply, verify, simulate, run, fleet, report, profiles, doctor, schema):
    cli.add_command(_verb.command)


def main() -> None:
    """The console script `autotune-offload`."""
    try:
        cli(prog_name="autotune-offload")
    finally:
        end_of_results()
