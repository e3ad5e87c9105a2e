"""What would have to change for another way to win, and the command that shows it."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from autotune_offload.records import PinCost, Profile
from autotune_offload.reports import explanation
from autotune_offload.reports.alternatives import Alternative, alternatives
from tests.factories import make_choice, make_profile


def _row(profile: Profile, name: str) -> Alternative:
    return next(row for row in alternatives(profile) if row.name.startswith(name))


def test_a_slower_way_names_its_largest_part_and_the_speed_that_it_lacks() -> None:
    """`direct` at 402 ms against 146 ms: its copy or its widening, and how many times as fast."""
    said = explanation.to_win(_row(make_profile(), "direct"), make_profile())
    assert re.search(
        r'"[a-z ,0-9]+" takes \d+ % of its time, and would have to be [\d.]+x as fast|at no cost', said
    )


@given(seconds=st.floats(0.2, 100))
def test_the_speed_that_is_named_would_do(seconds: float) -> None:
    """With its largest part that much faster, the way would cost what the chosen one does."""
    profile = make_profile()
    slower = dataclasses.replace(_row(profile, "direct"), measured_seconds=seconds)
    chosen = next(row.measured_seconds for row in alternatives(profile) if row.chosen)
    said = explanation.to_win(slower, profile)
    found = re.search(r"takes ([\d.]+) % of its time, and would have to be ([\d.]+)x", said)
    if found and chosen:
        share, factor = float(found[1]) / 100, float(found[2])
        part = seconds * share
        assert seconds - part + part / factor == pytest.approx(chosen, rel=0.05, abs=0.01 * seconds)


def test_what_a_limit_forbids_needs_a_higher_limit() -> None:
    """The tightest limit is named with its size and what raises it."""
    profile = make_profile()
    said = explanation.to_win(_row(profile, "pinned"), profile)
    assert "cgroup" in said and "23 GiB" in said and "raise the container's memory limit" in said


def test_without_page_locking_it_is_page_locking_that_lacks() -> None:
    """No limit is blamed where nothing can be locked at all."""
    none = PinCost(seconds_per_gib=None, largest_bytes=0, capped=False, reason="no pinning")
    profile = make_profile(pin=none)
    assert "would have to be on offer" in explanation.to_win(_row(profile, "pinned"), profile)


def test_what_is_faster_within_the_noise_needs_a_quieter_machine() -> None:
    """A candidate below the chosen time was not told apart from it."""
    profile = make_profile()
    faster = dataclasses.replace(_row(profile, "direct"), measured_seconds=0.0001)
    assert "exceed the noise" in explanation.to_win(faster, profile)


def test_the_check_is_a_command_that_exists() -> None:
    """Every command that is named is accepted by the command line."""
    import shlex

    from autotune_offload.cli import cli

    profile = make_profile()
    for row in alternatives(profile):
        program, *words = shlex.split(explanation.check(row, profile))
        verb = cli.commands[words[0]]
        assert program == "autotune-offload"
        assert verb.make_context(words[0], words[1:], resilient_parsing=True).params


def test_of_a_described_machine_nothing_is_measured_to_check() -> None:
    """Its check is another simulation."""
    described = structs.replace(make_profile().host, cpu_model="described: a machine")
    profile = make_profile(host=described)
    assert explanation.check(_row(profile, "direct"), profile).startswith("autotune-offload simulate")


def test_the_choice_needs_nothing() -> None:
    """It has won, and a choice that was never a trial leaves nothing to compare with."""
    profile = make_profile()
    assert "it is the choice" in explanation.to_win(
        next(r for r in alternatives(profile) if r.chosen), profile
    )
    never = make_profile(choice=make_choice(buffer_bytes=12345))
    assert "would have to be timed" in explanation.to_win(_row(never, "direct"), never)
