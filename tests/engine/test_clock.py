"""What gradients cost, on a clock that stands still unless it is moved."""

from __future__ import annotations

from autotune_offload.engine.clock import OffloadClock


class Hands:
    """A clock's."""

    def __init__(self) -> None:
        self.now = 0.0
        self.clock = OffloadClock(lambda: self.now)

    def micro_step(self, calls: int, epilogue: float) -> None:
        """So many calls of one second with two between them, and an epilogue."""
        for _ in range(calls):
            self.clock.begin()
            self.now += 1.0
            self.now += 2.0
        self.now += epilogue
        self.clock.end()


def test_from_the_first_call_to_the_end_of_the_epilogue() -> None:
    """With all that lies between; what comes before and after is not counted."""
    hands = Hands()
    hands.now = 100.0
    hands.micro_step(2, 10.0)
    hands.now += 1000.0
    hands.micro_step(1, 5.0)
    hands.now += 1000.0
    took = hands.clock.take()
    assert (took.seconds, took.passes, took.whole) == (6 + 10 + 3 + 5, 2, True)
    assert not hands.clock.take().whole


def test_a_pass_that_never_ended_is_not_compared() -> None:
    """Nobody knows what it took; the next accumulation begins anew."""
    hands = Hands()
    hands.micro_step(1, 5.0)
    hands.clock.begin()
    hands.now += 50.0
    assert not hands.clock.take().whole
    hands.micro_step(1, 5.0)
    assert hands.clock.take().seconds == 8.0
