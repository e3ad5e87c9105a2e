"""Staying the parent of a command that is to notice nothing of it: signals go on, and its end becomes ours."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Mapping
from typing import NoReturn

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG in linux/prctl.h
_PASSED_ON = tuple(
    getattr(signal, name)
    for name in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGCONT")
    if hasattr(signal, name)
)


def possible() -> bool:
    """Whether this system lets a process wait for signals and learn who sent them, as Linux does."""
    return hasattr(signal, "sigwaitinfo")


def run(command: list[str], environment: Mapping[str, str]) -> int:
    """Run `command` to its end; its exit status as `os.waitstatus_to_exitcode` has it.

    A signal that this process gets goes on to the command. What the terminal sends, it sends to both.

    Raises:
        OSError: it cannot be started.
    """
    waited_for = {*_PASSED_ON, signal.SIGCHLD}
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # ignored, as some parents leave it, children end without a status
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    try:
        child = _started(command, environment, before)
        while True:
            info = signal.sigwaitinfo(waited_for)
            if info.si_signo == signal.SIGCHLD:
                status = _ended(child)
                if status is not None:
                    return status
            elif info.si_pid > 0:  # else the kernel sent it, for the terminal, and to the command as well
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, info.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_as(status: int) -> NoReturn:
    """Leave with the exit status of the command, or die of the signal that it died of."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if status < 0:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
            signal.signal(-status, signal.SIG_DFL)  # SIGKILL has no other
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-status})
        os.kill(os.getpid(), -status)
    os._exit(status if status >= 0 else 128 - status)  # the first process of a container survives the signal


def _started(command: list[str], environment: Mapping[str, str], mask: set[int]) -> int:
    library = ctypes.CDLL(None)
    told, tells = os.pipe()  # closes with the exec, or has the reason why there was none
    child = os.fork()
    if child == 0:
        try:
            _become(command, environment, mask, library)
        except OSError as error:
            os.write(tells, str(error.errno).encode())
        finally:
            os._exit(127)
    os.close(tells)
    with open(told, "rb") as pipe:
        failed = pipe.read()
    if failed:
        os.waitpid(child, 0)
        raise OSError(int(failed), os.strerror(int(failed)))
    return child


def _become(
    command: list[str], environment: Mapping[str, str], mask: set[int], library: ctypes.CDLL
) -> NoReturn:
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and what it ignores is inherited
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    with contextlib.suppress(AttributeError):
        library.prctl(_DIE_WITH_PARENT, int(signal.SIGKILL))  # who kills us means the command
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.execve(command[0], command, environment)


def _ended(child: int) -> int | None:
    """The child's exit status, once it has ended. Orphans end here too where this is a container's first process."""
    with contextlib.suppress(ChildProcessError):
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return None
            if process == child:
                return os.waitstatus_to_exitcode(status)
    return None
