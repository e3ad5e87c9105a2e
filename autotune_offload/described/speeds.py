"""What each rank of a described machine gets while all ranks of its host do the same."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from autotune_offload.described.machine import Machine
from autotune_offload.line import Line
from autotune_offload.records import Memory

Direction = Literal["d2h", "h2d"]

COPY_TRAFFIC = 2.0
CAST_TRAFFIC = 1.5
ADD_TRAFFIC = 3.0
"""Bytes through memory for a byte that is written: a copy reads one, a cast from 16 bits half of one, adding two."""

PASS_TRAFFIC, SCALING_TRAFFIC = 28, 4
"""Bytes through memory for a weight in the optimizer's pass: 16 read and 12 written, and 4 more where gradients are
scaled; rounded weights come on top. Derived: no description tells how fast an Adam is."""

COLD_NARROWING = 10 / 6
"""A cast to 16 bits moves 6 bytes a weight. Into new pages the kernel writes 2 zeros first, and the processor reads 2
before it writes; what a page fault itself takes is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What one of `ranks` ranks gets while all do the same, in bytes a second."""

    link: dict[tuple[Direction, Memory], float]
    cold: float
    both_ways: float
    memory: float
    copy_one: float
    copy_all: float
    cast_one: float
    cast_all: float
    device_cast: float

    def threads(self, one: float, everyone: float, count: int) -> float:
        """What `count` threads reach together, of a rate that one thread and all of them reach."""
        return min(count * one, max(everyone, one))


def speeds(machine: Machine, ranks: int) -> Speeds:
    """The description's rates, divided among the ranks of one host where they share what is behind them."""
    here = min(ranks, machine.ranks_per_host)
    on_link = min(machine.link_shared_by_ranks, here)
    on_memory = min(machine.host.shared_by_ranks or here, here)
    memory = machine.host.mem_gbps * 1e9 / on_memory
    node = (machine.link.total_gbps or math.inf) * 1e9 / here
    link: dict[tuple[Direction, Memory], float] = {}
    lines: tuple[tuple[Direction, Line, Line], ...] = (
        ("d2h", machine.d2h.pinned, machine.d2h.pageable),
        ("h2d", machine.h2d.pinned, machine.h2d.pageable),
    )
    for direction, pinned, pageable in lines:
        most = max(pinned.bandwidth_gbps, pageable.bandwidth_gbps) * 1e9 / on_link
        link[direction, "pinned"] = min(pinned.bandwidth_gbps * 1e9, most, node, memory)
        link[direction, "pageable"] = min(pageable.bandwidth_gbps * 1e9, most, node, memory)
    copy, cast = machine.h2h.bandwidth_gbps * 1e9, machine.cast.host_gbps * 1e9
    together = machine.h2h.threads_gbps * 1e9 / on_memory
    return Speeds(
        link=link,
        cold=min(machine.d2h.pageable_cold.bandwidth_gbps * 1e9, *link.values()),
        both_ways=machine.duplex.total_gbps * 1e9 / on_link,
        memory=memory,
        copy_one=min(copy, memory / COPY_TRAFFIC),
        copy_all=min(together, memory / COPY_TRAFFIC),
        cast_one=min(cast, memory / CAST_TRAFFIC),
        cast_all=min(max(together, cast), memory / CAST_TRAFFIC),
        device_cast=machine.cast.device_gbps * 1e9,
    )
