"""Faults of the disk, the user and other processes while profiles are kept: real ones, in child processes."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotune_offload.errors import ProfileError
from autotune_offload.places import CACHE_VARIABLE
from autotune_offload.profiles.store import Miss, Store
from autotune_offload.records import Profile
from tests import CHECKOUT
from tests.factories import make_profile

NOBODY = 54321
"""A uid without an entry in passwd."""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def in_a_child(work: Callable[[], object]) -> int:
    """Runs `work` in a forked process, and returns its status: 0, 1 after an exception, or minus a signal."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def become_nobody() -> None:
    """For the rest of this process: another user, without groups, home or an entry in passwd."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    for name in ("HOME", CACHE_VARIABLE, "XDG_CACHE_HOME"):
        os.environ.pop(name, None)


def open_to_all(folder: Path) -> Path:
    """A folder below pytest's, which is root's alone, that another user can reach and write."""
    for above in (folder, *folder.parents):
        if above.name.startswith("pytest-"):
            above.chmod(0o755)
    folder.chmod(0o777)
    return folder


# -- killed, and many at once ---------------------------------------------------------------------


def test_200_writers_killed_in_the_middle_leave_a_whole_profile_each_time(tmp_path: Path) -> None:
    """SIGKILL after a time that goes from nothing to a whole save: what is read is the old one or the new one."""
    store = Store(tmp_path)
    few = {"transfers": make_profile().transfers[:4], "candidates": make_profile().candidates[:4]}
    profiles = [make_profile(plan=f"plan {number}", **few) for number in range(2)]
    store.save(profiles[0])
    started = time.perf_counter()
    store.save(profiles[0])
    whole = time.perf_counter() - started
    killed = 0
    for number in range(200):
        child = os.fork()
        if child == 0:
            try:
                Store(tmp_path).save(profiles[number % 2])
            finally:
                os._exit(0)
        time.sleep(3 * whole * number / 200)
        os.kill(child, signal.SIGKILL)
        killed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert store.lookup(profiles[0].fingerprint) in profiles
    assert killed > 50
    assert [entry.profile in profiles for entry in store.entries()] == [True]
    litter = list(tmp_path.glob(".*.tmp"))
    assert litter
    for path in litter:
        os.utime(path, (0, 0))
    assert sorted(store.prune(only_broken=True)) == sorted(litter)


STARTER = """
import sys, time
from pathlib import Path
from autotune_offload.profiles.store import Store
from tests.factories import make_profile
store = Store(Path(sys.argv[1]))
Path(sys.argv[1], f"ready-{sys.argv[2]}").touch()
while not Path(sys.argv[1], "go").exists():
    time.sleep(0.001)
began = time.perf_counter()
if not hasattr(store.lookup(make_profile().fingerprint), "plan"):
    store.save(make_profile(plan=f"plan {sys.argv[2]}"))
found = store.lookup(make_profile().fingerprint)
print(found.plan, time.perf_counter() - began)
"""


def test_eight_processes_that_start_at_once_find_one_whole_profile(tmp_path: Path) -> None:
    """Each looks, misses, saves and looks again; none fails and none waits for another."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", STARTER, str(tmp_path), str(number)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=CHECKOUT,
        )
        for number in range(8)
    ]
    while len(list(tmp_path.glob("ready-*"))) < 8:
        assert all(child.poll() in (None, 0) for child in children)
        time.sleep(0.01)
    (tmp_path / "go").touch()
    said = [child.communicate(timeout=30)[0].rsplit(" ", 1) for child in children]
    assert [child.returncode for child in children] == [0] * 8
    assert all(plan.startswith("plan ") and float(seconds) < 5 for plan, seconds in said)
    assert [path.suffix for path in tmp_path.iterdir() if not path.name.startswith(("ready-", "go"))] == [
        ".yaml"
    ]


def test_a_file_system_without_locks_makes_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No lock is ever asked for, so none can be missing or be held by a dead process."""

    def missing(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", missing)
    monkeypatch.setattr(fcntl, "lockf", missing)
    store, profile = Store(tmp_path), make_profile()
    store.save(profile)
    assert store.why_not_writable() is None
    assert store.lookup(profile.fingerprint) == profile


# -- full -----------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 KiB: one profile fits, two do not."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_keeps_the_old_profile_and_no_part_of_the_new_one(small_disk: Path) -> None:
    """The reason says so; with room again the next save replaces it."""
    store, old, new = Store(small_disk), make_profile(), make_profile(plan="thorough")
    store.save(old)
    with pytest.raises(ProfileError, match=rf"cannot save .*No space left on device.*{CACHE_VARIABLE}"):
        store.save(new)
    assert store.lookup(old.fingerprint) == old
    assert len(list(small_disk.iterdir())) == 1
    (path,) = small_disk.iterdir()
    path.write_text("")
    store.save(new)
    assert store.lookup(old.fingerprint) == new


def test_a_file_that_may_not_grow_is_the_same(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands for a quota, where no file system can be mounted."""
    store, old = Store(tmp_path), make_profile()
    store.save(old)

    def save_under_a_limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        with pytest.raises(ProfileError, match="File too large"):
            store.save(make_profile(plan="thorough"))

    assert in_a_child(save_under_a_limit) == 0
    assert store.lookup(old.fingerprint) == old
    assert len(list(tmp_path.iterdir())) == 1


# -- users and homes ------------------------------------------------------------------------------


@as_root
def test_a_read_only_home_is_known_before_measuring(tmp_path: Path) -> None:
    """For another user, since root may write anywhere; what is stored there is still used."""
    profile = make_profile()
    Store(open_to_all(tmp_path)).save(profile)
    (path,) = tmp_path.iterdir()
    os.chown(path, NOBODY, NOBODY)
    tmp_path.chmod(0o555)

    def start() -> None:
        become_nobody()
        for folder in (tmp_path, tmp_path / "deeper"):
            assert "Permission denied" in (Store(folder).why_not_writable() or "")
            with pytest.raises(ProfileError, match="Permission denied"):
                Store(folder).save(profile)
        assert Store(tmp_path).lookup(profile.fingerprint) == profile

    assert in_a_child(start) == 0


def test_a_read_only_file_system_is_known_before_measuring(small_disk: Path) -> None:
    """For root too."""
    remounted = subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], capture_output=True)
    if remounted.returncode != 0:
        pytest.skip("the file system cannot be made read-only here")
    assert "Read-only file system" in (Store(small_disk).why_not_writable() or "")
    assert "Read-only file system" in (Store(small_disk / "deeper").why_not_writable() or "")


@as_root
def test_a_user_without_an_entry_in_passwd_goes_without_a_cache(tmp_path: Path) -> None:
    """No home, no variable: one reason, no folder named "~", and the variable is the way out."""
    home = open_to_all(tmp_path)

    def start() -> None:
        become_nobody()
        os.chdir(home)
        homeless = Store()
        assert isinstance(homeless.lookup(make_profile().fingerprint), Miss)
        assert CACHE_VARIABLE in (homeless.why_not_writable() or "")
        with pytest.raises(ProfileError, match=CACHE_VARIABLE):
            homeless.save(make_profile())
        assert not list(home.iterdir())
        os.environ[CACHE_VARIABLE] = str(home / "named")
        Store().save(make_profile())
        assert isinstance(Store().lookup(make_profile().fingerprint), Profile)

    assert in_a_child(start) == 0


@as_root
def test_another_users_file_is_a_miss_and_is_replaced(tmp_path: Path) -> None:
    """What someone else put into a shared folder is not believed; root's own file is."""
    store, profile = Store(open_to_all(tmp_path)), make_profile()
    path = store.save(profile)
    path.chmod(0o644)

    def start() -> None:
        become_nobody()
        assert Store(tmp_path).lookup(profile.fingerprint) == profile

    assert in_a_child(start) == 0
    os.chown(path, NOBODY, NOBODY)
    miss = store.lookup(profile.fingerprint)
    assert isinstance(miss, Miss) and f"another user (uid {NOBODY}, this is uid 0)" in miss.reason
    (entry,) = store.entries()
    assert entry.profile is None and "another user" in (entry.problem or "")
    store.save(profile)
    assert path.stat().st_uid == 0
    assert store.lookup(profile.fingerprint) == profile


@pytest.mark.parametrize("where", ["a file", "below a file", "a dangling link", "a FIFO"])
def test_a_cache_path_that_is_no_folder_is_known_before_measuring(where: str, tmp_path: Path) -> None:
    """The reason names it, a lookup misses, and nothing is made or waited for."""
    path = tmp_path / "cache"
    if where == "a FIFO":
        os.mkfifo(path)
    elif where == "a dangling link":
        path.symlink_to(tmp_path / "gone")
    else:
        path.write_text("")
    store = Store(path / "profiles" if where == "below a file" else path)
    assert str(store.folder) in (store.why_not_writable() or "")
    assert isinstance(store.lookup(make_profile().fingerprint), Miss)
    assert store.entries() == ()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_usable_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    """Asking leaves nothing in it."""
    store = Store(tmp_path / "new" / "profiles")
    assert store.why_not_writable() is None
    assert list(store.folder.iterdir()) == []
