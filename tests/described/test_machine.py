"""Machine files: their numbers and sources, what is refused, and the thread's own tables from them alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune_offload import places
from autotune_offload.api.probe import probe
from autotune_offload.described import machine as described_machine
from autotune_offload.described.from_profile import machine_from
from autotune_offload.described.simulated import SimulatedDevice
from autotune_offload.errors import ConfigError
from autotune_offload.records import Profile
from benchmarks import bucket, regret, reported
from tests.factories import make_profile

SHIPPED = (
    "a100_pcie4 arc_a770 ascend_910b cpu gaudi2 gh200 h100_sxm_pcie5 intel_max1550 mi300x rtx4090_desktop t4_pcie3"
).split()
each_machine = pytest.mark.parametrize("name", SHIPPED)


def plain(name: str = "t4_pcie3") -> dict[str, Any]:
    """A shipped description as its file holds it."""
    found = yaml.safe_load(places.config_file("machines", f"{name}.yaml").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


# -- files ----------------------------------------------------------------------------------------


def test_the_shipped_machines_are_these() -> None:
    """Eleven descriptions come with the package."""
    assert list(described_machine.names()) == SHIPPED


@each_machine
def test_every_source_says_the_number_that_is_used(name: str) -> None:
    """A number and the value in its source are the same, and each has a URL and one of the known kinds."""
    described = plain(name)
    machine = described_machine.load(name)
    held = dict(
        described_machine.numbers({key: value for key, value in described.items() if key != "sources"})
    )
    assert machine.name == name
    assert {source.field: held[source.field] for source in machine.sources} == {
        source.field: source.value for source in machine.sources
    }
    assert all(source.url for source in machine.sources)


@each_machine
def test_a_description_survives_being_written(name: str, tmp_path: Path) -> None:
    """What `plain` gives reads back as the same machine."""
    machine = described_machine.load(name)
    file = tmp_path / "again.yaml"
    file.write_text(yaml.safe_dump(described_machine.plain(machine)), encoding="utf-8")
    assert described_machine.read(file) == machine


def test_the_calibrated_numbers_are_these() -> None:
    """The numbers that were fitted to the thread's reports are marked, and there are no others."""
    calibrated = {name: described_machine.load(name).sourced("calibrated") for name in SHIPPED}
    assert {name: fields for name, fields in calibrated.items() if fields} == {
        "gaudi2": ("sync.device_us",),
        "gh200": ("d2h.pageable_cold.bandwidth_gbps", "h2h.bandwidth_gbps"),
    }


def change(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Sets one dotted key."""

    def apply(described: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for parent in parents:
            described = described[parent]
        described[last] = value

    return apply


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (change("colour", "red"), "unknown field `colour`"),
        (change("d2h.pinned.bandwidth", 3), "unknown field `bandwidth`"),
        (change("d2h.pinned.bandwidth_gbps", -3.0), "> 0.0 - at `$.d2h.pinned.bandwidth_gbps`"),
        (change("h2h.bandwidth_gbps", 0), "> 0.0 - at `$.h2h.bandwidth_gbps`"),
        (change("sync.device_us", -1), "at `$.sync.device_us`"),
        (change("cast.host_gbps", "fast"), "Expected `float`, got `str` - at `$.cast.host_gbps`"),
        (change("h2d.pinned.bandwidth_gbps", float("inf")), "h2d.pinned.bandwidth_gbps is inf"),
        (change("ranks_per_host", 0), "at `$.ranks_per_host`"),
        (change("duplex.mode", "half"), "at `$.duplex.mode`"),
        (change("schema", 2), "schema 2; expected 1"),
        (change("compute", {"tflops": 20.0}), "no source for compute.tflops"),
        (lambda described: described.pop("pin"), "missing required field `pin`"),
        (lambda described: described["sources"].pop(), "no source for duplex.total_gbps"),
        (lambda described: described["sources"][0].update(kind="guess"), "at `$.sources[0].kind`"),
        (
            lambda described: described["sources"][0].update(field="link.speed"),
            "link.speed, which it does not",
        ),
    ],
)
def test_a_description_that_cannot_be_used_says_why(
    spoil: Callable[[dict[str, Any]], None], said: str, tmp_path: Path
) -> None:
    """Unknown and missing keys, impossible numbers and missing sources are named, with the file."""
    described = plain()
    spoil(described)
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(described), encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        described_machine.read(file)
    assert said in str(raised.value)
    assert "mine.yaml" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "said"), [("[1, 2", "not valid YAML"), ("- 1", "holds list"), ("", "holds NoneType")]
)
def test_a_file_that_is_no_description_says_so(text: str, said: str, tmp_path: Path) -> None:
    """Broken YAML and YAML of another form are told apart."""
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        described_machine.read(file)


def test_an_unknown_name_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wrong name and a missing file get different words."""
    monkeypatch.setenv(places.MACHINES_VARIABLE, str(tmp_path))
    with pytest.raises(ConfigError, match=r'no machine "gh2000": expected one of a100_pcie4, .*t4_pcie3'):
        described_machine.load("gh2000")
    with pytest.raises(ConfigError, match="no such file"):
        described_machine.load(str(tmp_path / "gh2000.yaml"))


def test_a_users_own_description_is_found_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files in the user's folder are known by name, and come before shipped ones."""
    monkeypatch.setenv(places.MACHINES_VARIABLE, str(tmp_path))
    for name, title in (("desk", "mine"), ("gh200", "mine too")):
        described = plain() | {"name": name, "title": title}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(described), encoding="utf-8")
    assert described_machine.load("desk").title == "mine"
    assert described_machine.load("gh200").title == "mine too"
    assert list(described_machine.names()) == [*SHIPPED, "desk"]


# -- from a profile -------------------------------------------------------------------------------


def test_a_profile_becomes_a_machine_with_its_rates() -> None:
    """Lines are fitted to the profile's curves, and every number has a source."""
    machine = machine_from(make_profile(), "mine")
    assert machine.d2h.pinned.bandwidth_gbps == pytest.approx(53, rel=0.02)
    assert machine.d2h.pageable_cold.bandwidth_gbps == pytest.approx(2.1, rel=0.02)
    assert machine.h2d.pageable.latency_us == pytest.approx(8, rel=0.05)
    assert machine.sync.device_us == pytest.approx(9.1)
    assert {source.kind for source in machine.sources} == {"measured", "derived"}


@pytest.mark.parametrize("name", ["t4_pcie3", "cpu"])
def test_a_simulated_machine_survives_the_way_through_a_profile(name: str) -> None:
    """What a probe of a described machine measures gives the description back, and the same path."""
    machine = described_machine.load(name)
    first = quick(machine)
    again = machine_from(first)
    assert again.d2h.pageable.bandwidth_gbps == pytest.approx(machine.d2h.pageable.bandwidth_gbps, rel=0.05)
    assert again.h2h.bandwidth_gbps == pytest.approx(machine.h2h.bandwidth_gbps, rel=0.05)
    second = quick(again)
    assert (second.choice.path, second.choice.cast) == (first.choice.path, first.choice.cast)


def quick(machine: described_machine.Machine) -> Profile:
    """A short probe."""
    return probe(plan="quick", device=SimulatedDevice(machine))


# -- the thread's own tables ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def gh200_3b() -> reported.Report:
    """DeepSpeed PR 6962."""
    return reported.gh200_3b()


@pytest.mark.slow
def test_gh200_backward_times_are_those_of_pr_6962(gh200_3b: reported.Report) -> None:
    """25603 ms before PR 6670 and 1174 ms after, within 5 %; 309 ms with the explicit upcast is the anchor.

    The cold pageable rate and the host copy's rate are calibrated on these two rows; the link is measured.
    """
    assert set(gh200_3b.calibrated) == {"d2h.pageable_cold.bandwidth_gbps", "h2h.bandwidth_gbps"}
    for name in ("implicit_upcast", "bounce_buffer"):
        assert gh200_3b.backward_seconds(name) == pytest.approx(reported.REPORTED_SECONDS[name], rel=0.05)
    # with nothing calibrated in it: what the explicit upcast adds are copies at the measured link rates
    link = described_machine.load("gh200")
    out, back = link.d2h.pageable.bandwidth_gbps, link.h2d.pageable.bandwidth_gbps
    copies = 3 * (6 / out + 2 / back)
    assert copies < gh200_3b.stock_seconds["explicit_upcast"] < 1.3 * copies


@pytest.mark.slow
def test_our_choice_on_gh200_beats_every_stock_version(gh200_3b: reported.Report) -> None:
    """The choice takes less than the best sequence of any DeepSpeed."""
    assert gh200_3b.chosen_seconds < min(gh200_3b.stock_seconds.values())


@pytest.mark.slow
def test_gh200_llama_7b_boundary_is_at_least_4_times_shorter() -> None:
    """PR 6670: the bounce buffer makes the offload at the boundary at least 4 times shorter on 4 ranks."""
    report = reported.gh200_llama_7b()
    assert report.ranks == 4
    assert report.ratio("implicit_upcast", "bounce_buffer") > 4
    assert report.chosen_seconds <= min(report.stock_seconds.values())


@pytest.mark.slow
def test_gaudi2_bounce_buffer_is_about_twice_as_slow() -> None:
    """A small BERT on 8 ranks: 1.4 to 2.8 times a direct copy; only the device synchronize is calibrated."""
    report = reported.gaudi2_bert()
    assert report.calibrated == ("sync.device_us",)
    assert 1.4 <= report.ratio("bounce_buffer", "explicit_upcast") <= 2.8
    assert report.chosen_seconds <= min(report.stock_seconds.values())


# -- when gradients leave -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gh200", "t4_pcie3"])
def test_gradients_that_leave_during_the_backward_pass_never_cost(name: str) -> None:
    """The chosen reduce_bucket_size is no slower than DeepSpeed's default on a model that fits one bucket."""
    row = bucket.measure(name, regret.described_workload("gpt2", 1, 1), 50.0)
    assert row is not None and row.bucket_elements < bucket.DEFAULT_ELEMENTS
    assert row.over_default <= bucket.SLOWER, str(row)


def test_gradients_that_leave_early_hide_behind_compute() -> None:
    """On a slow link half of the offloading of 124M parameters disappears behind the backward pass."""
    row = bucket.measure("t4_pcie3", regret.described_workload("gpt2", 1, 1), 20.0)
    assert row is not None
    assert row.ours_chosen_seconds - row.compute_seconds < 0.5 * (
        row.ours_default_seconds - row.compute_seconds
    )


def test_where_nothing_overlaps_no_bucket_is_chosen() -> None:
    """On the CPU the bucket cannot cost anything, because it stays DeepSpeed's own."""
    assert bucket.measure("cpu", regret.described_workload("gpt2", 1, 1), 50.0) is None
