"""Processes that this one started end with it, with all that they started themselves.

A build tool puts each compiler into a process group of its own, so that a signal to its own group does not reach
them; but all of them stay in the session of the process that was started for us.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence

_ROUNDS = 5
"""A process that is being ended may have started another one meanwhile."""


def end_session(leader: int) -> None:
    """SIGKILL to every process in the session that process `leader` began; to `leader` last."""
    for _ in range(_ROUNDS):
        members = [process for process in _members(leader) if process != leader]
        if not members:
            break
        for process in members:
            _kill(process)
    _kill(leader)


def run_in_session(
    command: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None
) -> str:
    """What `command` writes to stdout; whatever ends the wait for it, a signal included, ends all of it.

    Args:
        command: with its arguments.
        seconds: that it may take.
        environment: its variables; those of this process if None.

    Raises:
        OSError: it cannot be started.
        subprocess.SubprocessError: it fails, or takes longer.
    """
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment,
    ) as process:
        try:
            said, errors = process.communicate(timeout=seconds)
        except BaseException:
            end_session(process.pid)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, said, errors)
    return said


def _members(leader: int) -> Iterator[int]:
    import psutil  # here, since few starts end anything

    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                yield process.pid


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, signal.SIGKILL)
