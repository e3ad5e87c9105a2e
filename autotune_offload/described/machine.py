"""Machine descriptions: what a simulated device is made from, with the source of every number.

A description is a YAML file; those that are shipped lie in ``configs/machines/``, a user's own in any file or
in the folder of `places.machines`, and an installed package may bring some (`ENTRY_POINTS`).
GB are 1e9 bytes. Rates are those of one rank that has the link to itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from autotune_offload import documents, places
from autotune_offload.errors import ConfigError
from autotune_offload.line import Least0, Line, Positive

SCHEMA = 1
_FOLDER = "machines"
_log = logging.getLogger(__name__)

ENTRY_POINTS = "autotune_offload.machines"
"""The group in which an installed package names a package of its own that holds machine files."""

Count = Annotated[int, Meta(ge=1)]
Bytes = Annotated[int, Meta(ge=0)]
Origin = Literal["measured", "spec", "derived", "proxy", "estimate", "calibrated"]

_UNSOURCED = frozenset(
    """schema ranks_per_host link_shared_by_ranks host.shared_by_ranks host.intraop_threads host.ram_bytes
    pin.largest_bytes limits.memlock_bytes limits.device_memory_bytes""".split()
)
"""Numbers that say how a machine is built and set up, not how fast it is; they may have a source."""


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One mapping of the file; an unknown key is an error."""


class ToHost(_Part, frozen=True, kw_only=True):
    """d2h, by what the destination is. `pageable_cold` is memory whose pages were never touched."""

    pinned: Line
    pageable: Line
    pageable_cold: Line


class ToDevice(_Part, frozen=True, kw_only=True):
    """h2d, by what the source is."""

    pinned: Line
    pageable: Line


class HostCopy(Line, frozen=True, kw_only=True):
    """h2h: bytes copied a second by one thread, and by as many as the socket has; cost of one call."""

    threads_gbps: Positive


class Link(_Part, frozen=True, kw_only=True):
    """The link's own rate, and what all links of a host carry together where something else bounds them."""

    name: str
    peak_gbps: Least0
    total_gbps: Positive | None = None


class HostSide(_Part, frozen=True, kw_only=True):
    """The host's memory and threads.

    `shared_by_ranks` is how many ranks of one host share `mem_gbps`; None is all of them.
    `intraop_threads` is what torch uses for one operation: launchers give each rank one thread.
    `ram_bytes` None is not told, and nothing is bounded by it.
    """

    mem_gbps: Positive
    shared_by_ranks: Count | None = None
    intraop_threads: Count = 1
    ram_bytes: Bytes | None = None


class Sync(_Part, frozen=True, kw_only=True):
    """What waiting costs beyond what is waited for, by scope."""

    device_us: Least0
    stream_us: Least0
    event_us: Least0


class Pin(_Part, frozen=True, kw_only=True):
    """What page-locking costs. `largest_bytes` is the largest block that locks: None has no end, 0 locks none."""

    ms_per_gib: Least0
    largest_bytes: Bytes | None = None


class CastSpeed(_Part, frozen=True, kw_only=True):
    """fp32 bytes produced a second: on the device, and by one host thread."""

    device_gbps: Positive
    host_gbps: Positive


class Duplex(_Part, frozen=True, kw_only=True):
    """Both directions busy: what they carry together. `mode` says in a word whether that is less than both alone."""

    mode: Literal["full", "shared"]
    total_gbps: Positive


class Compute(_Part, frozen=True, kw_only=True):
    """What matrix products reach. Without it copies are timed with no compute to hide behind."""

    tflops: Positive


class Bounds(_Part, frozen=True, kw_only=True):
    """What a process may take: bytes that it may page-lock, and the device's memory."""

    memlock_bytes: Bytes | None = None
    device_memory_bytes: Bytes | None = None


class Source(_Part, frozen=True, kw_only=True):
    """Where one number comes from. `field` is its dotted name, `kind` how much of it was seen."""

    field: str
    value: float
    kind: Origin
    url: str
    confidence: Literal["high", "medium", "low"] = "low"
    estimate: bool = False
    note: str = ""


class Machine(_Part, frozen=True, kw_only=True):
    """One described machine; see the module."""

    schema: Literal[1]
    name: str
    title: str
    kind: str
    link: Link
    ranks_per_host: Count
    link_shared_by_ranks: Count
    d2h: ToHost
    h2d: ToDevice
    h2h: HostCopy
    host: HostSide
    sync: Sync
    pin: Pin
    cast: CastSpeed
    duplex: Duplex
    compute: Compute | None = None
    limits: Bounds = Bounds()
    notes: str = ""
    sources: tuple[Source, ...] = ()

    def sourced(self, kind: Origin) -> tuple[str, ...]:
        """The numbers that have a source of this kind."""
        return tuple(source.field for source in self.sources if source.kind == kind)


def names() -> tuple[str, ...]:
    """The machines that `load` knows by name: shipped ones, the user's own, those of installed packages."""
    own = (path.stem for path in sorted(places.machines().glob("*.yaml")))
    return tuple(dict.fromkeys([*(Path(name).stem for name in places.listed(_FOLDER)), *own, *_packaged()]))


def _packaged() -> dict[str, Path]:
    """The files of installed packages by name; one that cannot be imported costs a warning and nothing else."""
    found: dict[str, Path] = {}
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda each: each.value):
        try:
            folder = Path(str(files(entry.value)))
        except Exception as error:  # whatever somebody's package does when it is imported
            _log.warning("no machines of %s: %s: %s", entry.value, type(error).__name__, error)
            continue
        for file in sorted(folder.glob("*.yaml")):
            found.setdefault(file.stem, file)
    return found


def load(name: str) -> Machine:
    """A machine by its name, or from a file.

    Args:
        name: one of `names`, or the path of a YAML file. A user's own description comes before a shipped one,
            and that before one of an installed package.

    Raises:
        ConfigError: no such machine, or a description that cannot be used.
    """
    return read(_file(name))


def _file(name: str) -> Path:
    if name.endswith((".yaml", ".yml")) or "/" in name or Path(name).is_file():
        return Path(name)
    own = places.machines() / f"{name}.yaml"
    if own.is_file():
        return own
    if f"{name}.yaml" in places.listed(_FOLDER):
        return places.config_file(_FOLDER, f"{name}.yaml")
    packaged = _packaged()
    if name not in packaged:
        raise ConfigError(
            f'no machine "{name}": expected one of {", ".join(names())}, or the path of a YAML file; '
            f"own descriptions may lie in {places.machines()}"
        )
    return packaged[name]


def read(file: Path) -> Machine:
    """The machine that a file describes.

    Raises:
        ConfigError: no such file, not YAML, an unknown or missing key, a number out of range, or one
            without a source; the message names it.
    """
    try:
        text, _ = documents.read_text(file)
        described = documents.parse(text)
    except FileNotFoundError:
        raise ConfigError(f'no such file "{file}", looked in {Path.cwd()}; expected a machine file') from None
    except documents.Refused as error:
        raise ConfigError(f'machine file "{file}" {error}; docs/machines.md describes the keys') from error
    return parse(described, f'machine file "{file}"')


def parse(described: object, what: str = "machine") -> Machine:
    """The machine that plain data describes; `what` names it in messages.

    Raises:
        ConfigError: see `read`.
    """
    if not isinstance(described, Mapping):
        raise ConfigError(
            f"{what} holds {type(described).__name__}; expected keys such as d2h, h2d and sources"
        )
    if described.get("schema") != SCHEMA:
        raise ConfigError(f"{what} has schema {described.get('schema')!r}; expected {SCHEMA}")
    try:
        machine = msgspec.convert(described, Machine)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{what} cannot be used: {error}; docs/machines.md describes the keys") from error
    _check_finite(described, what)
    _check_sources(described, machine, what)
    return machine


def plain(machine: Machine) -> dict[str, Any]:
    """A machine as its file holds it; keys at their default are left out."""
    built: dict[str, Any] = msgspec.to_builtins(machine)
    return built


def numbers(described: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    """Dotted name and value of every number outside `sources`."""
    for key, value in described.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{before}{key}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{before}{key}", value


def _check_finite(described: Mapping[str, Any], what: str) -> None:
    for field, value in numbers(described):
        if not abs(value) < float("inf"):
            raise ConfigError(f"{what}: {field} is {value}; expected a finite number")


def _check_sources(described: Mapping[str, Any], machine: Machine, what: str) -> None:
    held = dict(numbers(described))
    sourced = {source.field for source in machine.sources}
    unknown = sorted(sourced - set(held))
    if unknown:
        raise ConfigError(f"{what} has a source for {', '.join(unknown)}, which it does not hold")
    missing = [field for field in held if field not in sourced | _UNSOURCED]
    if missing:
        raise ConfigError(
            f"{what} has no source for {', '.join(missing)}: add to `sources` an entry with field, value, kind "
            "(measured, spec, derived, proxy, estimate or calibrated) and url"
        )
