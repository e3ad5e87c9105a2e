"""Ranks and hosts come to one decision, through the store of the process group that they already have.

Messages go through c10d's key-value store and never through the group itself: no device wakes, and a rank
that never comes leaves no half-finished collective behind. An agreement is one or two gatherings and a
confirmation:

    gather    every rank's ballot goes to the first rank of its host; the hosts' views are merged up a binary
              tree; one plan comes back: who has to measure, or the choice and the sizes
    gather    again, with what was measured, where a host had to
    confirm   every rank shows a digest of the sizes that it is about to train with

Who cannot take part declines, and who has waited too long declines for all. What counts in the end is one
key, the verdict. It is written once, atomically, and "go" only by the last of all ranks to confirm: either
every rank uses what was agreed, or none does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from autotune_offload.config import equal_keys
from autotune_offload.config.keys import NAMES
from autotune_offload.errors import AgreementError
from autotune_offload.ranks.agreement import Agreement
from autotune_offload.ranks.ballots import (
    SIZE_FIELDS,
    Plan,
    Reply,
    ballot,
)
from autotune_offload.records import Choice, DeviceIdentity, Profile, ZeroSizes

# -- one profile for all --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What one rank has after the gatherings."""

    profile: Profile
    """This rank's own, with the choice of its host and the sizes of the job."""
    config: dict[str, Any]
    """The user's own, with the first rank's sizes where its ranks differ in them."""
    own: Profile
    """What this rank itself has found or measured."""
    measured: bool
    keeper: bool
    """Whether this rank is to store what it has measured: the slowest of those with its key on its host."""
    notices: tuple[str, ...]


def agree(
    agreement: Agreement,
    found: Profile | None,
    measure: Callable[[int], Profile],
    *,
    config: Mapping[str, Any],
    device: DeviceIdentity,
    measure_seconds: float,
) -> Agreed:
    """One choice for each host, and one set of sizes for the job.

    Args:
        agreement: just begun.
        found: this rank's stored profile, if any.
        measure: called with the number of ranks on this host, on all of them at once, where one has to.
        config: the user's configuration.
        device: this rank's.
        measure_seconds: how long `measure` may take.

    Raises:
        AgreementError: nothing was agreed.
        Exception: what `measure` raises; the caller has to decline then.
    """
    rank, given = agreement.group.rank, equal_keys.sizes(config)
    if rank == 0:
        agreement.show_sizes(given)
    digests = {"config": equal_keys.rest_digest(config), "given": equal_keys.sizes_digest(config)}
    profile = found
    reply = agreement.gather(ballot(rank, device.kind, device.name, profile=profile, **digests))
    measured = reply.measure
    if measured:
        profile = measure(reply.ranks)
    if reply.plan.measure:
        patience = agreement.margin_seconds + 2 * measure_seconds
        again = ballot(rank, device.kind, device.name, profile=profile, **digests)
        reply = agreement.gather(again, patience)
    if profile is None or reply.choice is None:
        raise AgreementError("a rank of this host has no profile that was measured with all of them copying")
    config, notices = _aligned(agreement, config, reply.plan)
    return Agreed(
        profile=_adopted(profile, reply, rank),
        config=config,
        own=profile,
        measured=measured,
        keeper=measured and rank in reply.keepers,
        notices=notices,
    )


def _aligned(
    agreement: Agreement, config: Mapping[str, Any], plan: Plan
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The configuration with the first rank's sizes where ranks differ, and what everybody should know."""
    loud = (plan.loud,) if plan.loud else ()
    if plan.odd_given < 0:
        return dict(config), loud
    shown = agreement.shown_sizes()
    said = ", ".join(f"{name} {value}" for name, value in shown.items()) or "none"
    notice = (
        f"the ZeRO sizes that rank {plan.odd_given} was given differ from those of rank 0, and would hang the job: "
        f"all ranks take those of rank 0 ({said}); give all ranks one configuration"
    )
    return equal_keys.with_sizes(config, shown), (*loud, notice)


def _adopted(profile: Profile, reply: Reply, rank: int) -> Profile:
    """With the choice of its host's slowest rank, the job's sizes, and a word about both."""
    plan, theirs = reply.plan, reply.choice
    assert theirs is not None
    own = profile.choice.reasons
    if rank != reply.decider:
        own = tuple(f"on rank {rank}: {reason}" for reason in own)
    decided = structs.replace(
        profile.choice, **structs.asdict(theirs), sizes=_sizes(profile.choice.sizes, plan)
    )
    word = (
        f"decided by {plan.ranks} ranks on {_counted(plan.hosts, 'host')}, measured with "
        f"{_counted(reply.ranks, 'rank')} copying at once on this one; its slowest, rank {reply.decider}, decides "
        f"for it: {_in_words(decided)}, {reply.seconds * 1e3:.3g} ms a backward pass"
    )
    return structs.replace(profile, choice=structs.replace(decided, reasons=(word, *own)))


def _in_words(choice: Choice) -> str:
    if choice.beats_deepspeed:
        return f"path {choice.path} with the cast on the {choice.cast}"
    return "DeepSpeed's own code"


def _sizes(own: ZeroSizes, plan: Plan) -> ZeroSizes:
    values = dict(zip(SIZE_FIELDS, plan.sizes, strict=True))
    reasons = dict(own.reasons)
    for name, value in values.items():
        if value is not None and value != getattr(own, name):
            reasons[name] = (
                f"{NAMES[name]} is {value:,} elements: the smallest that any of the {plan.ranks} ranks asks for"
            )
    return ZeroSizes(**values, reasons=reasons)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
