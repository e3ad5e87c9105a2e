"""The tables of current results in README.md and LOG.md, made from results.jsonl.

    python -m benchmarks.tables             writes them between their markers
    python -m benchmarks.tables --check     exits 1 where a document is not what would be written

Each row is of the latest run that has it. What stood there before is in the history of LOG.md.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune_offload.units import significant
from benchmarks import results
from benchmarks.results import Number, Of, Run

CHECKOUT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Row:
    """What README says of a measurement, and which one that is."""

    words: str
    benchmark: str
    what: str


COMPARED = (
    Row("`partition_grads`, 67M bf16 parameters", "gradient_path", "partition_grads, accumulation 1"),
    Row("the whole backward pass there", "gradient_path", "backward, accumulation 1"),
    Row("the whole step there", "gradient_path", "step, accumulation 1"),
    Row("`partition_grads`, 4 micro-steps", "gradient_path", "partition_grads, accumulation 4"),
    Row("the whole step with these", "gradient_path", "step, accumulation 4"),
    Row("the optimizer step, 67M bf16 parameters, both offloads", "step", "step phase, both offloads"),
    Row("a training step there, with path and pass", "step", "training step, both offloads"),
    Row("one pass over 16.8M bf16 values, with the fp64 norm", "host_pass", "one pass, bfloat16"),
)

JUDGED = (
    Row("the choice against the best of an exhaustive sweep", "choice", "the choice over the best of a sweep"),
    Row("the choice on described machines against the best there is, mean", "regret", "mean regret"),
    Row("the same, the worst case", "regret", "worst regret"),
    Row("a confirmation on real steps, of 200 of them", "confirm", "cost over 200 steps"),
    Row("starts that came to another choice than the probe's, quiet host", "confirm",
        "starts that came to another choice, quiet host"),
    Row("the same, a busy process on each core", "confirm", "starts that came to another choice, loaded host"),
    Row("our copy rate against a plain copy loop's, 1 thread", "stream",
        "our copy rate over a plain copy's, 1 threads"),
    Row("the same, 2 threads", "stream", "our copy rate over a plain copy's, 2 threads"),
    Row("a start with a stored profile, over plain DeepSpeed", "startup",
        "autotune_offload.initialize with a stored profile, over deepspeed.initialize"),
    Row("`autotune-offload --help`", "startup", "autotune-offload --help"),
    Row("`import autotune_offload`", "startup", "import autotune_offload, over the bare interpreter"),
)  # fmt: skip


class Latest:
    """The newest run of each row.

    Args:
        runs: oldest first.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = {
            (run.benchmark, number.what): run for run in runs for number in run.numbers
        }  # a later run takes the place of an earlier one

    def run(self, benchmark: str, what: str) -> Run:
        """The run.

        Raises:
            KeyError: nothing of that was recorded.
        """
        return self._runs[benchmark, what]

    def number(self, benchmark: str, what: str, of: Of) -> Number | None:
        """Of that row."""
        return next((n for n in self.run(benchmark, what).numbers if (n.what, n.of) == (what, of)), None)

    def rows(self) -> Iterable[tuple[Run, str]]:
        """All rows with their runs, a benchmark after the other."""
        return ((run, what) for (_, what), run in sorted(self._runs.items(), key=lambda item: item[0][0]))


def ratio(stock: Number | None, ours: Number | None, told: Number | None) -> float | None:
    """DeepSpeed's over ours: the median of pairs where it was recorded, else that of the medians."""
    if told is not None:
        return told.value
    return stock.value / ours.value if stock is not None and ours is not None else None


def said(number: Number | None, *, spread: bool = False) -> str:
    """A cell."""
    if number is None:
        return ""
    unit = f" {number.unit}" if number.unit else ""
    if not spread:
        return f"{f'{number.value:.2f}' if number.value < 10 else significant(number.value)}{unit}"
    around = {
        "IQR {0:.4g}": (number.iqr,),
        "{0:.4g} to {1:.4g}": number.quartiles or (None,),
        "all {0:.4g} to {1:.4g}": number.range or (None,),
    }
    told = [words.format(*values) for words, values in around.items() if values[0] is not None]
    return f"{number.value:.4g}{unit}" + "".join(f" ({each})" for each in told)


def wanted(number: Number) -> str:
    """The goal's cell."""
    words = (("at least", number.least), ("at most", number.most))
    limits = " and ".join(f"{word} {limit:g}" for word, limit in words if limit is not None)
    if not limits:
        return ""
    missed = ": missed" if number.goal is not None and number.goal.missed_by else ""
    return f"{limits}{f' {number.unit}' if number.unit else ''}{missed}"


def compared(latest: Latest) -> str:
    """DeepSpeed's own code beside ours."""
    lines = ["| what | DeepSpeed | ours | ratio | command |", "|---|---|---|---|---|"]
    before = ""
    for row in COMPARED:
        stock, ours, told = (
            latest.number(row.benchmark, row.what, of) for of in ("DeepSpeed", "ours", "ratio")
        )
        found = ratio(stock, ours, told)
        command, before = _command(latest.run(row.benchmark, row.what), before)
        times = "" if found is None else f"{found:.{0 if found >= 10 else 2}f}x"
        lines.append(f"| {row.words} | {said(stock)} | {said(ours)} | {times} | {command} |")
    return "\n".join([*lines, "", *_where(latest, COMPARED)])


def judged(latest: Latest) -> str:
    """What was found beside what is wanted."""
    lines = ["| what | measured | wanted | command |", "|---|---|---|---|"]
    before = ""
    for row in JUDGED:
        number = latest.number(row.benchmark, row.what, "found")
        if number is None:
            raise KeyError(f"{row.what} stands for itself in no run")
        command, before = _command(latest.run(row.benchmark, row.what), before)
        lines.append(f"| {row.words} | {said(number)} | {wanted(number)} | {command} |")
    return "\n".join([*lines, "", *_where(latest, JUDGED)])


def everything(latest: Latest) -> str:
    """Every row of every benchmark with its spread."""
    lines: list[str] = []
    before: Run | None = None
    for run, what in latest.rows():
        if run is not before:
            lines += ["", f"`{run.command}`, {_circumstances(run)}:", ""]
            lines += [
                "| what | DeepSpeed | ours | ratio, or the number | samples | wanted |",
                "|---|---|---|---|---|---|",
            ]
            before = run
        numbers = {number.of: number for number in run.numbers if number.what == what}
        alone = numbers.get("ratio", numbers.get("found"))
        samples = next((n.samples for n in numbers.values() if n.samples), "")
        cells = [what, *(said(numbers.get(of), spread=True) for of in ("DeepSpeed", "ours"))]
        cells += [said(alone, spread=True), str(samples), "" if alone is None else wanted(alone)]
        lines.append("|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|")
    return "\n".join(lines[1:])


def _command(run: Run, before: str) -> tuple[str, str]:
    """A cell, and what the next one is held against."""
    return ("the same" if run.command == before else f"`{run.command}`"), run.command


def _where(latest: Latest, rows: Iterable[Row]) -> Iterable[str]:
    """One line for each set of circumstances."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        run = latest.run(row.benchmark, row.what)
        found.setdefault(_circumstances(run), {})[f"`{run.benchmark}`"] = None
    return [f"{', '.join(names)}: {circumstances}.  " for circumstances, names in found.items()]


def _circumstances(run: Run) -> str:
    versions = [("DeepSpeed", run.versions.deepspeed), ("torch", run.versions.torch)]
    told = ", ".join(f"{name} {version}" for name, version in versions if version)
    return f"{run.date}, {run.machine}; {told}; {run.conditions}"


TABLES: dict[str, tuple[str, Callable[[Latest], str]]] = {
    "compared": ("README.md", compared),
    "judged": ("README.md", judged),
    "everything": ("benchmarks/LOG.md", everything),
}
"""By the name in the marker: the document and what makes it."""


def with_tables(document: str, text: str, latest: Latest) -> str:
    """The text of a document with its tables as they should be.

    Raises:
        ValueError: a marker is missing.
    """
    for name, (place, make) in TABLES.items():
        if place != document:
            continue
        begin, end = f"<!-- made by `python -m benchmarks.tables`: {name} -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"{document}: expected the lines {begin!r} and {end!r} once")
        made = f"{begin}\n{make(latest).strip()}\n\n{end}"
        text = pattern.sub(lambda _, made=made: made, text)  # type: ignore[misc]
    return text


def main() -> int:
    """Write the documents, or hold them against what would be written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where a document differs")
    options = parser.parse_args()
    latest, differing = Latest(results.read()), []
    for document in sorted({place for place, _ in TABLES.values()}):
        file = CHECKOUT / document
        text = file.read_text(encoding="utf-8")
        made = with_tables(document, text, latest)
        if made != text:
            differing.append(document)
            if not options.check:
                file.write_text(made, encoding="utf-8")
    print(f"{'differ from the results' if options.check else 'written'}: {', '.join(differing) or 'none'}")
    return 1 if options.check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
