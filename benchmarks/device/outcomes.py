"""What is found, on disk as soon as it is found: one file a part, and one for all of them."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

SCHEMA = 1

State = Literal["done", "out of time", "failed", "interrupted", "not run"]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How a part went, and what it found, in whole or until it ended."""

    name: str
    title: str
    state: State = "not run"
    why: str | None = None
    limit_seconds: float | None = None
    seconds: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def ended_well(self) -> bool:
        """Whether it came to its own end."""
        return self.state == "done"


def write(file: Path, document: object) -> None:
    """JSON in the file's place, whole or not at all; infinities and not-a-numbers become null."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}")
    part.write_text(json.dumps(finite(document), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(file)


def read(file: Path) -> dict[str, Any]:
    """A part's file; nothing where there is none, or where it cannot be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def finite(value: Any) -> Any:
    """The same with null for numbers that JSON does not have, and lists for tuples."""
    if isinstance(value, dict):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def document(about: dict[str, Any], outcomes: list[Outcome], verdicts: list[Any]) -> dict[str, Any]:
    """All of a run."""
    return {
        "schema": SCHEMA,
        **about,
        "parts": {outcome.name: asdict(outcome) for outcome in outcomes},
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }
