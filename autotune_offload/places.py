"""Where files lie: those that come with the package, and this user's profiles, machines and compiled passes.

``configs/`` holds probe plans and examples. A wheel has them inside the package; in a checkout, and so for an
editable install, they lie beside it.
"""

from __future__ import annotations

import os
from pathlib import Path

from autotune_offload.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent


def config_file(*parts: str) -> Path:
    """Path of a shipped file, by its parts below ``configs/``: ``config_file("probe_plans", "quick.yaml")``.

    Raises:
        ConfigError: no such file is shipped; the message lists those that are.
    """
    root = _configs_folder()
    shipped = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
    wanted = "/".join(parts)
    if wanted not in shipped:
        known = ", ".join(sorted(shipped)) or "none"
        raise ConfigError(f"no shipped file {wanted!r} in {root}; use one of those that exist: {known}")
    return shipped[wanted]


def listed(folder: str) -> tuple[str, ...]:
    """Names of the files that are shipped in a folder below ``configs/``, in order."""
    return tuple(sorted(path.name for path in (_configs_folder() / folder).glob("*") if path.is_file()))


def _configs_folder() -> Path:
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"


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
