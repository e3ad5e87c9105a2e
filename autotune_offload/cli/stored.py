"""Finding the stored profile that a verb was asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from autotune_offload.cli.output import notice
from autotune_offload.errors import ProfileError

if TYPE_CHECKING:
    from autotune_offload.records import Profile
    from autotune_offload.store import Store


def open_store(cache: Path | None) -> Store:
    """The store in `cache`, or in the default folder."""
    from autotune_offload.store import Store

    return Store(cache)


def find_profile(store: Store, wanted: str | None) -> tuple[Profile, Path]:
    """The profile at a path, the stored one of a file name or of a key that starts so, or the newest one.

    Raises:
        ProfileError: nothing there, nothing that can be read, or several names that start so.
    """
    if wanted is not None:
        named = Path(wanted)
        path = named if os.sep in wanted or named.is_file() else _only_match(store, wanted)
        return store.load(path), path
    readable = readable_profiles(store)
    if not readable:
        raise ProfileError(
            f"no profile is stored in {store.folder}; run `autotune-offload probe` to measure this host"
        )
    return readable[0]


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


def fitting_profile(store: Store) -> tuple[Profile, Path]:
    """The stored profile for this host as it is now.

    Raises:
        ProfileError: none fits; names what differs.
    """
    from autotune_offload.probing import lookup
    from autotune_offload.records import Profile

    found = lookup(store, None)
    if isinstance(found, Profile):
        return found, store.path_of(found.fingerprint)
    raise ProfileError(
        f"{found.reason}; run `autotune-offload probe` first, or name a profile with --profile"
    )
