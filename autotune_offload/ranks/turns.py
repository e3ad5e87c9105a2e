"""The ranks of one host before there is a group: one measures at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from autotune_offload.errors import AgreementError
from autotune_offload.ranks.agreement import LAST_POLL_SECONDS, MARGIN_SECONDS

# -- the ranks of a host before there is a group --------------------------------------------------


def turn_seconds(measure_seconds: float) -> float:
    """How long to wait for a rank that measures for so long."""
    return 2 * measure_seconds + MARGIN_SECONDS


@contextlib.contextmanager
def turn_on_host(folder: Path, seconds: float) -> Iterator[None]:
    """One process at a time, of all that keep their profiles in `folder`; waits so long and no longer.

    The lock is the kernel's and dies with the process that holds it. Where the folder takes no locks, all
    go on at once: what they write is replaced whole.

    Raises:
        AgreementError: somebody else has held it all the time.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder / ".measuring", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:  # profiles cannot be stored here either, which is said elsewhere
        yield
        return
    try:
        _lock(descriptor, folder, seconds)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise AgreementError(
                    f"another rank of this host has been measuring for over {seconds:g} s (lock {folder}/.measuring)"
                ) from None
            time.sleep(LAST_POLL_SECONDS)
        except OSError:  # a file system without locks
            return
