"""`autotune-offload fleet`: many hosts' profiles side by side; names the outliers, and what each costs the job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune_offload import units
from autotune_offload.cli import options
from autotune_offload.cli.output import console, emit_json, notice
from autotune_offload.errors import ProfileError

if TYPE_CHECKING:
    from rich.console import Console

    from autotune_offload.profiles.fleet import Member, Outlier, Survey

_MOST_ROWS = 24
_METRICS = {
    "d2h": "device to host",
    "h2d": "host to device",
    "h2h": "host to host",
    "offload": "gradient path",
}


@click.command("fleet", short_help="Many hosts' profiles side by side; names the outliers.")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR")
@options.json_option
def command(*, folder: Path, as_json: bool) -> None:
    """Compare all profiles in DIR and the folders below it: the spread, who stands out, what it costs.

    `autotune-offload probe --collect DIR` under a launcher writes such a folder.
    """
    from autotune_offload.profiles.fleet import entries_below, newest, survey

    readable, skipped = [], []
    for entry in entries_below(folder):
        if entry.profile is None:
            skipped.append({"path": str(entry.path), "problem": entry.problem})
            notice(f"skipped {entry.path}: {entry.problem}")
        else:
            readable.append((entry.profile, entry.path))
    if not readable:
        raise ProfileError(
            f"no profile in {folder} that can be read; `autotune-offload probe --collect {folder}` under a launcher "
            "writes one for each rank"
        )
    found = survey(newest(readable))
    if as_json:
        emit_json({"folder": str(folder), **as_plain(found), "skipped": skipped})
    else:
        print_survey(console(), found)


def as_plain(survey: Survey) -> dict[str, Any]:
    """A survey for JSON."""
    from autotune_offload.records import to_plain

    plain: dict[str, Any] = to_plain(survey)
    labels = [each.label for each in survey.members]
    plain["members"] = [
        {"label": label, **each} for label, each in zip(labels, plain["members"], strict=True)
    ]
    return plain


def print_survey(out: Console, survey: Survey) -> None:
    """Who there is, how far they spread, and who stands out."""
    from autotune_offload.cli.readable import bullets, heading
    from autotune_offload.profiles.fleet import LEAST_MEMBERS

    _print_members(out, survey.members)
    heading(out, "Spread")
    _print_spreads(out, survey)
    if survey.outliers:
        heading(out, "Slower than the others")
        bullets(out, map(_sentence, survey.outliers))
        out.print(
            f"All of them together cost the job {units.duration(survey.costs_seconds)} in each step: it waits for "
            "the slowest.",
            soft_wrap=True,
        )
    elif any(spread.members >= LEAST_MEMBERS for spread in survey.spreads):
        out.print("\nNobody stands out.")
    for text in survey.notices:
        notice(text)


def _print_members(out: Console, members: Sequence[Member]) -> None:
    from autotune_offload.cli.readable import table

    grid = table(folds="host", right=(*_METRICS, "backward"))
    shown = sorted(members, key=lambda each: -(each.backward_seconds or 0.0))[:_MOST_ROWS]
    for each in sorted(shown, key=lambda each: (each.host, each.rank or 0, each.index)):
        rates = (units.rate(each.rates_gbps.get(metric)) for metric in _METRICS)
        grid.add_row(f"{each.label}: {each.path}", *rates, units.duration(each.backward_seconds))
    out.print(grid)
    if len(members) > len(shown):
        out.print(f"  (the slowest {len(shown)} of {len(members)}; all of them in --json)")


def _print_spreads(out: Console, survey: Survey) -> None:
    from autotune_offload.cli.readable import table

    grid = table("copies", folds="device", right=("members", "lowest", "median", "highest", "MAD"))
    for each in survey.spreads:
        values = (each.lowest_gbps, each.median_gbps, each.highest_gbps)
        share = units.percent(each.mad_gbps / each.median_gbps)
        grid.add_row(each.metric, each.device, str(each.members), *map(units.rate, values), share)
    out.print(grid)


def _sentence(outlier: Outlier) -> str:
    how = "timed" if outlier.measured else "from bytes over bandwidth"
    said = (
        f"{outlier.label}: {_METRICS[outlier.metric]} at {units.rate(outlier.gbps)}, where the median of "
        f"{outlier.members} is {units.rate(outlier.median_gbps)}: it costs the job "
        f"{units.duration(outlier.costs_seconds)} in each step ({how})"
    )
    return "; ".join([said, *outlier.reasons])
