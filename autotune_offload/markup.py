"""A small table in HTML, everything escaped, for a notebook; it needs nothing but the standard library."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def table(title: str, rows: Iterable[tuple[str, str]], sentences: Iterable[str] = ()) -> str:
    """A caption, a row for each (name, value), and sentences as a list below."""
    cells = "".join(
        f'<tr><th scope="row" style="text-align: left">{escape(name)}</th>'
        f'<td style="text-align: left">{escape(value)}</td></tr>'
        for name, value in rows
    )
    listed = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<table><caption>{escape(title)}</caption>{cells}</table>" + (
        f"<ul>{listed}</ul>" if listed else ""
    )
