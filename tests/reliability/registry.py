"""The table of faults: each registered once, with what injects it and what must come of it."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

import pytest

Area = Literal["limits", "device", "cache", "config", "ranks", "signals", "reports"]
Check = Callable[[Path], str]

AREAS: tuple[Area, ...] = ("limits", "device", "cache", "config", "ranks", "signals", "reports")
SECONDS = 90
"""No fault may take longer, whatever hangs; the usual one takes less than one."""


class NotPossible(Exception):
    """This machine does not let the fault be made; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    `check` gets an empty folder, injects the fault and says what happened; it raises AssertionError where that
    is not what must happen, and NotPossible where the fault cannot be made here.
    """

    name: str
    area: Area
    injected: str
    expected: str
    check: Check


FAULTS: dict[str, Fault] = {}


def fault(*, area: Area, name: str, injected: str, expected: str) -> Callable[[Check], Check]:
    """Registers the decorated check under a name that no other one has."""

    def register(check: Check) -> Check:
        assert name not in FAULTS, f"two faults are called {name}"
        FAULTS[name] = Fault(name=name, area=area, injected=injected, expected=expected, check=check)
        return check

    return register


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one fault: `result` is "pass", "fail" or "not possible here"."""

    fault: Fault
    happened: str
    result: str


def run(one: Fault) -> Outcome:
    """Inject one fault in a folder of its own, within SECONDS."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            with within(SECONDS):
                return Outcome(fault=one, happened=one.check(Path(folder)), result="pass")
        except NotPossible as why:
            return Outcome(fault=one, happened=str(why), result="not possible here")
        except (Exception, pytest.fail.Exception) as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())
            return Outcome(fault=one, happened=words, result="fail")


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """What lasts longer is cut with an AssertionError, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"nothing had happened after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def cells(*texts: str) -> str:
    """One row of a table in Markdown."""
    return "| " + " | ".join(" ".join(text.split()).replace("|", "\\|") for text in texts) + " |"
