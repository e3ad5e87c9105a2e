"""Progress on stderr: a bar on a terminal, one line elsewhere, nothing for what is over in a second."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

from autotune_offload.cli.output import console, is_terminal, notice

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PATIENCE_SECONDS = 1.0
"""What is over sooner shows no progress."""


SEEN_SHARE = 0.1
"""Of the work that must be done before a guess at the rest is worth showing."""

MOST_CHARACTERS = 26
"""Of what is being measured; more would squeeze the bar on 80 columns."""


class Reporter:
    """A context manager that is called with (what is being done, share done from 0 to 1)."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._what, self._share = "", 0.0
        self._started = time.monotonic()
        self._lock = threading.Lock()  # the timer's one call comes from a thread of its own
        self._timer = threading.Timer(PATIENCE_SECONDS, self._begin)
        self._timer.daemon = True
        self._draws = False
        self._bar: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> Reporter:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            self._draws = False
            if self._bar is not None:
                self._bar[0].stop()

    def __call__(self, what: str, share: float) -> None:
        """Take note of how far it is, and show it where a bar is shown."""
        with self._lock:
            self._what, self._share = what, share
            if self._draws:
                self._draw()

    def _begin(self) -> None:
        """Called once, when it has lasted long enough to be worth a word."""
        with self._lock:
            if self._timer.finished.is_set():
                return
            if is_terminal(sys.stderr):
                self._draws = True
                self._draw()
            else:
                notice(f"{self._title}: {self._what} ..." if self._what else f"{self._title} ...")

    def _draw(self) -> None:
        if self._bar is None:
            self._bar = _open_bar(self._title)
        bar, task = self._bar
        left = time_left(time.monotonic() - self._started, self._share)
        bar.update(task, completed=self._share, what=self._what[:MOST_CHARACTERS], left=left)
        bar.refresh()


def time_left(elapsed_seconds: float, share: float) -> str:
    """``3 s left``, if the rest goes on as the work so far; nothing before that can be guessed."""
    if not SEEN_SHARE <= share < 1:
        return ""
    return f"{elapsed_seconds * (1 - share) / share:.0f} s left"


def _open_bar(title: str) -> tuple[Progress, TaskID]:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=18),
        TaskProgressColumn(),
        TextColumn("{task.fields[left]}", markup=False),
        TextColumn("{task.fields[what]}", markup=False),
        console=console(stderr=True),
        auto_refresh=False,  # a refreshing thread would run inside what is being timed
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    task = bar.add_task(title, total=1.0, what="", left="")
    bar.start()
    return bar, task
