"""Timed rounds: entrants run in turn on one bench, whoever fails is put aside with the reason.

`Race` times entrants in interleaved rounds, so that a host that slows down in the middle slows down
all of them. `search` is Optuna over such races.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Sequence
from typing import Any

from autotune_offload.decide.entrant import FAILURES, Entrant, put_aside_on_failure
from autotune_offload.decide.trial import Trial
from autotune_offload.machine.device import Device
from autotune_offload.measure.bench import Bench
from autotune_offload.records import Baseline, Candidate

MAX_ROUNDS = 60


class Race:
    """Entrants that are timed in turn. A context manager: the paths live inside.

    Args:
        device: the current device.
        bench: what they run on.
        entrants: who takes part. The first `sure` of them start and run once whatever the clock says.
        deadline: on the device's clock; after it nothing more is started or timed.
        sure: how many do not heed the deadline the first time.
        trial: how an entrant is built, checked and timed.
    """

    def __init__(
        self,
        device: Device,
        bench: Bench,
        entrants: Sequence[Entrant[Any]],
        *,
        deadline: float,
        sure: int = 0,
        trial: Trial | None = None,
    ) -> None:
        self.device, self.bench, self.entrants = device, bench, entrants
        self.deadline, self.sure = deadline, sure
        self._trial = trial or Trial(device, bench)
        self._paths: dict[int, Any] = {}
        self._rounds = 0
        self._random = random.Random(0)

    def __enter__(self) -> Race:
        with contextlib.ExitStack() as stack:  # closes what was started when a start is interrupted
            stack.callback(self.close)
            for index, entrant in enumerate(self.entrants):
                if index < self.sure or not self.over:
                    self._start(index, entrant)
            stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back what the paths hold."""
        while self._paths:
            _, path = self._paths.popitem()
            path.close()

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return self.device.now() >= self.deadline

    def round(self) -> None:
        """Time everyone once more, after the first round in a drawn order.

        Whoever follows a multi-threaded operation finds its threads still spinning on the other cores, so
        that no entrant may always follow the same one.
        """
        self._trial.begin_round()
        order = list(range(len(self.entrants)))
        if self._rounds:
            self._random.shuffle(order)
        for index in order:
            sure = self._rounds == 0 and index < self.sure
            if index in self._paths and (sure or not self.over):
                self._time(index)
        self._rounds += 1

    def drop_beyond(self, factor: float, keep: Sequence[Entrant[Any]] = ()) -> None:
        """Time no more who takes that many times the least, but for whom to keep."""
        least = min((e.median for e in self.entrants if e.timed), default=math.inf)
        for index, entrant in enumerate(self.entrants):
            kept = any(entrant is each for each in keep)
            if index in self._paths and not kept and entrant.median > factor * least:
                entrant.behind = True
                self._paths.pop(index).close()

    def _start(self, index: int, entrant: Entrant[Any]) -> None:
        """Build the path and warm it up: the first time with a check bit for bit."""
        with put_aside_on_failure(entrant):
            path = self._trial.built(entrant)
            self._paths[index] = path
            warm_up = self._trial.warm_up if entrant.checked else self._trial.check
            warm_up(path, entrant.memory)
            entrant.checked = True
        self._leave_if_failed(index)

    def _time(self, index: int) -> None:
        entrant = self.entrants[index]
        with put_aside_on_failure(entrant):
            entrant.seconds.append(self._trial.time(self._paths[index], entrant.memory))
            entrant.rounds.append(self._trial.rounds)
        self._leave_if_failed(index)

    def _leave_if_failed(self, index: int) -> None:
        if self.entrants[index].failed is not None and index in self._paths:
            with contextlib.suppress(*FAILURES):  # it failed already; the others go on
                self._paths.pop(index).close()


def dealt(finalists: list[Entrant[Candidate]], baselines: list[Entrant[Baseline]]) -> list[Entrant[Any]]:
    """The fastest and DeepSpeed's own first: if time is short, those two count."""
    return [*finalists[:1], *baselines[:1], *finalists[1:], *baselines[1:]]
