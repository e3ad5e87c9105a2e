"""Faults of the profiles on disk: each is a miss with its reason, measured again and replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from autotune_offload.profiles.store import Miss, Store
from autotune_offload.records import Profile
from tests.factories import make_profile
from tests.reliability.registry import NotPossible, fault
from tests.reliability.scenes import (
    CONFIG,
    UNPRIVILEGED,
    answering,
    as_root,
    child,
    environment,
    may_mount,
    shortened,
    start,
    verb,
)

_MISS = "a miss with its reason; measured again and replaced, whole"
_WITHOUT = "the run goes without a cache, with one notice"


def damaged(folder: Path, damage: Callable[[Path], object], *words: str, seconds: float = 1.0) -> str:
    """The miss that a damaged file makes; the next save must replace it."""
    store, profile = Store(folder / "profiles"), make_profile()
    path = store.save(profile)
    damage(path)
    before = time.monotonic()
    found = store.lookup(profile.fingerprint)
    taken = time.monotonic() - before
    assert isinstance(found, Miss), "it was taken for a profile"
    assert "\n" not in found.reason and taken < seconds, f"{taken:.2f} s: {found.reason}"
    for word in words:
        assert word in found.reason, f'"{word}" is not in: {found.reason}'
    store.save(make_profile(warnings=("measured again",)))
    again = store.lookup(profile.fingerprint)
    assert isinstance(again, Profile) and again.warnings == ("measured again",)
    return f"missed in {taken * 1e3:.0f} ms: {shortened(found.reason.replace(str(folder), '...'))}; replaced"


def instead(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Something else in the file's place."""

    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


@fault(area="cache", name="a truncated profile", injected="the last third cut off", expected=_MISS)
def _(folder: Path) -> str:
    return damaged(folder, lambda p: os.truncate(p, p.stat().st_size * 2 // 3), "truncated")


@fault(area="cache", name="an empty profile", injected="0 bytes", expected=_MISS)
def _(folder: Path) -> str:
    return damaged(folder, lambda p: os.truncate(p, 0), "empty")


@fault(area="cache", name="a profile of bytes", injected="256 KiB from a random source", expected=_MISS)
def _(folder: Path) -> str:
    return damaged(folder, lambda p: p.write_bytes(os.urandom(1 << 18)))


@fault(area="cache", name="a profile of a newer schema", injected="schema: 999", expected=_MISS)
def _(folder: Path) -> str:
    def newer(path: Path) -> None:
        path.write_text(path.read_text().replace("schema: 1", "schema: 999", 1))

    return damaged(folder, newer, "999")


@fault(
    area="cache",
    name="a profile of another device under this one's name",
    injected="device.name changed in the file's fingerprint",
    expected=_MISS,
)
def _(folder: Path) -> str:
    def other(path: Path) -> None:
        path.write_text(path.read_text().replace("device.name: NVIDIA H200", "device.name: NVIDIA H100", 1))

    return damaged(folder, other, "device.name")


@fault(
    area="cache",
    name="aliases that explode",
    injected="nine levels of nine aliases each in the file",
    expected=_MISS,
)
def _(folder: Path) -> str:
    def bomb(path: Path) -> None:
        lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
        lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
        text = path.read_text()
        path.write_text(text.replace("\nhost:", "\n" + "\n".join(lines) + "\nhost:", 1))

    return damaged(folder, bomb, "aliases")


@fault(
    area="cache",
    name="a tag that runs code",
    injected="!!python/object/apply:os.system in the file",
    expected="never run; " + _MISS,
)
def _(folder: Path) -> str:
    mark = folder / "ran"

    def tag(path: Path) -> None:
        evil = f'\nhost: !!python/object/apply:os.system ["touch {mark}"]\nhost_: '
        path.write_text(path.read_text().replace("\nhost:", evil, 1))

    said = damaged(folder, tag)
    assert not mark.exists(), "the code was run"
    return said


@fault(area="cache", name="a gigabyte of text", injected="a sparse file of 1 GB", expected=_MISS)
def _(folder: Path) -> str:
    return damaged(folder, lambda p: os.truncate(p, 10**9), "MB")


@fault(area="cache", name="a FIFO in the profile's place", injected="mkfifo", expected=_MISS)
def _(folder: Path) -> str:
    return damaged(folder, instead(os.mkfifo), "not a regular file")


@fault(
    area="cache",
    name="a link to nowhere in the profile's place",
    injected="a symbolic link whose target is gone",
    expected=_MISS,
)
def _(folder: Path) -> str:
    return damaged(folder, instead(lambda p: p.symlink_to(folder / "gone")))


@fault(
    area="cache",
    name="a profile that others may write",
    injected="mode 0666",
    expected=_MISS,
)
def _(folder: Path) -> str:
    return damaged(folder, lambda p: p.chmod(0o666))


@fault(
    area="cache",
    name="a profile of another user",
    injected="chown to another uid",
    expected=_MISS,
)
def _(folder: Path) -> str:
    as_root("give files away")
    return damaged(folder, lambda p: os.chown(p, 12345, 12345))


_OPEN = """
import json
import platformdirs
from autotune_offload.errors import ProfileError
from autotune_offload.profiles.store import Miss, Store
from tests.factories import make_profile
profile = make_profile()
{drop}
found = Store().lookup(profile.fingerprint)
assert isinstance(found, Miss), found
try:
    Store().save(profile)
    said = "saved"
except ProfileError as error:
    said = str(error)
print(json.dumps([found.reason, said]))
"""


def goes_without(miss_and_save: list[str], *words: str) -> str:
    """A miss, and a save that says why it cannot."""
    _, said = miss_and_save
    assert said != "saved", "it was saved"
    for word in words:
        assert word in said, f'"{word}" is not in: {said}'
    return f"a miss; not saved: {shortened(said)}"


@fault(
    area="cache",
    name="a read-only home",
    injected="a read-only mount over HOME in a child's own namespace",
    expected=_WITHOUT,
)
def _(folder: Path) -> str:
    may_mount(folder)
    home = folder / "home"
    home.mkdir()
    mount = f"mount -t tmpfs -o ro,size=64k none {home}"
    found = child(
        _OPEN.format(drop=""), before=mount, HOME=str(home), XDG_CACHE_HOME="", AUTOTUNE_OFFLOAD_CACHE=""
    )
    return goes_without(found, "Read-only file system", "AUTOTUNE_OFFLOAD_CACHE")


@fault(
    area="cache",
    name="a uid without passwd entry and no HOME",
    injected="setuid(54321) in a child, HOME unset",
    expected=_WITHOUT,
)
def _(folder: Path) -> str:
    as_root("become another user")
    drop = (
        UNPRIVILEGED.format(uid=54321)
        + "\nos.environ.pop('HOME', None); os.environ.pop('XDG_CACHE_HOME', None)"
    )
    return goes_without(child(_OPEN.format(drop=drop), AUTOTUNE_OFFLOAD_CACHE=""), "HOME")


@fault(
    area="cache",
    name="a full disk",
    injected="a real tmpfs of 64 KiB, filled but for 8, in a child's own namespace",
    expected=_WITHOUT + "; no half file is left",
)
def _(folder: Path) -> str:
    may_mount(folder)
    disk = folder / "disk"
    disk.mkdir()
    mount = (
        f"mount -t tmpfs -o size=64k none {disk}\n"
        f"dd if=/dev/zero of={disk}/filling bs=1k count=56 2>/dev/null"
    )
    drop = "import os, atexit\natexit.register(lambda: None)\n"
    source = (
        _OPEN.format(drop=drop) + f"left = os.listdir({str(disk / 'profiles')!r})\nassert left == [], left\n"
    )
    source = source.replace("print(", "result = (", 1) + "print(result)\n"
    found = child(source, before=mount, AUTOTUNE_OFFLOAD_CACHE=str(disk / "profiles"))
    return goes_without(found, "No space left")


@fault(
    area="cache",
    name="a store that cannot be written at all",
    injected="a file where the folder of profiles should be, in a whole start",
    expected="tuned all the same; the report says that nothing was stored",
)
def _(folder: Path) -> str:
    (folder / "profiles").touch()
    seen = start(folder, CONFIG, probe=answering())
    assert seen.error is None and seen.report.profile is not None
    notice = next(n for n in seen.report.notices if "not stored" in n)
    return shortened(notice.replace(str(folder), "..."))


@fault(
    area="cache",
    name="SIGKILL in the middle of saving",
    injected="kill -9 to a child that saves without end, 8 times at moments 20 ms apart",
    expected="the old profile or the new one, never a part",
)
def _(folder: Path) -> str:
    where = folder / "profiles"
    source = (
        "from autotune_offload.profiles.store import Store\nfrom tests.factories import make_profile\n"
        f"store, profile = Store(__import__('pathlib').Path({str(where)!r})), make_profile()\n"
        "store.save(profile)\nprint('saving', flush=True)\nwhile True:\n    store.save(profile)\n"
    )
    store, asked = Store(where), make_profile().fingerprint
    for turn in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", source], stdout=subprocess.PIPE, env=environment(), text=True
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.02 * turn)
        process.kill()
        process.wait()
        process.stdout.close()
        found = store.lookup(asked)
        assert isinstance(found, Profile), found.reason
    return "8 of 8 left a whole profile"


@fault(
    area="cache",
    name="eight processes that save at once",
    injected="eight real processes, five saves each",
    expected="one whole file, nothing beside it",
)
def _(folder: Path) -> str:
    where = folder / "profiles"
    source = (
        "from pathlib import Path\nfrom autotune_offload.profiles.store import Store\n"
        "from tests.factories import make_profile\n"
        f"store = Store(Path({str(where)!r}))\n"
        "for _ in range(5):\n    store.save(make_profile())\n"
    )
    all_of_them = [subprocess.Popen([sys.executable, "-c", source], env=environment()) for _ in range(8)]
    try:
        assert [process.wait(60) for process in all_of_them] == [0] * 8
    finally:
        for process in all_of_them:
            process.kill()
    left = sorted(path.name for path in where.iterdir())
    assert len(left) == 1, left
    assert isinstance(Store(where).lookup(make_profile().fingerprint), Profile)
    return "one whole file"


@fault(
    area="cache",
    name="a temporary file of a killed process",
    injected="a stale .tmp beside the profile",
    expected="not waited for, not read; pruned",
)
def _(folder: Path) -> str:
    store = Store(folder / "profiles")
    store.save(make_profile())
    stale = store.folder / f".{store.path_of(make_profile().fingerprint).name}.abc.tmp"
    stale.write_text("half")
    os.utime(stale, (time.time() - 10**6,) * 2)
    before = time.monotonic()
    assert isinstance(store.lookup(make_profile().fingerprint), Profile)
    assert time.monotonic() - before < 2
    assert stale in store.prune(older_than_days=10_000)
    return "found at once; the leftover was pruned"


@fault(
    area="cache",
    name="a lock that nobody will release",
    injected="the profile's file locked by flock in a process that is stopped",
    expected="no wait beyond seconds",
)
def _(folder: Path) -> str:
    store = Store(folder / "profiles")
    path = store.save(make_profile())
    source = (
        f"import fcntl, time\nfile = open({str(path)!r})\nfcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\ntime.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        before = time.monotonic()
        assert isinstance(store.lookup(make_profile().fingerprint), Profile)
        store.save(make_profile())
        taken = time.monotonic() - before
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]  # a pipe
    assert taken < 3
    return f"found and saved in {taken * 1e3:.0f} ms"


@fault(
    area="cache",
    name="show with a broken profile among good ones",
    injected="autotune-offload profiles list over a damaged file",
    expected="exit 0; the file is listed with its reason",
)
def _(folder: Path) -> str:
    Store(folder / "profiles").save(make_profile())
    (folder / "profiles" / "cuda-broken-0123.yaml").write_text("schema: 1\n")
    code, out, _ = verb(folder, "profiles", "list", "--json")
    assert code == 0
    listed = json.loads(out)
    assert "cuda-broken-0123" in json.dumps(listed)
    return f"exit {code}; both files are listed"


@fault(
    area="cache",
    name="a profile that cannot be opened",
    injected="mode 0000, read by an unprivileged child",
    expected="a miss with its reason",
)
def _(folder: Path) -> str:
    if os.geteuid() != 0:
        raise NotPossible("needs a second user, which only root can become")
    where = folder / "profiles"
    path = Store(where).save(make_profile())
    folder.chmod(0o755)
    where.chmod(0o755)
    path.chmod(0)
    source = (
        "import json\nfrom pathlib import Path\nfrom autotune_offload.profiles.store import Miss, Store\n"
        "from tests.factories import make_profile\nprofile = make_profile()\n"
        f"{UNPRIVILEGED.format(uid=65534)}\n"
        f"found = Store(Path({str(where)!r})).lookup(profile.fingerprint)\n"
        "assert isinstance(found, Miss)\nprint(json.dumps(found.reason))\n"
    )
    return shortened(str(child(source)).replace(str(folder), "..."))
