"""Who carried what: partitions and bytes by the path and by DeepSpeed's own code, now and since the start.

What is published is one frozen record, put in place as a whole: another thread may read and copy it at any time.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from autotune_offload.records import Record

By = Literal["path", "deepspeed", "compared"]


class Carried(Record, frozen=True, kw_only=True):
    """Partitions that somebody moved, one count for each time; bytes are in the dtype that gradients accumulate in."""

    partitions: int = 0
    """Taken to the fp32 gradient."""
    bytes: int = 0
    summed_partitions: int = 0
    """Taken to the accumulation buffer alone, before the accumulation ends."""
    summed_bytes: int = 0


class Shares(Record, frozen=True, kw_only=True):
    """What each has moved."""

    path: Carried = Carried()
    deepspeed: Carried = Carried()
    compared: Carried = Carried()
    """By both, in the self-check: DeepSpeed's came last, so that its results stayed."""


class Tally(Record, frozen=True, kw_only=True):
    """What each has moved now and since the path was attached."""

    since_start: Shares = Shares()
    last_accumulation: Shares = Shares()
    """Since the last optimizer step; while nothing was reduced since that, of the accumulation which it ended."""


class _Sums(msgspec.Struct):
    """The numbers of one `Carried` while they grow."""

    partitions: int = 0
    bytes: int = 0
    summed_partitions: int = 0
    summed_bytes: int = 0

    def add(self, size_bytes: int, *, to_fp32: bool) -> None:
        """One partition."""
        if to_fp32:
            self.partitions += 1
            self.bytes += size_bytes
        else:
            self.summed_partitions += 1
            self.summed_bytes += size_bytes

    def carried(self) -> Carried:
        """As it is now."""
        return Carried(
            partitions=self.partitions,
            bytes=self.bytes,
            summed_partitions=self.summed_partitions,
            summed_bytes=self.summed_bytes,
        )


class Counter:
    """Counts partitions as they are moved."""

    def __init__(self) -> None:
        """From 0."""
        self._since_start, self._last = _fresh(), _fresh()
        self._over = False
        self._changed = False

    def add(self, by: By, size_bytes: int, *, to_fp32: bool) -> None:
        """One partition that was moved."""
        if self._over:
            self._last, self._over = _fresh(), False
        for sums in (self._since_start, self._last):
            sums[by].add(size_bytes, to_fp32=to_fp32)
        self._changed = True

    def stepped(self) -> None:
        """The optimizer takes its step: what comes next belongs to another accumulation."""
        if self._over:
            self._last, self._changed = _fresh(), True
        self._over = True

    def changed(self) -> Tally | None:
        """Everything so far; None where nothing has changed since the last call."""
        if not self._changed:
            return None
        self._changed = False
        return Tally(since_start=_shares(self._since_start), last_accumulation=_shares(self._last))


def _fresh() -> dict[By, _Sums]:
    return {"path": _Sums(), "deepspeed": _Sums(), "compared": _Sums()}


def _shares(sums: dict[By, _Sums]) -> Shares:
    return Shares(**{by: of.carried() for by, of in sums.items()})
