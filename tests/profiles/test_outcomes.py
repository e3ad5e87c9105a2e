"""What lies beside a profile: about which choice, merged, trusted or missed, and forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from autotune_offload.errors import ProfileError
from autotune_offload.profiles import outcomes
from autotune_offload.profiles.outcomes import Outcome, Way, Wrong
from autotune_offload.profiles.store import Store, found_beside
from tests.factories import make_choice, make_profile

CHOICE = make_choice()
STORED = Way.of(CHOICE)
OTHER = Way(path="direct", cast="host", buffer_bytes=1 << 18, buffer_count=1, host_threads=0)
CONFIRMED = Outcome(
    choice=STORED, winner=OTHER, confirmed="direct is faster", when="2026-12-01T00:00:00+00:00"
)


def test_it_comes_back_for_the_choice_that_it_is_about(tmp_path: Path) -> None:
    """For another choice in the same environment nothing is known."""
    file = tmp_path / "p.yaml"
    assert outcomes.about(file, CHOICE) == Outcome(choice=STORED)
    outcomes.save(file, CONFIRMED)
    assert outcomes.about(file, CHOICE) == CONFIRMED
    other = structs.replace(CHOICE, buffer_count=2)
    assert outcomes.about(file, other) == Outcome(choice=Way.of(other))
    assert [path.name for path in tmp_path.iterdir()] == ["p.found.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"choice": 1}', '{"schema": 2}', "\x00"])
def test_a_file_that_is_none_is_missed(tmp_path: Path, text: str) -> None:
    """Never an error: the next save replaces it."""
    file = tmp_path / "p.yaml"
    found_beside(file).write_text(text)
    assert outcomes.read(file) is None
    outcomes.save(file, CONFIRMED)
    assert outcomes.read(file) == CONFIRMED


def test_one_that_everybody_may_write_is_not_believed(tmp_path: Path) -> None:
    """Like a profile."""
    file = tmp_path / "p.yaml"
    outcomes.save(file, CONFIRMED)
    found_beside(file).chmod(0o666)
    assert outcomes.read(file) is None


def test_what_was_found_wrong_stays_and_who_wins_is_not_wrong() -> None:
    """A later conclusion replaces an earlier one; a finding without a conclusion leaves it."""
    slow, differs = (
        Wrong(way=OTHER, kind="slower", why="2x"),
        Wrong(way=STORED, kind="differs", why="1 of 5"),
    )
    first = outcomes.merged(Outcome(choice=STORED), Outcome(choice=STORED, wrong=(slow,)))
    assert first.wrong == (slow,) and not first.confirmed
    second = outcomes.merged(first, Outcome(choice=STORED, wrong=(differs,)))
    assert second.wrong == (slow, differs)
    third = outcomes.merged(second, CONFIRMED)
    assert third.wrong == (differs,) and third.confirmed == CONFIRMED.confirmed
    fourth = outcomes.merged(third, Outcome(choice=STORED, wrong=(slow,)))
    assert fourth.confirmed == CONFIRMED.confirmed and fourth.winner == OTHER
    assert outcomes.sentences(third) == [
        "confirmed 2026-12-01T00:00:00+00:00: direct is faster",
        "not tried again: staged with the cast on the device, 3 buffers of 16,777,216 bytes: 1 of 5",
    ]


def test_forgetting_takes_the_file_away(tmp_path: Path) -> None:
    """Once."""
    file = tmp_path / "p.yaml"
    outcomes.save(file, CONFIRMED)
    assert outcomes.forget(file) and not outcomes.forget(file)
    found_beside(file).mkdir()
    with pytest.raises(ProfileError, match="cannot remove"):
        outcomes.forget(file)


def test_it_goes_with_its_profile(tmp_path: Path) -> None:
    """Whoever prunes a profile prunes what was found about it."""
    store = Store(tmp_path)
    file = store.save(make_profile())
    outcomes.save(file, CONFIRMED)
    assert store.files() == [file]
    assert store.prune(older_than_days=1) == ()
    assert store.prune() == (file, found_beside(file))
    assert list(tmp_path.iterdir()) == []
