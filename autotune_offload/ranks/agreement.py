"""One agreement of all ranks through a key-value store: gatherings, then one confirmation."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import structs

from autotune_offload.errors import AgreementError, UndecidedError
from autotune_offload.ranks.ballots import (
    MESSAGE_BYTES,
    REPLY_BYTES,
    Ballot,
    Plan,
    Reply,
    View,
    conclusion,
    merged,
    of_host,
    packed,
    plain_text,
    unpacked,
)
from autotune_offload.ranks.group import PREFIX, WAIT_SECONDS, Group, Store
from autotune_offload.ranks.patience import DeadStoreError, bounded

MARGIN_SECONDS = 60.0
"""For ranks that were there already, beyond the time that measuring may take: imports and a compiler."""

_LEADERS_GRACE_SECONDS = 3.0
"""What a rank waits longer than the first of its host, who has to say so when time is up."""

_FIRST_POLL_SECONDS, LAST_POLL_SECONDS, _POLL_GROWTH = 0.0005, 0.1, 1.3
"""Waiting asks instead of blocking: a blocked request would lock the group's own users out of the store."""

_POLL_SECONDS_A_RANK = 100e-6
"""Times the ranks that wait: at most 10,000 polls a second reach the store, of some 25,000 that it answers."""

_NAMED_MISSING = 4
_SIZES_BYTES = 512

# -- the protocol ---------------------------------------------------------------------------------

_GO, _STOP = "go", "stop: "


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
        calls = f"{PREFIX}/{purpose}/calls/{group.rank}"
        self._home = f"{PREFIX}/{purpose}/{bounded(lambda: group.store.add(calls, 1), 0.0)}"
        self._gatherings = 0
        self._dead = False

    @property
    def margin_seconds(self) -> float:
        """The patience with ranks that were there already."""
        return min(self.wait_seconds, MARGIN_SECONDS)

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
            except DeadStoreError as error:
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
            self._dead = isinstance(error, (DeadStoreError, UndecidedError))
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
    longest = max(LAST_POLL_SECONDS, pause)
    while not store.check([key]):
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(pause * _POLL_GROWTH, longest)
    return True
