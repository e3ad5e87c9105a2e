"""The numbers that benchmarks record, and the tables and goals that are made of them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from benchmarks import gates, output, results, tables
from benchmarks.results import Number, Run, Versions
from tests import CHECKOUT


def run(*numbers: Number, benchmark: str = "step", date: str = "2026-01-01") -> Run:
    """A run of these numbers."""
    return Run(
        benchmark=benchmark,
        command=f"python -m benchmarks.{benchmark}",
        date=date,
        machine="one machine",
        versions=Versions(deepspeed="0.19.8"),
        conditions="quiet",
        numbers=numbers,
    )


def test_the_documents_are_what_the_command_makes() -> None:
    """README.md and LOG.md have the tables that `python -m benchmarks.tables` writes from results.jsonl."""
    latest = tables.Latest(results.read())
    for document in {place for place, _ in tables.TABLES.values()}:
        text = (CHECKOUT / document).read_text(encoding="utf-8")
        assert tables.with_tables(document, text, latest) == text, "python -m benchmarks.tables"


def test_a_number_that_was_changed_by_hand_is_seen() -> None:
    """What stands between the markers is compared, not only that they are there."""
    latest = tables.Latest(results.read())
    text = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    number = latest.number("gradient_path", "partition_grads, accumulation 1", "ours")
    cell = f"| {tables.said(number)} |"
    assert cell in text
    assert tables.with_tables("README.md", text.replace(cell, "| 0.12 ms |"), latest) == text


def test_a_marker_that_is_missing_is_named() -> None:
    """No table is left out in silence."""
    with pytest.raises(ValueError, match="end of compared"):
        tables.with_tables("README.md", "nothing", tables.Latest(results.read()))


def test_a_later_run_takes_the_place_of_the_rows_that_it_has() -> None:
    """And of no others."""
    before = run(Number(what="a", value=1.0), Number(what="b", value=2.0))
    after = run(Number(what="a", value=3.0), date="2026-01-02")
    latest = tables.Latest([before, after])
    assert (latest.run("step", "a"), latest.run("step", "b")) == (after, before)


def test_a_ratio_is_that_of_the_pairs_where_it_was_recorded() -> None:
    """Else that of the medians, and nothing where one side is missing."""
    stock, ours = Number(what="a", of="DeepSpeed", value=6.0), Number(what="a", of="ours", value=2.0)
    assert tables.ratio(stock, ours, Number(what="a", of="ratio", value=2.5)) == 2.5
    assert tables.ratio(stock, ours, None) == 3.0
    assert tables.ratio(None, ours, None) is None


def test_a_pair_is_told_with_quartiles_and_the_ratio_of_each_round() -> None:
    """In milliseconds; the median of ratios is not the ratio of medians."""
    stock, ours, ratio = results.pair("a", [0.001, 0.004, 0.009], [0.001, 0.001, 0.0045])
    assert (stock.value, stock.quartiles, ours.value) == (4.0, (2.5, 6.5), 1.0)
    assert (ratio.value, ratio.samples) == (2.0, 3)


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["--record", "--pairs", "5"], "python -m benchmarks.step --pairs 5"),
        (["--pairs", "5", "--record", "quiet host", "--json"], "python -m benchmarks.step --pairs 5"),
        (
            ["--record=quiet", "--cases", "optimizer only"],
            "python -m benchmarks.step --cases 'optimizer only'",
        ),
    ],
)
def test_a_run_is_appended_with_its_command_and_circumstances(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    command: str,
) -> None:
    """Without the words that say where the numbers go; what stood in the file stays."""
    file = tmp_path / "results.jsonl"
    monkeypatch.setattr(results, "FILE", file)
    monkeypatch.setattr(output, "_keep_to_few_cores", lambda: None)
    monkeypatch.setattr(sys, "argv", ["benchmarks/step.py", *arguments])
    parser = argparse.ArgumentParser()
    output.add_output(parser)
    options = parser.parse_known_args()[0]
    for value in (1.0, 2.0):
        with output.reporting(options) as emit:
            emit({}, [Number(what="a", value=value, unit="ms")])
    assert str(file) in capsys.readouterr().err
    first, second = results.read(file)
    assert [found.numbers[0].value for found in (first, second)] == [1.0, 2.0]
    assert (second.benchmark, second.command) == ("step", command)
    assert second.conditions == options.record
    assert second.versions.deepspeed and second.versions.python and " cores of " in second.machine


def test_nothing_is_recorded_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --record the file is not touched."""
    monkeypatch.setattr(results, "FILE", tmp_path / "results.jsonl")
    monkeypatch.setattr(output, "_keep_to_few_cores", lambda: None)
    parser = argparse.ArgumentParser()
    output.add_output(parser)
    with output.reporting(parser.parse_args([])) as emit:
        emit({}, [Number(what="a", value=1.0)])
    assert not results.FILE.exists()


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    """With its number."""
    file = tmp_path / "results.jsonl"
    file.write_text(results.FILE.read_text(encoding="utf-8").splitlines()[0] + "\n{}\n")
    with pytest.raises(ValueError, match="line 2"):
        results.read(file)


def gated(monkeypatch: pytest.MonkeyPatch, value: float, *, leave_out: int = 0) -> int:
    """The exit status of the gates where all but the first few stand at `value` and are wanted below 1."""
    runs = [
        run(Number(what=what, value=value, most=1.0), benchmark=benchmark)
        for benchmark, what in gates.GATES[leave_out:]
    ]
    monkeypatch.setattr(results, "read", lambda: runs)
    return gates.main()


def test_a_goal_that_is_missed_or_was_never_measured_fails_the_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only that."""
    assert gated(monkeypatch, 0.5) == 0
    assert gated(monkeypatch, 1.5) == 1
    assert gated(monkeypatch, 0.5, leave_out=1) == 1


def test_every_gate_is_a_number_that_its_benchmark_records() -> None:
    """Its words stand in the benchmark's source, but for what is put in there."""
    for benchmark, what in gates.GATES:
        source = (CHECKOUT / "benchmarks" / f"{benchmark}.py").read_text(encoding="utf-8")
        for found, put_in in (("200", "{COUNTED_STEPS}"), ("quiet", "{name}"), ("loaded", "{name}")):
            what = what.replace(found, put_in)
        assert what in source
