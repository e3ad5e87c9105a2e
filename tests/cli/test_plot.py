"""The small plot of the curves on a terminal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from autotune_offload.cli.plot import curves
from autotune_offload.records import Transfer
from tests.factories import make_profile

D2H = [each for each in make_profile().transfers if each.kind == "d2h"]


def test_every_curve_has_its_letter_and_the_axes_their_units() -> None:
    """Three curves, three letters, sizes and rates; the faster curve is the higher one."""
    drawn = curves(D2H, 78)
    legend = drawn.splitlines()[-1]
    assert "p pinned" in legend and "w pageable warm" in legend and "c pageable cold" in legend
    assert "4 KiB" in drawn and "10" in drawn
    rows = drawn.splitlines()[:-1]
    first = {letter: next(i for i, row in enumerate(rows) if letter in row) for letter in "pwc"}
    assert first["p"] < first["w"] < first["c"]


def test_no_colour_is_written() -> None:
    """Letters tell the curves apart, so that nothing is lost without colour."""
    assert "\x1b" not in curves(D2H, 78)


def test_nothing_is_drawn_of_a_single_size() -> None:
    """One point is no curve."""
    assert curves(D2H[:1], 78) == "" and curves([], 78) == ""


sizes = st.lists(st.integers(10, 34), min_size=2, max_size=12, unique=True)


@given(powers=sizes, gbps=st.floats(1e-4, 2e4), growth=st.floats(0.1, 3), width=st.integers(60, 100))
def test_any_curve_fits_its_width(powers: list[int], gbps: float, growth: float, width: int) -> None:
    """Whatever was measured, no line is wider than asked for."""
    points: list[Transfer] = [
        structs.replace(D2H[0], bytes=1 << power, gbps=gbps * growth**index)
        for index, power in enumerate(sorted(powers))
    ]
    assert max(map(len, curves(points, width).splitlines())) <= max(width, 78)
