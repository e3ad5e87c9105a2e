"""Where a benchmark's words go, and what it may take of the machine.

Lines for people, or with --json one document on stdout and nothing else; with --record its numbers go into
results.jsonl too. A benchmark keeps to CORES processors, with all that it starts: BENCHMARK_CORES=8 in the environment
gives it more.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from autotune_offload.cli.output import emit_json, stdout_set_aside
from benchmarks import results
from benchmarks.results import Number

CORES = 2
UNTOLD = "conditions not told"


class Emit(Protocol):
    """Takes what a benchmark has found: the document for --json, and the numbers for --record."""

    def __call__(self, document: object, numbers: Iterable[Number] = ()) -> None:
        """Once, at the end."""
        ...


def add_output(parser: argparse.ArgumentParser, *, records: bool = True) -> None:
    """The options --json and, where there are numbers to record, --record."""
    parser.add_argument("--json", action="store_true", help="one JSON document and nothing else")
    parser.set_defaults(record=None)
    if records:
        parser.add_argument(
            "--record",
            nargs="?",
            const=UNTOLD,
            metavar="CONDITIONS",
            help="append the numbers to benchmarks/results.jsonl; CONDITIONS says what else ran here: 'quiet'",
        )


def _keep_to_few_cores() -> None:
    """Before threads are started; children inherit it."""
    cores = max(int(os.environ.get("BENCHMARK_CORES", CORES)), 1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(min(torch.get_num_threads(), cores))


@contextmanager
def reporting(options: argparse.Namespace) -> Iterator[Emit]:
    """Give the function that takes the document and the numbers.

    With --json all that is printed inside, by DeepSpeed and C code too, goes to stderr, and the
    document to stdout at the end; without, lines stay on stdout and the document is dropped.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    _keep_to_few_cores()
    documents: list[object] = []

    def emit(document: object, numbers: Iterable[Number] = ()) -> None:
        documents.append(document)
        if options.record is not None:
            found = results.append(numbers, options.record, load=load, file=results.FILE)
            print(f"{len(found.numbers)} numbers recorded in {results.FILE}", file=sys.stderr)

    if not options.json:
        yield emit
        return
    with stdout_set_aside():
        yield emit
    for document in documents:
        emit_json(document)
