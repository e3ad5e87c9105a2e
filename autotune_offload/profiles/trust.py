"""Whether a stored file may be believed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from autotune_offload import documents
from autotune_offload.errors import ProfileError

AGAIN = "measure again with `autotune-offload probe --refresh`"


def read_trusted(path: Path, *, only_own: bool) -> str:
    """The text of a stored profile.

    Raises:
        ProfileError: no such file, one that cannot be read, or one that somebody else may have written.
    """
    try:
        text, status = documents.read_text(path)
    except FileNotFoundError as error:
        raise ProfileError(
            f"there is no profile {path}; list them with `autotune-offload profiles list`"
        ) from error
    except documents.Refused as error:
        raise ProfileError(f"{path} {error}; remove it and {AGAIN}") from error
    why_not = why_not_trusted(status) if only_own else None
    if why_not is not None:
        raise ProfileError(f"{path} {why_not}; {AGAIN}")
    return text


def why_not_trusted(status: os.stat_result) -> str | None:
    """Why a file that was not named by the user is not believed: someone else could have written it.

    root's are believed, as OpenSSH does (sshd_config(5), StrictModes): an administrator may prepare a store.
    """
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user (uid {status.st_uid}, this is uid {os.geteuid()})"
    if status.st_mode & stat.S_IWOTH:
        return f"can be written by everyone (mode {stat.S_IMODE(status.st_mode):04o})"
    return None
