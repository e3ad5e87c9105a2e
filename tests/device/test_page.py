"""The page: all that was found, nobody's name, and no table that breaks."""

from __future__ import annotations

import copy
import re
from dataclasses import asdict
from typing import Any

import pytest
from markdown_it import MarkdownIt

from benchmarks.device import outcomes
from benchmarks.device.cells import table
from benchmarks.device.claims import judged
from benchmarks.device.outcomes import Outcome
from benchmarks.device.page import page, verdict_lines
from benchmarks.device.page_parts import SECTIONS
from benchmarks.device.parts import PARTS
from tests.device.found import good

ABOUT = {"date": "2026-12-01T10:00:00+00:00", "minutes": 8.0, "commit": "abc", "short": False, "fake": None}


def _document(found: dict[str, Any]) -> dict[str, Any]:
    parts = [
        Outcome(name=part.name, title=part.title, state="done", seconds=1.0, found=found.get(part.name, {}))
        for part in PARTS
    ]
    return outcomes.document(ABOUT, parts, judged(found))


def test_every_part_has_a_section() -> None:
    """With what it found, in tables whose rows are as wide as their heads."""
    text = page(_document(good()))
    assert set(SECTIONS) == {part.name for part in PARTS}
    for part in PARTS:
        assert f"### {part.title}" in text
    assert "cannot be shown" not in text
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    assert sum(token.type == "table_open" for token in tokens) >= 9
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.replace("\\|", "").count("|") for line in block.splitlines()}) == 1, block


def test_the_first_lines_say_what_and_where() -> None:
    """Device and versions, then how many claims hold."""
    head = page(_document(good()))[:600]
    assert "2026-12-01: A card" in head and "DeepSpeed 0.19.8" in head
    assert "Claims: 0 does not hold, 19 holds, 0 not measurable here" in head


def test_a_run_that_found_nothing_has_a_page() -> None:
    """Interrupted in its first second."""
    text = page(outcomes.document(ABOUT, [Outcome(name=p.name, title=p.title) for p in PARTS], judged({})))
    assert "19 not measurable here" in text and text.count("not run") == len(PARTS)


@pytest.mark.parametrize("name", [part.name for part in PARTS])
def test_what_cannot_be_shown_is_told(name: str) -> None:
    """A part that left half of what it should leaves the others readable."""
    found = copy.deepcopy(good())
    found[name] = {"probes": [{}], "copies": [{}], "repeats": [{}], "cases": [{}], "runs": [{}], "ways": [{}]}
    text = page(_document(found))
    assert all(f"### {part.title}" in text for part in PARTS)


def test_a_stand_in_is_called_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody takes a fake accelerator's numbers for measurements."""
    document = _document(good()) | {"fake": "cuda", "short": True}
    assert "no number here is a measurement" in page(document) and "no time here means anything" in page(
        document
    )
    found = copy.deepcopy(good())
    found["here"]["training_kind"] = "cpu"
    assert "There is no accelerator here" in page(_document(found))


def test_no_name_is_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed may have said a path below somebody's home, or the host's name."""
    monkeypatch.setenv("USER", "rosalind")
    monkeypatch.setenv("HOME", "/home/rosalind")
    document = _document(good())
    document["parts"]["copies"]["why"] = "no such file: /home/rosalind/x | rosalind@somewhere"
    text = page(document)
    assert "rosalind" not in text and "~/x \\| USER@somewhere" in text


def test_a_bar_in_a_cell_is_no_border() -> None:
    """Nor is a line's end."""
    assert list(table(("a", "b"), [("x|y", "1\n2")]))[2] == "| x\\|y | 1 2 |"


def test_the_verdicts_on_a_terminal_end_with_what_fails() -> None:
    """A line each, and the counts."""
    found = copy.deepcopy(good())
    found["sweep"]["median_ratio"] = 2.0
    lines = verdict_lines(judged(found)).splitlines()
    assert len(lines) == 20
    assert lines[-2].startswith("DOES NOT HOLD: The choice") and lines[-1].startswith(
        "1 does not hold, 18 holds"
    )


def test_results_hold_numbers_that_json_has(tmp_path: Any) -> None:
    """An endless time is null, and the file is whole or not there."""
    file = tmp_path / "a" / "results.json"
    outcomes.write(file, {"a": float("inf"), "b": (1, float("nan")), "c": {"d": 2.5}})
    assert outcomes.read(file) == {"a": None, "b": [1, None], "c": {"d": 2.5}}
    assert [each.name for each in file.parent.iterdir()] == ["results.json"]
    file.write_text("{half", encoding="utf-8")
    assert outcomes.read(file) == {} and outcomes.read(tmp_path / "none") == {}
    assert asdict(Outcome(name="a", title="b"))["state"] == "not run"
