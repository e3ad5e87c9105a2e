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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from autotune_offload import folders
from autotune_offload.errors import ProfileError
from autotune_offload.records import SCHEMA, Profile, Scalar, fingerprint_key, from_plain, to_plain

try:
    from yaml import CSafeDumper as _SafeDumper
    from yaml import CSafeLoader as _SafeLoader
except ImportError:  # PyYAML built without libyaml: the same result, some 15 times slower
    from yaml import SafeDumper as _SafeDumper  # type: ignore[assignment]
    from yaml import SafeLoader as _SafeLoader  # type: ignore[assignment]

MAX_FILE_BYTES = 4 << 20
"""A larger file is refused unread. An ordinary profile has 40 KB; 4 MB take seconds to parse."""

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
_ABSENT = object()

# What PyYAML's constructors are known to raise, besides YAMLError, for a malformed document.
_UNREADABLE = (
    yaml.YAMLError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """Why no profile was found. `differs` names the fields in which the nearest stored one differs."""

    reason: str
    differs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
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
            raise ProfileError(
                f"cannot save the profile as {path}: {error}; "
                f"set {folders.CACHE_VARIABLE} to a folder that can be written, or go on without saving"
            ) from error
        return path

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
        """Reads one file.

        Raises:
            ProfileError: it is missing, unreadable, truncated, of another schema, or not a profile.
        """
        return _load(path)

    def entries(self) -> tuple[Entry, ...]:
        """Every file of the store, newest first, broken ones included."""
        return tuple(_entry(path) for path in self._files())

    def prune(self, *, older_than_days: float | None = None, only_broken: bool = False) -> tuple[Path, ...]:
        """Removes profiles, and what a killed process left of one, and returns the removed files.

        Args:
            older_than_days: only those written longer ago; None takes any age.
            only_broken: only those that cannot be used.

        Raises:
            ProfileError: a file cannot be removed.
        """
        horizon = time.time() - (older_than_days or 0) * 86400
        doomed = [path for path in self._files() if older_than_days is None or _modified(path) < horizon]
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

    def _files(self, prefix: str = "") -> list[Path]:
        found = [path for path in self.folder.glob(f"{prefix}*.yaml") if not path.name.startswith(".")]
        return sorted(found, key=_modified, reverse=True)

    def _exact(self, fingerprint: dict[str, Scalar]) -> Profile | Miss:
        path = self.path_of(fingerprint)
        if not os.path.lexists(path):
            return self._nearest(fingerprint)
        try:
            profile = _load(path)
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
                return _load(path)
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
        for path in self._files(prefix):
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


def _read(path: Path) -> str:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a FIFO would wait for ever
            raise ProfileError(f"{path} is not a regular file; remove it and {_AGAIN}")
        if status.st_size > MAX_FILE_BYTES:
            size = f"{status.st_size / 1e6:.1f} MB, and a profile has at most {MAX_FILE_BYTES / 1e6:.1f} MB"
            raise ProfileError(f"{path} has {size}; remove it and {_AGAIN}")
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise ProfileError(
            f"there is no profile {path}; list them with `autotune-offload profiles list`"
        ) from error
    except (OSError, UnicodeError) as error:
        raise ProfileError(f"{path} cannot be read: {error}; {_AGAIN}") from error


# -- the stored form ------------------------------------------------------------------------------


class _Line(list[Any]):
    """A sequence that is written on one line."""


class _Dumper(_SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_line(dumper: _Dumper, line: _Line) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", line, flow_style=True)


_Dumper.add_representer(_Line, _represent_line)


def _to_text(profile: Profile) -> str:
    plain = to_plain(profile)
    for name in _TABLES:
        plain[name] = _to_table(plain[name])
    for name in ("partitions", "parameters"):
        plain["workload"][name] = _Line(plain["workload"][name])
    return _HEADER + str(yaml.dump(plain, Dumper=_Dumper, sort_keys=False, width=110, explicit_end=True))


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


def _schema_checked(path: Path) -> str:
    """The file's text. Looked at before any parsing: a large file that is no profile would take long."""
    text = _read(path)
    if not text.strip():
        raise ProfileError(f"{path} is empty; {_AGAIN}")
    schema = re.search(r"^schema: (.*)$", text[:_IDENTITY_BYTES], re.MULTILINE)
    if schema is None or schema[1] != str(SCHEMA):
        has = f"schema {schema[1]}" if schema else "no schema"
        raise ProfileError(f"{path} has {has}, and this version reads schema {SCHEMA}; {_AGAIN}")
    return text


def _load(path: Path) -> Profile:
    text = _schema_checked(path)
    if not text.rstrip().endswith(_END):
        raise ProfileError(f"{path} is truncated: its last line must be '...'; {_AGAIN}")
    plain = _parse(path, text)
    try:
        tables = {name: _from_table(plain[name]) for name in _TABLES}
    except _UNREADABLE as error:
        raise ProfileError(f"{path} holds a malformed table of measurements: {error!r}; {_AGAIN}") from error
    try:
        return from_plain({**plain, **tables}, Profile)
    except ProfileError as error:
        raise ProfileError(f"{path} is {error}") from error


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        _refuse_aliases(path, text)
        plain = yaml.load(text, Loader=_SafeLoader)
    except _UNREADABLE as error:
        raise ProfileError(f"{path} is not valid YAML: {' '.join(str(error).split())}; {_AGAIN}") from error
    if not isinstance(plain, dict):
        raise ProfileError(f"{path} holds a {type(plain).__name__} where a profile is a mapping; {_AGAIN}")
    return plain


def _refuse_aliases(path: Path, text: str) -> None:
    """Nested aliases turn a small file into a huge document; a profile never has one."""
    if "*" in text and any(
        isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=_SafeLoader)
    ):
        raise ProfileError(f"{path} holds YAML aliases, which no profile has; remove it and {_AGAIN}")


def _identity(path: Path) -> dict[str, Scalar]:
    """The fingerprint alone, from the head of the file."""
    head, found, _ = _schema_checked(path)[:_IDENTITY_BYTES].partition(_AFTER_IDENTITY)
    fingerprint = _parse(path, head).get("fingerprint") if found else None
    if not isinstance(fingerprint, dict):
        raise ProfileError(f"{path} has no fingerprint at its head; {_AGAIN}")
    return fingerprint


def _entry(path: Path) -> Entry:
    try:
        return Entry(path=path, profile=_load(path))
    except ProfileError as error:
        return Entry(path=path, problem=str(error))
