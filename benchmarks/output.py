"""Where a benchmark's words go, and what it may take of the machine.

Lines for people, or with --json one document on stdout and nothing else. A benchmark keeps to CORES processors,
with all that it starts: BENCHMARK_CORES=8 in the environment gives it more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autotune_offload.cli.output import emit_json, stdout_set_aside

CORES = 2


def _keep_to_few_cores() -> None:
    """Before threads are started; children inherit it."""
    cores = max(int(os.environ.get("BENCHMARK_CORES", CORES)), 1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(min(torch.get_num_threads(), cores))


@contextmanager
def reporting(as_json: bool) -> Iterator[Callable[[object], None]]:
    """Give the function that takes the document.

    With `as_json` all that is printed inside, by DeepSpeed and C code too, goes to stderr, and the
    document to stdout at the end; without, lines stay on stdout and the document is dropped.
    """
    _keep_to_few_cores()
    documents: list[object] = []
    if not as_json:
        yield documents.append
        return
    with stdout_set_aside():
        yield documents.append
    for document in documents:
        emit_json(document)
