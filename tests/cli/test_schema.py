"""`autotune-offload schema`: the documents that are really printed are what their schemas say."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import hjson
import pytest
from click.testing import CliRunner
from msgspec import structs

from autotune_offload.cli import cli, shapes
from autotune_offload.config import block
from autotune_offload.described import machine
from autotune_offload.doctor import examine
from autotune_offload.doctor.examine import Examination
from autotune_offload.engine.trainee import Timing
from autotune_offload.engine.verify import Ratio, VariantResult, Verification
from autotune_offload.errors import ConfigError
from autotune_offload.profiles import outcomes
from autotune_offload.profiles.fleet import member, survey
from autotune_offload.profiles.store import Store
from autotune_offload.records import Change, Finding, Settings, to_plain
from tests import CHECKOUT
from tests.cli.json_schema import problems
from tests.cli.test_surface import verbs
from tests.factories import make_choice, make_profile

NAMES = list(shapes.SCHEMAS)
CONFIGS = sorted((CHECKOUT / "configs").rglob("*.json"))


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile in a cache of its own."""
    monkeypatch.setenv("AUTOTUNE_OFFLOAD_CACHE", str(tmp_path / "cache"))
    return Store().save(make_profile())


def said(*arguments: str) -> Any:
    """What a verb prints with --json."""
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def wrong(name: str, document: Any) -> list[str]:
    """What is not as the schema says; a key of a document that it does not name is wrong, too."""
    read = json.loads(json.dumps(document))
    return list(problems(shapes.schema(name), read, closed=name != "config"))


def test_every_verb_has_a_schema() -> None:
    """One for each that says something with --json, by its name with hyphens."""
    speaking = {name.replace(" ", "-") for name, verb in verbs(cli) if not hasattr(verb, "commands")}
    assert speaking - {"schema"} == set(NAMES) - {"config", "machine", "profile"}


@pytest.mark.parametrize("name", NAMES)
def test_the_verb_prints_it(name: str) -> None:
    """One JSON document with dialect, title and what it is of."""
    result = CliRunner().invoke(cli, ["schema", name])
    made = json.loads(result.stdout)
    assert made["$schema"] == shapes.DIALECT and made["title"] == f"autotune-offload {name}"
    assert made["description"].endswith(".")


def test_without_a_name_it_lists_them() -> None:
    """A line each; with --json all of them in one document. An unknown name is told the others."""
    lines = CliRunner().invoke(cli, ["schema"]).stdout.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    assert max(map(len, lines)) <= 90
    assert list(said("schema")) == NAMES
    unknown = CliRunner().invoke(cli, ["schema", "nothing"])
    assert unknown.exit_code == 2 and "expected one of config, machine" in unknown.stderr


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("show", ["show"]),
        ("profile", ["profiles", "show"]),
        ("profiles-show", ["profiles", "show"]),
        ("explain", ["explain"]),
        ("profiles-list", ["profiles", "list"]),
        ("profiles-path", ["profiles", "path"]),
        ("profiles-forget", ["profiles", "forget", "--all"]),
        ("profiles-prune", ["profiles", "prune", "--all", "--yes"]),
        ("run", ["run", "--environment"]),
        ("simulate", ["simulate", "--list"]),
        ("simulate", ["simulate", "gh200", "--plan", "quick", "--budget", "0.2", "--params", "20m"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:2]),
)
def test_what_a_verb_prints_is_as_its_schema_says(stored: Path, name: str, arguments: list[str]) -> None:
    """Every value, and no key that is not named."""
    assert stored.exists()
    assert wrong(name, said(*arguments)) == []


def test_findings_of_runs_are_as_the_schemas_say(stored: Path) -> None:
    """What runs have found out about a choice, listed and forgotten."""
    choice = outcomes.Way.of(make_profile().choice)
    outcomes.save(stored, outcomes.Outcome(choice=choice, winner=choice, confirmed="is faster", when="2026"))
    listed = said("profiles", "list")
    assert listed["profiles"][0]["found"] and wrong("profiles-list", listed) == []
    forgotten = said("profiles", "forget")
    assert forgotten == {"forgotten": [str(stored)]} and wrong("profiles-forget", forgotten) == []


def test_a_decided_step_is_explained_as_the_schema_says(stored: Path, tmp_path: Path) -> None:
    """With its alternatives and parts; no part of the document is left open."""
    del stored
    simulated = tmp_path / "gh200.json"
    simulated.write_text(json.dumps(said("simulate", "gh200", "--plan", "quick", "--params", "20m")))
    found = said("explain", str(simulated))
    assert found["step"]["alternatives"] and found["step"]["parts_seconds"]
    assert wrong("explain", found) == []
    assert wrong("explain", {**found, "step": {**found["step"], "threads": "many"}}) != []


def test_a_file_that_cannot_be_read_has_a_row_that_fits(stored: Path) -> None:
    """It has a path, no key and a problem."""
    stored.with_name("broken.yaml").write_text("schema: 1")
    assert wrong("profiles-list", said("profiles", "list")) == []
    assert wrong("fleet", said("fleet", str(stored.parent))) == []


def test_apply_and_report_print_what_their_schemas_say(stored: Path, tmp_path: Path) -> None:
    """With a change and a page that is really written."""
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}))
    found = said("apply", str(config), "--profile", str(stored))
    assert found["changes"] and wrong("apply", found) == []
    assert wrong("report", said("report", str(stored), "-o", str(tmp_path / "page.html"))) == []


def test_doctor_prints_what_its_schema_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finding with costs and one without."""
    finding = Finding(id="memlock", severity="notice", found="a limit", fix="raise it")
    found = Examination(findings=(finding, structs.replace(finding, costs="time")), checks=("memlock",))
    monkeypatch.setattr(examine, "examine", lambda config, cache: found)
    assert wrong("doctor", said("doctor")) == []


def test_what_several_ranks_and_verify_print_is_as_their_schemas_say() -> None:
    """Both need a launcher or training: here their records, as the verbs print them."""
    from autotune_offload.cli.fleet import as_plain

    profile = make_profile()
    ranks = {"schema": 1, **as_plain(survey([member(profile, rank=rank) for rank in range(3)]))}
    assert wrong("probe", ranks) == [] and wrong("probe", to_plain(profile)) == []
    timing = Timing(median_seconds=1.0, iqr_seconds=0.1, raw_seconds=(1.0, 1.1))
    ratio = Ratio(ratio=1.1, low=1.0, high=1.2, confidence=0.95)
    variant = VariantResult(
        name="tuned",
        step=timing,
        backward=timing,
        gradient_offload=timing,
        ratios={"step": ratio},
        losses=(1.0, 0.5),
        verdict="faster",
        phases={},
    )
    outcome = Verification(
        variants=(variant,),
        control=variant,
        device="cpu",
        parameters=1,
        steps=2,
        warmup=1,
        losses_identical=True,
        verdict="faster",
        elapsed_seconds=1.0,
    )
    change = Change(key="a.b", before=None, after=False, reason="measured")
    document = {**to_plain(outcome), "changes": to_plain((change,)), "profile": "file"}
    assert wrong("verify", document) == []


def test_a_number_that_json_cannot_hold_is_allowed_for() -> None:
    """It is printed as null."""
    from autotune_offload.cli.output import finite

    plain = finite(to_plain(make_profile(choice=make_choice(gain=float("inf")))))
    assert plain["choice"]["gain"] is None and wrong("profile", plain) == []


@pytest.mark.parametrize("name", machine.names())
def test_every_machine_file_is_as_the_schema_says(name: str) -> None:
    """Shipped ones, as `simulate` reads them."""
    assert wrong("machine", machine.plain(machine.load(name))) == []


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_example_config_is_as_the_schema_says(file: Path) -> None:
    """The rest of a ds_config is DeepSpeed's, and open."""
    assert wrong("config", dict(hjson.loads(file.read_text(encoding="utf-8")))) == []


VALUES: list[Any] = ["auto", True, 0, 1, 2.5, -1, "direct", "device", "fused", "deepspeed", "4MiB", "1 kb"]
VALUES += ["4", "4iB", [], ["a.b"], [1], None, {}, "host", "0 B", "many"]


@pytest.mark.parametrize(
    ("key", "value"), list(itertools.product([*structs.asdict(Settings()), "no"], VALUES))
)
def test_the_schema_of_the_block_takes_what_the_block_takes(key: str, value: Any) -> None:
    """Each key with each value: both allow it, or neither does."""
    document = {block.BLOCK: {key: value}}
    try:
        block.settings(document)
        taken = True
    except ConfigError:
        taken = False
    if (key, value) == ("buffer_bytes", "0 B"):
        return  # that a size is at least one byte no pattern says
    assert taken == (not wrong("config", document))


def test_every_key_of_the_block_is_described() -> None:
    """An editor shows the sentence."""
    ours = shapes.schema("config")["properties"][block.BLOCK]["properties"]
    assert set(ours) == set(structs.asdict(Settings()))
    assert all(each["description"].endswith(".") for each in ours.values())


def test_a_wrong_document_is_seen() -> None:
    """A missing key, a wrong type, another word, and a key that nobody named."""
    plain = to_plain(make_profile())
    for change, word in (
        ({"created": 3}, "no string"),
        ({"plan": None}, "no string"),
        ({"more": 1}, "does not name"),
        ({"casts": [{}]}, "lacks"),
    ):
        assert any(word in each for each in wrong("profile", {**plain, **change})), word
    del plain["host"]
    assert wrong("profile", plain) == ["$ lacks ['host']"]
