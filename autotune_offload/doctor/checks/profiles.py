"""The folder of the profiles, and what is in it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from autotune_offload import places
from autotune_offload.doctor.checks.case import Case
from autotune_offload.records import Finding


def profiles(case: Case) -> Iterator[Finding]:
    """Whether profiles can be stored, read and used here."""
    if (why := _unwritable(case.store.folder)) is not None:
        yield Finding(
            id="profiles",
            severity="costs",
            found=f"profiles cannot be stored in {case.store.folder}: {why}",
            costs="every start measures again, 5 s by default",
            fix=f"set {places.CACHE_VARIABLE} to a folder that can be written",
        )
    for entry in case.store.entries():
        if entry.problem is not None:
            yield Finding(
                id="profiles",
                severity="notice",
                found=entry.problem,
                costs="it is not used",
                fix="`autotune-offload profiles prune --broken` removes such files",
            )
    error, told = case.answers.errors.get("profile"), case.answers.answers.get("profile") or {}
    if error or told.get("miss"):
        yield Finding(
            id="profiles",
            severity="notice",
            found=error or told["miss"],
            costs="the next start measures first, 5 s by default",
            fix="`autotune-offload probe` measures now",
        )


def _unwritable(folder: Path) -> str | None:
    """Why no file can be put there, if so; tried with 64 KiB where the folder exists, a profile's size."""
    if not folder.is_absolute():
        return "there is no home directory"
    try:
        there = next(place for place in (folder, *folder.parents) if place.exists())
        if there == folder:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(1 << 16))
        elif not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            return f"{there} is not a folder that can be written"
    except OSError as error:
        return str(error)
    return None
