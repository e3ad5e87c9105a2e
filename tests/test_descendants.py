"""Processes end with what they started."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from autotune_offload.descendants import end_session, run_in_session

_STARTS_ANOTHER = """
import os, subprocess, sys
other = subprocess.Popen(["sleep", "3600"], preexec_fn=os.setpgrp)
open(sys.argv[1] + ".part", "w").write(str(other.pid))
os.rename(sys.argv[1] + ".part", sys.argv[1])
other.wait()
"""


def _started(file: Path) -> psutil.Process:
    deadline = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return psutil.Process(int(file.read_text()))


def test_a_session_ends_with_all_its_process_groups(tmp_path: Path) -> None:
    """This process, which is in another one, does not."""
    file = tmp_path / "pid"
    leader = subprocess.Popen([sys.executable, "-c", _STARTS_ANOTHER, str(file)], start_new_session=True)
    other = _started(file)
    end_session(leader.pid)
    leader.wait(10)
    assert not psutil.wait_procs([other], timeout=10)[1]


def test_a_session_of_nobody_is_nothing_to_end() -> None:
    """Its leader has gone already."""
    gone = subprocess.Popen(["true"], start_new_session=True)
    gone.wait(10)
    end_session(gone.pid)


def test_a_command_gives_what_it_says() -> None:
    """Or fails as `subprocess` does, with what it wrote to stderr."""
    assert run_in_session([sys.executable, "-c", "print(7)"], seconds=30) == "7\n"
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run_in_session([sys.executable, "-c", "raise SystemExit('no')"], seconds=30)
    assert failed.value.stderr == "no\n"


def test_a_command_that_takes_too_long_leaves_nothing(tmp_path: Path) -> None:
    """What it had started is ended too."""
    file = tmp_path / "pid"
    with pytest.raises(subprocess.TimeoutExpired):
        run_in_session([sys.executable, "-c", _STARTS_ANOTHER, str(file)], seconds=3)
    left = []
    with contextlib.suppress(psutil.NoSuchProcess):  # then it has gone already
        left = [_started(file)] if file.exists() else []
    assert not psutil.wait_procs(left, timeout=10)[1]
