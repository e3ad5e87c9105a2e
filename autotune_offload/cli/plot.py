"""A small plot of bandwidth curves for a terminal: letters for curves, so that it needs no colour."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autotune_offload import units

if TYPE_CHECKING:
    from autotune_offload.records import Transfer

_ROWS = 13
_LETTERS = {("pinned", "warm"): "p", ("pageable", "warm"): "w", ("pageable", "cold"): "c"}
_WORDS = {"p": "pinned", "w": "pageable warm", "c": "pageable cold"}
_MOST_TICKS = 5
_LEAST_DECADES = 0.1
"""A flat curve is drawn in the middle of a band of this height."""


def curves(points: Sequence[Transfer], width: int) -> str:
    """GB/s against bytes, both logarithmic, `width` columns wide; empty where fewer than two sizes were timed.

    Copies both ways at once and copies by threads of their own are left to the tables.
    """
    drawn = {letter: _along(points, letter) for letter in _WORDS}
    drawn = {letter: line for letter, line in drawn.items() if len(line) > 1}
    if not drawn:
        return ""
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, _ROWS)
    for letter, line in drawn.items():
        signal = figure.signal(
            [math.log2(x) for x, _ in line], [math.log10(y) for _, y in line], marker=letter
        )
        signal.lines()
        figure.draw(signal)
    _mark_sizes(figure.ruler("x", 0), sorted({x for line in drawn.values() for x, _ in line}))
    _mark_rates(figure.ruler("y", 0), [y for line in drawn.values() for _, y in line])
    text = plotext.uncolorize(str(figure.build()))
    figure.clear()
    legend = "  ".join(f"{letter} {_WORDS[letter]}" for letter in drawn)
    rows = [row.rstrip() for row in text.splitlines()]
    return "\n".join([*rows, f"  GB/s, both axes logarithmic: {legend}"])


def _along(points: Sequence[Transfer], letter: str) -> list[tuple[int, float]]:
    return sorted(
        (each.bytes, each.gbps)
        for each in points
        if _LETTERS.get((each.memory, each.state)) == letter
        and not (each.duplex or each.threads)
        and 0 < each.gbps < math.inf
    )


def _mark_sizes(ruler: Any, sizes: list[int]) -> None:
    shown = sizes[:: max(1, -(-len(sizes) // _MOST_TICKS))]
    ruler.lim(math.log2(sizes[0]), math.log2(sizes[-1]))
    ruler.ticks([math.log2(each) for each in shown], [units.size(each) for each in shown])


def _mark_rates(ruler: Any, rates: list[float]) -> None:
    """The lowest, the highest and two between, evenly on the logarithmic axis."""
    low, high = math.log10(min(rates)), math.log10(max(rates))
    if high - low < _LEAST_DECADES:
        low, high = low - _LEAST_DECADES / 2, high + _LEAST_DECADES / 2
    steps = [low + (high - low) * part / 3 for part in range(4)]
    ruler.lim(low, high)
    ruler.ticks(steps, [units.significant(10**each, 2) for each in steps])
