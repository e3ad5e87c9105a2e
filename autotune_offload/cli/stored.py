"""Finding the stored profile that a verb was asked for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune_offload.cli.output import notice
from autotune_offload.errors import ProfileError

if TYPE_CHECKING:
    from autotune_offload.profiles.store import Store
    from autotune_offload.records import Profile


def open_store(cache: Path | None) -> Store:
    """The store in `cache`, or in the default folder."""
    from autotune_offload.profiles.store import Store

    return Store(cache)


def find_profile(store: Store, wanted: str | None) -> tuple[Profile, Path]:
    """The profile at a path, the stored one of a file name or of a key that starts so, or the newest one.

    Raises:
        ProfileError: nothing there, nothing that can be read, or several names that start so.
    """
    if wanted is not None:
        if _is_path(wanted):
            return _only_one(read_profiles(Path(wanted)), wanted), Path(wanted)
        path = _only_match(store, wanted)
        return store.load(path), path
    readable = readable_profiles(store)
    if not readable:
        raise ProfileError(
            f"no profile is stored in {store.folder}; run `autotune-offload probe` to measure this host"
        )
    return readable[0]


def find_profiles(store: Store, wanted: Sequence[str]) -> list[tuple[str, Profile]]:
    """Each of `wanted` as `find_profile` finds it, under the name it came by; a file may hold several.

    Raises:
        ProfileError: as `find_profile`.
    """
    found: list[tuple[str, Profile]] = []
    for each in wanted or (None,):
        if each is not None and _is_path(each):
            found += [(each, profile) for profile in read_profiles(Path(each))]
        else:
            profile, path = find_profile(store, each)
            found.append((str(path), profile))
    return found


def read_profiles(path: Path) -> list[Profile]:
    """The profiles in a file: a stored one, or what `probe --json` or `simulate --json` printed.

    Raises:
        ProfileError: the file cannot be read, or holds no profile; says what to do.
    """
    from autotune_offload.profiles.store import Store

    document = _json_document(path)
    if document is None:
        _refuse_a_machine(path)
        return [Store().load(path)]
    listed = document.get("machines")
    documents = listed if isinstance(listed, list) else [document]
    return [_from_document(path, each) for each in documents]


def readable_profiles(store: Store) -> list[tuple[Profile, Path]]:
    """Every stored profile that can be read, newest first; each other file costs one notice."""
    found = []
    for entry in store.entries():
        if entry.profile is None:
            notice(f"skipped {entry.path}: {entry.problem}")
        else:
            found.append((entry.profile, entry.path))
    return found


def key_of(profile: Profile) -> str:
    """The key that `profile` is stored under."""
    from autotune_offload.records import fingerprint_key

    return fingerprint_key(profile.fingerprint)


def _only_match(store: Store, wanted: str) -> Path:
    """By the names of the files alone, so that a broken one has a name too and says nothing about others."""
    start = wanted.removesuffix(".yaml").lower()
    files = store.files()
    matches = [path for path in files if path.stem.lower() == start]
    matches = matches or [path for path in files if _key_in(path).startswith(start)]
    matches = matches or [path for path in files if path.stem.lower().startswith(start)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(path.stem for path in matches)
        raise ProfileError(
            f"{len(matches)} stored profiles have a name or a key that starts with {wanted!r}: {names}"
        )
    raise ProfileError(
        f"{wanted!r} is neither a file nor the start of a key in {store.folder}; "
        "`autotune-offload profiles list` shows the keys"
    )


def _key_in(path: Path) -> str:
    return path.stem.rpartition("-")[2]


def _only_one(profiles: list[Profile], wanted: str) -> Profile:
    if len(profiles) != 1:
        raise ProfileError(
            f"{wanted} holds {len(profiles)} profiles, and one was expected; "
            f"`autotune-offload report {wanted}` shows them side by side"
        )
    return profiles[0]


def _json_document(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None for what is no JSON, which the store then reads or refuses."""
    import msgspec

    from autotune_offload import documents

    try:
        document = msgspec.json.decode(documents.read_text(path)[0])
    except (FileNotFoundError, documents.Refused, msgspec.DecodeError):
        return None
    return document if isinstance(document, dict) else None


def _from_document(path: Path, document: object) -> Profile:
    from autotune_offload.records import SCHEMA, Profile, from_plain

    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ProfileError(
            f"{path} is JSON but no profile of schema {SCHEMA}; give what `autotune-offload probe --json` or "
            "`autotune-offload simulate MACHINE --json` printed"
        )
    try:
        return from_plain(document, Profile)
    except ProfileError as error:
        raise ProfileError(f"{path} is {error}") from error


def _refuse_a_machine(path: Path) -> None:
    """A machine's description, as `simulate --write` saves it, has a schema too but was never measured."""
    from autotune_offload.described import machine
    from autotune_offload.errors import ConfigError

    if path.is_file():
        with contextlib.suppress(ConfigError):
            name = machine.load(str(path)).name
            raise ProfileError(
                f"{path} describes the machine {name} and holds no measurements; run "
                f"`autotune-offload simulate {path} --json > {name}.json` and give {name}.json"
            )


def _is_path(wanted: str) -> bool:
    return os.sep in wanted or Path(wanted).is_file()


def fitting_profile(store: Store) -> tuple[Profile, Path]:
    """The stored profile for this host as it is now.

    Raises:
        ProfileError: none fits; names what differs.
    """
    from autotune_offload.profiles.lookup import lookup
    from autotune_offload.records import Profile

    found = lookup(store, None)
    if isinstance(found, Profile):
        return found, store.path_of(found.fingerprint)
    raise ProfileError(
        f"{found.reason}; run `autotune-offload probe` first, or name a profile with --profile"
    )
