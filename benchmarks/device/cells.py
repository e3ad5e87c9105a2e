"""Cells and tables of the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from autotune_offload.units import MISSING, duration, percent, size

Lines = Iterator[str]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Lines:
    """In Markdown; a bar in a cell is no border."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(' '.join(str(cell).split()).replace('|', chr(92) + '|') for cell in row)} |"


def pair(case: dict[str, Any], metric: str) -> tuple[str, str]:
    """DeepSpeed's own and ours, then the ratio."""
    stock, ours = case[f"{metric}_stock_seconds"], case[f"{metric}_ours_seconds"]
    return f"{spread(stock)}, {spread(ours)}", f"{case[f'{metric}_ratio']:.2f}"


def spread(timing: dict[str, Any]) -> str:
    """Median and interquartile range."""
    return f"{duration(timing['median'])} ({duration(timing['iqr'])})"


def moved(link: dict[str, Any], elements: int) -> tuple[str, str, str]:
    """Bytes a parameter, time, and what of it is hidden."""
    if not link["copies"]:
        return "none seen", MISSING, MISSING
    each = f"{link['bytes'] / elements:.2f}" if link["bytes"] is not None else MISSING
    return each, duration(link["seconds"]), percent(link["hidden_seconds"] / max(link["seconds"], 1e-12))


def more(run: dict[str, Any], key: str) -> str:
    """What is held after an engine beyond what was before."""
    more = run["after"][key] - run["before"][key]
    return "as before" if not more else f"{'+' if more > 0 else '-'}{size(abs(more))}"


def times(predicted: float, measured: float) -> str:
    """Predicted over measured."""
    return f"{predicted / measured:.2f}" if measured > 0 and predicted > 0 else MISSING
