"""`autotune-offload doctor`: what stands in the way on this host or in a ds_config, and how to fix it."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune_offload.cli import options
from autotune_offload.cli.output import console, emit_json, stdout_set_aside
from autotune_offload.cli.progress import Reporter

if TYPE_CHECKING:
    from rich.console import Console

    from autotune_offload.doctor.examine import Examination
    from autotune_offload.records import Finding


@click.command("doctor", short_help="What stands in the way on this host, and how to fix it.")
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Look at this ds_config too.",
)
@click.option("--markdown", is_flag=True, help="One block to paste into an issue, without names of yours.")
@options.cache_option
@options.json_option
@click.pass_context
def command(
    ctx: click.Context, /, *, config: Path | None, markdown: bool, cache: Path | None, as_json: bool
) -> None:
    """Look for what will break a run on this host, or cost it time, and say how to fix it.

    Nothing is changed or measured. Exit 1 where something will break, 0 otherwise.
    """
    if markdown and as_json:
        raise click.UsageError("--markdown and --json are two forms of the same; name one")
    from autotune_offload.doctor.examine import examine

    with stdout_set_aside(), Reporter("looking at this host"):
        found = examine(config, cache=cache)
    if as_json:
        emit_json(_document(found, config))
    elif markdown:
        from autotune_offload.doctor import pasted
        from autotune_offload.machine import host

        click.echo(pasted.block(found, host.facts(), host.software()))
    else:
        _print(console(), found)
    ctx.exit(1 if found.will_break else 0)


def _document(found: Examination, config: Path | None) -> dict[str, Any]:
    from autotune_offload.records import to_plain

    return {
        "will_break": found.will_break,
        "config": None if config is None else str(config),
        "findings": to_plain(found.findings),
        "checks": list(found.checks),
        "host_passes": dict(found.host_passes),
    }


def _print(out: Console, found: Examination) -> None:
    for finding in found.findings:
        _print_finding(out, finding)
    counts = dict.fromkeys(("will break", "costs", "notice"), 0)
    for finding in found.findings:
        counts[finding.severity] += 1
    well = [name for name in found.checks if name not in {finding.id for finding in found.findings}]
    out.print(f"{counts['will break']} will break, {counts['costs']} cost, {counts['notice']} to know")
    if well:
        out.print(_wrapped("nothing found by: ", ", ".join(well), out.width), soft_wrap=True)
    for name, origin in found.host_passes.items():
        out.print(_wrapped(f"pass {name}: ", origin, out.width), soft_wrap=True)


def _print_finding(out: Console, finding: Finding) -> None:
    out.print(f"{finding.severity}: {finding.id}")
    for label, text in (("found", finding.found), ("costs", finding.costs), ("fix", finding.fix)):
        if text:
            out.print(_wrapped(f"  {label + ':':7}", text, out.width), soft_wrap=True)
    out.print()


def _wrapped(label: str, text: str, columns: int) -> str:
    """With a hanging indent; a path or a command is never broken."""
    return textwrap.fill(
        text,
        columns,
        initial_indent=label,
        subsequent_indent=" " * min(len(label), 9),
        break_long_words=False,
        break_on_hyphens=False,
    )
