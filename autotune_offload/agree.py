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

import contextlib
import datetime
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from msgspec import structs

from autotune_offload import equal_keys, host
from autotune_offload.ballots import (
    MESSAGE_BYTES,
    REPLY_BYTES,
    SIZE_FIELDS,
    Ballot,
    Plan,
    Reply,
    View,
    ballot,
    conclusion,
    merged,
    of_host,
    packed,
    plain_text,
    unpacked,
)
from autotune_offload.errors import AgreementError, ConfigError, UndecidedError
from autotune_offload.records import Choice, DeviceIdentity, Profile, ZeroSizes

T = TypeVar("T")

WAIT_SECONDS = 300.0
"""For ranks that come late, after reading a checkpoint for example, unless the user sets another time."""

_MARGIN_SECONDS = 60.0
"""For ranks that were there already, beyond the time that measuring may take: imports and a compiler."""

_GRACE_SECONDS = 10.0
"""After a time-out, for a store that is slow to answer; then it counts as dead."""

_LEADERS_GRACE_SECONDS = 3.0
"""What a rank waits longer than the first of its host, who has to say so when time is up."""

_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS, _POLL_GROWTH = 0.0005, 0.1, 1.3
"""Waiting asks instead of blocking: a blocked request would lock the group's own users out of the store."""

_POLL_SECONDS_A_RANK = 100e-6
"""Times the ranks that wait: at most 10,000 polls a second reach the store, of some 25,000 that it answers."""

_PREFIX = "ato"
"""Of every key of ours in the store; short, since each request carries it."""

_NAMED_MISSING = 4
_SIZES_BYTES = 512

_ANNOUNCED = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""Where launchers say how many processes they started: torchrun and DeepSpeed, the MPIs, srun."""


_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Where launchers put a process's rank: torchrun and DeepSpeed, Open MPI, MVAPICH2, Hydra, srun."""


class Store(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: Any, /) -> None:
        """Write text or bytes."""

    def get(self, key: str, /) -> bytes:
        """Read a key that is there."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, and give its new value."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """With `expected` empty: write where nothing is yet. Gives what is there afterwards."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The ranks of a job as one of them sees them."""

    store: Store
    rank: int
    world_size: int
    host: str
    """The same on all ranks that share a host, another one elsewhere."""


def present_group() -> Group | None:
    """The initialized process group; None where there is none, or only of one rank.

    Raises:
        AgreementError: a group without a store, as one of torch's MPI backend.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    try:
        store = dist.distributed_c10d._get_default_store()
    except (AttributeError, KeyError, ValueError, RuntimeError) as error:
        raise AgreementError(f"the process group has no store to agree through: {error}") from error
    if store is None:
        raise AgreementError(f"a process group of backend {dist.get_backend()} has no store to agree through")
    return Group(store=store, rank=dist.get_rank(), world_size=dist.get_world_size(), host=host.identity())


def launched_group(seconds: float = WAIT_SECONDS) -> Group:
    """The ranks that a launcher started, by its environment alone: no process group, no device.

    Raises:
        AgreementError: no RANK, WORLD_SIZE, MASTER_ADDR or MASTER_PORT, or nobody at that address.
    """
    from torch.distributed.rendezvous import rendezvous

    try:
        found = next(iter(rendezvous("env://", timeout=datetime.timedelta(seconds=seconds))))
    except (ValueError, RuntimeError) as error:
        raise AgreementError(
            f"{announced_ranks()} ranks were started, and cannot find each other: {error}; start them with deepspeed "
            "or torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        ) from error
    store, rank, world_size = found
    return Group(store=store, rank=rank, world_size=world_size, host=host.identity())


def announced_ranks() -> int:
    """How many ranks the job has: those of the process group, else what a launcher says, else 1.

    Raises:
        ConfigError: the launcher's word is not a number.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    counts = [1]
    for name in _ANNOUNCED:
        told = os.environ.get(name, "").strip() or "1"
        if not told.isdecimal() or int(told) < 1:
            raise ConfigError(f'{name} is "{told}"; expected the number of ranks, or no such variable')
        counts.append(int(told))
    return max(counts)


def present_rank() -> int:
    """Of this process in the group, else as the launcher says, else 0."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    said = (os.environ.get(name, "").strip() for name in _RANKS)
    return next((int(text) for text in said if text.isdecimal()), 0)


# -- the protocol ---------------------------------------------------------------------------------

_GO, _STOP = "go", "stop: "


class _DeadStoreError(AgreementError):
    """The store does not answer."""


class Agreement:
    """One agreement of one job. Every rank makes the same calls in the same order, or declines.

    Args:
        group: who takes part.
        purpose: tells the agreements of different callers apart; each rank numbers its own of each purpose.
        wait_seconds: how long to wait for ranks that come late.

    Every method may raise AgreementError: then nothing is agreed, and no other rank will use anything.
    """

    def __init__(self, group: Group, purpose: str, wait_seconds: float = WAIT_SECONDS) -> None:
        """Takes this rank's next number; waits for nobody."""
        self.group, self.wait_seconds = group, wait_seconds
        calls = f"{_PREFIX}/{purpose}/calls/{group.rank}"
        self._home = f"{_PREFIX}/{purpose}/{bounded(lambda: group.store.add(calls, 1), 0.0)}"
        self._gatherings = 0
        self._dead = False

    @property
    def margin_seconds(self) -> float:
        """The patience with ranks that were there already."""
        return min(self.wait_seconds, _MARGIN_SECONDS)

    def show_sizes(self, sizes: Mapping[str, Any]) -> None:
        """What the first rank's configuration sets, for ranks that differ; before it gathers."""
        text = json.dumps(dict(sizes), default=repr)
        if len(text) > _SIZES_BYTES:
            raise AgreementError(f"ZeRO sizes of {len(text)} characters; expected numbers")
        bounded(lambda: self.group.store.set(f"{self._home}/sizes", text), 0.0)

    def shown_sizes(self) -> dict[str, Any]:
        """Those of the first rank; after a gathering."""
        shown: dict[str, Any] = json.loads(bounded(lambda: self.group.store.get(f"{self._home}/sizes"), 0.0))
        return shown

    def gather(self, mine: Ballot, seconds: float | None = None) -> Reply:
        """The reply to this rank's ballot, once every rank's has come, within so many seconds."""
        self._gatherings += 1
        wait = self.wait_seconds if seconds is None else seconds
        gathering = _Gathering(self.group, self._gathering(self._gatherings), wait)
        with self._declining():
            reply = bounded(lambda: gathering.reply(mine), wait + _LEADERS_GRACE_SECONDS)
            if reply.plan.stop:
                raise AgreementError(reply.plan.stop)
        return reply

    def rows(self, mine: bytes) -> list[bytes]:
        """What every rank hands in, in their order, on the first rank; nothing on the others."""
        store, ranks = self.group.store, range(self.group.world_size)
        keys = [f"{self._home}/rows/{rank}" for rank in ranks]
        bounded(lambda: store.set(keys[self.group.rank], mine), 0.0)
        if self.group.rank:
            return []
        return bounded(lambda: [self._row(key) for key in keys], self.margin_seconds)

    def _row(self, key: str) -> bytes:
        if not _arrived(self.group.store, key, self.margin_seconds, 1):
            raise AgreementError(f"{key.rpartition('/')[2]} is a rank that handed in nothing")
        return self.group.store.get(key)

    def confirm(self, digest: str) -> None:
        """Returns where every rank has confirmed the same digest.

        Raises:
            AgreementError: some rank has another one, declined, or did not come.
            UndecidedError: the store died after this rank had confirmed.
        """
        confirmed = threading.Event()
        with self._declining():
            try:
                bounded(lambda: self._confirmed(digest, confirmed), self.margin_seconds)
            except _DeadStoreError as error:
                if not confirmed.is_set():
                    raise
                raise UndecidedError(
                    f"{error}; this rank had confirmed, and the others may train with what was agreed: start the "
                    "job again"
                ) from error

    def _confirmed(self, digest: str, confirmed: threading.Event) -> None:
        store, rank = self.group.store, self.group.rank
        first, _, who = self._once("digest", f"{digest} {rank}").partition(" ")
        if first != digest:
            raise AgreementError(
                f"rank {rank} would train with other ZeRO sizes than rank {who}, and hang; give all ranks one "
                "configuration"
            )
        confirmed.set()
        if store.add(f"{self._home}/confirmed", 1) == self.group.world_size:
            self._once("verdict", _GO)
        seconds = self.margin_seconds
        if not _arrived(store, f"{self._home}/verdict", seconds, self.group.world_size):
            self._once("verdict", f"{_STOP}not all ranks confirmed within {seconds:g} s")
        verdict = self._once("verdict", _STOP)
        if verdict != _GO:
            raise AgreementError(verdict.removeprefix(_STOP))

    def decline(self, reason: str) -> None:
        """Nothing is agreed, for no rank. Waits for nobody; without effect after "go"."""
        if self._dead:  # the others find that out as well
            return
        stop = _STOP + plain_text(reason)
        gates = ["verdict", *(f"{number}/complete" for number in (1, 2))]
        with contextlib.suppress(AgreementError):
            bounded(lambda: [self._once(gate, stop) for gate in gates], 0.0)

    @contextlib.contextmanager
    def _declining(self) -> Iterator[None]:
        try:
            yield
        except AgreementError as error:
            self._dead = isinstance(error, (_DeadStoreError, UndecidedError))
            self.decline(str(error))
            raise

    def _gathering(self, number: int) -> str:
        return f"{self._home}/{number}"

    def _once(self, key: str, value: str) -> str:
        return self.group.store.compare_set(f"{self._home}/{key}", "", value).decode()


class _Gathering:
    """One gathering; its keys lie below `home`."""

    def __init__(self, group: Group, home: str, seconds: float) -> None:
        self.group, self.store, self.home = group, group.store, home
        self.seconds, self.deadline = seconds, time.monotonic() + seconds

    def reply(self, mine: Ballot) -> Reply:
        """This rank's part, whichever it is: the first of a host leads it."""
        seat = self.store.add(self._of_host("seats"), 1)
        number = self.store.add(f"{self.home}/hosts", 1) if seat == 1 else 0
        if seat > 1:
            self.store.set(self._of_host(seat), packed(mine, MESSAGE_BYTES))
        self.store.set(f"{self.home}/here/{self.group.rank}", "")
        if self.store.add(f"{self.home}/came", 1) == self.group.world_size:
            self.store.compare_set(f"{self.home}/complete", "", _GO)
        if seat == 1:
            return self._lead(mine, number)
        text = self._when_there(self._of_host("reply"), "the first rank of its host", self.group.world_size)
        return unpacked(text, Reply)

    def _lead(self, mine: Ballot, number: int) -> Reply:
        try:
            self._all_came()
            reply = self._combined(mine, number)
        except AgreementError as error:
            reply = Reply(plan=Plan(stop=plain_text(str(error)) or "declined"))
        self.store.set(self._of_host("reply"), packed(reply, REPLY_BYTES))
        return reply

    def _all_came(self) -> None:
        gate, ranks = f"{self.home}/complete", self.group.world_size
        if not _arrived(self.store, gate, self._left(), ranks):
            # one host asks who is missing, or a thousand would ask for each of thousands of ranks
            if self.store.add(f"{self.home}/late", 1) == 1:
                self.store.compare_set(gate, "", _STOP + self._missing())
            elif not _arrived(self.store, gate, _LEADERS_GRACE_SECONDS / 2, ranks):
                self.store.compare_set(gate, "", f"{_STOP}not all ranks came within {self.seconds:g} s")
        found = self.store.compare_set(gate, "", _STOP).decode()
        if found != _GO:
            raise AgreementError(found.removeprefix(_STOP))

    def _combined(self, mine: Ballot, number: int) -> Reply:
        """The view of this host and of those below it in the tree goes up; the plan comes down."""
        seats = range(2, self.store.add(self._of_host("seats"), 0) + 1)
        view, reply = of_host([mine, *(unpacked(self.store.get(self._of_host(s)), Ballot) for s in seats)])
        hosts = self.store.add(f"{self.home}/hosts", 0)
        for below in (2 * number, 2 * number + 1):
            if below <= hosts:
                text = self._when_there(f"{self.home}/view/{below}", "another host", hosts)
                view = merged(view, unpacked(text, View))
        if number > 1:
            self.store.set(f"{self.home}/view/{number}", packed(view, MESSAGE_BYTES))
            plan = unpacked(self._when_there(f"{self.home}/plan", "the first host", hosts), Plan)
        else:
            plan = conclusion(view)
            self.store.set(f"{self.home}/plan", packed(plan, REPLY_BYTES))
        return structs.replace(reply, plan=plan)

    def _of_host(self, what: str | int) -> str:
        return f"{self.home}/{self.group.host}/{what}"

    def _when_there(self, key: str, whose: str, waiting: int) -> bytes:
        if not _arrived(self.store, key, self._left() + _LEADERS_GRACE_SECONDS, waiting):
            raise AgreementError(f"rank {self.group.rank} waited {self.seconds:g} s for {whose}")
        return self.store.get(key)

    def _left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.0)

    def _missing(self) -> str:
        """Who has not come, in words."""
        ranks = range(self.group.world_size)
        missing = [rank for rank in ranks if not self.store.check([f"{self.home}/here/{rank}"])]
        named = ", ".join(map(str, missing[:_NAMED_MISSING])) + ", ..." * (len(missing) > _NAMED_MISSING)
        return (
            f"{len(missing)} of {self.group.world_size} ranks did not come within {self.seconds:g} s (rank {named}); "
            "every rank has to make the same call; a larger wait_seconds waits longer"
        )


def _arrived(store: Store, key: str, seconds: float, waiting: int) -> bool:
    """Whether a key is there within so many seconds; so many ranks wait at the same time."""
    deadline = time.monotonic() + seconds
    pause = max(_FIRST_POLL_SECONDS, waiting * _POLL_SECONDS_A_RANK)
    longest = max(_LAST_POLL_SECONDS, pause)
    while not store.check([key]):
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(pause * _POLL_GROWTH, longest)
    return True


def bounded(step: Callable[[], T], seconds: float) -> T:
    """What `step` gives, from a thread of its own: a store on a frozen host would hold a request for ever.

    Raises:
        AgreementError: no answer within so many seconds and a grace, or no connection.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(step())
        except BaseException as error:  # the calling thread's to raise
            failed.append(error)

    thread = threading.Thread(target=run, name="autotune-offload agreement", daemon=True)
    thread.start()
    thread.join(seconds + _GRACE_SECONDS)
    if done:
        return done[0]
    if not failed:
        raise _DeadStoreError(f"the store of rank 0 gave no answer within {seconds + _GRACE_SECONDS:g} s")
    if isinstance(failed[0], RuntimeError):  # torch's DistError is one
        raise _DeadStoreError(f"the store of rank 0 cannot be used: {failed[0]}") from failed[0]
    raise failed[0]


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
    decided = replace(profile.choice, **structs.asdict(theirs), sizes=_sizes(profile.choice.sizes, plan))
    word = (
        f"decided by {plan.ranks} ranks on {_counted(plan.hosts, 'host')}, measured with "
        f"{_counted(reply.ranks, 'rank')} copying at once on this one; its slowest, rank {reply.decider}, decides "
        f"for it: {_in_words(decided)}, {reply.seconds * 1e3:.3g} ms a backward pass"
    )
    return replace(profile, choice=replace(decided, reasons=(word, *own)))


def _in_words(choice: Choice) -> str:
    if choice.beats_deepspeed:
        return f"path {choice.path} with the cast on the {choice.cast}"
    return "DeepSpeed's own code"


def _sizes(own: ZeroSizes, plan: Plan) -> ZeroSizes:
    values = dict(zip(SIZE_FIELDS, plan.sizes, strict=True))
    reasons = dict(own.reasons)
    for name, value in values.items():
        if value is not None and value != getattr(own, name):
            reasons[name] = f"{value:,} elements: the smallest that any of the {plan.ranks} ranks asks for"
    return ZeroSizes(**values, reasons=reasons)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


# -- the ranks of a host before there is a group --------------------------------------------------


def turn_seconds(measure_seconds: float) -> float:
    """How long to wait for a rank that measures for so long."""
    return 2 * measure_seconds + _MARGIN_SECONDS


@contextlib.contextmanager
def turn_on_host(folder: Path, seconds: float) -> Iterator[None]:
    """One process at a time, of all that keep their profiles in `folder`; waits so long and no longer.

    The lock is the kernel's and dies with the process that holds it. Where the folder takes no locks, all
    go on at once: what they write is replaced whole.

    Raises:
        AgreementError: somebody else has held it all the time.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder / ".measuring", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:  # profiles cannot be stored here either, which is said elsewhere
        yield
        return
    try:
        _lock(descriptor, folder, seconds)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise AgreementError(
                    f"another rank of this host has been measuring for over {seconds:g} s (lock {folder}/.measuring)"
                ) from None
            time.sleep(_LAST_POLL_SECONDS)
        except OSError:  # a file system without locks
            return
