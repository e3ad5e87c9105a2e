"""What runs found out about a stored choice: a small file beside the profile, which a running job never changes.

It holds for the choice that it names. Where that was measured again and came out otherwise, what was found about the
former one says nothing. Like a profile it is read or missed, never trusted, and written whole or not at all.
"""

from __future__ import annotations

from pathlib import Path as File
from typing import Any, Literal

import msgspec
from msgspec import structs

from autotune_offload.errors import ProfileError
from autotune_offload.profiles.store import found_beside, replace_file
from autotune_offload.profiles.trust import read_trusted
from autotune_offload.records import Accumulate, Cast, Path, Record, path_in_words

CLEAR = "`autotune-offload profiles forget` clears it"

_SCHEMA = 1


class Way(Record, frozen=True, kw_only=True):
    """A gradient path with all that it is built from."""

    path: Path
    cast: Cast
    buffer_bytes: int
    buffer_count: int
    host_threads: int
    accumulate: Accumulate = "device"

    @classmethod
    def of(cls, spec: Any) -> Way:
        """Of a choice or a candidate."""
        names = [field.name for field in structs.fields(cls)]
        return cls(**{name: getattr(spec, name) for name in names if hasattr(spec, name)})


class Wrong(Record, frozen=True, kw_only=True):
    """A path that is not tried again here."""

    way: Way
    kind: Literal["differs", "slower"]
    """It gave other bits than DeepSpeed's own code, or was clearly slower than the fastest."""
    why: str


class FoundStep(Record, frozen=True, kw_only=True):
    """What is known about the optimizer step."""

    threads: int
    """Host threads of the compiled pass where that was the fastest; 0 for DeepSpeed's own step."""
    words: str
    when: str = ""
    """UTC, ISO 8601."""
    differs: bool = False
    """Whether the pass gave other bits: then it is not tried again here."""


class Outcome(Record, frozen=True, kw_only=True):
    """What is known about one choice."""

    choice: Way
    winner: Way | None = None
    """Who was found to be the fastest; None for DeepSpeed's own code."""
    confirmed: str = ""
    """The finding in words; empty where there is none, and `winner` says nothing."""
    when: str = ""
    """UTC, ISO 8601."""
    wrong: tuple[Wrong, ...] = ()
    step: FoundStep | None = None
    schema: int = _SCHEMA


def read(profile: File) -> Outcome | None:
    """What lies beside a stored profile; None where nothing does that can be used."""
    try:
        found = msgspec.json.decode(read_trusted(found_beside(profile), only_own=True), type=Outcome)
    except (ProfileError, msgspec.DecodeError, ValueError):
        return None
    return found if found.schema == _SCHEMA else None


def about(profile: File, choice: Any) -> Outcome:
    """What is known about this choice; an empty outcome where nothing is."""
    found, way = read(profile), Way.of(choice)
    return found if found is not None and found.choice == way else Outcome(choice=way)


def save(profile: File, outcome: Outcome) -> None:
    """Put it beside a stored profile. Raises OSError where that cannot be."""
    profile.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(found_beside(profile), msgspec.json.format(msgspec.json.encode(outcome)).decode() + "\n")


def forget(profile: File) -> bool:
    """Take it away; False where there is none.

    Raises:
        ProfileError: it cannot be removed.
    """
    path = found_beside(profile)
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ProfileError(f"cannot remove {path}: {error}; remove it by hand") from error
    return True


def sentences(outcome: Outcome) -> list[str]:
    """For people, one a finding."""
    found = [f"confirmed {outcome.when}: {outcome.confirmed}"] if outcome.confirmed else []
    found += [f"not tried again: {path_in_words(wrong.way)}: {wrong.why}" for wrong in outcome.wrong]
    step = outcome.step
    if step is not None:
        kind = "not tried again: the compiled pass" if step.differs else f"confirmed {step.when}"
        found.append(f"{kind}: {step.words}")
    return found


def merged(former: Outcome, later: Outcome) -> Outcome:
    """The later findings, and all that was found wrong; of one path the later word counts."""
    wrong = {each.way: each for each in (*former.wrong, *later.wrong)}
    base = later if later.confirmed else former
    base = structs.replace(base, step=later.step or former.step)
    return structs.replace(base, wrong=tuple(each for way, each in wrong.items() if _stays(way, base)))


def _stays(way: Way, outcome: Outcome) -> bool:
    """Whoever has won since is not wrong."""
    return not (outcome.confirmed and way == outcome.winner)
