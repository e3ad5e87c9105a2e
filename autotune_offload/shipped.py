"""Finds the files that come with the package: ``configs/`` with its probe plans and ZeRO-3 examples.

A wheel holds them inside the package; in a checkout, and so for an editable install, they lie beside it.
"""

from __future__ import annotations

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
