"""Which aio setting suits a drive: Optuna asks, each answer is a ratio to DeepSpeed's own in the same round."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, get_args

from autotune_offload import spread, units
from autotune_offload.decide.search import quiet_optuna
from autotune_offload.errors import BudgetError
from autotune_offload.machine import host
from autotune_offload.machine.procfs import affinity
from autotune_offload.measure.drive import Bench, What
from autotune_offload.records import AioSetting, Drive, DriveTimes

BLOCKS = (1 << 18, 1 << 20, 1 << 22, 1 << 23)
DEPTHS = (8, 32, 128)
THREADS = (1, 2, 4, 8)
"""What is tried, as far as CPUs and the cap on blocks go; submit one by one or in batches, and both ways to wait."""

SEARCH_SHARE = 0.6
"""Of the time; the rest is for the best of them against DeepSpeed's own."""

FINALISTS = 2
NEAR = 1.1
"""Of one round: what is within a tenth of the fastest may be as fast."""

_TRANSFERS: tuple[What, ...] = get_args(What)

Progress = Callable[[float], None]


class Measured:
    """Times by setting, all in rounds in which DeepSpeed's own ran, too."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._seconds: dict[AioSetting, dict[What, list[float]]] = {}
        self._ratios: dict[AioSetting, list[float]] = {}

    def round(self, settings: Sequence[AioSetting]) -> None:
        """Every transfer by DeepSpeed's own setting and by each of these, in turn."""
        own = AioSetting()
        took = dict.fromkeys((own, *settings), 0.0)
        for what in _TRANSFERS:
            for each in took:
                seconds = self.bench.time(what, each)
                self._seconds.setdefault(each, {kind: [] for kind in _TRANSFERS})[what].append(seconds)
                took[each] += seconds
        for each in settings:
            self._ratios.setdefault(each, []).append(took[each] / took[own])

    @property
    def known(self) -> list[AioSetting]:
        """Those other than DeepSpeed's own, the fastest first."""
        return sorted(self._ratios, key=self.ratio)

    def ratio(self, setting: AioSetting) -> float:
        """Its time over DeepSpeed's own: the median over the rounds."""
        return statistics.median(self._ratios[setting])

    def ratios(self, setting: AioSetting) -> list[float]:
        """Of each round."""
        return self._ratios[setting]

    def times(self) -> Iterator[DriveTimes]:
        """Of all, DeepSpeed's own first."""
        for setting in (AioSetting(), *self.known):
            took = self._seconds[setting]
            yield DriveTimes(
                setting=setting,
                write_seconds=tuple(took["write"]),
                read_seconds=tuple(took["read"]),
                both_seconds=tuple(took["both"]),
            )


def choose(
    folder: Path,
    bench: Bench,
    *,
    seconds: float,
    most_block_bytes: int | None = None,
    progress: Progress = lambda share: None,
) -> Drive:
    """Measure a drive and choose.

    Args:
        folder: where DeepSpeed is to swap.
        bench: not opened yet.
        seconds: for measuring, the children's start not counted.
        most_block_bytes: a cap, since DeepSpeed swaps nothing that is smaller than a block (see `config.nvme`).
        progress: told the part of the time that is spent.

    Raises:
        ConfigError, BudgetError, MeasurementError: as `Bench.opened` and `Bench.time`; nothing is left behind.
    """
    with bench.opened():
        began = time.monotonic()
        measured = Measured(bench)

        def share() -> float:
            spent = min((time.monotonic() - began) / seconds, 1.0)
            progress(spent)
            return spent

        _search(measured, list(candidates(most_block_bytes)), lambda: share() < SEARCH_SHARE)
        finalists = _finalists(measured)
        for _ in range(spread.FEWEST):
            if share() >= 1.0 or bench.rounds_left < len(finalists) + 1:
                break
            measured.round(finalists)
        elapsed = time.monotonic() - began
    return decided(folder, measured, elapsed, most_block_bytes)


def candidates(most_block_bytes: int | None) -> Iterator[AioSetting]:
    """All that may be tried; DeepSpeed's own is not among them."""
    cpus = max(len(affinity()), 1)
    for block, depth, threads, single, overlap in itertools.product(
        BLOCKS, DEPTHS, THREADS, (False, True), (True, False)
    ):
        setting = AioSetting(
            block_bytes=block,
            queue_depth=depth,
            threads=threads,
            single_submit=single,
            overlap_events=overlap,
        )
        fits = most_block_bytes is None or block <= max(most_block_bytes, BLOCKS[0])
        if fits and threads <= cpus and setting != AioSetting():
            yield setting


def _finalists(measured: Measured) -> list[AioSetting]:
    """The fastest by its one round, and of those that were near it the most modest."""
    if not measured.known:
        return []
    fastest = measured.known[0]
    near = [each for each in measured.known if measured.ratio(each) <= NEAR * measured.ratio(fastest)]
    return list(dict.fromkeys((fastest, min(near, key=modest))))


def _search(measured: Measured, settings: list[AioSetting], goes_on: Callable[[], bool]) -> None:
    """Race DeepSpeed's own against what Optuna asks for, one round each."""
    names = ("block_bytes", "queue_depth", "threads", "single_submit", "overlap_events")
    values = {name: sorted({getattr(each, name) for each in settings}) for name in names}
    left = set(settings)
    with quiet_optuna() as optuna:
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=6))
        for deep in (DEPTHS[-1], DEPTHS[1]):
            study.enqueue_trial(
                {**_plain(AioSetting(), names), "queue_depth": deep, "threads": max(values["threads"])}
            )
        while left and goes_on() and measured.bench.rounds_left > spread.FEWEST * (FINALISTS + 1) + 1:
            trial = study.ask()
            asked = AioSetting(**{name: trial.suggest_categorical(name, of) for name, of in values.items()})
            if asked not in left:
                asked = min(left, key=lambda each: _steps_between(each, asked, values))
            left.discard(asked)
            measured.round([asked])
            study.tell(trial, measured.ratio(asked))


def _plain(setting: AioSetting, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(setting, name) for name in names}


def _steps_between(one: AioSetting, other: AioSetting, values: dict[str, list[Any]]) -> tuple[int, ...]:
    steps = [abs(of.index(getattr(one, n)) - of.index(getattr(other, n))) for n, of in values.items()]
    return (sum(steps), *steps)


def decided(folder: Path, measured: Measured, elapsed: float, most_block_bytes: int | None) -> Drive:
    """What the times say; DeepSpeed's own setting stays unless another is faster beyond the noise."""
    own, bench = AioSetting(), measured.bench
    finalists = [each for each in measured.known if len(measured.ratios(each)) >= spread.SEEN_FROM]
    if not measured.known:
        raise BudgetError("the time did not suffice for a single round; allow more, or take smaller files")
    near: list[AioSetting] = []
    noise = spread.UNSEEN
    if finalists:
        best = min(finalists, key=measured.ratio)
        noise = spread.noise(measured.ratios(best))
        bound = measured.ratio(best) * (1 + max(spread.TIE, noise))
        near = [each for each in finalists if measured.ratio(each) <= bound]
    chosen = min(near, key=modest) if near else own
    faster = bool(near) and measured.ratio(chosen) * (1 + max(spread.TIE, noise)) < 1
    if not faster:
        chosen = own
    gain = 1 / measured.ratio(chosen) if faster else 1.0
    return Drive(
        folder=str(folder.resolve()),
        device=device_of(folder),
        host=host.facts().name,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        ranks=bench.ranks,
        files=bench.files,
        file_bytes=bench.file_bytes,
        written_bytes=bench.written_bytes,
        elapsed_seconds=elapsed,
        deepspeed=bench.deepspeed,
        times=tuple(measured.times()),
        chosen=chosen,
        gain=gain,
        noise=noise,
        reasons=tuple(_reasons(measured, chosen, near, noise, most_block_bytes)),
    )


def modest(setting: AioSetting) -> tuple[int, ...]:
    """What a setting takes, for near ties: threads first, then requests in flight, then the size of a block."""
    return (
        setting.threads,
        setting.queue_depth,
        setting.block_bytes,
        setting.single_submit,
        not setting.overlap_events,
    )


def device_of(folder: Path) -> str:
    """Which file system it is on."""
    number = folder.stat().st_dev
    return f"{os.major(number)}:{os.minor(number)}"


def _reasons(
    measured: Measured,
    chosen: AioSetting,
    near: Sequence[AioSetting],
    noise: float,
    most_block_bytes: int | None,
) -> Iterator[str]:
    tried = len(measured.known)
    rounds = max((len(measured.ratios(each)) for each in measured.known), default=0)
    if chosen == AioSetting():
        best = measured.ratio(measured.known[0])
        yield (
            f"DeepSpeed's own setting stays: of {tried} others the best took {best:.2f} times its time, and "
            f"{noise:.1%} is noise"
        )
    else:
        yield (
            f"{1 / measured.ratio(chosen):.2f} times as fast as DeepSpeed's own setting in {rounds} rounds of writing, "
            f"reading and both at once, the best of {tried} that were tried (noise {noise:.1%})"
        )
    if len(near) > 1:
        yield "a near tie goes to fewer threads, then to fewer requests in flight, then to smaller blocks"
    if most_block_bytes is not None:
        yield (
            f"blocks were held to {units.size(most_block_bytes)}: DeepSpeed keeps gradients smaller than a block on "
            "the device, in fp32, until the step"
        )
