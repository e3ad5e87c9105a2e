"""`autotune-offload probe` on every rank that a launcher started: one measurement, one table."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from autotune_offload.cli.output import console, emit_json, notice

if TYPE_CHECKING:
    from autotune_offload.profiles.fleet import Survey
    from autotune_offload.profiles.store import Store
    from autotune_offload.ranks.agree import Agreed
    from autotune_offload.ranks.agreement import Agreement
    from autotune_offload.records import Profile

_LATE_SECONDS = 5.0
"""Ranks that a launcher started have found each other by then, imports aside."""


def ranks() -> int:
    """How many ranks the launcher started; 1 without one."""
    from autotune_offload.ranks.group import announced_ranks

    return announced_ranks()


def probe_together(
    store: Store,
    found: Profile | None,
    measure: Callable[[int], Profile],
    *,
    measure_seconds: float,
    save: bool,
    collect: Path | None,
) -> Survey | None:
    """Agree, measure at once where a host has to, and store; the survey of all ranks on the first.

    Raises:
        AgreementError: the ranks did not find each other, or one could not measure.
    """
    from autotune_offload.errors import AutotuneError
    from autotune_offload.machine.accelerator import AcceleratorDevice
    from autotune_offload.ranks import agree, group
    from autotune_offload.ranks import agreement as ranks_agreement

    with _said_when_late(f"{group.told()}: waiting for the others; {group.alone()}"):
        launched = group.launched_group()
    agreement = ranks_agreement.Agreement(launched, "probe")
    rank = agreement.group.rank
    try:
        agreed = agree.agree(
            agreement,
            found,
            measure,
            config={},
            device=AcceleratorDevice().identity,
            measure_seconds=measure_seconds,
        )
    except AutotuneError as error:
        agreement.decline(f"rank {rank}: {error}")
        raise
    if save and agreed.keeper:
        _saved(store, agreed)
    if collect is not None:
        from autotune_offload.profiles.store import Store

        _saved(Store(collect / agreed.own.host.name / f"rank-{rank}"), agreed)
    return _survey(agreement, agreed.own)


@contextlib.contextmanager
def _said_when_late(text: str) -> Iterator[None]:
    """A line on stderr where what is inside takes longer than ranks of one launcher need."""
    timer = threading.Timer(_LATE_SECONDS, notice, args=(text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _saved(store: Store, agreed: Agreed) -> None:
    from autotune_offload.errors import ProfileError

    try:
        store.save(agreed.own)
    except ProfileError as error:  # what was measured is shown all the same
        notice(f"not saved: {error}")


def _survey(agreement: Agreement, own: Profile) -> Survey | None:
    import msgspec

    from autotune_offload.profiles.fleet import Member, member, survey

    mine = msgspec.json.encode(member(own, rank=agreement.group.rank))
    rows = agreement.rows(mine)
    return survey([msgspec.json.decode(row, type=Member) for row in rows]) if rows else None


def show(survey: Survey | None, *, as_json: bool) -> None:
    """One table or one document, on the first rank."""
    if survey is None:
        return
    from autotune_offload.cli.fleet import as_plain, print_survey

    if as_json:
        emit_json({"schema": 1, **as_plain(survey)})
    else:
        print_survey(console(), survey)
