"""What was measured, for machines to read: one JSON line a run in results.jsonl, oldest first.

A benchmark appends its run with `--record [CONDITIONS]`; `python -m benchmarks.tables` makes the tables of README.md
and LOG.md from the file, `python -m benchmarks.gates` holds the latest runs against their goals. Lines are not changed
afterwards: a number that turned out to be wrong is measured again. Runs that were made before the file was there have
been copied from LOG.md, with what is said of them there.
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from autotune_offload import units
from benchmarks.goals import Goal

FILE = Path(__file__).with_name("results.jsonl")

Of = Literal["DeepSpeed", "ours", "ratio", "found"]


class Number(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A median, or the one number there is, with its spread: the interquartile range, both quartiles, or all.

    Attributes:
        what: was measured; numbers of one `what` make a row.
        of: whose it is: DeepSpeed's own code, ours, DeepSpeed's over ours, or a number that stands alone.
        value: in `unit`.
        samples: how many it is the median of, where that is known.
        least: the goal, if there is one.
        most: the same.
    """

    what: str
    of: Of = "found"
    value: float
    unit: str = ""
    iqr: float | None = None
    quartiles: tuple[float, float] | None = None
    range: tuple[float, float] | None = None
    samples: int | None = None
    least: float | None = None
    most: float | None = None

    @property
    def goal(self) -> Goal | None:
        """What it is to reach."""
        if self.least is None and self.most is None:
            return None
        unit = f" {self.unit}" if self.unit else ""
        return Goal(name=self.what, found=self.value, least=self.least, most=self.most, unit=unit)


class Versions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Of what took part, where they are known."""

    deepspeed: str | None = None
    torch: str | None = None
    python: str | None = None
    autotune_offload: str | None = None


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One run of one benchmark.

    Attributes:
        benchmark: module below `benchmarks`.
        command: as it was typed.
        date: ISO 8601.
        machine: in words: processors, memory, device.
        conditions: what else ran there, as whoever recorded it says.
        load: average number of runnable processes over the minute before the run, where it was read.
        numbers: in the order in which they are told.
    """

    benchmark: str
    command: str
    date: str
    machine: str
    versions: Versions
    conditions: str
    load: float | None = None
    numbers: tuple[Number, ...]


def median(
    what: str,
    raw: Sequence[float],
    *,
    of: Of = "found",
    unit: str = "ms",
    scale: float = 1.0,
    least: float | None = None,
    most: float | None = None,
) -> Number:
    """The median of these, each times `scale`, with both quartiles where there are two and more."""
    values = [value * scale for value in raw]
    low, middle, high = (
        _rounded(value)
        for value in (
            statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        )
    )
    return Number(
        what=what,
        of=of,
        value=middle,
        unit=unit,
        quartiles=(low, high) if len(values) > 1 else None,
        samples=len(values),
        least=least,
        most=most,
    )


def _rounded(value: float) -> float:
    """To six digits: no clock tells more."""
    return float(f"{value:.6g}")


def pair(what: str, stock: Sequence[float], ours: Sequence[float]) -> tuple[Number, Number, Number]:
    """DeepSpeed's seconds and ours, that ran in turn, as milliseconds; and the median of their ratios."""
    ratios = [a / b for a, b in zip(stock, ours, strict=True)]
    return (
        median(what, stock, of="DeepSpeed", scale=1e3),
        median(what, ours, of="ours", scale=1e3),
        median(what, ratios, of="ratio", unit=""),
    )


def read(file: Path = FILE) -> list[Run]:
    """Every run, oldest first.

    Raises:
        ValueError: a line that is no run; it says which.
    """
    runs = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            runs.append(msgspec.json.decode(line, type=Run))
        except msgspec.DecodeError as error:
            raise ValueError(f"{file}, line {number}: {error}") from error
    return runs


def append(numbers: Iterable[Number], conditions: str, *, load: float | None, file: Path) -> Run:
    """Add the run of this process to the file."""
    found = run_of_this_process(tuple(numbers), conditions, load=load)
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(msgspec.to_builtins(found), ensure_ascii=False) + "\n")
    return found


def run_of_this_process(numbers: tuple[Number, ...], conditions: str, *, load: float | None) -> Run:
    """These numbers with all that is known of where and how they came to be."""
    from autotune_offload.machine.host import software

    name, *arguments = Path(sys.argv[0]).stem, *_without_record(sys.argv[1:])
    versions = software()
    return Run(
        benchmark=name,
        command=shlex.join(["python", "-m", f"benchmarks.{name}", *arguments]),
        date=datetime.date.today().isoformat(),
        machine=machine(),
        versions=Versions(
            deepspeed=versions.deepspeed,
            torch=versions.torch,
            python=versions.python,
            autotune_offload=versions.autotune_offload,
        ),
        conditions=conditions,
        load=load,
        numbers=numbers,
    )


def machine() -> str:
    """The processors that may be used, the memory, and the device, in words and without a name of the host."""
    from autotune_offload.machine.accelerator import AcceleratorDevice
    from autotune_offload.machine.host import facts

    host, device = facts(), AcceleratorDevice().identity
    cores = f"{len(os.sched_getaffinity(0))} of {host.cpu_count} cores of {host.cpu_model}"
    end = "CPU only" if device.kind == "cpu" else device.name
    return f"{cores}, {units.size(host.ram_bytes)}, {end}"


def _without_record(arguments: Sequence[str]) -> list[str]:
    """The arguments that make the numbers: not where they are written to."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--json" or word.startswith("--record="):
            continue
        if word != "--record":
            kept.append(word)
            continue
        following = next(words, None)
        if following is not None and following.startswith("-"):
            kept.append(following)
    return kept
