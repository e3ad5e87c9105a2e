"""`autotune-offload show`: a stored profile, readable."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune_offload.cli import options
from autotune_offload.cli.output import console, emit_json
from autotune_offload.cli.stored import find_profile, open_store

if TYPE_CHECKING:
    from autotune_offload.records import Profile


@click.command("show", short_help="Show a stored profile.")
@options.profile_argument
@options.cache_option
@options.json_option
def command(*, profile: str | None, cache: Path | None, as_json: bool) -> None:
    """Show a stored profile: PROFILE is a path, a file name or the start of a key, by default the newest."""
    show(profile, cache, as_json=as_json)


def show(wanted: str | None, cache: Path | None, *, as_json: bool) -> None:
    """Print the profile that `wanted` names."""
    found, path = find_profile(open_store(cache), wanted)
    if as_json:
        from autotune_offload.records import to_plain

        emit_json(to_plain(found))
    else:
        from autotune_offload.cli.readable import print_profile

        print_profile(console(), found, path, plots=True)
        _print_found(found, path)


def _print_found(profile: Profile, path: Path) -> None:
    """What runs have found out about the choice since."""
    from autotune_offload.cli.readable import bullets, heading
    from autotune_offload.profiles import outcomes

    sentences = outcomes.sentences(outcomes.about(path, profile.choice))
    if sentences:
        out = console()
        heading(out, f"Found on real training steps ({outcomes.CLEAR})")
        bullets(out, sentences)
