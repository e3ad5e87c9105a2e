"""SIGTERM in the middle of measuring: what is open is closed, then the process ends as it would have.

Ctrl-C raises by itself. SIGTERM ends a process at once, with a child that it has started still running and a file
that it was writing half written. A handler that a program has set is its own: it is left alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Terminated(BaseException):
    """SIGTERM arrived. Like KeyboardInterrupt it is no failure of anything, so nothing may swallow it."""


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """SIGTERM raises `Terminated` inside, where it would have ended the process without a word."""
    if not _ours_to_handle():
        yield
        return
    signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def cleaned_up() -> Iterator[None]:
    """SIGTERM unwinds what is inside, and then ends the process by the signal as it would have without us."""
    handles = _ours_to_handle()
    try:
        with raising():
            yield
    except Terminated:
        if handles:
            os.kill(os.getpid(), signal.SIGTERM)
        raise


def _ours_to_handle() -> bool:
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _raise(number: int, frame: Any) -> None:
    del number, frame
    raise Terminated
