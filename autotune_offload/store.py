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
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune_offload import documents, folders
from autotune_offload.errors import ProfileError
from autotune_offload.records import SCHEMA, Profile, Record, Scalar, fingerprint_key, from_plain, to_plain

_HEADER = """\
# A profile of autotune-offload: what was measured on one host, and the choice that followed.
# The key is the fingerprint (its hash is in the file's name); host.name is only a label.
# raw_seconds are the single samples in seconds, rounded to 4 significant digits.
"""
_END = "\n..."  # YAML's own end-of-document mark: without it the file is truncated
_AFTER_IDENTITY = "\nhost:"  # schema, created and fingerprint come before it
_IDENTITY_BYTES = 16 << 10
_NEAREST_AMONG = 64
_TABLES = ("transfers", "casts", "baselines", "candidates")
_STALE_SECONDS = 3600.0  # a temporary file this old belongs to a process that was killed
_AGAIN = "measure again with `autotune-offload probe --refresh`"
_ELSEWHERE = f"set {folders.CACHE_VARIABLE} to a folder that can be written, or go on without saving"
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
        self.folder = _resolved(folder or folders.profiles())

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
            _replace(path, _to_text(profile))
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
        return _load(path, only_own=False)

    def entries(self) -> tuple[Entry, ...]:
        """Every file of the store, newest first, broken ones included."""
        return tuple(_entry(path) for path in self.files())

    def files(self, prefix: str = "") -> list[Path]:
        """The files whose names begin so, newest first; the key is what follows the last hyphen of a stem."""
        found = [path for path in self.folder.glob(f"{prefix}*.yaml") if not path.name.startswith(".")]
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
                f"set HOME, or {folders.CACHE_VARIABLE} to a folder that can be written"
            )

    def _exact(self, fingerprint: dict[str, Scalar]) -> Profile | Miss:
        path = self.path_of(fingerprint)
        if not os.path.lexists(path):
            return self._nearest(fingerprint)
        try:
            profile = _load(path, only_own=True)
        except ProfileError as error:
            return Miss(reason=str(error))
        if differs := _differing(profile.fingerprint, fingerprint):
            found = _both(differs, profile.fingerprint, fingerprint)
            return Miss(
                reason=f"{path} holds another environment's profile: {found}; {_AGAIN}", differs=differs
            )
        return profile

    def _newest(self, fingerprint: dict[str, Scalar], ignore: frozenset[str]) -> Profile | Miss:
        prefix = "" if ignore & {"device.kind", "device.name"} else _prefix(fingerprint)
        problems = []
        for path, stored in self._identities(prefix):
            if not set(_differing(stored, fingerprint)) <= ignore:
                continue
            try:
                return _load(path, only_own=True)
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
                yield path, _identity(path)


# -- names ----------------------------------------------------------------------------------------


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


def _replace(path: Path, text: str) -> None:
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


def _read(path: Path, *, only_own: bool) -> str:
    try:
        text, status = documents.read_text(path)
    except FileNotFoundError as error:
        raise ProfileError(
            f"there is no profile {path}; list them with `autotune-offload profiles list`"
        ) from error
    except documents.Refused as error:
        raise ProfileError(f"{path} {error}; remove it and {_AGAIN}") from error
    why_not = _why_not_trusted(status) if only_own else None
    if why_not is not None:
        raise ProfileError(f"{path} {why_not}; {_AGAIN}")
    return text


def _why_not_trusted(status: os.stat_result) -> str | None:
    """Why a file that was not named by the user is not believed: someone else could have written it.

    root's are believed, as OpenSSH does (sshd_config(5), StrictModes): an administrator may prepare a store.
    """
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user (uid {status.st_uid}, this is uid {os.geteuid()})"
    if status.st_mode & stat.S_IWOTH:
        return f"can be written by everyone (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


# -- the stored form ------------------------------------------------------------------------------


class _Line(list[Any]):
    """A sequence that is written on one line."""


def _to_text(profile: Profile) -> str:
    plain = to_plain(profile)
    for name in _TABLES:
        plain[name] = _to_table(plain[name])
    for name in ("partitions", "parameters"):
        plain["workload"][name] = _Line(plain["workload"][name])
    return _HEADER + _dumped(plain)


def _dumped(plain: dict[str, Any]) -> str:
    import yaml  # here, so that a start with a stored profile does not wait for the half that writes

    class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]  # with or without libyaml
        def ignore_aliases(self, data: object) -> bool:
            return True

    def on_one_line(dumper: Dumper, line: _Line) -> yaml.Node:
        node: yaml.Node = dumper.represent_sequence("tag:yaml.org,2002:seq", line, flow_style=True)
        return node

    Dumper.add_representer(_Line, on_one_line)
    return str(yaml.dump(plain, Dumper=Dumper, sort_keys=False, width=110, explicit_end=True))


def _to_table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    for row in rows:
        row["raw_seconds"] = " ".join(f"{seconds:.4g}" for seconds in row["raw_seconds"])
    columns = list(rows[0]) if rows else []
    return {"columns": _Line(columns), "rows": [_Line(row[name] for name in columns) for row in rows]}


def _from_table(table: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    for row in rows:
        row["raw_seconds"] = [float(seconds) for seconds in str(row["raw_seconds"]).split()]
    return rows


def _schema_checked(path: Path, *, only_own: bool) -> str:
    """The file's text. Looked at before any parsing: a large file that is no profile would take long."""
    text = _read(path, only_own=only_own)
    if not text.strip():
        raise ProfileError(f"{path} is empty; {_AGAIN}")
    schema = re.search(r"^schema: (.*)$", text[:_IDENTITY_BYTES], re.MULTILINE)
    if schema is None or schema[1] != str(SCHEMA):
        has = f"schema {schema[1][:40]}" if schema else "no schema"
        raise ProfileError(f"{path} has {has}, and this version reads schema {SCHEMA}; {_AGAIN}")
    return text


def _load(path: Path, *, only_own: bool) -> Profile:
    text = _schema_checked(path, only_own=only_own)
    if not text.rstrip().endswith(_END):
        raise ProfileError(f"{path} is truncated: its last line must be '...'; {_AGAIN}")
    plain = _parse(path, text)
    try:
        tables = {name: _from_table(plain[name]) for name in _TABLES}
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ProfileError(f"{path} holds a malformed table of measurements: {error!r}; {_AGAIN}") from error
    try:
        return from_plain({**plain, **tables}, Profile)
    except ProfileError as error:
        raise ProfileError(f"{path} is {error}") from error


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        plain = documents.parse(text)
    except documents.Refused as error:
        raise ProfileError(f"{path} {error}; {_AGAIN}") from error
    if not isinstance(plain, dict):
        raise ProfileError(f"{path} holds a {type(plain).__name__} where a profile is a mapping; {_AGAIN}")
    return plain


def _identity(path: Path) -> dict[str, Scalar]:
    """The fingerprint alone, from the head of the file."""
    head, found, _ = _schema_checked(path, only_own=True)[:_IDENTITY_BYTES].partition(_AFTER_IDENTITY)
    fingerprint = _parse(path, head).get("fingerprint") if found else None
    if not isinstance(fingerprint, dict):
        raise ProfileError(f"{path} has no fingerprint at its head; {_AGAIN}")
    return fingerprint


def _entry(path: Path) -> Entry:
    try:
        return Entry(path=path, profile=_load(path, only_own=True))
    except ProfileError as error:
        return Entry(path=path, problem=str(error))
