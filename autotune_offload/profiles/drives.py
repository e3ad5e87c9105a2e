"""What was measured of drives: one small file for each file system of a host, beside the profiles."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from autotune_offload.errors import ProfileError
from autotune_offload.profiles.store import Store, replace_file
from autotune_offload.profiles.trust import read_trusted
from autotune_offload.records import Drive


def path_of(store: Store, host: str, device: str) -> Path:
    """The file that holds, or would hold, what was measured of a file system of this host."""
    key = hashlib.sha256(f"{host} {device}".encode()).hexdigest()[:16]
    return store.folder / f"nvme-{key}.json"


def save(store: Store, drive: Drive) -> Path:
    """Put it there, whole or not at all.

    Raises:
        ProfileError: it cannot be written.
    """
    path = path_of(store, drive.host, drive.device)
    try:
        store.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, msgspec.json.format(msgspec.json.encode(drive)).decode() + "\n")
    except OSError as error:
        raise ProfileError(
            f"cannot write {path}: {error.strerror}; name another folder with --cache"
        ) from error
    return path


def measured(store: Store, host: str, folder: Path) -> Drive | None:
    """What is known of the file system that `folder` lies on, or would lie on; None where nothing is."""
    while not os.path.exists(folder) and folder != folder.parent:  # False, too, for what can be no path
        folder = folder.parent
    try:
        number = folder.stat().st_dev
        path = path_of(store, host, f"{os.major(number)}:{os.minor(number)}")
        return msgspec.json.decode(read_trusted(path, only_own=True), type=Drive)
    except (OSError, ProfileError, msgspec.DecodeError, ValueError):
        return None
