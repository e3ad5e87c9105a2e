"""Where a benchmark's words go: lines for people, or with --json one document on stdout and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autotune_offload.cli.output import emit_json, stdout_set_aside


@contextmanager
def reporting(as_json: bool) -> Iterator[Callable[[object], None]]:
    """Give the function that takes the document.

    With `as_json` all that is printed inside, by DeepSpeed and C code too, goes to stderr, and the
    document to stdout at the end; without, lines stay on stdout and the document is dropped.
    """
    documents: list[object] = []
    if not as_json:
        yield documents.append
        return
    with stdout_set_aside():
        yield documents.append
    for document in documents:
        emit_json(document)
