"""What each document holds, as types, and the JSON schemas that msgspec makes of them.

Numbers of a document are null where JSON cannot hold them (see `output.finite`), so its schema says so.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_type_hints

import msgspec

from autotune_offload import packaged
from autotune_offload.config.block import BLOCK
from autotune_offload.described.machine import Machine
from autotune_offload.profiles.fleet import Member, Survey
from autotune_offload.records import (
    PATHS,
    Accumulated,
    Back,
    Baseline,
    Candidate,
    Change,
    Choice,
    Drive,
    Finding,
    Profile,
    Record,
    Settings,
    StepCandidate,
)
from autotune_offload.reports.alternatives import Alternative

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]


# -- documents that are no record of their own ----------------------------------------------------


class Rejected(Record, frozen=True, kw_only=True):
    """Candidates that one reason put aside."""

    reason: str
    candidates: list[str]


class Applied(Record, frozen=True, kw_only=True):
    """A tuned ds_config, and how it came about."""

    config: dict[str, Any]
    changes: list[Change]
    notices: list[str]
    profile: str | None
    output: str | None


class SimulatedMachine(Record, frozen=True, kw_only=True):
    """What was simulated; `calibrated` names the numbers that were fitted to a published result."""

    name: str
    title: str
    calibrated: list[str]


class Simulated(Profile, frozen=True, kw_only=True):
    """A profile from a described machine; all times in it are virtual."""

    machine: SimulatedMachine
    virtual_seconds: float


class SimulatedAll(Record, frozen=True, kw_only=True):
    """Every known machine."""

    machines: list[Simulated]


class KnownMachine(Record, frozen=True, kw_only=True):
    """A machine that can be simulated by its name."""

    name: str
    kind: str
    title: str


class KnownMachines(Record, frozen=True, kw_only=True):
    """All machines that can be simulated by name."""

    machines: list[KnownMachine]


class Environment(Record, frozen=True, kw_only=True):
    """The variables that `run` sets."""

    environment: dict[str, str]


class Reported(Record, frozen=True, kw_only=True):
    """One profile on the page."""

    profile: str
    where: str
    decision: str


class Page(Record, frozen=True, kw_only=True):
    """The file that was written, and what is on it."""

    output: str
    profiles: list[Reported]


class Examined(Record, frozen=True, kw_only=True):
    """What doctor looked at and found."""

    will_break: bool
    config: str | None
    findings: list[Finding]
    checks: list[str]
    host_passes: dict[str, str]


class Skipped(Record, frozen=True, kw_only=True):
    """A file that is no usable profile."""

    path: str
    problem: str | None


class Row(Record, frozen=True, kw_only=True):
    """A stored profile; of a file that cannot be read only `path`, `key` and `problem`."""

    path: str
    key: str | None
    problem: str | None
    created: str = ""
    host: str = ""
    device: str = ""
    choice: str = ""
    cast: str = ""
    gain: float = 0.0
    found: tuple[str, ...] = ()


class Listed(Record, frozen=True, kw_only=True):
    """The stored profiles."""

    folder: str
    profiles: list[Row]


class Pruned(Record, frozen=True, kw_only=True):
    """The files that were deleted."""

    removed: list[str]


class Forgotten(Record, frozen=True, kw_only=True):
    """The profiles whose findings were taken away."""

    forgotten: list[str]


class StepWeighed(StepCandidate, frozen=True, kw_only=True):
    """One way to make the optimizer's step, and what became of it."""

    name: str
    chosen: bool
    times_chosen: float | None
    verdict: str


class StepExplained(Record, frozen=True, kw_only=True):
    """How the optimizer's step is to be made, and what was weighed against it; parts by way and name."""

    way: Literal["deepspeed", "fused"]
    threads: int
    back: Back
    gain: float | None
    reasons: list[str]
    alternatives: list[StepWeighed]
    parts_seconds: dict[str, dict[str, float]]


class Folder(Record, frozen=True, kw_only=True):
    """Where profiles are stored."""

    folder: str


def _extended(name: str, what: str, source: type, *, but: tuple[str, ...] = (), **more: Any) -> type:
    """The fields of a class, but for some, and more of them."""
    hints = get_type_hints(source, localns={"Baseline": Baseline, "Candidate": Candidate})
    assert is_dataclass(source)
    kept = {each.name: hints[each.name] for each in fields(source) if each.name not in but}
    return msgspec.defstruct(name, list({**kept, **more}.items()), kw_only=True, namespace={"__doc__": what})


MeasuredDrive = msgspec.defstruct(
    "MeasuredDrive",
    [("drive", Drive), ("aio", dict[str, int | bool])],
    kw_only=True,
    namespace={"__doc__": "A drive, and the aio section that follows."},
)
_Weighed = _extended(
    "Weighed", "One alternative.", Alternative, but=("way",), verdict=str, to_win=str | None, check=str | None
)
_Member = _extended("LabelledMember", Member.__doc__ or "", Member, label=str)
_FLEET: dict[str, Any] = {"members": list[_Member]}  # type: ignore[valid-type]  # made above
_Fleet = _extended("Fleet", Survey.__doc__ or "", Survey, **_FLEET, folder=str, skipped=list[Skipped])
_Ranks = _extended("Ranks", "What all ranks of a job measured.", Survey, **_FLEET, schema=int)
_Explained = msgspec.defstruct(
    "Explained",
    [
        ("profile", str),
        ("choice", Choice),
        ("accumulations", list[Accumulated]),
        ("step", StepExplained | None),
        ("alternatives", list[_Weighed]),  # type: ignore[valid-type]  # made above
        ("rejected", list[Rejected]),
    ],
    kw_only=True,
    namespace={"__doc__": "A choice and what was weighed against it."},
)


# -- schemas --------------------------------------------------------------------------------------


def schema(name: str) -> Schema:
    """The schema of this name."""
    what, make = SCHEMAS[name]
    return {"$schema": DIALECT, "title": f"autotune-offload {name}", "description": what, **make()}


def _document(*kinds: type) -> Callable[[], Schema]:
    """The schema of a verb's document, which is one of these."""

    def make() -> Schema:
        found, components = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
        made = {"anyOf": list(found)} if len(found) > 1 else dict(found[0])
        nullable: Schema = _nullable({**made, "$defs": components})
        return nullable

    return make


def _nullable(part: Any) -> Any:
    """Every number may be null: what JSON cannot hold."""
    if isinstance(part, list):
        return [_nullable(each) for each in part]
    if not isinstance(part, dict):
        return part
    made = {key: _nullable(value) for key, value in part.items()}
    return {**made, "type": ["number", "null"]} if made.get("type") == "number" else made


def _machine() -> Schema:
    return msgspec.json.schema(Machine)


def _verified() -> Schema:
    from autotune_offload.engine.verify import Verification  # loads torch

    more: dict[str, Any] = {"changes": list[Change], "profile": str}
    return _document(_extended("Verified", Verification.__doc__ or "", Verification, **more))()


_LEAST = {"confirm_rounds": 1, "buffer_bytes": 1, "buffer_count": 1, "host_threads": 0, "max_pinned_bytes": 0}
_SIZE = r"^\s*\d+(\.\d+)?\s*([kKmMgGtT][iI]?)?[bB]\s*$"


def _config() -> Schema:
    """A ds_config, of which only the block of ours is described."""
    block = msgspec.json.schema(Settings)["$defs"]["Settings"]
    said = _attribute_docstrings(Settings)
    properties = {
        name: {**_or_auto(name, made), "default": made["default"], "description": said[name]}
        for name, made in block["properties"].items()
    }
    properties["path"] |= {"enum": ["auto", *PATHS, *packaged.names(), "deepspeed"]}
    del properties["path"]["anyOf"]
    ours = {**block, "properties": properties, "additionalProperties": False}
    return {"type": "object", "properties": {BLOCK: ours}}


def _or_auto(name: str, made: Schema) -> Schema:
    """What the block takes in place of the setting: "auto" for each, and sizes as texts."""
    if "enum" in made:
        return {"enum": made["enum"]}
    (value, *_) = made.get("anyOf", [{key: made[key] for key in ("type", "items") if key in made}])
    if name in _LEAST:
        value = {**value, "minimum": _LEAST[name]}
    elif name.endswith("_seconds"):
        value = {**value, "exclusiveMinimum": 0}
    texts = [{"type": "string", "pattern": _SIZE}] if name.endswith("_bytes") else []
    return {"anyOf": [value, *texts, {"const": "auto"}]}


def _attribute_docstrings(kind: type) -> dict[str, str]:
    """What stands below each field in the source, which nothing keeps at run time."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    said = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                said[name] = text.replace("``", "`")
    return said


SCHEMAS: dict[str, tuple[str, Callable[[], Schema]]] = {
    "config": ("A ds_config with an autotune_offload block, for an editor.", _config),
    "machine": ("A described machine: a file for simulate.", _machine),
    "profile": ("What was measured on one host, and chosen.", _document(Profile)),
    "probe": (
        "probe --json: a profile, a table of all ranks, or a drive.",
        _document(Profile, _Ranks, MeasuredDrive),
    ),
    "show": ("show --json: a profile.", _document(Profile)),
    "explain": ("explain --json.", _document(_Explained)),
    "apply": ("apply --json.", _document(Applied)),
    "verify": ("verify --json.", _verified),
    "simulate": (
        "simulate --json: one machine, all machines, or the list of them.",
        _document(Simulated, SimulatedAll, KnownMachines),
    ),
    "run": ("run --environment --json.", _document(Environment)),
    "report": ("report --json.", _document(Page)),
    "doctor": ("doctor --json.", _document(Examined)),
    "fleet": ("fleet --json.", _document(_Fleet)),
    "profiles-list": ("profiles list --json.", _document(Listed)),
    "profiles-show": ("profiles show --json: a profile.", _document(Profile)),
    "profiles-forget": ("profiles forget --json.", _document(Forgotten)),
    "profiles-prune": ("profiles prune --json.", _document(Pruned)),
    "profiles-path": ("profiles path --json.", _document(Folder)),
}
"""By name: what it is of, and what makes it."""
