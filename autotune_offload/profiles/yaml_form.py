"""A profile as YAML text, and back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from autotune_offload import documents
from autotune_offload.errors import ProfileError
from autotune_offload.profiles.trust import AGAIN, read_trusted
from autotune_offload.records import SCHEMA, Profile, Scalar, from_plain, to_plain

_HEADER = """\
# A profile of autotune-offload: what was measured on one host, and the choice that followed.
# The key is the fingerprint (its hash is in the file's name); host.name is only a label.
# raw_seconds are the single samples in seconds, rounded to 4 significant digits.
"""
END = "\n..."  # YAML's own end-of-document mark: without it the file is truncated
AFTER_IDENTITY = "\nhost:"  # schema, created and fingerprint come before it
IDENTITY_BYTES = 16 << 10

_TABLES = ("transfers", "casts", "baselines", "candidates")
_PARTS = {"step_rates": ("narrowings", "passes"), "step": ("candidates",)}
"""Tables within what a profile may have, and the older ones have not."""


# -- the stored form ------------------------------------------------------------------------------


class _Line(list[Any]):
    """A sequence that is written on one line."""


def to_text(profile: Profile) -> str:
    """A profile as YAML, its samples rounded and each measurement on a line."""
    plain = to_plain(profile)
    for name in _TABLES:
        plain[name] = _to_table(plain[name])
    for part, names in _PARTS.items():
        if plain[part] is not None:
            plain[part].update({name: _to_table(plain[part][name]) for name in names})
    for name in ("partitions", "parameters"):
        plain["workload"][name] = _Line(plain["workload"][name])
    return _HEADER + dumped(plain)


def dumped(plain: dict[str, Any]) -> str:
    """Plain data as YAML."""
    import yaml  # here, so that a start with a stored profile does not wait for the half that writes

    class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]  # with or without libyaml
        def ignore_aliases(self, data: object) -> bool:
            return True

    def on_one_line(dumper: Dumper, line: _Line) -> yaml.Node:
        node: yaml.Node = dumper.represent_sequence("tag:yaml.org,2002:seq", line, flow_style=True)
        return node

    Dumper.add_representer(_Line, on_one_line)
    return str(yaml.dump(plain, Dumper=Dumper, sort_keys=False, width=110, explicit_end=True))


def _to_table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    for row in rows:
        if "raw_seconds" in row:
            row["raw_seconds"] = " ".join(f"{seconds:.4g}" for seconds in row["raw_seconds"])
    columns = list(rows[0]) if rows else []
    return {"columns": _Line(columns), "rows": [_Line(row[name] for name in columns) for row in rows]}


def _from_table(table: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    for row in rows:
        if "raw_seconds" in row:
            row["raw_seconds"] = [float(seconds) for seconds in str(row["raw_seconds"]).split()]
    return rows


def schema_checked(path: Path, *, only_own: bool) -> str:
    """The file's text. Looked at before any parsing: a large file that is no profile would take long."""
    text = read_trusted(path, only_own=only_own)
    if not text.strip():
        raise ProfileError(f"{path} is empty; {AGAIN}")
    schema = re.search(r"^schema: (.*)$", text[:IDENTITY_BYTES], re.MULTILINE)
    if schema is None or schema[1] != str(SCHEMA):
        has = f"schema {schema[1][:40]}" if schema else "no schema"
        raise ProfileError(f"{path} has {has}, and this version reads schema {SCHEMA}; {AGAIN}")
    return text


def load(path: Path, *, only_own: bool) -> Profile:
    """A profile from a file. Raises ProfileError where it is none."""
    text = schema_checked(path, only_own=only_own)
    if not text.rstrip().endswith(END):
        raise ProfileError(f"{path} is truncated: its last line must be '...'; {AGAIN}")
    plain = parse(path, text)
    try:
        tables: dict[str, Any] = {name: _from_table(plain[name]) for name in _TABLES}
        for part, names in _PARTS.items():
            if plain.get(part) is not None:
                tables[part] = {**plain[part], **{name: _from_table(plain[part][name]) for name in names}}
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ProfileError(f"{path} holds a malformed table of measurements: {error!r}; {AGAIN}") from error
    try:
        return from_plain({**plain, **tables}, Profile)
    except ProfileError as error:
        raise ProfileError(f"{path} is {error}") from error


def parse(path: Path, text: str) -> dict[str, Any]:
    """YAML text as plain data."""
    try:
        plain = documents.parse(text)
    except documents.Refused as error:
        raise ProfileError(f"{path} {error}; {AGAIN}") from error
    if not isinstance(plain, dict):
        raise ProfileError(f"{path} holds a {type(plain).__name__} where a profile is a mapping; {AGAIN}")
    return plain


def identity(path: Path) -> dict[str, Scalar]:
    """The fingerprint alone, from the head of the file."""
    head, found, _ = schema_checked(path, only_own=True)[:IDENTITY_BYTES].partition(AFTER_IDENTITY)
    fingerprint = parse(path, head).get("fingerprint") if found else None
    if not isinstance(fingerprint, dict):
        raise ProfileError(f"{path} has no fingerprint at its head; {AGAIN}")
    return fingerprint
