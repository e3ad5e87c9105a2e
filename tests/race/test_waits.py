"""Taking out any one wait makes some drawn schedule differ; a wait that nobody has listed is a failure, too."""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator

import pytest

from tests.race.listed import FIRST, WAITS, Dies, Stays
from tests.race.waits import CALLS, Wait, _calls, waits

SEEDS = 400
"""Schedules in which a wait that is taken out must be missed."""

FOUND = waits()
MUTATIONS = [name for name, listed in WAITS.items() if isinstance(listed, Dies)]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """A path that fails says so, hundreds of times."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_every_wait_is_listed_and_no_other() -> None:
    """Whoever adds one says which drawn run dies without it; whoever renames a function renames it in the list."""
    assert set(FOUND) - set(WAITS) == set(), "in the code, but not in tests/race/listed.py"
    assert set(WAITS) - set(FOUND) == set(), "in tests/race/listed.py, but not in the code"


def test_what_stays_has_a_reason() -> None:
    """And is but a few."""
    reasons = [listed.why for listed in WAITS.values() if isinstance(listed, Stays)]
    assert all(len(reason.split()) >= 5 for reason in reasons) and len(reasons) < len(WAITS) / 4


def missed(name: str) -> int | None:
    """The first seed that differs without this wait; None where none of so many does."""
    listed = WAITS[name]
    assert isinstance(listed, Dies)
    seed: int
    with FOUND[name].taken_out():
        for seed in (FIRST.get(name, 0), *range(SEEDS)):
            try:
                listed.run(seed, **listed.fixed)
            except Exception:
                return seed
    return None


@pytest.mark.parametrize("name", MUTATIONS)
def test_without_it_some_schedule_differs(name: str) -> None:
    """And with it, the same schedule does not."""
    seed = missed(name)
    assert seed is not None, f"of {SEEDS} schedules none misses it: it is needless, or the device is too kind"
    listed = WAITS[name]
    assert isinstance(listed, Dies)
    listed.run(seed, **listed.fixed)


def test_a_wait_is_found_wherever_it_stands() -> None:
    """In a nested function, twice in one function, behind another call."""
    nested = "def g():\n        e.synchronize()"
    text = f"def f(e, x):\n    {nested}\n    x.record_event().synchronize()\n    e.synchronize()"
    [function] = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef)
    found = [ast.unparse(call.func) for call in _calls(function)]
    assert found == ["e.synchronize", "x.record_event().synchronize", "e.synchronize"]
    assert {"wait_stream", "wait_event", "record_stream"} <= CALLS


def test_a_wait_is_taken_out_alone_and_comes_back() -> None:
    """The function is another one inside, with everything else in it."""
    from autotune_offload.paths.ring import Ring

    before = Ring.put
    wait = FOUND["paths.ring: Ring.put: event.synchronize"]
    with wait.taken_out():
        assert Ring.put is not before
        assert "record_event" in Ring.put.__code__.co_names
        nested = [code.co_names for code in Ring.put.__code__.co_consts if hasattr(code, "co_names")]
        assert nested and all("synchronize" not in names for names in nested)
    assert Ring.put is before


def test_a_wait_that_is_not_there_cannot_be_taken_out() -> None:
    """A list that names it twice would pass otherwise."""
    wait = Wait("paths.ring", "Ring.put", "event.synchronize", 2)
    with pytest.raises(IndexError), wait.taken_out():
        pass
