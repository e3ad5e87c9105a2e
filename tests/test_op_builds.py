"""The directory of compiled operations is cleared of stale locks, and only of those."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from tests import op_builds


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """Where torch puts the lock of one operation's build."""
    (tmp_path / "cpu_adam").mkdir()
    return tmp_path / "cpu_adam" / "lock"


def test_the_lock_of_a_killed_build_is_removed(lock: Path, tmp_path: Path) -> None:
    """A process that took torch's lock and died leaves a file, which goes and is named."""
    take = "import os, sys; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); os.abort()"
    subprocess.run([sys.executable, "-c", take, str(lock)], check=False, capture_output=True)
    assert lock.exists()
    assert op_builds.remove_stale_locks(tmp_path) == [lock]
    assert not lock.exists()


def test_the_lock_of_a_running_build_stays(lock: Path, tmp_path: Path) -> None:
    """While torch's own lock is held by a live process, it is left alone."""
    baton = FileBaton(str(lock))
    assert baton.try_acquire()
    try:
        assert op_builds.remove_stale_locks(tmp_path) == []
        assert lock.exists()
    finally:
        baton.release()


def test_a_directory_that_was_never_used_is_fine(tmp_path: Path) -> None:
    """The first run of all has nothing to clear."""
    assert op_builds.remove_stale_locks(tmp_path / "absent") == []


def test_the_kept_directory_gives_way_to_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCH_EXTENSIONS_DIR from outside wins over the checkout's own directory."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/somewhere/else")
    assert op_builds.environment()["TORCH_EXTENSIONS_DIR"] == "/somewhere/else"
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    assert op_builds.environment()["TORCH_EXTENSIONS_DIR"] == str(op_builds.DEFAULT_DIRECTORY)
