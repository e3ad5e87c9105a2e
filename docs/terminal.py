"""What a command prints, as a picture of a terminal: run it, shorten it, draw it.

Used by `draw.py`. The picture is text in an SVG, so that it stays sharp, small and searchable.
"""

from __future__ import annotations

import io
import os
import re
import shlex
from pathlib import Path
from unittest import mock

from click.testing import CliRunner
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from autotune_offload.cli import cli

COLUMNS = 100
SCHEMES = """.{unique_id}-matrix text, text.{unique_id}-title {{ fill: #1f2328 !important; }}
    svg > rect {{ fill: #f6f8fa; stroke: #d0d7de; }}
    @media (prefers-color-scheme: dark) {{
      .{unique_id}-matrix text, text.{unique_id}-title {{ fill: #e6edf3 !important; }}
      svg > rect {{ fill: #161b22; stroke: #30363d; }}
    }}
    {styles}"""
FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""Of rich's picture, without the font that it would load from the network: the reader's own monospaced one will do."""
FORMAT = FORMAT.replace("{styles}", SCHEMES).replace("Fira Code, monospace", "ui-monospace, monospace")


def said(command: str, folder: Path) -> str:
    """What `autotune-offload COMMAND` prints on a terminal with COLUMNS columns, in that folder.

    Raises:
        RuntimeError: it failed.
    """
    before = Path.cwd()
    terminal = {"COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    unset = dict.fromkeys(("NO_COLOR", "COLORTERM"))
    try:
        os.chdir(folder)
        with mock.patch("rich.console.Console._environ", {**os.environ, **terminal}):
            done = CliRunner(env={**terminal, **unset}).invoke(cli, shlex.split(command))
    finally:
        os.chdir(before)
    if done.exit_code:
        raise RuntimeError(f"autotune-offload {command} ended with {done.exit_code}: {done.output[-500:]}")
    return done.stdout


def cut(text: str, begin: str, end: str | None = None) -> str:
    """Lines from the first that begins with `begin` to before the next with `end`, or all; one line says how many.

    Raises:
        ValueError: there is no such line.
    """
    lines = text.rstrip().splitlines()
    plain = [Text.from_ansi(line).plain for line in lines]
    first = _where(plain, begin, 0)
    last = len(lines) if end is None else _where(plain, end, first)
    while last > first and end is not None and not plain[last - 1].strip():
        last -= 1  # the empty line before what follows stays
    return "\n".join([*lines[:first], f"... {last - first} lines", *lines[last:]])


def _where(lines: list[str], begin: str, start: int) -> int:
    for number, line in enumerate(lines[start:], start=start):
        if line.startswith(begin):
            return number
    raise ValueError(f"no line begins with {begin!r}")


def drawn(text: str, title: str) -> str:
    """The picture: an SVG that follows the reader's light or dark scheme."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, _environ={})
    for line in text.splitlines():
        console.print(Text.from_ansi(line.rstrip()), highlight=False, soft_wrap=True)
    made = console.export_svg(title=title, unique_id="t", code_format=FORMAT)
    return "\n".join(line.rstrip() for line in made.splitlines() if line.strip()) + "\n"
