"""Which aio setting is chosen, from drives on paper."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune_offload.decide import drive as deciding
from autotune_offload.decide.drive import candidates, choose, modest
from autotune_offload.errors import BudgetError
from autotune_offload.records import AioSetting, from_plain, to_plain
from autotune_offload.records import Drive as DriveRecord

OWN = AioSetting()


class Paper:
    """A bench whose transfers take what a formula says; its clock is the sum of them."""

    ranks, files, file_bytes, deepspeed = 1, 4, 1 << 20, "0.19.8"
    written_bytes = 0

    def __init__(self, seconds: Callable[[AioSetting], float], rounds: int = 10**6) -> None:
        self.seconds, self.spent, self._rounds = seconds, 0.0, rounds

    @contextmanager
    def opened(self) -> Any:
        """As it is."""
        yield self

    @property
    def rounds_left(self) -> int:
        """Of the bytes that may be written."""
        return max(self._rounds - self.written_bytes, 0)

    def time(self, what: str, setting: AioSetting) -> float:
        """By the formula."""
        seconds = self.seconds(setting)
        self.spent += seconds
        self.written_bytes += what == "both"
        return seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Paper], None]:
    """Has time pass as a bench says, on a host with eight CPUs."""
    monkeypatch.setattr(deciding, "affinity", lambda: frozenset(range(8)))

    def follow(bench: Paper) -> None:
        monkeypatch.setattr("autotune_offload.decide.drive.time.monotonic", lambda: bench.spent)

    return follow


def decided(bench: Paper, folder: Path, **options: Any) -> DriveRecord:
    """What comes of it in a minute of its time."""
    return choose(folder, bench, seconds=60.0, **options)  # type: ignore[arg-type]


def by_depth(setting: AioSetting) -> float:
    """A drive that wants many requests in flight, up to a point, and does not care for the rest."""
    return 0.02 * 8 / min(setting.queue_depth * setting.threads, 64)


def test_a_drive_that_wants_depth_gets_it_with_the_fewest_threads(
    tmp_path: Path, clock: Callable[[Paper], None]
) -> None:
    """Of many that are equally fast, the most modest."""
    bench = Paper(by_depth)
    clock(bench)
    found = decided(bench, tmp_path)
    best = min(by_depth(each) for each in candidates(None))
    assert by_depth(found.chosen) <= 1.05 * best and found.gain == pytest.approx(8, rel=0.05)
    assert found.times[0].setting == OWN and found.of(found.chosen).write_seconds
    assert from_plain(to_plain(found), DriveRecord) == found


def test_deepspeeds_own_setting_stays_where_nothing_is_faster(
    tmp_path: Path, clock: Callable[[Paper], None]
) -> None:
    """Also where others are, within a tie."""
    for factor in (1.5, 0.99):
        bench = Paper(lambda setting, factor=factor: 0.02 if setting == OWN else 0.02 * factor)  # type: ignore[misc]
        clock(bench)
        found = decided(bench, tmp_path)
        assert found.chosen == OWN and found.gain == 1.0 and "stays" in found.reasons[0]


def test_blocks_are_held_to_the_cap(tmp_path: Path, clock: Callable[[Paper], None]) -> None:
    """However fast larger ones are."""
    bench = Paper(lambda setting: 0.02 * (1 << 20) / setting.block_bytes)
    clock(bench)
    found = decided(bench, tmp_path, most_block_bytes=1 << 22)
    assert found.chosen.block_bytes == 1 << 22 and any("held to 4 MiB" in reason for reason in found.reasons)


def test_what_may_be_written_ends_the_search(tmp_path: Path, clock: Callable[[Paper], None]) -> None:
    """With what is known by then; without a single round there is nothing to say."""
    bench = Paper(by_depth, rounds=40)
    clock(bench)
    found = decided(bench, tmp_path)
    assert bench.written_bytes <= 40 and len(found.times) < 20
    bench = Paper(by_depth, rounds=2)
    clock(bench)
    with pytest.raises(BudgetError, match="single round"):
        decided(bench, tmp_path)


@given(cpus=st.integers(1, 64), cap=st.sampled_from([None, 1 << 10, 1 << 20, 1 << 25]))
def test_candidates_fit_the_host_and_the_cap(cpus: int, cap: int | None) -> None:
    """Each once, and DeepSpeed's own is not among them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deciding, "affinity", lambda: frozenset(range(cpus)))
        found = list(candidates(cap))
    assert len(found) == len(set(found)) and OWN not in found
    assert all(each.threads <= cpus for each in found)
    assert all(each.block_bytes <= max(cap or 1 << 30, 1 << 18) for each in found)


def test_modest_is_fewer_threads_then_fewer_requests() -> None:
    """Then smaller blocks."""
    ordered = [
        AioSetting(queue_depth=128),
        AioSetting(threads=2),
        AioSetting(threads=2, block_bytes=1 << 22),
    ]
    mixed = [ordered[1], ordered[2], ordered[0]]
    assert sorted(mixed, key=modest) == ordered
