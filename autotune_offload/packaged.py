"""Gradient paths that installed packages bring: named by their entry points, loaded when used.

A path from outside page-locks nothing and varies as `direct` does. It is timed, compared bit for bit and confirmed like
one of ours, so that a wrong or slow one does not carry; one that cannot be loaded is no candidate.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune_offload.errors import ConfigError
from autotune_offload.records import PATHS

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "autotune_offload.paths"
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TAKEN = frozenset({*PATHS, "auto", "deepspeed"})

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedPath:
    """What an entry point names.

    Attributes:
        make: called with device, spec and dtype; gives a `paths.path.GradientPath`.
        stages: called with candidate, bytes of an element on the device, and rates; gives `paths.stages.Stages`.
    """

    make: Callable[[Any, Any, Any], Any]
    stages: Callable[[Any, int, Any], Any]


@functools.cache
def _entries() -> dict[str, EntryPoint]:
    from importlib.metadata import (
        entry_points,  # takes milliseconds, and a start with our own paths does without
    )

    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda each: each.value):
        if entry.name in _TAKEN or not _NAME.fullmatch(entry.name):
            _log.warning(
                "no path %r of %s: the name is taken, or not of a-z, 0-9 and _", entry.name, entry.value
            )
            continue
        found.setdefault(entry.name, entry)
    return found


def names() -> tuple[str, ...]:
    """Of the paths that installed packages name; nothing of theirs is imported."""
    return tuple(sorted(_entries()))


@functools.cache
def load(name: str) -> PackagedPath:
    """The path of this name.

    Raises:
        ConfigError: no installed package has it, or it cannot be loaded.
    """
    entry = _entries().get(name)
    if entry is None:
        raise ConfigError(f"no installed package brings the gradient path {name!r}; known are {_known()}")
    try:
        found = entry.load()
    except Exception as error:  # whatever somebody's package does when it is imported
        raise ConfigError(f"the path {name!r} of {entry.value}: {type(error).__name__}: {error}") from error
    if not isinstance(found, PackagedPath):
        raise ConfigError(
            f"the path {name!r} of {entry.value} is {type(found).__name__}; expected PackagedPath"
        )
    return found


def _known() -> str:
    return ", ".join((*PATHS, *names()))


def why_missing(path: str) -> str | None:
    """Why a path that a stored choice names cannot be built here, if so."""
    if path in PATHS:
        return None
    try:
        load(path)
    except ConfigError as error:
        return str(error)
    return None


def usable() -> tuple[str, ...]:
    """The names of those that can be loaded; each other one costs a warning."""
    found = []
    for name in names():
        why = why_missing(name)
        if why is None:
            found.append(name)
        else:
            _log.warning("not tried: %s", why)
    return tuple(found)
