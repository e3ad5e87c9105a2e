"""Reads YAML files that anyone may have edited, damaged or made to do harm: plain data, and quickly.

Only plain YAML is taken: no tags that make objects, no aliases, one document. What is refused costs less
than a second, whatever the file holds.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

MAX_BYTES = 4 << 20
"""A larger file is refused unread. An ordinary profile has 30 KB, a machine description 8 KB."""

MAX_PARTS = 1 << 14
"""Marks that can begin or end a value: what parsing costs follows them. An ordinary profile has 2,000, and
as many as this take half a second at worst."""

_MARKS = (",", ":", "\n", "[", "{", "- ", "? ")


class Refused(ValueError):
    """Why a file is not read or parsed: the rest of a sentence that begins with its name."""


def read_text(path: Path, most_bytes: int = MAX_BYTES) -> tuple[str, os.stat_result]:
    """A regular file's text, and its status as it was when it was opened.

    Raises:
        FileNotFoundError: no such file.
        Refused: it cannot be read, is larger than `most_bytes`, or is no UTF-8 text.
    """
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise Refused("is not a regular file")
            content = file.read(most_bytes + 1) if status.st_size <= most_bytes else b""
            size = max(status.st_size, len(content))
        if size > most_bytes:
            raise Refused(
                f"has {size / 1e6:,.1f} MB, and {most_bytes / 1e6:,.1f} MB are the most that is read"
            )
        return content.decode("utf-8"), status
    except (FileNotFoundError, Refused):
        raise
    except IsADirectoryError as error:
        raise Refused("is not a regular file") from error
    except UnicodeDecodeError as error:
        raise Refused(f"cannot be read: it is no UTF-8 text (byte {error.start})") from error
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        raise Refused(f"cannot be read: {error}") from error


def _without_waiting(path: str, flags: int) -> int:
    """Opens a FIFO, too, at once, where it would wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def parse(text: str) -> Any:
    """What a YAML document holds: dicts, lists and scalars.

    Raises:
        Refused: not YAML, or YAML of a kind that no file of ours has.
    """
    import yaml

    try:
        loader = yaml.CSafeLoader
    except AttributeError:  # PyYAML built without libyaml: the same result, some 15 times slower
        loader = yaml.SafeLoader  # type: ignore[assignment]
    _refuse_many_parts(text)
    try:
        # nested aliases turn a small file into a huge document
        if "*" in text and any(isinstance(e, yaml.AliasEvent) for e in yaml.parse(text, Loader=loader)):
            raise Refused("holds YAML aliases, which none of our files has")
        return yaml.load(text, Loader=loader)
    except Refused:
        raise
    except (
        # YAMLError, and what PyYAML's constructors are known to raise for a malformed document
        yaml.YAMLError,
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise Refused(f"is not valid YAML: {' '.join(str(error).split())}") from error


def _refuse_many_parts(text: str) -> None:
    parts = sum(text.count(mark) for mark in _MARKS)
    if parts > MAX_PARTS:
        raise Refused(f"has {parts:,} lines and values, and {MAX_PARTS:,} are the most that is read")
