"""Who shares a link's direction and the host's memory with whom, and when a transfer ends beside them."""

from __future__ import annotations

from collections.abc import Iterator

from autotune_offload.described.speeds import COPY_TRAFFIC, Direction, Speeds
from autotune_offload.described.virtual_time import Busy

_LEAST_SHARE = 0.1
"""Of its own rate that a transfer keeps, however busy a shared link is."""

Rival = tuple[Busy, float, bool]
"""What is shared, how much of it there is, and whether the later one gets a fair part of it."""


class Traffic:
    """What is under way on one rank's link and in its share of the host's memory."""

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds
        self._busy: dict[Direction, Busy] = {"d2h": Busy(), "h2d": Busy()}
        self._memory_busy = Busy()
        both_host = max(self._speeds.copy_all, self._speeds.copy_one) * COPY_TRAFFIC
        both_links = self._speeds.link["d2h", "pinned"] + self._speeds.link["h2d", "pinned"]
        self._memory_binds = both_host + both_links > self._speeds.memory

    def shared(
        self, direction: Direction | None, begin: float, seconds: float, size: int, now: float
    ) -> float:
        """When a transfer ends that takes `seconds` alone, beside what else uses link and memory.

        `direction` None is work of the host alone; `size` counts bytes through the host's memory; `now` is the
        moment of the thread that asks.
        """
        if seconds <= 0:
            return begin
        other = self._busy["h2d" if direction == "d2h" else "d2h"] if direction else None
        memory = self._memory_busy if self._memory_binds else None
        rate = size / seconds
        end = self._end(begin, size, rate, self._rivals(min(begin, now), other, memory))
        if direction:
            self._busy[direction].take(begin, end, rate)
        if memory is not None:
            memory.take(begin, end, rate)
        return end

    def _end(self, begin: float, size: float, rate: float, shared: Iterator[Rival]) -> float:
        rivals = [each for each in shared if each[0].spans]
        moment = begin
        while rivals:
            allowed = rate
            for busy, total, fair in rivals:
                used = busy.used(moment)
                least = total / (rate + used) if fair else _LEAST_SHARE
                allowed = min(allowed, max(total - used, rate * least))
            change = min(busy.next_change(moment) for busy, *_ in rivals)
            if moment + size / allowed <= change:
                return moment + size / allowed
            size -= (change - moment) * allowed
            moment = change
        return moment + size / rate

    def _rivals(self, past: float, other: Busy | None, memory: Busy | None) -> Iterator[Rival]:
        """What is shared with whom, how much there is, and whether the later one gets a fair part of it.

        A link gives the later direction what the earlier leaves (nvbandwidth#53); memory serves both.
        """
        if other is not None:
            other.forget_before(past)
            yield other, self._speeds.both_ways, False
        if memory is not None:
            memory.forget_before(past)
            yield memory, self._speeds.memory, True
