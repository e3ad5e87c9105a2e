"""Where this package keeps what it makes, profiles and the compiled pass, and finds a user's own machines."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "AUTOTUNE_OFFLOAD_CACHE"
"""Names the folder of the profiles; the compiled pass lies in a folder below it."""

MACHINES_VARIABLE = "AUTOTUNE_OFFLOAD_MACHINES"
"""Names the folder of the user's own machine descriptions."""


def profiles() -> Path:
    """The folder that CACHE_VARIABLE names, else one in the user's cache directory for this platform."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    import platformdirs  # takes 5 ms, and a folder that is named does without it

    try:
        return platformdirs.user_cache_path("autotune-offload", appauthor=False) / "profiles"
    except RuntimeError:  # no home directory; older platformdirs leave the "~" in the path instead
        return Path("~/.cache/autotune-offload/profiles")


def kernels() -> Path:
    """The folder of the compiled pass."""
    return profiles() / "kernels"


def machines() -> Path:
    """The folder that MACHINES_VARIABLE names, else one in the user's configuration directory."""
    named = os.environ.get(MACHINES_VARIABLE)
    if named:
        return Path(named)
    import platformdirs

    try:
        return platformdirs.user_config_path("autotune-offload", appauthor=False) / "machines"
    except RuntimeError:  # no home directory, as in `profiles`
        return Path("~/.config/autotune-offload/machines")
