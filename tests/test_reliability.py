"""Every fault of the table, injected; and the table itself."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path

import pytest

from tests import CHECKOUT
from tests.reliability import FAULTS, training_loops
from tests.reliability.registry import AREAS, Fault, NotPossible, fault, run, within

PAGE = CHECKOUT / "docs" / "reliability.md"


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_the_outcome_that_it_must_have(name: str, tmp_path: Path) -> None:
    """Each is injected for real, with a time-out around it."""
    one = FAULTS[name]
    try:
        with within(90):
            happened = one.check(tmp_path)
    except NotPossible as why:
        pytest.skip(str(why))
    assert happened, "a check says what happened"


def test_there_are_sixty_faults_over_all_areas() -> None:
    """None of the areas is left out."""
    by_area = Counter(one.area for one in FAULTS.values())
    assert len(FAULTS) >= 60
    assert set(by_area) == set(AREAS) and min(by_area.values()) >= 8


def test_the_committed_table_lists_exactly_the_registered_faults() -> None:
    """Each in its area, with what was injected and what must come of it; none failed."""
    text = PAGE.read_text(encoding="utf-8")
    listed = []
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        area, _, rest = part.partition("\n")
        if area not in AREAS:
            continue
        rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in rest.splitlines() if line.startswith("| ")][1:]
        listed += [(area, *(cell.strip() for cell in row[:3]), row[4].strip()) for row in rows]
    assert [row[:4] for row in listed] == [
        (one.area, one.name, one.injected, one.expected)
        for area in AREAS
        for one in FAULTS.values()
        if one.area == area
    ]
    assert {row[4] for row in listed} <= {"pass", "not possible here"}


def test_the_committed_page_says_what_a_loop_may_do() -> None:
    """The table as it stands in the code, and each row is held by something that exists."""
    assert training_loops.section() in PAGE.read_text(encoding="utf-8")
    for _, _, held_by in training_loops.ROWS:
        file, _, names = held_by.partition(": ")
        source = (CHECKOUT / file).read_text(encoding="utf-8")
        for name in names.split(", "):
            assert re.search(rf"^ *def {name}\(", source, re.MULTILINE), held_by


def _named(check: object) -> Fault:
    return Fault(name="x", area="cache", injected="y", expected="z", check=check)  # type: ignore[arg-type]  # a stand-in


def test_a_run_tells_a_pass_from_a_failure_and_from_what_is_not_possible() -> None:
    """A failed assertion, any other exception, and a machine that does not allow it."""

    def wrong(folder: Path) -> str:
        raise KeyError("x")

    def impossible(folder: Path) -> str:
        raise NotPossible("no mounts")

    assert run(_named(lambda folder: "well")).result == "pass"
    assert run(_named(wrong)).result == "fail"
    assert run(_named(impossible)).result == "not possible here"


def test_what_hangs_is_cut() -> None:
    """After the seconds that were given."""
    before = time.monotonic()
    with pytest.raises(AssertionError, match="after 1 s"), within(1):
        time.sleep(30)
    assert time.monotonic() - before < 5


def test_two_faults_cannot_share_a_name() -> None:
    """The table would list one of them only."""
    with pytest.raises(AssertionError, match="two faults"):
        fault(area="cache", name=next(iter(FAULTS)), injected="", expected="")(lambda folder: "")
