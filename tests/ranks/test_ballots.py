"""What ranks tell each other, and how many ballots become one plan."""

from __future__ import annotations

import random
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from autotune_offload.errors import AgreementError
from autotune_offload.ranks.ballots import (
    MESSAGE_BYTES,
    REASON_CHARACTERS,
    REPLY_BYTES,
    SIZE_FIELDS,
    Ballot,
    Plan,
    Reply,
    Settled,
    View,
    ballot,
    conclusion,
    merged,
    of_host,
    packed,
    plain_text,
    unpacked,
)
from autotune_offload.records import Choice, backward_seconds
from tests.factories import make_choice, make_profile

SIZE = st.none() | st.integers(1, 10**12)
FLOATS = st.floats(0, 1e6, allow_nan=False)
CHOICES = st.builds(
    lambda **fields: Settled.of(structs.replace(make_choice(), **fields)),
    path=st.sampled_from(["direct", "pinned", "staged"]),
    buffer_bytes=st.integers(0, 1 << 40),
    buffer_count=st.integers(0, 1 << 16),
    host_threads=st.integers(0, 4096),
    accumulate=st.sampled_from(["device", "host"]),
    gain=FLOATS,
    noise=FLOATS,
    unsettled_pins=st.sampled_from([(), ("pin_optimizer",), ("pin_optimizer", "pin_parameters")]),
)


def ballots(count: int) -> st.SearchStrategy[list[Ballot]]:
    """Of ranks 0 to `count` less one, alike in most ways and different in some."""
    each = st.builds(
        Ballot,
        rank=st.just(0),
        kind=st.sampled_from(["cuda"] * 5 + ["hpu"]),
        name=st.sampled_from(["NVIDIA H200"] * 5 + ["NVIDIA A100"]),
        config=st.sampled_from(["a" * 8] * 5 + ["b" * 8]),
        given=st.sampled_from(["c" * 8] * 5 + ["d" * 8]),
        copying=st.sampled_from([count] * 5 + [0, 1]),
        key=st.sampled_from(["k" * 8] * 3 + ["l" * 8]),
        seconds=FLOATS,
        sizes=st.tuples(SIZE, SIZE, SIZE, SIZE),
        choice=CHOICES,
    )
    several = st.lists(each, min_size=count, max_size=count)
    return several.map(lambda found: [structs.replace(one, rank=rank) for rank, one in enumerate(found)])


def on_hosts(several: list[Ballot], hosts: int) -> list[View]:
    """The views of ranks that are dealt to hosts."""
    return [of_host(several[number::hosts])[0] for number in range(min(hosts, len(several)))]


@given(st.integers(1, 7).flatmap(ballots), st.integers(1, 4), st.randoms(use_true_random=False))
def test_views_merge_in_any_order(several: list[Ballot], hosts: int, order: random.Random) -> None:
    """What comes out says the same whoever was asked first, and in whatever tree."""
    views = on_hosts(several, hosts)
    expected = conclusion(reduce(merged, views))
    while len(views) > 1:
        order.shuffle(views)
        views.append(merged(views.pop(), views.pop()))
    assert conclusion(views[0]) == expected


@given(st.integers(1, 7).flatmap(ballots), st.integers(1, 4))
def test_the_smallest_of_each_size_counts(several: list[Ballot], hosts: int) -> None:
    """DeepSpeed's own, None, is larger than any."""
    plan = conclusion(reduce(merged, on_hosts(several, hosts)))
    for index in range(len(SIZE_FIELDS)):
        asked = [each.sizes[index] for each in several if each.sizes[index] is not None]
        assert plan.sizes[index] == min(asked, default=None)  # type: ignore[type-var]  # None is left out


@given(st.integers(1, 7).flatmap(ballots), st.integers(1, 4))
def test_the_lowest_rank_that_differs_is_named(several: list[Ballot], hosts: int) -> None:
    """From the first one, in kind, configuration, sizes and name."""
    view = reduce(merged, on_hosts(several, hosts))

    def odd(what: str) -> int:
        first = getattr(several[0], what)
        return next((each.rank for each in several if getattr(each, what) != first), -1)

    assert view.odd_kind[0] == odd("kind") and view.odd_name[0] == odd("name")
    assert view.odd_config == odd("config") and view.odd_given == odd("given")
    plan = conclusion(view)
    assert bool(plan.stop) is (odd("kind") >= 0 or odd("config") >= 0)
    assert plan.odd_given == odd("given")
    assert ("mixed accelerators" in plan.loud) is (odd("name") >= 0)
    if odd("kind") >= 0:
        assert f"rank {odd('kind')} uses hpu" in plan.stop or f"rank {odd('kind')} uses cuda" in plan.stop


@given(st.integers(1, 7).flatmap(ballots))
def test_the_slowest_rank_decides_for_its_host(several: list[Ballot]) -> None:
    """And one rank of each key keeps its profile: the slowest that has it."""
    _, reply = of_host(several)
    assert reply.ranks == len(several)
    assert reply.measure is any(each.copying != len(several) for each in several)
    if reply.measure:
        assert reply.choice is None and reply.keepers == ()
        return
    worst = max(each.seconds for each in several)
    decider = several[reply.decider]
    assert decider.seconds == worst == reply.seconds and reply.choice == decider.choice
    for key in {each.key for each in several}:
        alike = [each for each in several if each.key == key]
        (keeper,) = [each for each in alike if each.rank in reply.keepers]
        assert keeper.seconds == max(each.seconds for each in alike)


def test_all_of_a_choice_is_settled_but_its_sizes_and_words() -> None:
    """What a rank of a host adopts from its slowest; sizes are agreed by the whole job."""
    whole = set(structs.asdict(make_choice()))
    assert set(Settled.__struct_fields__) == whole - {"sizes", "reasons"}


@given(st.integers(1, 7).flatmap(ballots), st.text(max_size=400), st.text(max_size=400))
def test_every_message_fits_its_fixed_size(several: list[Ballot], reason: str, name: str) -> None:
    """Whatever is in it, and it reads back the same."""
    profile = make_profile(ranks_copying=len(several))
    profile = structs.replace(profile, device=structs.replace(profile.device, name=name))
    mine = ballot(10**6, "cuda", name, config="a" * 8, given="b" * 8, profile=profile)
    view, reply = of_host(several)
    view = merged(view, of_host([mine])[0])
    plan = conclusion(view)
    stopped = structs.replace(plan, stop=plain_text(reason), loud="")
    messages = [(each, MESSAGE_BYTES) for each in (*several, mine, view)]
    messages += [
        (each, REPLY_BYTES)
        for each in (
            plan,
            structs.replace(reply, plan=plan, keepers=tuple(range(10**6, 10**6 + 16))),
            structs.replace(reply, plan=stopped),
        )
    ]
    for message, size in messages:
        text = packed(message, size)
        assert len(text) == size
        assert unpacked(text, type(message)) == message


def test_what_does_not_fit_or_cannot_be_read_is_an_error() -> None:
    """Of ours, in words."""
    with pytest.raises(AgreementError, match="a Reply of"):
        packed(Reply(plan=Plan(stop="x" * REPLY_BYTES)), REPLY_BYTES)
    with pytest.raises(AgreementError, match="one version of autotune-offload on all hosts"):
        unpacked(b"\0\1\7", Ballot)


@given(st.text(max_size=1000))
def test_reasons_are_one_line_of_ascii(text: str) -> None:
    """So that so many characters are so many bytes."""
    plain = plain_text(text)
    assert len(plain) <= REASON_CHARACTERS and plain.isascii() and "\n" not in plain


def test_a_ballot_carries_what_the_profile_measured() -> None:
    """The time of the choice: of DeepSpeed's own code where that stays."""
    profile = make_profile()
    assert backward_seconds(profile) == pytest.approx(0.11 + 0.8 / 24)
    own = structs.replace(profile, choice=make_choice(gain=1.0))
    assert backward_seconds(own) == 0.402
    elsewhere: Choice = make_choice(buffer_count=9)
    assert backward_seconds(structs.replace(profile, choice=elsewhere)) is None
    blank = ballot(3, "cuda", "H200", config="a", given="b", profile=None)
    assert (blank.rank, blank.copying, blank.choice) == (3, 0, None)
