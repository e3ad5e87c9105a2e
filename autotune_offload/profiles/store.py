"""Profiles on disk: one YAML file an environment, read or missed with the reason.

The key is the hash of the fingerprint, which is part of the file's name; the host's name inside is
only a label. Writing is atomic and takes no lock, so no killed process leaves anything to wait for.
Reading never trusts the file: whatever is wrong with it makes a miss, and the next save replaces it.

Rows of measurements are stored as tables (column names once, one line a row) with the raw samples as
one string of numbers: as YAML numbers they would take most of the time that a start may cost.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from autotune_offload import packaged, places
from autotune_offload.errors import ProfileError
from autotune_offload.profiles.trust import AGAIN
from autotune_offload.profiles.yaml_form import identity, load, to_text
from autotune_offload.records import Profile, Record, Scalar, fingerprint_key

_NEAREST_AMONG = 64

_STALE_SECONDS = 3600.0  # a temporary file this old belongs to a process that was killed

_ELSEWHERE = f"set {places.CACHE_VARIABLE} to a folder that can be written, or go on without saving"
_ABSENT = object()


class Miss(Record, frozen=True, kw_only=True):
    """Why no profile was found. `differs` names the fields in which the nearest stored one differs.

    `rechecked_seconds` is what a copy took that was too slow for the stored profile (see `recheck`).
    """

    reason: str
    differs: tuple[str, ...] = ()
    rechecked_seconds: float | None = None


class Entry(Record, frozen=True, kw_only=True):
    """One file of the store: its profile, or in `problem` why it cannot be used."""

    path: Path
    profile: Profile | None = None
    problem: str | None = None


class Store:
    """The profiles in one folder.

    Args:
        folder: where they are. None takes the environment variable AUTOTUNE_OFFLOAD_CACHE, or else
            the folder `profiles` in the user's cache directory for this platform.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = _resolved(folder or places.profiles())

    def path_of(self, fingerprint: dict[str, Scalar]) -> Path:
        """The file that holds, or would hold, the profile of an environment."""
        return self.folder / f"{_prefix(fingerprint)}{fingerprint_key(fingerprint)}.yaml"

    def save(self, profile: Profile) -> Path:
        """Writes a profile, whole or not at all, in place of an older one of the same environment.

        Raw samples are rounded to 4 significant digits. The file is readable for its owner only.

        Raises:
            ProfileError: the folder cannot be made or written; nothing is left behind.
        """
        path = self.path_of(profile.fingerprint)
        self._require_home()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(path, to_text(profile))
        except (OSError, UnicodeError) as error:
            raise ProfileError(f"cannot save the profile as {path}: {error}; {_ELSEWHERE}") from error
        return path

    def why_not_writable(self) -> str | None:
        """Why nothing can be saved here, if so, found out by making the folder and an empty file in it.

        To be asked before minutes go into what cannot be kept. A disk that fills up later, or quotas, still
        end `save`.
        """
        try:
            self._require_home()
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
        except ProfileError as error:
            return str(error)
        except OSError as error:
            return f"no profile can be saved in {self.folder}: {error}; {_ELSEWHERE}"
        return None

    def lookup(self, fingerprint: dict[str, Scalar], ignore: frozenset[str] = frozenset()) -> Profile | Miss:
        """The stored profile of an environment, or why there is none. Never raises for a bad file.

        Args:
            fingerprint: the environment asked for.
            ignore: fields that may differ; of several profiles the newest is taken.
        """
        try:
            self._require_home()
        except ProfileError as error:
            return Miss(reason=str(error))
        return self._newest(fingerprint, ignore) if ignore else self._exact(fingerprint)

    def load(self, path: Path) -> Profile:
        """Reads one file that the user named, whoever owns it.

        Raises:
            ProfileError: it is missing, unreadable, truncated, of another schema, or not a profile.
        """
        return load(path, only_own=False)

    def entries(self) -> tuple[Entry, ...]:
        """Every file of the store, newest first, broken ones included."""
        return tuple(_entry(path) for path in self.files())

    def files(self, prefix: str = "") -> list[Path]:
        """The files whose names begin so, newest first; the key is what follows the last hyphen of a stem."""
        try:
            found = [path for path in self.folder.glob(f"{prefix}*.yaml") if not path.name.startswith(".")]
        except PermissionError:  # a folder above may not be entered
            return []
        return sorted(found, key=_modified, reverse=True)

    def prune(self, *, older_than_days: float | None = None, only_broken: bool = False) -> tuple[Path, ...]:
        """Removes profiles, and what a killed process left of one, and returns the removed files.

        Args:
            older_than_days: only those written longer ago; None takes any age.
            only_broken: only those that cannot be used.

        Raises:
            ProfileError: a file cannot be removed.
        """
        horizon = time.time() - (older_than_days or 0) * 86400
        doomed = [path for path in self.files() if older_than_days is None or _modified(path) < horizon]
        if only_broken:
            doomed = [path for path in doomed if _entry(path).problem]
        doomed += [beside for path in doomed if os.path.lexists(beside := found_beside(path))]
        doomed += [
            path for path in self.folder.glob(".*.tmp") if _modified(path) < time.time() - _STALE_SECONDS
        ]
        for path in doomed:
            _remove(path)
        return tuple(doomed)

    def _require_home(self) -> None:
        if not self.folder.is_absolute():
            raise ProfileError(
                f"no folder for profiles: {self.folder} needs a home directory, and this user has none; "
                f"set HOME, or {places.CACHE_VARIABLE} to a folder that can be written"
            )

    def _exact(self, fingerprint: dict[str, Scalar]) -> Profile | Miss:
        path = self.path_of(fingerprint)
        if not os.path.lexists(path):
            return self._nearest(fingerprint)
        try:
            profile = _own(path)
        except ProfileError as error:
            return Miss(reason=str(error))
        if differs := _differing(profile.fingerprint, fingerprint):
            found = _both(differs, profile.fingerprint, fingerprint)
            return Miss(
                reason=f"{path} holds another environment's profile: {found}; {AGAIN}", differs=differs
            )
        return profile

    def _newest(self, fingerprint: dict[str, Scalar], ignore: frozenset[str]) -> Profile | Miss:
        prefix = "" if ignore & {"device.kind", "device.name"} else _prefix(fingerprint)
        problems = []
        for path, stored in self._identities(prefix):
            if not set(_differing(stored, fingerprint)) <= ignore:
                continue
            try:
                return _own(path)
            except ProfileError as error:
                problems.append(str(error))
        return Miss(reason=problems[0]) if problems else self._nearest(fingerprint, ignore)

    def _nearest(self, fingerprint: dict[str, Scalar], ignore: frozenset[str] = frozenset()) -> Miss:
        best: tuple[str, ...] | None = None
        reason = f"no usable profile is stored in {self.folder}"
        for count, (path, stored) in enumerate(self._identities()):
            differs = tuple(name for name in _differing(stored, fingerprint) if name not in ignore)
            if best is None or len(differs) < len(best):
                best = differs
                reason = (
                    f"no stored profile fits; the nearest, {path.name}, "
                    f"differs in {_both(differs, stored, fingerprint)}"
                )
            if count + 1 == _NEAREST_AMONG:
                break
        return Miss(reason=reason, differs=best or ())

    def _identities(self, prefix: str = "") -> Iterator[tuple[Path, dict[str, Scalar]]]:
        """The readable files' fingerprints, newest first, without parsing the measurements."""
        for path in self.files(prefix):
            with contextlib.suppress(ProfileError):
                yield path, identity(path)


def found_beside(profile: Path) -> Path:
    """The file with what runs found out about a stored profile's choice; see `outcomes`."""
    return profile.with_suffix(".found.json")


# -- names ----------------------------------------------------------------------------------------


def _own(path: Path) -> Profile:
    """A stored profile that may be used here: this user's, with a path that can be built."""
    profile = load(path, only_own=True)
    if (missing := packaged.why_missing(profile.choice.path)) is not None:
        raise ProfileError(f"{path} cannot be carried out: {missing}; {AGAIN}")
    return profile


def _resolved(folder: Path) -> Path:
    """Absolute, or still starting with "~" where there is no home directory: never made below the cwd."""
    expanded = os.path.expanduser(folder)
    return Path(expanded if expanded.startswith("~") else os.path.abspath(expanded))


def _slug(text: object) -> str:
    return re.sub(r"[^a-z0-9]+", "-", str(text or "").lower()).strip("-")[:48] or "unknown"


def _prefix(fingerprint: dict[str, Scalar]) -> str:
    return f"{_slug(fingerprint.get('device.kind'))}-{_slug(fingerprint.get('device.name'))}-"


def _differing(stored: dict[str, Scalar], asked: dict[str, Scalar]) -> tuple[str, ...]:
    """Fields that differ in value, type or presence: 1, 1.0 and True hash to different keys."""
    names = dict.fromkeys([*asked, *stored])
    return tuple(name for name in names if _shown(stored, name) != _shown(asked, name))


def _shown(fingerprint: dict[str, Scalar], name: str) -> str:
    value = fingerprint.get(name, _ABSENT)
    return "absent" if value is _ABSENT else repr(value)


def _both(differs: tuple[str, ...], stored: dict[str, Scalar], asked: dict[str, Scalar]) -> str:
    return ", ".join(
        f"{name} (stored {_shown(stored, name)}, here {_shown(asked, name)})" for name in differs
    )


# -- files ----------------------------------------------------------------------------------------


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime_ns / 1e9
    except OSError:  # removed by someone else in the meantime
        return 0.0


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ProfileError(f"cannot remove {path}: {error}; remove it by hand") from error


def replace_file(path: Path, text: str) -> None:
    """Writes beside the target and renames, so that a reader sees the old file or the new one."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _entry(path: Path) -> Entry:
    try:
        return Entry(path=path, profile=load(path, only_own=True))
    except ProfileError as error:
        return Entry(path=path, problem=str(error))
