"""Writing a trace of what was computed: an option of several verbs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune_offload.cli.output import finite, notice
from autotune_offload.errors import ConfigError

if TYPE_CHECKING:
    from autotune_offload.records import Profile

trace_option = click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the stages of a gradient and of a step for chrome://tracing or ui.perfetto.dev; replaces FILE.",
)


def write_trace(file: Path | None, named: list[tuple[str, Profile]]) -> None:
    """Where a file was asked for. Raises ConfigError where it cannot be written."""
    if file is None:
        return
    from autotune_offload.reports.trace import trace

    try:
        file.write_text(json.dumps(finite(trace(named)), allow_nan=False), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}; name another file") from error
    notice(f"written: {file}")
