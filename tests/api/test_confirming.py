"""Who takes part in a confirmation, by the profile and by what is known; and what is kept of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from autotune_offload.api import confirming
from autotune_offload.api.confirming import Plan, planned
from autotune_offload.engine.confirmation import FEWEST_ROUNDS, MOST_ROUNDS, ROUNDS_AGAIN, Conclusion
from autotune_offload.engine.entrants import Told
from autotune_offload.engine.entrants import Wrong as WrongPath
from autotune_offload.engine.status import Status
from autotune_offload.profiles import outcomes
from autotune_offload.profiles.outcomes import Outcome, Way, Wrong
from autotune_offload.profiles.store import Store
from autotune_offload.records import Candidate, Limits, Profile, Settings
from tests.factories import make_choice, make_profile


def tried(path: str, cast: str, seconds: float, threads: int = 0, buffer_bytes: int = 1 << 20) -> Candidate:
    """A candidate that was timed."""
    return Candidate(
        path=path,
        cast=cast,  # type: ignore[arg-type]
        buffer_bytes=buffer_bytes,
        buffer_count=2,
        host_threads=threads,
        measured_seconds=seconds,
    )


CHOSEN = tried("staged", "host", 0.100)
SAME_KIND = tried("staged", "host", 0.101, buffer_bytes=1 << 22)
DIRECT = tried("direct", "host", 0.105)
THREADS = tried("staged", "host", 0.104, threads=2)
DEVICE = tried("direct", "device", 0.109)
SLOW = tried("staged", "device", 0.111)
PINNED = tried("pinned", "host", 0.099)
CHOICE = make_choice(**structs.asdict(Way.of(CHOSEN)))
PROFILE = make_profile(choice=CHOICE, candidates=(CHOSEN, SAME_KIND, DIRECT, THREADS, DEVICE, SLOW, PINNED))
NOTHING = Outcome(choice=Way.of(CHOICE))


def plan(
    known: Outcome = NOTHING, limits: Limits | None = None, profile: Profile = PROFILE, **block: Any
) -> Plan:
    """With these settings."""
    return planned(profile, Settings(**block), known, limits, "seed")


def ways(found: Plan) -> list[Way]:
    """The paths that take part, in order."""
    others = () if found.confirm is None else found.confirm.others
    return [Way.of(each) for each in (found.choice, *others) if each is not None]


def test_the_best_of_other_kinds_within_a_tenth_take_part() -> None:
    """Two at most, of those whose gradients land in the same kind of memory."""
    found = plan()
    assert ways(found) == [Way.of(each) for each in (CHOSEN, THREADS, DIRECT)]
    assert found.confirm is not None
    assert (found.confirm.fewest_rounds, found.confirm.most_rounds) == (FEWEST_ROUNDS, MOST_ROUNDS)
    assert found.confirm.seed == "seed" and not found.confirm.begins_with_own
    pinned = make_profile(choice=make_choice(**structs.asdict(Way.of(PINNED))), candidates=PROFILE.candidates)
    assert ways(plan(profile=pinned)) == [Way.of(PINNED)]


def test_a_fixed_path_is_confirmed_against_deepspeeds_own_alone() -> None:
    """And with `confirm` false nothing is."""
    assert ways(plan(path="staged")) == [Way.of(CHOSEN)]
    off = plan(confirm=False)
    assert off.confirm is None and ways(off) == [Way.of(CHOSEN)]
    few = plan(confirm_rounds=4)
    assert few.confirm is not None and few.confirm.most_rounds == 4


@pytest.mark.parametrize("winner", [Way.of(DIRECT), None])
def test_the_next_start_begins_with_the_winner_and_needs_fewer_rounds(winner: Way | None) -> None:
    """The stored choice is the first of the others; DeepSpeed's own code may be who begins."""
    known = structs.replace(NOTHING, winner=winner, confirmed="in words")
    found = plan(known)
    assert found.confirm is not None and found.confirm.fewest_rounds == ROUNDS_AGAIN
    assert found.confirm.begins_with_own == (winner is None)
    first = [DIRECT, CHOSEN, THREADS] if winner else [CHOSEN, THREADS, DIRECT]
    assert ways(found) == [Way.of(each) for each in first]
    assert ways(plan(known, confirm=False)) == [Way.of(CHOSEN)]


def test_what_was_found_wrong_is_not_tried_again() -> None:
    """What was only slower is, where nothing is confirmed; where nothing is left, it is said why and what clears it."""
    wrong = [
        Wrong(way=Way.of(THREADS), kind="differs", why="differs here"),
        Wrong(way=Way.of(DIRECT), kind="slower", why="slower here"),
    ]
    assert ways(plan(structs.replace(NOTHING, wrong=tuple(wrong)))) == [Way.of(CHOSEN), Way.of(DEVICE)]
    chosen = structs.replace(wrong[1], way=Way.of(CHOSEN))
    assert ways(plan(structs.replace(NOTHING, wrong=(chosen,)), confirm=False)) == [Way.of(CHOSEN)]
    none = plan(structs.replace(NOTHING, wrong=(structs.replace(chosen, kind="differs"),)), path="staged")
    assert none.choice is None
    assert none.why_not == "slower here; `autotune-offload profiles forget` clears it"


def test_rings_that_do_not_fit_beside_one_another_stay_out() -> None:
    """What page-locks nothing stays in."""
    ring = CHOICE.buffer_bytes * CHOICE.buffer_count
    narrow = Limits(available_bytes=1 << 34, pinnable_bytes=ring + ring // 2)
    assert ways(plan(limits=narrow)) == [Way.of(each) for each in (CHOSEN, DIRECT, DEVICE)]


def told(winner: Candidate | None, *wrong: WrongPath, concluded: bool = True) -> Told:
    """What a run says."""
    conclusion = Conclusion(winner=0, before=1, seconds=(1.0, 2.0), gain=1.0, noise=0.0, rounds=6, behind=())
    return Told(winner=winner, conclusion=conclusion if concluded else None, words="in words", wrong=wrong)


def test_a_conclusion_is_kept_by_the_first_rank_of_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other bits by whoever finds them."""
    file = tmp_path / "p.yaml"
    slow = WrongPath(spec=THREADS, kind="slower", why="2x")
    differs = WrongPath(spec=DEVICE, kind="differs", why="1 of 5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    confirming.keep(file, CHOICE, told(DIRECT, slow))
    assert outcomes.read(file) is None
    confirming.keep(file, CHOICE, told(DIRECT, differs, concluded=False))
    assert [each.kind for each in outcomes.about(file, CHOICE).wrong] == ["differs"]
    monkeypatch.setenv("LOCAL_RANK", "0")
    confirming.keep(file, CHOICE, told(DIRECT, slow))
    found = outcomes.about(file, CHOICE)
    assert found.winner == Way.of(DIRECT) and found.confirmed == "in words" and found.when
    assert {each.kind for each in found.wrong} == {"slower", "differs"}


def test_what_is_kept_is_what_the_next_start_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the profile of this environment; where nothing is left to try, nothing is attached."""
    monkeypatch.setenv("AUTOTUNE_OFFLOAD_CACHE", str(tmp_path))
    attached: list[Any] = []

    def attach(engine: Any, choice: Any, device: Any, *, confirm: Any, tell: Any) -> Status:
        attached.append((choice, confirm))
        tell(told(None, WrongPath(spec=CHOICE, kind="differs", why="1 of 5")))
        return Status()

    monkeypatch.setattr(confirming, "attach", attach)
    settings = Settings(path="staged")
    assert confirming.put_in(None, PROFILE, settings, None, "seed").why_not is None
    assert Way.of(attached[0][0]) == Way.of(CHOSEN)
    assert outcomes.read(Store().path_of(PROFILE.fingerprint)) is not None
    refused = confirming.put_in(None, PROFILE, settings, None, "seed")
    assert "1 of 5" in str(refused.why_not) and len(attached) == 1
