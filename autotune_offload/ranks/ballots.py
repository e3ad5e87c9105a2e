"""What ranks tell each other when they agree, and how many ballots become one plan. Pure: no store, no clock.

Messages are MessagePack of a fixed size. The views of hosts merge in any order and any grouping, so that no
rank has to hold a list of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TypeVar

import msgspec
from msgspec import structs

from autotune_offload.errors import AgreementError
from autotune_offload.records import (
    Accumulate,
    Cast,
    Choice,
    Path,
    Profile,
    backward_seconds,
    fingerprint_key,
)

MESSAGE_BYTES = 208
"""A ballot, and a view of many: padded, so that the bytes of an agreement are known beforehand."""

REPLY_BYTES = 512
"""What every rank reads at the end of a gathering."""

REASON_CHARACTERS = 260
_NAME_CHARACTERS = 24
_KIND_CHARACTERS = 8
_LENGTH_BYTES = 2
_KEY_DIGITS = 8
_KEEPERS = 16
"""Profiles stored on one host; where ranks differ in more ways, the others measure again at the next start."""

Sizes = tuple[int | None, int | None, int | None, int | None]
"""The fields of `ZeroSizes` in the order of `SIZE_FIELDS`."""

SIZE_FIELDS = (
    "reduce_bucket_elements",
    "prefetch_bucket_elements",
    "persistence_threshold_elements",
    "sub_group_elements",
)
NO_SIZES: Sizes = (None, None, None, None)


class Settled(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A choice without its words and sizes."""

    path: Path
    cast: Cast
    buffer_bytes: int
    buffer_count: int
    host_threads: int
    accumulate: Accumulate
    pin_optimizer: bool
    pin_parameters: bool
    pin_optimizer_alone: bool
    tie: bool
    gain: float
    noise: float
    unsettled_pins: tuple[str, ...]
    untried_pins: tuple[str, ...]

    @classmethod
    def of(cls, choice: Choice) -> Settled:
        """Of a whole choice."""
        return cls(**{name: getattr(choice, name) for name in cls.__struct_fields__})


class Ballot(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What one rank brings to a gathering."""

    rank: int
    kind: str
    name: str
    """Of its device."""
    config: str
    """Digest of what of the user's ZeRO section must be the same on all ranks, the sizes left out."""
    given: str
    """Digest of the sizes that the user wrote."""
    copying: int = 0
    """How many ranks of this host were copying when its profile was measured; 0 where it has none."""
    key: str = ""
    """Of its profile."""
    seconds: float = 0.0
    """What the choice adds to this rank's backward pass."""
    sizes: Sizes = NO_SIZES
    choice: Settled | None = None


class View(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Many ballots as one. `kind`, `name`, `config` and `given` are those of the lowest rank.

    The `odd` ones are the lowest ranks in which something differs from that one; -1 is none.
    """

    rank: int
    kind: str
    name: str
    config: str
    given: str
    ranks: int
    hosts: int
    unmeasured: int
    """Hosts that have to measure."""
    sizes: Sizes
    odd_kind: tuple[int, str] = (-1, "")
    odd_name: tuple[int, str] = (-1, "")
    odd_config: int = -1
    odd_given: int = -1


class Plan(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What the job does next."""

    measure: bool = False
    """Whether any host has to measure, so that a second gathering follows."""
    ranks: int = 0
    hosts: int = 0
    sizes: Sizes = NO_SIZES
    odd_given: int = -1
    """The lowest rank whose sizes in the configuration differ from the first's; -1 where none does."""
    stop: str = ""
    """Why nothing is tuned; empty where it is."""
    loud: str = ""
    """What everybody should know though the job goes on."""


class Reply(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What the ranks of one host read."""

    plan: Plan = Plan()
    measure: bool = False
    """Whether this host's ranks have to measure."""
    ranks: int = 0
    """On this host."""
    decider: int = -1
    """The slowest rank of this host, whose choice holds on it."""
    seconds: float = 0.0
    choice: Settled | None = None
    keepers: tuple[int, ...] = ()
    """Ranks whose profiles are stored: one for each key on this host, the slowest that has it."""


M = TypeVar("M", bound=msgspec.Struct)


def packed(message: msgspec.Struct, size: int) -> bytes:
    """A message in exactly `size` bytes: its length in two, itself, zeros.

    Raises:
        AgreementError: it is longer.
    """
    body = msgspec.msgpack.encode(message)
    if len(body) + _LENGTH_BYTES > size:
        raise AgreementError(f"a {type(message).__name__} of {len(body)} bytes, and messages have {size}")
    return (len(body).to_bytes(_LENGTH_BYTES, "big") + body).ljust(size, b"\0")


def unpacked(message: bytes, kind: type[M]) -> M:
    """What was packed.

    Raises:
        AgreementError: something else, as from another version of this package on another host.
    """
    end = _LENGTH_BYTES + int.from_bytes(message[:_LENGTH_BYTES], "big")
    try:
        return msgspec.msgpack.decode(message[_LENGTH_BYTES:end], type=kind)
    except msgspec.DecodeError as error:
        raise AgreementError(
            f"a {kind.__name__} of another rank cannot be read: {error}; install one version of autotune-offload "
            "on all hosts"
        ) from error


def plain_text(text: str, most: int = REASON_CHARACTERS) -> str:
    """One line of ASCII, so that characters are bytes."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in " ".join(text.split()))[:most]


# -- ballots --------------------------------------------------------------------------------------


def ballot(rank: int, kind: str, name: str, *, config: str, given: str, profile: Profile | None) -> Ballot:
    """A rank's ballot, with what its profile says where it has one."""
    blank = Ballot(
        rank=rank,
        kind=plain_text(kind, _KIND_CHARACTERS),
        name=plain_text(name, _NAME_CHARACTERS),
        config=config,
        given=given,
    )
    if profile is None:
        return blank
    a, b, c, d = (getattr(profile.choice.sizes, field) for field in SIZE_FIELDS)
    return structs.replace(
        blank,
        copying=profile.ranks_copying,
        key=fingerprint_key(profile.fingerprint)[:_KEY_DIGITS],
        seconds=backward_seconds(profile) or 0.0,
        sizes=(a, b, c, d),
        choice=Settled.of(profile.choice),
    )


# -- merging --------------------------------------------------------------------------------------


def of_host(ballots: Sequence[Ballot]) -> tuple[View, Reply]:
    """The view of one host, and the part of the reply that is decided on it.

    The host has to measure where a rank has no profile, or one from another number of ranks copying. Path
    and pinning are those of the slowest rank; where two are equally slow, of the lower one.
    """
    unmeasured = any(each.copying != len(ballots) for each in ballots)
    view = structs.replace(reduce(merged, map(_alone, ballots)), hosts=1, unmeasured=int(unmeasured))
    reply = Reply(measure=unmeasured, ranks=len(ballots))
    if unmeasured:
        return view, reply
    slowest_first = sorted(ballots, key=lambda each: (-each.seconds, each.rank))
    of_key: dict[str, int] = {}
    for each in slowest_first:
        of_key.setdefault(each.key, each.rank)
    slowest = slowest_first[0]
    return view, structs.replace(
        reply,
        decider=slowest.rank,
        seconds=slowest.seconds,
        choice=slowest.choice,
        keepers=tuple(of_key.values())[:_KEEPERS],
    )


def _alone(each: Ballot) -> View:
    names = ("rank", "kind", "name", "config", "given", "sizes")
    return View(ranks=1, hosts=0, unmeasured=0, **{name: getattr(each, name) for name in names})


def merged(one: View, other: View) -> View:
    """Two views as one.

    Of each size the smallest counts, since each is bounded by memory; None stands for DeepSpeed's own,
    which is the largest.
    """
    first, second = (one, other) if one.rank < other.rank else (other, one)
    return structs.replace(
        first,
        ranks=first.ranks + second.ranks,
        hosts=first.hosts + second.hosts,
        unmeasured=first.unmeasured + second.unmeasured,
        sizes=_smallest(first.sizes, second.sizes),
        odd_kind=_odd(first, second, "kind"),
        odd_name=_odd(first, second, "name"),
        odd_config=_odd_rank(first, second, "config"),
        odd_given=_odd_rank(first, second, "given"),
    )


def _odd(first: View, second: View, what: str) -> tuple[int, str]:
    """The lowest rank of both in which `what` is not that of the first one, and what it has instead."""
    found: list[tuple[int, str]] = [getattr(view, f"odd_{what}") for view in (first, second)]
    if getattr(second, what) != getattr(first, what):
        found[1] = (second.rank, getattr(second, what))
    return min((pair for pair in found if pair[0] >= 0), default=(-1, ""))


def _odd_rank(first: View, second: View, what: str) -> int:
    found: list[int] = [getattr(view, f"odd_{what}") for view in (first, second)]
    if getattr(second, what) != getattr(first, what):
        found[1] = second.rank
    return min((rank for rank in found if rank >= 0), default=-1)


def _smallest(one: Sizes, other: Sizes) -> Sizes:
    pairs = zip(one, other, strict=True)
    a, b, c, d = (min((size for size in pair if size is not None), default=None) for pair in pairs)
    return a, b, c, d


def conclusion(view: View) -> Plan:
    """What follows from the view of the whole job."""
    odd, name = view.odd_name
    mixed = (
        f"mixed accelerators: rank {odd} has {name}, rank {view.rank} {view.name}; the sizes are the smallest "
        "that any of them asks for, and the slowest sets the pace of all"
    )
    return Plan(
        measure=view.unmeasured > 0,
        ranks=view.ranks,
        hosts=view.hosts,
        sizes=view.sizes,
        odd_given=view.odd_given,
        stop=_contradiction(view),
        loud=mixed if odd >= 0 else "",
    )


def _contradiction(view: View) -> str:
    odd, kind = view.odd_kind
    if odd >= 0:
        return (
            f"mixed accelerators: rank {odd} uses {kind}, rank {view.rank} {view.kind}; a job needs one kind: set "
            "DS_ACCELERATOR to the same on all hosts"
        )
    if view.odd_config >= 0:
        return (
            f"rank {view.odd_config} has another zero_optimization than rank {view.rank}, in more than sizes and "
            "pinning; give all ranks one configuration"
        )
    return ""
