"""The pictures of README.md and docs/: drawn by one command, small, shown, and as the commands print today."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests import CHECKOUT

PICTURES = CHECKOUT / "docs" / "pictures"
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]
BY_HAND = {"architecture.svg"}
MOST_BYTES = 200_000


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`docs/draw.py` as a module."""
    monkeypatch.syspath_prepend(str(CHECKOUT / "docs"))
    return importlib.import_module("draw")


def shown() -> set[Path]:
    """Every picture that a page names."""
    pattern = re.compile(r"(?:\]\(|src=\"|srcset=\")([^)\"]+\.(?:svg|png))")
    return {(page.parent / name).resolve() for page in PAGES for name in pattern.findall(page.read_text())}


def test_every_picture_that_is_shown_is_there_and_every_one_there_is_shown() -> None:
    """No page has a hole, and nothing is carried along that nobody sees."""
    assert shown() == {file.resolve() for file in PICTURES.iterdir()}


def test_one_command_draws_every_picture(draw: Any) -> None:
    """But for the one that is drawn by hand."""
    screenshots = {f"{name}-{scheme}.png" for name in draw.CROPS for scheme in ("light", "dark")}
    drawn = {f"{name}.svg" for name in draw.ALL if name != "pages"} | screenshots
    assert {file.name for file in PICTURES.iterdir()} == drawn | BY_HAND


def test_no_picture_is_large_or_asks_the_network_for_anything() -> None:
    """A page with all of them loads quickly, and a reader's address goes nowhere."""
    for file in PICTURES.iterdir():
        assert file.stat().st_size < MOST_BYTES
        if file.suffix == ".svg":
            found = re.findall(r"(?:url\(|href=|src=)[\"']?(?!#)(\S+)", file.read_text())
            assert [each for each in found if each.startswith(("http", "//", "data"))] == []


@pytest.mark.slow
def test_pictures_show_what_the_commands_print(draw: Any) -> None:
    """Those that come out the same everywhere: `explain` and a trace of a described machine, and the results."""
    for name, drawn in draw.HELD.items():
        assert (PICTURES / f"{name}.svg").read_text(encoding="utf-8") == drawn(), (
            f"python docs/draw.py {name}"
        )


def test_what_is_left_out_of_a_transcript_is_counted(draw: Any) -> None:
    """From one heading to before the next, or to the end; a heading that is missing is an error."""
    text = "a\nb\n1\n2\n\nc\n3\n"
    assert draw.terminal.cut(text, "b", "c") == "a\n... 3 lines\n\nc\n3"
    assert draw.terminal.cut(text, "c") == "a\nb\n1\n2\n\n... 2 lines"
    with pytest.raises(ValueError, match="no line begins with 'd'"):
        draw.terminal.cut(text, "d")
