"""What an attached path has done so far, for whoever asks."""

from __future__ import annotations

import msgspec
from torch import Tensor

from autotune_offload.engine.contest import Contest
from autotune_offload.engine.entrants import Confirmed
from autotune_offload.engine.self_check import SelfCheck
from autotune_offload.engine.stage3 import Stage3
from autotune_offload.engine.tally import By, Counter, Tally
from autotune_offload.machine.device import Device
from autotune_offload.paths.accumulation import Moment

_KEPT_TIMES = 100


class Status(msgspec.Struct, kw_only=True):
    """What an attached path has done so far. Times are of one accumulation, as `clock` counts them.

    Every value is put in place as a whole and never changed afterwards, so that another thread may read and copy it.
    """

    why_not: str | None = None
    """Why DeepSpeed's own code runs: from the start, or since the path has failed."""
    ended: str | None = None
    """Why the path carries nothing any more though it has not failed: it was detached, or the engine destroyed."""
    replaced: tuple[str, ...] = ()
    """Methods that somebody else has put in place of ours since: what they do with gradients is not known here."""
    check: SelfCheck | None = None
    """None until a backward pass that ends an accumulation has been compared; grows with each new kind of pass."""
    tally: Tally = Tally()
    """Who carried how many partitions and bytes, now and since the start."""
    accumulation_seconds: tuple[float, ...] = ()
    """The latest hundred, without those in which DeepSpeed's own code ran, for comparison or for its time."""
    stock_accumulation_seconds: tuple[float, ...] = ()
    """The same of DeepSpeed's own code: the one after the self-check, or those of a confirmation."""
    carriers: tuple[str, ...] = ()
    """Who carries the gradients now, in words; several while they take turns, so that the fastest can be found."""
    confirmed: Confirmed | None = None
    """What was found last; None before, and without confirmation."""
    switches: int = 0
    """How often another was committed to than had carried before."""
    left_out: tuple[tuple[str, str], ...] = ()
    """Paths that carry no more, in words, each with the reason."""
    link_bytes: int = 0
    """Moved between device and host for the gradients that came to the path, by it or, where DeepSpeed takes them on to
    fp32 later, by both; 0 where they share memory. Values of gradients alone: no norms."""
    stock_link_bytes: int = 0
    """What DeepSpeed's own code would have moved for the same gradients."""
    left_to_deepspeed: int = 0
    """Partitions that DeepSpeed's own code carried because the path does not do them exactly."""

    def took(self, seconds: float, *, by_deepspeed: bool) -> None:
        """One accumulation more."""
        if by_deepspeed:
            self.stock_accumulation_seconds = (*self.stock_accumulation_seconds, seconds)[-_KEPT_TIMES:]
        else:
            self.accumulation_seconds = (*self.accumulation_seconds, seconds)[-_KEPT_TIMES:]


class Account:
    """Keeps the counts of a status as partitions are moved; bytes of a link where there is one."""

    def __init__(self, status: Status, stage3: Stage3, device: Device) -> None:
        """From 0."""
        self._status, self._stage3 = status, stage3
        self._linked = not device.shares_host_memory
        self._counter = Counter()

    def add(self, by: By, size_bytes: int, moment: Moment) -> None:
        """One partition, of so many bytes in the accumulation buffer."""
        self._counter.add(by, size_bytes, to_fp32=moment.boundary)

    def carried(self, by: By, low: Tensor, moment: Moment, link_bytes: int, *, by_path: bool) -> None:
        """One that our code has carried, or delivered plainly when the path failed; so many bytes crossed the link."""
        self.add(by if by_path else "path", low.nbytes, moment)
        if by_path:
            self.crossed(link_bytes, low, moment)

    def crossed(self, link_bytes: int, low: Tensor, moment: Moment) -> None:
        """So many bytes by a path, for what DeepSpeed's own code would have moved otherwise."""
        if self._linked:
            self._status.link_bytes += link_bytes
            self._status.stock_link_bytes += 2 * low.nbytes + (4 * low.numel() if moment.boundary else 0)

    def who(self, contest: Contest) -> None:
        """Who carries now, and what was found so far."""
        status = self._status
        status.carriers, status.left_out = contest.carriers, contest.left_out
        status.confirmed, status.switches = contest.confirmed, contest.switches

    def deferred(self) -> None:
        """What unmanaged accumulation has summed, and DeepSpeed's own code takes to fp32 at the step."""
        for low in self._stage3.deferred:
            self._counter.add("deepspeed", low.nbytes, to_fp32=True)
            if self._linked:
                taken = low.nbytes + 4 * low.numel()
                self._status.link_bytes += taken
                self._status.stock_link_bytes += taken
        self.publish()

    def stepped(self) -> None:
        """The optimizer takes its step."""
        self._counter.stepped()
        self.publish()

    def publish(self) -> None:
        """Put the counts into the status, as a whole."""
        tally = self._counter.changed()
        if tally is not None:
            self._status.tally = tally
