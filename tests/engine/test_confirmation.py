"""Who carries which accumulation, and who stays: by made-up times."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune_offload.engine.confirmation import (
    FIRST_PAUSE,
    MOST_ROUNDS,
    MOST_SWITCHES,
    SHARE,
    SLOWER,
    WINDOW,
    WINDOWS,
    Conclusion,
    Confirmation,
)
from autotune_offload.engine.rounds import OWN
from autotune_offload.spread import TIE

STORED = 1
TIMES = st.floats(min_value=1e-6, max_value=1e3)

# -- a job ----------------------------------------------------------------------------------------


class Job:
    """Accumulations of which each takes what `seconds` says of its number and its carrier."""

    def __init__(self, seconds: Callable[[int, int], float | None], state: Confirmation) -> None:
        self.seconds, self.state = seconds, state
        self.carried: list[int] = []
        self.conclusions: list[tuple[int, Conclusion]] = []

    def run(self, accumulations: int) -> Job:
        """So many more."""
        for _ in range(accumulations):
            number, carrier = len(self.carried), self.state.carrier
            assert carrier in self.state.needed
            self.carried.append(carrier)
            concluded = self.state.over(self.seconds(number, carrier), 1)
            if concluded is not None:
                self.conclusions.append((number + 1, concluded))
        return self

    def until_committed(self) -> Conclusion:
        """However long that takes, within the bound."""
        bound = slots(len(self.state._costs), MOST_ROUNDS)
        while self.state.exploring:
            assert len(self.carried) < bound
            self.run(1)
        return self.conclusions[-1][1]


def slots(entrants: int, rounds: int) -> int:
    """Accumulations of so many rounds, with the one before them that does not count."""
    return (rounds + 1) * entrants - 1


def fixed(*seconds: float, noise: float = 0.0, seed: int = 0) -> Callable[[int, int], float]:
    """Always the same times, but for a noise that is drawn anew each time."""
    draw = random.Random(seed)
    return lambda number, carrier: seconds[carrier] * draw.uniform(1 - noise, 1 + noise)


def confirmation(entrants: int, **options: object) -> Confirmation:
    """Of DeepSpeed's own code, the stored choice and others."""
    given_ = {"holder": STORED, "seed": "agreed", **options}
    return Confirmation([0] * entrants, **given_)  # type: ignore[arg-type]


# -- explore --------------------------------------------------------------------------------------


@given(st.integers(0, 99), st.floats(1.8, 20), st.floats(0, 0.1), st.integers(3, 4))
def test_a_stored_choice_that_is_wrong_is_left_within_five_rounds(
    seed: int, times: float, noise: float, entrants: int
) -> None:
    """Whether another path or DeepSpeed's own code is the better one."""
    for better in (OWN, 2):
        of_each = [times] * entrants
        of_each[better] = 1.0
        state = confirmation(entrants, seed=str(seed))
        job = Job(fixed(*of_each, noise=noise, seed=seed), state).run(slots(entrants, 5))
        after = job.run(3 * entrants).carried[-3 * entrants :]
        assert STORED not in after
        assert job.until_committed().winner == better


@given(st.data(), st.integers(2, 4))
def test_exploring_ends_whatever_is_seen(data: st.DataObject, entrants: int) -> None:
    """Times that say nothing, that cannot be compared, and numbers of passes that change in the middle."""
    state = confirmation(entrants)
    spans = 0
    while state.exploring:
        seconds = data.draw(st.none() | TIMES) if spans < 30 else 1.0
        state.over(seconds, data.draw(st.integers(1, 2)) if spans < 30 else 1)
        spans += 1
        assert spans <= slots(entrants, MOST_ROUNDS)


@given(st.lists(TIMES, min_size=2, max_size=4))
def test_without_noise_the_fastest_stays_and_deepspeeds_own_in_a_tie(of_each: list[float]) -> None:
    """The winner is within the tie of the fastest; nothing takes over from DeepSpeed's own code for less."""
    found = Job(fixed(*of_each), confirmation(len(of_each))).until_committed()
    assert of_each[found.winner] <= min(of_each) * (1 + TIE) * 1.0001
    assert (found.winner == OWN) == (of_each[OWN] <= min(of_each) * (1 + TIE)) or math.isclose(
        of_each[OWN], min(of_each) * (1 + TIE), rel_tol=1e-4
    )
    assert found.gain == pytest.approx(of_each[OWN] / of_each[found.winner])


def test_a_near_tie_goes_to_the_one_that_page_locks_less() -> None:
    """And among equals to the stored choice."""
    state = Confirmation([0, 1, 0], holder=STORED, seed="agreed")
    assert Job(fixed(2.0, 1.0, 1.01), state).until_committed().winner == 2
    assert Job(fixed(2.0, 1.01, 1.0), confirmation(3)).until_committed().winner == STORED


def test_a_difference_within_the_noise_leaves_deepspeeds_own_code() -> None:
    """After as many rounds as there may be."""
    job = Job(fixed(1.0, 0.97, noise=0.3, seed=3), confirmation(2))
    found = job.until_committed()
    assert found.winner == OWN and found.rounds == MOST_ROUNDS


def test_a_clear_difference_needs_but_a_few_rounds() -> None:
    """Four where it is far, six that give an interval, three where it was confirmed before, one if no more may be."""
    cases: Any = ((8.0, {}, 4), (1.5, {}, 6), (8.0, {"fewest": 3}, 3), (8.0, {"most": 1}, 1))
    for own, options, rounds in cases:
        job = Job(fixed(own, 1.0, noise=0.05), confirmation(2, **options))
        assert job.until_committed().rounds == rounds
        assert len(job.carried) == slots(2, rounds)


def test_what_is_certain_need_not_be_known_exactly() -> None:
    """DeepSpeed's own code takes anything from 1.1 to 2.5 times as long: which is faster is told by six rounds."""
    own = itertools.cycle((1.1, 2.5, 1.2, 2.4, 1.7, 1.9))
    job = Job(lambda number, carrier: next(own) if carrier == OWN else 1.0, confirmation(2))
    found = job.until_committed()
    assert found.noise > (found.gain - 1) / 3
    assert (found.winner, found.rounds) == (STORED, 6)


@given(st.integers(0, 99), st.integers(2, 4), st.lists(TIMES, min_size=8, max_size=8))
def test_ranks_try_the_same_entrants_at_the_same_time(seed: int, entrants: int, times: list[float]) -> None:
    """As long as both explore, whatever each of them measures, and whoever leaves on one of them alone."""
    ranks = [confirmation(entrants, seed=str(seed)) for _ in range(2)]
    jobs = [Job(fixed(*times[4 * at : 4 * at + 4]), rank) for at, rank in enumerate(ranks)]
    while all(rank.exploring for rank in ranks):
        rounds = [rank._rounds for rank in ranks]
        assert rounds[0] is not None and rounds[1] is not None and rounds[0].slot == rounds[1].slot
        for job in jobs:
            job.run(1)


def test_every_counted_round_has_deepspeeds_own_code_and_each_entrant_once() -> None:
    """In another order each time."""
    job = Job(fixed(1.0, 1.0, 1.0, 1.0, noise=0.4), confirmation(4))
    job.until_committed()
    rounds = [tuple(job.carried[at : at + 4]) for at in range(3, len(job.carried), 4)]
    assert sorted(job.carried[:3]) == [1, 2, 3]
    assert all(sorted(each) == [0, 1, 2, 3] for each in rounds)
    assert len(set(rounds)) > len(rounds) / 3


def test_who_is_far_behind_leaves_early_and_its_slots_are_the_bests() -> None:
    """Twice the best's time in two rounds; after three a clear tenth is enough."""
    job = Job(fixed(2.0, 1.0, 3.0, 1.2), confirmation(4)).run(slots(4, 6))
    first, rest = job.carried[3:11], job.carried[11:]
    assert sorted(first) == [0, 0, 1, 1, 2, 2, 3, 3] and 2 not in rest
    assert rest[:4].count(3) == 1 and 3 not in rest[4:]
    assert job.conclusions[0][1].behind == (2, 3)
    assert job.conclusions[0][1].winner == STORED


@given(st.integers(0, 200))
def test_one_hiccup_decides_nothing(seed: int) -> None:
    """An accumulation that takes a hundred times as long costs nobody its place, nor the best its win."""
    draw = random.Random(seed)
    hiccup = draw.randrange(3, 11)
    job = Job(
        lambda number, carrier: (2.0, 1.0, 1.05, 1.05)[carrier] * (100 if number == hiccup else 1),
        confirmation(4, seed=str(seed)),
    )
    found = job.until_committed()
    assert found.winner in (1, 2, 3) and found.behind == ()


def test_accumulations_of_different_length_are_not_compared() -> None:
    """In the round in which that changes, nothing is wrong with the others of it."""
    state = confirmation(2)
    for number in range(slots(2, 6)):
        passes = 4 if number >= 4 else 1  # from the middle of a round on
        state.over((8.0, 1.0)[state.carrier] * passes, passes)
    found = state.conclusion
    assert found is not None and found.gain == pytest.approx(8.0) and found.noise == 0


def test_one_that_fails_takes_no_further_part() -> None:
    """Its slots are carried by others, and DeepSpeed's own code alone ends the rounds at once."""
    state = confirmation(3)
    job = Job(fixed(3.0, 1.0, 2.0), state).run(2)
    state.leave(STORED)
    assert job.until_committed().winner == 2 and STORED not in job.carried[2:]
    state = confirmation(2)
    state.leave(STORED)
    assert Job(fixed(3.0, 1.0), state).until_committed().winner == OWN
    assert state.needed == {OWN}


def test_losers_are_not_needed_any_more() -> None:
    """Nor who left early, from then on."""
    state = confirmation(4)
    job = Job(fixed(2.0, 1.0, 3.0, 1.0), state)
    assert state.needed == {0, 1, 2, 3}
    job.run(slots(4, 2))
    assert state.needed == {0, 1, 3}
    job.until_committed()
    assert state.needed == {STORED}


# -- drift ----------------------------------------------------------------------------------------


def turning(at: int, until: int, times: float = 2.0) -> Callable[[int, int], float]:
    """The stored choice turns slow and recovers; DeepSpeed's own code takes 1.5 times as long as it does before."""
    noise = random.Random(7)
    return lambda number, carrier: (
        (1.5 if carrier == OWN else times if at <= number < until else 1.0) * noise.uniform(0.97, 1.03)
    )


def test_a_path_that_turns_slow_is_left_as_the_rule_says() -> None:
    """Two whole windows after it turned, and the rounds, once they are affordable."""
    turned = 1000
    job = Job(turning(turned, 10**9), confirmation(2)).run(turned + (WINDOWS + 1) * WINDOW + slots(2, 3))
    assert job.state.holder == OWN
    (_, first), (when, second) = job.conclusions
    assert first.winner == STORED and second.winner == OWN and second.changed
    assert second.drifted is not None
    assert second.drifted[0] == pytest.approx(1.0, rel=0.05) and second.drifted[1] == pytest.approx(
        2.0, rel=0.05
    )
    assert when <= turned + (WINDOWS + 1) * WINDOW + slots(2, 3)
    assert job.state.switches == 1


def test_one_that_recovers_is_not_flapped() -> None:
    """Neither when it comes back before anything was decided, nor later."""
    short = Job(turning(1000, 1000 + WINDOW), confirmation(2)).run(4000)
    assert len(short.conclusions) == 1
    long = Job(turning(1000, 1400), confirmation(2)).run(4000)
    assert [found.winner for _, found in long.conclusions] == [STORED, OWN]
    on_and_off = Job(
        lambda number, carrier: 1.5 if carrier == OWN else 2.0 if number % 400 > 340 else 1.0, confirmation(2)
    )
    assert on_and_off.run(6000).state.switches == 0


def test_after_drift_who_carries_stays_in_a_tie() -> None:
    """Where it has become as slow as DeepSpeed's own code: at the start that would have stayed."""
    job = Job(turning(1000, 10**9, times=1.5), confirmation(2)).run(3000)
    assert [(found.winner, found.drifted is not None) for _, found in job.conclusions] == [
        (STORED, False),
        (STORED, True),
    ]
    assert Job(fixed(1.5, 1.5), confirmation(2)).until_committed().winner == OWN


def test_slower_than_that_is_no_drift() -> None:
    """Nor is a median that only the noise carries over the bound."""
    just = Job(turning(1000, 10**9, times=SLOWER * 0.96), confirmation(2)).run(4000)
    assert len(just.conclusions) == 1
    draw = random.Random(1)
    noisy = Job(
        lambda number, carrier: 1.5 if carrier == OWN else draw.choice((1.0, 1.8)) if number > 1000 else 1.0,
        confirmation(2),
    ).run(3000)
    assert len(noisy.conclusions) == 1


@given(st.integers(2, 4), st.integers(0, 20))
def test_rounds_after_drift_take_their_share_at_most(entrants: int, seed: int) -> None:
    """Of a job in which everything gets slower and slower; and the pauses between them double."""
    draw = random.Random(seed)
    state = confirmation(entrants)
    job = Job(lambda number, carrier: (1 + carrier) * 1.002**number * draw.uniform(0.95, 1.05), state)
    job.until_committed()
    first, spent = len(job.carried), 0
    for number in range(first, 6000):
        spent += state.exploring
        job.run(1)
        assert spent <= SHARE * (number + 1)
    ends = [when for when, found in job.conclusions[1:] if not found.changed]
    gaps = [later - earlier for earlier, later in itertools.pairwise(ends)]
    assert all(gap >= FIRST_PAUSE * 2**number for number, gap in enumerate(gaps))


def test_a_run_switches_a_few_times_at_most() -> None:
    """Where whoever carries turns slow each time, the last one stays."""
    held: list[int] = []
    state = confirmation(2)

    def spiteful(number: int, carrier: int) -> float:
        if not held or held[-1] != state.holder:
            held.append(state.holder)
        return 3.0 if carrier == held[-1] and len(held) > 0 and number > 60 else 1.0

    Job(spiteful, state).run(30_000)
    assert state.switches <= MOST_SWITCHES
    assert state.switches > 1


def test_a_carrier_that_fails_later_leaves_deepspeeds_own_code() -> None:
    """And what came before is no measure for it."""
    state = confirmation(2)
    job = Job(fixed(9.0, 1.0), state)
    job.until_committed()
    state.leave(STORED)
    assert state.carrier == OWN and state.needed == {OWN}
    job.run(1000)
    assert len(job.conclusions) == 1
