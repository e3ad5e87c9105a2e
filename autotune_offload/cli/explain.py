"""`autotune-offload explain`: why this choice, and what each alternative would have cost."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune_offload import units
from autotune_offload.cli import options
from autotune_offload.cli.output import console, emit_json
from autotune_offload.cli.steps import print_steps, step_document
from autotune_offload.cli.stored import find_profile, open_store
from autotune_offload.cli.trace import trace_option, write_trace
from autotune_offload.reports.alternatives import Alternative, alternatives, best_of_each, rejections, verdict

if TYPE_CHECKING:
    from rich.console import Console

    from autotune_offload.records import Choice, Profile


@click.command("explain", short_help="Why this choice; what each alternative would have cost.")
@options.profile_argument
@trace_option
@options.cache_option
@options.json_option
def command(*, profile: str | None, trace: Path | None, cache: Path | None, as_json: bool) -> None:
    """Explain a stored choice: PROFILE is a file or the start of a key, by default the newest.

    Shows the best candidate of each path and cast and each sequence of DeepSpeed's own: what it costs a
    backward pass against the chosen one, the rule or the limit that put it aside, what would have to
    change on this machine for it to win, and the command that checks it.
    """
    found, path = find_profile(open_store(cache), profile)
    write_trace(trace, [("", found)])
    if as_json:
        emit_json(_document(found, path))
    else:
        _print(console(), found)


def _document(profile: Profile, path: Path) -> dict[str, Any]:
    from autotune_offload.records import to_plain
    from autotune_offload.reports import explanation

    return {
        "profile": str(path),
        "choice": to_plain(profile.choice),
        "accumulations": to_plain(profile.accumulations),
        "step": step_document(profile),
        "alternatives": [
            {
                **{each.name: getattr(row, each.name) for each in fields(row) if each.name != "way"},
                "verdict": verdict(row, profile),
                "to_win": explanation.to_win(row, profile),
                "check": explanation.check(row, profile),
            }
            for row in best_of_each(alternatives(profile))
        ],
        "rejected": [
            {"reason": rows[0].rejected, "candidates": [f"{row.name} {row.detail}".strip() for row in rows]}
            for rows in rejections(profile)
        ],
    }


def _print(out: Console, profile: Profile) -> None:
    from autotune_offload.cli.readable import bullets, describe_choice, heading, print_accumulations

    choice = profile.choice
    out.print(f"Choice: {describe_choice(choice)}", style="bold")
    bullets(out, choice.reasons)
    out.print(_gain(choice))
    heading(out, "The best of each kind (time added to a backward pass, ratio to the chosen)")
    rows = best_of_each(alternatives(profile))
    _print_alternatives(out, rows)
    print_accumulations(out, profile)
    print_steps(out, profile, rates=False)
    _print_doubts(out, rows, profile)
    _print_rejections(out, rejections(profile))
    _print_sizes(out, choice)


def _gain(choice: Choice) -> str:
    tie = "; another path was within it: a tie" if choice.tie else ""
    return (
        f"DeepSpeed's own time over the chosen time: {units.times(choice.gain)} "
        f"(noise of these trials: {units.percent(choice.noise)}{tie})"
    )


def _print_alternatives(out: Console, rows: list[Alternative]) -> None:
    from autotune_offload.cli.readable import MARKS, mark, table

    grid = table("", "path", folds="details", right=("predicted", "measured", "ratio"))
    for row in rows:
        grid.add_row(
            mark(row),
            row.name,
            row.detail,
            units.duration(row.predicted_seconds),
            units.duration(row.measured_seconds),
            units.times(row.times_chosen),
        )
    out.print(grid)
    out.print(MARKS)


def _print_doubts(out: Console, rows: list[Alternative], profile: Profile) -> None:
    """Of each alternative: what put it aside, what would have to change, how to check."""
    from autotune_offload.cli.readable import heading, pairs
    from autotune_offload.reports import explanation

    heading(out, "Why not the others, and what would have to change")
    for row in rows:
        if not row.chosen:
            out.print(f"\n{row.name}{f' ({row.detail})' if row.detail else ''}")
            grid = pairs()
            grid.add_row("  put aside:", verdict(row, profile))
            grid.add_row("  to win:", explanation.to_win(row, profile))
            grid.add_row("  check:", explanation.check(row, profile))
            out.print(grid)


def _print_rejections(out: Console, groups: list[list[Alternative]]) -> None:
    from autotune_offload.cli.readable import bullets, heading

    if groups:
        heading(out, "Rejected by a limit or rule (of several the cheapest is quoted)")
        bullets(out, (f"{_names(rows)}: {rows[0].rejected}" for rows in groups))


def _names(rows: list[Alternative]) -> str:
    names = list(dict.fromkeys(row.name for row in rows))
    return f"{len(rows)} candidate{'s' if len(rows) > 1 else ''} ({'; '.join(names)})"


def _print_sizes(out: Console, choice: Choice) -> None:
    from autotune_offload.cli.readable import bullets, heading

    if choice.sizes.reasons:
        heading(out, "ZeRO-3 sizes")
        bullets(out, choice.sizes.reasons.values())
