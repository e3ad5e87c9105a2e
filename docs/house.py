"""Draws the house: pictures/house.svg, from the floors in pyproject.toml and the docstrings of the rooms.

    python docs/house.py

Nothing in the picture is written by hand, and a test holds the file against what this draws.
"""

from __future__ import annotations

import ast
import re
import textwrap
from html import escape
from pathlib import Path

from importlinter.api import read_configuration

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGE = CHECKOUT / "autotune_offload"
PICTURE = CHECKOUT / "docs" / "pictures" / "house.svg"

WIDTH, MARGIN, GAP, LINE = 1080, 12, 12, 16
CHARACTER = 6.4
"""Pixels of a character of the text, on average."""

STYLE = """text { font: 12px system-ui, sans-serif; fill: #1f2328; }
.t { font-weight: 600; font-size: 15px; } .s { fill: #57606a; }
.m { font-family: ui-monospace, monospace; font-size: 11px; }
.b { fill: #f6f8fa; stroke: #57606a; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .s { fill: #9da7b3; } .b { fill: #161b22; stroke: #9da7b3; }
}"""


def floors() -> list[list[str]]:
    """The rooms and flat files of each floor, from the top, as import-linter holds them."""
    contract = read_configuration(str(CHECKOUT / "pyproject.toml"))["contracts_options"][0]
    return [re.findall(r"\w+", layer) for layer in contract["layers"]]


def described(name: str) -> tuple[str, str]:
    """What a room or flat file is, in its own first sentence, and the modules in it from below."""
    room = PACKAGE / name / "__init__.py"
    source = room if room.exists() else PACKAGE / f"{name}.py"
    text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    sentence, _, listed = text.partition("From below:")
    modules = " ".join(re.findall(r"\w+", listed))
    if room.exists() and not modules:
        modules = " ".join(sorted(file.stem for file in room.parent.glob("*.py") if file.stem != "__init__"))
    return " ".join(sentence.split("\n\n")[0].replace("`", "").split()), modules


def _box(name: str, x: float, y: float, width: float) -> tuple[list[str], float]:
    """The texts of one box, and how high it has to be."""
    says, modules = described(name)
    letters = int((width - 2 * MARGIN) / CHARACTER)
    lines = [("t", name), *(("s", line) for line in textwrap.wrap(says, letters))]
    lines += [("m", line) for line in textwrap.wrap(modules, letters)]
    texts = [
        f'<text class="{kind}" x="{x + MARGIN:.0f}" y="{y + 22 + index * LINE:.0f}">{escape(line)}</text>'
        for index, (kind, line) in enumerate(lines)
    ]
    return texts, 22 + len(lines) * LINE


def drawn() -> str:
    """The picture as SVG."""
    parts: list[str] = []
    y = float(MARGIN)
    for rooms in floors():
        width = (WIDTH - 2 * MARGIN - GAP * (len(rooms) - 1)) / len(rooms)
        places = [MARGIN + index * (width + GAP) for index in range(len(rooms))]
        boxes = [_box(name, x, y, width) for name, x in zip(rooms, places, strict=True)]
        height = max(high for _, high in boxes)
        for (texts, _), x in zip(boxes, places, strict=True):
            parts.append(
                f'<rect class="b" x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="6"/>'
            )
            parts += texts
        y += height + GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" role="img" '
        'aria-label="The rooms of the package by floor; each imports only from those below it">'
    )
    return "\n".join([head, f"<style>\n{STYLE}\n</style>", *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(drawn(), encoding="utf-8")
