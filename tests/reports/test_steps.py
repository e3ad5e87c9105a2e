"""The step of a profile as rows and parts."""

from __future__ import annotations

from msgspec import structs

from autotune_offload.reports.steps import OWN, best_steps, measured_rates, step_parts, step_rows
from tests.factories import make_profile, make_step, make_step_rates


def test_every_way_has_a_row_with_its_verdict() -> None:
    """The chosen one is marked, the others are told by how much or by what they are put aside."""
    rows = step_rows(make_profile())
    assert [row.own for row in rows] == [True, False, False, False]
    assert [row.chosen for row in rows] == [False, True, False, False]
    said = [row.said for row in rows]
    assert said[0].startswith("10.5x") and said[1] == "chosen" and "needs more" in said[2]


def test_the_best_of_each_way_home_is_shown() -> None:
    """DeepSpeed's own, through page-locked and through pageable buffers."""
    shown = [(row.way.threads, row.way.back) for row in best_steps(make_profile())]
    assert shown == [(0, "direct"), (8, "staged"), (8, "direct")]


def test_the_parts_are_those_of_both_ways() -> None:
    """DeepSpeed's own has four behind a link; the pass has one, and the copy that hides behind it."""
    parts = step_parts(make_profile())
    assert list(parts) == [OWN, "chosen"] and len(parts[OWN]) == 4 and len(parts["chosen"]) == 2
    kept = make_step(way="deepspeed", threads=0, back="direct")
    assert list(step_parts(make_profile(step=kept))) == [OWN]


def test_a_profile_without_a_step_has_nothing_of_it() -> None:
    """As those from before."""
    old = make_profile(step=None, step_rates=None)
    assert step_rows(old) == [] and step_parts(old) == {} and not list(measured_rates(old))


def test_what_was_timed_is_told_with_threads_and_reasons() -> None:
    """And what was not."""
    told = dict(measured_rates(make_profile()))
    assert "GB/s" in told["pass, 8 threads"] and "bfloat16" in told["cast back host"]
    none = structs.replace(make_step_rates(), passes=(), why_no_pass="no compiler")
    assert ("pass", "not timed: no compiler") in list(measured_rates(make_profile(step_rates=none)))
