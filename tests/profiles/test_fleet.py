"""The spread over a fleet: who stands out, who does not, and what it costs."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from autotune_offload.cli import cli
from autotune_offload.profiles.fleet import LEAST_SHARE, Member, entries_below, member, newest, survey
from autotune_offload.profiles.store import Store
from autotune_offload.records import Profile
from tests.factories import make_profile

RATES = {"d2h": 53.0, "h2d": 54.0, "h2h": 12.0, "offload": 20.0}


def one(number: int, /, facts: dict[str, str] | None = None, **rates: Any) -> Member:
    """A member at the usual rates, but for those given."""
    return Member(
        host=f"node-{number}",
        device="cuda NVIDIA H200",
        index=0,
        workload="w",
        path="staged",
        rates_gbps=RATES | rates,
        facts={"link": "generation 5 x16", "NUMA binding": "bound to one node"} | (facts or {}),
        backward_seconds=1.0,
        gradient_bytes=20 * 10**9,
        parameter_bytes=54 * 10**9,
    )


def fleet(count: int, noise: float, seed: int, shape: str) -> list[Member]:
    """Alike, but for noise of a relative size in every rate."""
    draw = random.Random(seed)

    def noisy(rate: float) -> float:
        if shape == "normal":
            return rate * max(draw.gauss(1.0, noise), 0.05)
        return rate * draw.uniform(1 - noise, 1 + noise)

    return [one(n, None, **{metric: noisy(rate) for metric, rate in RATES.items()}) for n in range(count)]


@given(
    st.integers(1, 200),
    st.floats(0, 0.1),
    st.integers(0, 1 << 30),
    st.sampled_from(["uniform", "normal"]),
)
def test_a_homogeneous_fleet_gives_no_alarm(count: int, noise: float, seed: int, shape: str) -> None:
    """However noisy up to 10 % either way, or 3.5 % as a standard deviation."""
    members = fleet(count, noise if shape == "uniform" else noise * 0.35, seed, shape)
    assert survey(members).outliers == ()


@given(
    st.one_of(
        st.tuples(st.integers(3, 120), st.floats(0, 0.01)), st.tuples(st.integers(8, 120), st.floats(0, 0.03))
    ),
    st.integers(0, 1 << 30),
    st.sampled_from(list(RATES)),
    st.floats(0.05, 0.5),
)
def test_a_rank_at_half_speed_is_named(
    count_and_noise: tuple[int, float], seed: int, metric: str, share: float
) -> None:
    """Alone, whichever it is, and in the metric in which it is slow; few ranks say so only if they are quiet."""
    count, noise = count_and_noise
    members = fleet(count, noise, seed, "uniform")
    slow = seed % count
    members[slow] = one(slow, None, **{metric: RATES[metric] * share})
    (outlier,) = survey(members).outliers
    assert (outlier.label, outlier.metric) == (f"node-{slow} device 0", metric)
    assert outlier.times > 1 / (1 - LEAST_SHARE)


@pytest.mark.parametrize(("share", "outliers"), [(0.85, 0), (0.75, 1)])
def test_a_small_difference_is_no_outlier_however_alike_the_others_are(share: float, outliers: int) -> None:
    """Seven equal ones have a MAD of 0."""
    assert len(survey([*map(one, range(7)), one(7, d2h=RATES["d2h"] * share)]).outliers) == outliers


@given(st.integers(3, 6), st.floats(0, 0.1), st.integers(0, 1 << 30))
def test_a_small_homogeneous_fleet_gives_no_alarm(count: int, noise: float, seed: int) -> None:
    """Where two of three agree by chance, the third is no outlier for it."""
    assert survey(fleet(count, noise, seed, "uniform")).outliers == ()


def test_a_fast_rank_is_no_outlier() -> None:
    """It costs nobody anything."""
    assert survey([*map(one, range(8)), one(8, d2h=100.0)]).outliers == ()


def test_one_rank_at_14_among_57() -> None:
    """With what it costs every step of the job, and the facts that may explain it."""
    odd = {"link": "generation 5 x4", "NUMA binding": "unbound"}
    found = survey([*(one(n, d2h=57.0) for n in range(7)), one(7, d2h=14.0, facts=odd)])
    (outlier,) = found.outliers
    assert outlier.costs_seconds == pytest.approx(20 / 14 - 20 / 57) == found.costs_seconds
    assert outlier.reasons == (
        "link: generation 5 x4, where 7 of 8 have generation 5 x16",
        "NUMA binding: unbound, where 7 of 8 have bound to one node",
    )


def test_the_job_waits_for_its_slowest_only() -> None:
    """Two slow ranks cost what the slower one does; a slow fetch comes on top; no time is counted twice."""
    others = [one(n) for n in range(8)]
    slow, slower = one(8, offload=8.0, d2h=25.0), one(9, offload=5.0)
    fetches = one(10, h2d=27.0)
    found = survey([*others, slow, slower, fetches])
    assert [(o.label, o.metric, o.measured) for o in found.outliers] == [
        ("node-9 device 0", "offload", True),
        ("node-8 device 0", "offload", True),
        ("node-10 device 0", "h2d", False),
    ]
    assert [o.costs_seconds for o in found.outliers] == pytest.approx([3.0, 1.5, 1.0])
    assert found.costs_seconds == pytest.approx(4.0)


def test_two_cannot_say_which_of_them_is_slow() -> None:
    """A notice instead."""
    found = survey([one(0), one(1, d2h=10.0)])
    assert found.outliers == () and "two profiles" in found.notices[0]
    assert found.spreads[0].lowest_gbps == 10.0 and found.spreads[0].lowest == "node-1 device 0"


def test_each_device_is_compared_with_its_like() -> None:
    """Mixed accelerators are said aloud."""
    old = [dataclasses.replace(one(10 + n, d2h=12.0), device="cuda Tesla T4") for n in range(4)]
    found = survey([*map(one, range(4)), *old])
    assert found.outliers == ()
    assert "4 x cuda NVIDIA H200" in found.notices[0] and "4 x cuda Tesla T4" in found.notices[0]


# -- profiles -------------------------------------------------------------------------------------


def on_host(name: str, index: int = 0, factor: float = 1.0, **changes: Any) -> Profile:
    """A whole profile whose copies are so many times as fast."""
    made = make_profile(**changes)
    transfers = tuple(
        structs.replace(t, gbps=t.gbps * factor) if t.kind == "d2h" else t for t in made.transfers
    )
    width = 16 if factor > 0.6 else 8
    return structs.replace(
        made,
        host=structs.replace(made.host, name=name),
        device=structs.replace(made.device, index=index, link_width=width),
        transfers=transfers,
    )


def test_a_profile_as_a_member() -> None:
    """The best memory's rate at its largest size, and the bytes of the workload."""
    profile = make_profile()
    made = member(profile, rank=3)
    assert made.label == "node-17 rank 3" and made.path == "staged"
    assert made.rates_gbps["d2h"] == pytest.approx(53.0, rel=0.01)
    assert made.gradient_bytes == 4 * profile.workload.elements
    assert made.facts["link"] == "generation 5 x16" and made.facts["NUMA binding"] == "bound to one node"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder of six hosts, one of them with a link at half width, an older profile, and a broken file."""
    for number in range(6):
        Store(tmp_path / f"node-{number}").save(on_host(f"node-{number}", factor=0.5 if number == 4 else 1.0))
    Store(tmp_path / "old").save(on_host("node-0", factor=0.1, created="2020-01-01T00:00:00+00:00"))
    (tmp_path / "broken.yaml").write_text("schema: 1\n")
    return tmp_path


def test_a_folder_of_profiles_is_read_with_its_folders(shared: Path) -> None:
    """The newest of each device; what cannot be read is reported."""
    entries = list(entries_below(shared))
    assert len(entries) == 8 and sum(entry.problem is not None for entry in entries) == 1
    members = newest((e.profile, e.path) for e in entries if e.profile is not None)
    assert sorted(each.host for each in members) == [f"node-{n}" for n in range(6)]
    (outlier,) = survey(members).outliers
    assert outlier.label == "node-4 device 0"
    assert outlier.reasons == ("link: generation 5 x8, where 5 of 6 have generation 5 x16",)


def test_the_fleet_command_names_the_outlier(shared: Path) -> None:
    """As JSON, one document; as text, with the cause and the cost."""
    run = CliRunner().invoke(cli, ["fleet", str(shared), "--json"])
    assert run.exit_code == 0, run.output
    document = json.loads(run.stdout)
    assert len(document["members"]) == 6 and len(document["skipped"]) == 1
    assert [outlier["label"] for outlier in document["outliers"]] == ["node-4 device 0"]
    assert {spread["metric"] for spread in document["spreads"]} == {"d2h", "h2d", "h2h", "offload"}
    text = CliRunner().invoke(cli, ["fleet", str(shared)])
    assert text.exit_code == 0
    assert "node-4 device 0" in text.stdout and "generation 5 x8" in text.stdout
    assert "skipped" in text.stderr


def test_the_fleet_command_says_what_is_missing(tmp_path: Path) -> None:
    """No folder is bad usage; no profile in it is an error with what to do."""
    assert CliRunner().invoke(cli, ["fleet", str(tmp_path / "absent")]).exit_code == 2
    run = CliRunner().invoke(cli, ["fleet", str(tmp_path)])
    assert run.exit_code == 1 and "no profile" in run.stderr


def test_profiles_list_reads_a_shared_folder(shared: Path) -> None:
    """With a row for each file below it."""
    run = CliRunner().invoke(cli, ["profiles", "list", "--cache", str(shared), "--json"])
    rows = json.loads(run.stdout)["profiles"]
    assert {row.get("host") for row in rows} == {None, *(f"node-{n}" for n in range(6))}
