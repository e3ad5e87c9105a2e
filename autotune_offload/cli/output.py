"""What goes where: results to stdout, everything else to stderr, one JSON document when asked for."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

import click

if TYPE_CHECKING:
    from rich.console import Console

WIDEST = 100
"""Columns at most, however wide the terminal is; tables are laid out for 80."""


@contextlib.contextmanager
def stdout_set_aside() -> Iterator[None]:
    """Send to stderr whatever is written to stdout meanwhile, by Python, by C code or by a child process.

    DeepSpeed and torch log to stdout, at import too. Only the result of a verb belongs there.
    """
    with contextlib.redirect_stdout(sys.stderr), _descriptor_set_aside(), _without_deprecations():
        yield


@contextlib.contextmanager
def _without_deprecations() -> Iterator[None]:
    """What torch and DeepSpeed plan to change in each other is nothing that a user can act on here."""
    with warnings.catch_warnings():
        if not sys.warnoptions:  # who asks for warnings gets them
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
        yield


@contextlib.contextmanager
def _descriptor_set_aside() -> Iterator[None]:
    try:
        saved = os.dup(1)
    except OSError:  # started with stdout closed: nothing to keep clean
        yield
        return
    try:
        _flush_everything()
        with contextlib.suppress(OSError):  # stderr closed
            os.dup2(2, 1)
        yield
    finally:
        _flush_everything()
        os.dup2(saved, 1)
        os.close(saved)


def _flush_everything() -> None:
    """Empty Python's and the C library's buffers into the descriptor that they were written for."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)


def end_of_results() -> None:
    """Close the real stdout for the rest of the process: later words, at exit too, go to stderr."""
    _flush_everything()
    with contextlib.suppress(OSError):
        os.dup2(2, 1)


def drop_results() -> None:
    """Let go of what is left to be written to stdout, whose reader has gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError):
        os.dup2(nowhere, 1)
    os.close(nowhere)
    _flush_everything()


def emit_json(document: object) -> None:
    """Write the one JSON document of a verb to stdout. Infinities and not-a-numbers become null."""
    click.echo(json.dumps(finite(document), indent=2, allow_nan=False))


def finite(value: Any) -> Any:
    """`value` with None for every float that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def notice(text: str) -> None:
    """One message to stderr."""
    click.echo(text, err=True)


def console(*, stderr: bool = False) -> Console:
    """A console that takes text literally: no markup, no emoji, no guesses at what to colour.

    It honours NO_COLOR, and writes no colour where the stream is not a terminal.
    """
    from rich.console import Console

    class Plain(Console):
        """rich ends the program with 1 where the reader has gone; here that is for `outcome` to say."""

        def on_broken_pipe(self) -> None:
            """Say so, and end nothing."""
            raise BrokenPipeError

    made = Plain(stderr=stderr, markup=False, emoji=False, highlight=False)
    made.width = min(made.width, WIDEST)
    return made


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person is watching `stream`."""
    return stream is not None and not stream.closed and stream.isatty()
