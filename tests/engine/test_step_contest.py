"""Who makes which step, from times that are given."""

from __future__ import annotations

import logging
import types

import pytest

from autotune_offload.engine.confirmation import FEWEST_ROUNDS, WINDOW, WINDOWS
from autotune_offload.engine.rounds import OWN
from autotune_offload.engine.step_contest import StepConfirm, StepContest, StepTold
from autotune_offload.engine.visible import STEP_GAIN, STEP_SECONDS


class Run:
    """A contest over steps that take given times by threads."""

    def __init__(
        self,
        seconds: dict[int, float],
        *,
        own_may_stay: bool = True,
        confirm: StepConfirm | None = None,
    ) -> None:
        self.seconds, self.told, self.order = seconds, list[StepTold](), list[int]()
        self.contest = StepContest(
            [way for way in seconds if way != OWN],
            confirm or StepConfirm(seed="one"),
            own_may_stay=own_may_stay,
            tell=self.told.append,
        )

    def steps(self, count: int) -> Run:
        """So many of them."""
        for _ in range(count):
            way = self.contest.threads
            self.order.append(way)
            self.contest.over(self.seconds[way])
        return self

    def until_known(self) -> Run:
        """Every contest comes to an end."""
        for _ in range(200):
            if not self.contest.exploring:
                return self
            self.steps(1)
        raise AssertionError("still exploring after 200 steps")


def test_the_fastest_beyond_the_noise_is_kept() -> None:
    """With both times and the gain in words, told once."""
    run = Run({OWN: 0.2, 2: 0.08, 1: 0.12}).until_known()
    assert run.contest.threads == 2 and run.contest.confirmed is not None
    (told,) = run.told
    assert told.threads == 2 and not told.differs
    assert told.words.startswith(
        "the pass with 2 host threads takes 80.0 ms a step, DeepSpeed's own step 200 ms"
    )


def test_fewer_threads_win_a_tie() -> None:
    """What a second thread gains must exceed the noise."""
    assert Run({OWN: 0.2, 1: 0.1005, 2: 0.1}).until_known().contest.threads == 1


def test_deepspeeds_own_stays_in_a_tie_unless_the_pass_was_asked_for() -> None:
    """Where the pass was asked for, its best number of threads is found all the same."""
    seconds = {OWN: 0.1, 1: 0.099, 2: 0.0995}
    assert Run(seconds).until_known().contest.threads == OWN
    assert Run(seconds, own_may_stay=False).until_known().contest.threads == 1
    slower = {OWN: 0.1, 1: 0.16, 2: 0.13}
    assert Run(slower).until_known().contest.threads == OWN
    assert Run(slower, own_may_stay=False).until_known().contest.threads == 2


def test_steps_begin_with_what_was_decided_and_each_round_has_deepspeeds_own() -> None:
    """The first steps are the passes', to warm up, the decided one holding; then all take turns."""
    run = Run({OWN: 0.4, 4: 0.3, 2: 0.315, 8: 0.32}).until_known()
    assert run.contest.threads == 4
    assert set(run.order[:3]) == {2, 4, 8}
    rounds = [run.order[3 + 4 * number : 7 + 4 * number] for number in range(FEWEST_ROUNDS)]
    assert all(sorted(each) == [0, 2, 4, 8] for each in rounds)


def test_who_is_far_behind_is_not_timed_further() -> None:
    """After two rounds."""
    run = Run({OWN: 0.5, 1: 0.4, 2: 0.1, 4: 0.11}).until_known()
    assert run.contest.threads == 2 and run.order.count(1) == 3


def test_ranks_make_the_same_steps_the_same_way() -> None:
    """The order hangs on the seed alone."""
    seconds = {OWN: 0.5, 1: 0.4, 2: 0.41}
    orders = [
        Run({way: took * factor for way, took in seconds.items()}).until_known().order[:15]
        for factor in (1.0, 1.7)
    ]
    assert orders[0] == orders[1]


def test_a_start_after_a_confirmed_one_needs_three_rounds() -> None:
    """And with DeepSpeed's own step holding where that was the finding."""
    again = StepConfirm(seed="one", fewest_rounds=3)
    assert len(Run({OWN: 0.2, 1: 0.1}, confirm=again).until_known().order) == 1 + 3 * 2
    own = StepConfirm(seed="one", begins_with_own=True, fewest_rounds=3)
    assert Run({OWN: 0.1, 1: 0.2}, confirm=own).contest._schedule.holder == OWN


def test_a_pass_that_turns_slow_is_left(caplog: pytest.LogCaptureFixture) -> None:
    """Two windows, and rounds again; said with both numbers."""
    run = Run({OWN: 0.2, 1: 0.1}).until_known()
    run.steps(1000)
    run.seconds[1] = 0.3
    with caplog.at_level(logging.WARNING, "autotune_offload"):
        run.steps(WINDOW * (WINDOWS + 1)).until_known()
    assert run.contest.threads == OWN and run.contest.switches == 1
    (record,) = caplog.records
    assert "a step took 300 ms, 100 ms when it was confirmed" in record.getMessage()


def test_a_pass_with_other_bits_is_told_for_the_next_start() -> None:
    """So that it is not tried again."""
    run = Run({OWN: 0.2, 1: 0.1})
    run.contest.found_wrong("1 of 5 values differ")
    assert run.told == [StepTold(threads=OWN, words="1 of 5 values differ", differs=True)]


def test_what_cannot_be_kept_disturbs_nobody() -> None:
    """The next start finds it out again."""

    def full(told: StepTold) -> None:
        raise OSError("no space left")

    contest = StepContest([1], StepConfirm(), own_may_stay=True, tell=full)
    for _ in range(50):
        contest.over(0.1 if contest.threads else 0.2)
    assert contest.threads == 1


class Monitor:
    """Keeps what it is given."""

    enabled = True

    def __init__(self) -> None:
        self.events: list[tuple[str, float, int]] = []

    def write_events(self, events: list[tuple[str, float, int]]) -> None:
        """As DeepSpeed's."""
        self.events += events


def test_the_engines_monitor_gets_what_a_step_took_and_the_gain() -> None:
    """The gain once there is one."""
    engine = types.SimpleNamespace(monitor=Monitor(), global_samples=8)
    contest = StepContest([1], StepConfirm(), own_may_stay=True, tell=None, engine=lambda: engine)
    for _ in range(12):
        contest.over(0.1 if contest.threads else 0.3)
    seconds = [value for label, value, _ in engine.monitor.events if label == STEP_SECONDS]
    gains = [value for label, value, _ in engine.monitor.events if label == STEP_GAIN]
    assert len(seconds) == 12 and set(seconds) == {0.1, 0.3}
    assert gains and all(gain == pytest.approx(3) for gain in gains)
