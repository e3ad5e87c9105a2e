"""What users are told: one warning on one rank, and where to look further."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from autotune_offload.errors import AutotuneError
from autotune_offload.ranks import group as ranks_group
from autotune_offload.records import Change

DOCTOR = "`autotune-offload doctor` tells what stands in the way on this host"


FORESEEN = (AutotuneError, OSError, MemoryError)
"""Ours, and what a host may do to anybody: no traceback is shown for it."""


log = logging.getLogger("autotune_offload")


def cause(error: Exception) -> str:
    """What a failure says of itself, in one clause."""
    return str(error) if isinstance(error, AutotuneError) else f"{type(error).__name__}: {error}"


def warn(notice: str, error: Exception | None = None) -> None:
    """On one rank; with a traceback only where a failure was not foreseen."""
    if ranks_group.present_rank() == 0:
        unforeseen = error is not None and not isinstance(error, FORESEEN)
        log.warning("autotune-offload: %s", notice, exc_info=unforeseen)


def say(notices: Iterable[str], changes: Iterable[Change]) -> None:
    """Warn of what matters, log what was changed."""
    for notice in notices:
        warn(notice)
    for change in changes:
        log.info("%s: %s -> %s (%s)", change.key, change.before, change.after, change.reason)
