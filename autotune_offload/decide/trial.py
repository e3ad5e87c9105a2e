"""How an entrant is built, checked and timed: on single backward passes, or over an accumulation."""

from __future__ import annotations

from typing import Any

from autotune_offload.decide.entrant import Entrant
from autotune_offload.machine.device import Device
from autotune_offload.measure.bench import Bench, Window
from autotune_offload.paths.accumulation import Accumulation
from autotune_offload.paths.build import build
from autotune_offload.paths.path import page_locks
from autotune_offload.paths.stock import StockAccumulation, stock_path
from autotune_offload.records import Candidate, Memory
from autotune_offload.upstream import named_sequence


class Trial:
    """How an entrant is built and timed: one backward pass at a time, which is an accumulation of its own."""

    def __init__(self, device: Device, bench: Bench) -> None:
        self.device, self.bench = device, bench
        self.rounds = 0

    def built(self, entrant: Entrant[Any]) -> Any:
        """What the bench runs, with its buffers allocated."""
        record = entrant.record
        if isinstance(record, Candidate):
            return build(self.device, record, self.bench.dtype)
        sequence = named_sequence(record.name)
        return stock_path(sequence, self.device, self.bench.dtype, self.bench.largest_elements)

    def begin_round(self) -> None:
        """Called before each round of a race."""
        self.rounds += 1

    def check(self, built: Any, memory: Memory) -> None:
        """Once, bit for bit."""
        self.bench.check(built, memory)

    def warm_up(self, built: Any, memory: Memory) -> None:
        """For one whose bytes were compared before."""
        self.bench.time(built, memory)

    def time(self, built: Any, memory: Memory) -> float:
        """Seconds, for the whole workload."""
        return self.bench.time(built, memory)


class AccumulationTrial(Trial):
    """The same over whole accumulations of so many micro-steps, which are added up where the entrant says.

    Until the last micro-step the same is done for several entrants. It is timed once a round, for all of them:
    the time goes to what they differ in, and the noise of what they share cancels out of their ratios.
    """

    def __init__(self, device: Device, bench: Bench, micro_steps: int) -> None:
        super().__init__(device, bench)
        self.micro_steps = micro_steps
        self._shared: dict[Any, float] = {}

    def begin_round(self) -> None:
        """What entrants share is timed anew."""
        super().begin_round()
        self._shared.clear()

    def built(self, entrant: Entrant[Any]) -> Any:
        """A path or sequence, and what adds up before it."""
        record = entrant.record
        if isinstance(record, Candidate):
            added = Accumulation(self.device, entrant.place, page_lock=page_locks(record.path))
        else:
            added = StockAccumulation(self.device, "device", page_lock=False)
        return Window(super().built(entrant), added, self.micro_steps)

    def check(self, built: Any, memory: Memory) -> None:
        """Once, bit for bit."""
        self.bench.check_accumulation(built, memory)

    def warm_up(self, built: Any, memory: Memory) -> None:
        """For one whose bytes were compared before."""
        self.bench.warm_up_accumulation(built, memory)

    def time(self, built: Any, memory: Memory) -> float:
        """Seconds, for the whole workload and all micro-steps."""
        seconds = 0.0
        for moment, count in built.moments:
            alike = moment, memory, built.accumulation.alike(moment)
            each = None if moment.boundary else self._shared.get(alike)
            if each is None:
                each = self._shared[alike] = self.bench.time_micro_step(built, moment, memory)
            seconds += count * each
        return seconds
