"""`autotune-offload profiles`: the stored profiles: list, show, prune, forget, path."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune_offload import units
from autotune_offload.cli import options
from autotune_offload.cli.output import console, emit_json, notice
from autotune_offload.cli.show import show
from autotune_offload.cli.stored import find_profile, key_of, open_store

if TYPE_CHECKING:
    from autotune_offload.profiles.store import Entry


@click.group("profiles", short_help="The stored profiles: list, show, prune, forget, path.")
def command() -> None:
    """Look after the stored profiles."""


@command.command("list")
@options.cache_option
@options.json_option
def list_(*, cache: Path | None, as_json: bool) -> None:
    """List the stored profiles, of a shared folder those of all hosts; unreadable files too."""
    from autotune_offload.profiles.fleet import entries_below

    store = open_store(cache)
    rows = [_row(entry) for entry in entries_below(store.folder)]
    if as_json:
        emit_json({"folder": str(store.folder), "profiles": rows})
    elif rows:
        _print_rows(rows)
    else:
        notice(f"no profile is stored in {store.folder}; `autotune-offload probe` makes one")


@command.command("show")
@options.profile_argument
@options.cache_option
@options.json_option
def show_(*, profile: str | None, cache: Path | None, as_json: bool) -> None:
    """Show a stored profile; the same as `autotune-offload show`."""
    show(profile, cache, as_json=as_json)


@command.command("forget")
@options.profile_argument
@click.option("--all", "everything", is_flag=True, help="Of all stored profiles.")
@options.cache_option
@options.json_option
def forget(*, profile: str | None, everything: bool, cache: Path | None, as_json: bool) -> None:
    """Forget what runs have found out about a stored choice; the profile stays, by default the newest's."""
    from autotune_offload.profiles import outcomes

    if everything and profile is not None:
        raise click.UsageError("--all is of every profile; give it without PROFILE")
    store = open_store(cache)
    files = store.files() if everything else [find_profile(store, profile)[1]]
    forgotten = [str(file) for file in files if outcomes.forget(file)]
    if as_json:
        emit_json({"forgotten": forgotten})
        return
    for file in forgotten:
        click.echo(file)
    notice(
        f"forgotten: what runs found out about {len(forgotten)} stored choice{'s' * (len(forgotten) != 1)}"
    )


@command.command("prune")
@click.option(
    "--older-than", type=click.FloatRange(min=0), metavar="DAYS", help="Those measured before that."
)
@click.option("--broken", is_flag=True, help="Only files that cannot be read as a profile of this version.")
@click.option("--all", "everything", is_flag=True, help="All of them; needs --yes.")
@click.option("--yes", is_flag=True, help="Confirms --all.")
@options.cache_option
@options.json_option
def prune(
    *, older_than: float | None, broken: bool, everything: bool, yes: bool, cache: Path | None, as_json: bool
) -> None:
    """Delete stored profiles: old ones, broken ones, or all."""
    _check_what_to_prune(older_than, broken, everything, yes)
    removed = open_store(cache).prune(older_than_days=older_than, only_broken=broken)
    if as_json:
        emit_json({"removed": [str(path) for path in removed]})
        return
    for path in removed:
        click.echo(path)
    notice(f"deleted {len(removed)} file{'' if len(removed) == 1 else 's'}")


@command.command("path")
@options.cache_option
@options.json_option
def path_(*, cache: Path | None, as_json: bool) -> None:
    """Print the folder of the stored profiles."""
    folder = str(open_store(cache).folder)
    if as_json:
        emit_json({"folder": folder})
    else:
        click.echo(folder)


def _check_what_to_prune(older_than: float | None, broken: bool, everything: bool, yes: bool) -> None:
    if not (older_than is not None or broken or everything):
        raise click.UsageError("say what to delete: --older-than DAYS, --broken, or --all --yes")
    if everything and (older_than is not None or broken):
        raise click.UsageError("--all deletes every profile; give it without --older-than and --broken")
    if everything and not yes:
        raise click.UsageError("--all deletes every stored profile; add --yes to confirm")


def _row(entry: Entry) -> dict[str, Any]:
    from autotune_offload.profiles import outcomes

    profile = entry.profile
    if profile is None:
        return {"path": str(entry.path), "key": None, "problem": entry.problem}
    return {
        "path": str(entry.path),
        "key": key_of(profile),
        "created": profile.created,
        "host": profile.host.name,
        "device": f"{profile.device.kind} {profile.device.name}",
        "choice": profile.choice.path,
        "cast": profile.choice.cast,
        "gain": profile.choice.gain,
        "found": outcomes.sentences(outcomes.about(entry.path, profile.choice)),
        "problem": entry.problem,
    }


def _print_rows(rows: list[dict[str, Any]]) -> None:
    from autotune_offload.cli.readable import table

    out = console()
    grid = table("key", "measured", "choice", folds="host: device", right=("gain",))
    for row in rows:
        if row["key"] is not None:
            measured = row["created"][:16].replace("T", " ")
            gain = units.times(row["gain"])
            grid.add_row(row["key"][:8], measured, row["choice"], f"{row['host']}: {row['device']}", gain)
    if grid.row_count:
        out.print(grid)
    for row in rows:
        for sentence in row.get("found", ()):
            out.print(f"{row['key'][:8]}: {sentence}", soft_wrap=True)
        if row["problem"]:
            out.print(f"cannot be used: {row['path']}: {row['problem']}", soft_wrap=True)
