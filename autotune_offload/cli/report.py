"""`autotune-offload report`: one self-contained HTML page with the curves and the decision."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune_offload.cli import options
from autotune_offload.cli.outcome import SAVED
from autotune_offload.cli.output import emit_json, notice
from autotune_offload.cli.stored import find_profiles, open_store
from autotune_offload.errors import ConfigError

if TYPE_CHECKING:
    from autotune_offload.records import Profile

_FILE = Path("autotune-offload-report.html")


@click.command("report", short_help="One HTML page with the curves and the decision.")
@click.argument("profiles", nargs=-1, metavar="[PROFILE]...")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=_FILE,
    show_default=True,
    metavar="FILE",
    help="Write the page there.",
)
@click.option(
    "--png",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write one picture there instead, to paste into an issue.",
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Show what changes in this ds_config [default: plain ZeRO-3 offload].",
)
@options.cache_option
@options.json_option
def command(
    *,
    profiles: tuple[str, ...],
    output: Path,
    png: Path | None,
    config: Path | None,
    cache: Path | None,
    as_json: bool,
) -> None:
    """Make one HTML page of stored choices: what was measured, decided and put aside.

    Each PROFILE is a file or the start of a key, by default the newest; a file may be what `probe --json`
    or `simulate --json` printed. Several are shown side by side too. The page is one file that needs no
    network. The file is replaced where it exists.
    """
    found = find_profiles(open_store(cache), profiles)
    if png is not None:
        if len(found) != 1:
            raise click.UsageError(f"--png draws one profile, and {len(found)} were given; name one PROFILE")
        _write_picture(png, found[0][1])
    else:
        _write_page(output, found, config)
    if as_json:
        emit_json(_document(found, png or output))


def _write_picture(file: Path, profile: Profile) -> None:
    from autotune_offload.reports import page

    _write(file, page.png(profile))


def _write_page(file: Path, found: list[tuple[str, Profile]], config: Path | None) -> None:
    from autotune_offload.config import reading
    from autotune_offload.reports import page

    read = reading.read(config) if config else None
    _write(file, page.html(found, config=read).encode())


def _write(file: Path, content: bytes) -> None:
    try:
        file.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}; name another file") from error
    click.get_current_context().meta[SAVED] = file
    notice(f"written: {file}")


def _document(found: list[tuple[str, Profile]], file: Path) -> dict[str, Any]:
    from autotune_offload.reports import page

    return {
        "output": str(file),
        "profiles": [
            {"profile": name, "where": page.where(profile), "decision": page.decision(profile)}
            for name, profile in found
        ],
    }
