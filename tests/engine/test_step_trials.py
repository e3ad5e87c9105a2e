"""Which way a step is made, from times that are given."""

from __future__ import annotations

from autotune_offload.engine.step_trials import OWN, ROUNDS, StepChoice, Trials


def decided(seconds: dict[int, list[float]], *, own_may_stay: bool = True) -> tuple[StepChoice, list[int]]:
    """The choice, and the ways in the order in which they were tried; times repeat."""
    trials, order, turns = Trials(tuple(seconds)), [], dict.fromkeys(seconds, 0)
    while (way := trials.way) is not None:
        order.append(way)
        trials.timed(seconds[way][turns[way] % len(seconds[way])])
        turns[way] += 1
    return trials.choice(own_may_stay=own_may_stay), order


def test_the_fastest_beyond_the_noise_is_kept() -> None:
    """With both medians in the reason."""
    choice, _ = decided({OWN: [0.2, 0.21], 1: [0.12], 2: [0.08, 0.081]})
    assert choice.threads == 2
    assert "80 ms with 2 host threads against 200 ms" in choice.reason


def test_fewer_threads_win_a_tie() -> None:
    """What a second thread gains must exceed the scatter."""
    choice, _ = decided({OWN: [0.2], 1: [0.101], 2: [0.1, 0.13, 0.08]})
    assert choice.threads == 1


def test_deepspeeds_own_stays_where_the_difference_is_noise() -> None:
    """Unless the pass was asked for."""
    seconds = {OWN: [0.1, 0.14, 0.1], 1: [0.098, 0.09, 0.13]}
    choice, _ = decided(seconds)
    assert choice.threads == OWN and "not faster beyond the noise" in choice.reason
    assert decided(seconds, own_may_stay=False)[0].threads == 1


def test_every_round_has_another_order_and_leaves_out_the_hopeless() -> None:
    """A number of threads that is far behind is tried once; DeepSpeed's own step in every round."""
    choice, order = decided({OWN: [0.5], 1: [0.4], 2: [0.1], 4: [0.11]})
    assert order[:4] == [OWN, 1, 2, 4] and order.count(1) == 1 and 1 not in choice.seconds
    assert {way: order.count(way) for way in (OWN, 2, 4)} == dict.fromkeys((OWN, 2, 4), ROUNDS)
    rounds = [order[4 + 3 * n : 7 + 3 * n] for n in range(ROUNDS - 1)]
    assert len({tuple(each) for each in rounds}) == 3
