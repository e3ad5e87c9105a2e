"""`autotune-offload simulate`: one machine, all machines, a file, a stored profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from autotune_offload import places
from autotune_offload.cli import cli
from autotune_offload.described import machine
from autotune_offload.profiles.store import Store
from tests.described.test_machine import SHIPPED, plain
from tests.factories import make_profile

QUICK = ("--plan", "quick", "--budget", "0.5", "--params", "20m")


def run(*arguments: str) -> Result:
    """The verb in this process."""
    return CliRunner().invoke(cli, ["simulate", *arguments], prog_name="autotune-offload")


def document(*arguments: str) -> dict[str, Any]:
    """What it says as JSON."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def test_one_machine_gives_a_probes_document_and_the_virtual_seconds() -> None:
    """The keys of a probe are there, with every alternative's cost, for the ranks that were asked for."""
    found = document("t4_pcie3", *QUICK, "--ranks", "4")
    probed = {"schema", "host", "device", "software", "limits", "transfers", "sync", "pin", "candidates"}
    assert probed | {"choice", "zero_optimization", "elapsed_seconds", "warnings"} <= set(found)
    assert found["machine"]["name"] == "t4_pcie3"
    assert found["virtual_seconds"] == found["elapsed_seconds"] > 0
    assert found["workload"]["world_size"] == 4
    assert all(each["predicted_seconds"] is not None for each in found["candidates"])
    assert found["step"]["way"] == "fused" and found["step_rates"]["passes"]


def test_the_text_says_that_it_is_simulated_and_from_what() -> None:
    """Machine, kinds of its numbers, alternatives and choice."""
    result = run("gh200", *QUICK)
    assert result.exit_code == 0
    assert "simulated: gh200" in result.stdout and "2 calibrated" in result.stdout
    assert "Candidates against DeepSpeed's own" in result.stdout and "Choice:" in result.stdout
    assert "Optimizer step: one compiled pass" in result.stdout


SMALL = ("--plan", "quick", "--budget", "0.2", "--params", "50m")


def test_all_machines_are_one_table() -> None:
    """Every known machine has its row."""
    result = run("--all", *SMALL)
    assert result.exit_code == 0
    gradients, _, steps = result.stdout.partition("Optimizer step:")
    for table in (gradients, steps):
        assert all(any(line.startswith(name) for line in table.splitlines()) for name in SHIPPED)
    assert max(map(len, result.stdout.splitlines())) <= 100


@pytest.mark.long
def test_all_machines_are_one_document() -> None:
    """One for all of them."""
    assert [each["machine"]["name"] for each in document("--all", *SMALL)["machines"]] == SHIPPED


def test_whole_accumulations_are_shown_where_they_decide() -> None:
    """In the document and the text: one chosen, DeepSpeed's own in its default memory, the fastest first."""
    found = document("t4_pcie3", *QUICK, "--accumulation-steps", "8")
    rows = found["accumulations"]
    assert [row["measured_seconds"] for row in rows] == sorted(row["measured_seconds"] for row in rows)
    assert sum(row["chosen"] for row in rows) == sum(row["installed"] for row in rows) == 1
    assert {row["place"] for row in rows} == {"device", "host"} and {row["micro_steps"] for row in rows} == {
        4
    }
    chosen, own = (next(row for row in rows if row[which]) for which in ("chosen", "installed"))
    assert chosen["place"] == found["choice"]["accumulate"]
    gain = (
        own["measured_seconds"] / chosen["measured_seconds"]
    )  # what locking takes at a start counts as well
    assert found["choice"]["gain"] == pytest.approx(gain, rel=0.01)
    assert document("t4_pcie3", *QUICK)["accumulations"] == []
    text = run("t4_pcie3", *QUICK, "--accumulation-steps", "8").stdout
    assert "Over an accumulation of 4 micro-steps, which decides" in text


@pytest.mark.long
def test_the_table_of_all_machines_says_what_it_is_of() -> None:
    """Accumulations, and the better of DeepSpeed's two memories."""
    table = run("--all", *SMALL, "--accumulation-steps", "2").stdout
    assert max(map(len, table.splitlines())) <= 100
    assert "Time added to an accumulation" in table and "best of its two memories" in " ".join(table.split())


def test_a_file_that_is_not_shipped_works_as_well(tmp_path: Path) -> None:
    """A machine that nobody knows, in a file: the choice follows its numbers."""
    described = plain() | {"name": "mine", "kind": "newkind"}
    described["d2h"]["pinned"]["bandwidth_gbps"] = 1.0
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(described), encoding="utf-8")
    found = document(str(file), *QUICK)
    assert (found["device"]["kind"], found["choice"]["path"]) == ("newkind", "direct")


def test_pinned_memory_can_be_capped() -> None:
    """--max-pinned is a limit like any other, and the choice stays within it."""
    found = document("h100_sxm_pcie5", *QUICK, "--max-pinned", "4MiB")
    choice = found["choice"]
    assert choice["path"] != "pinned" and not choice["pin_optimizer"]
    assert choice["path"] == "direct" or choice["buffer_bytes"] * choice["buffer_count"] <= 4 << 20


def test_a_stored_profile_becomes_a_machine_and_a_file(tmp_path: Path) -> None:
    """--from-profile simulates where it was measured, and --write keeps the description, once."""
    stored = Store(tmp_path / "store").save(make_profile())
    file = tmp_path / "host.yaml"
    result = run("--from-profile", str(stored), "--write", str(file), *QUICK)
    assert result.exit_code == 0, result.output
    assert machine.read(file).title.startswith("NVIDIA H200")
    again = run("--from-profile", str(stored), "--write", str(file), *QUICK)
    assert again.exit_code == 1 and "exists already" in again.output


def test_the_list_names_every_machine() -> None:
    """--list is quick, and says the same in JSON."""
    result = run("--list")
    assert [line.split()[0] for line in result.stdout.splitlines()] == SHIPPED
    assert [each["name"] for each in document("--list")["machines"]] == SHIPPED


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give one of MACHINE, --all"),
        (("gh200", "--all"), "give one of MACHINE, --all"),
        (("gh200", "--params", "7b", "--model", "."), "give one of them"),
        (("--all", "--write", "x.yaml"), "--write saves one machine"),
        (("gh200", "--noise", "-1"), "noise"),
        (("gh200", "--ranks", "0"), "ranks"),
    ],
)
def test_bad_usage_is_told_with_exit_2(arguments: tuple[str, ...], said: str) -> None:
    """What cannot be meant is refused before anything runs."""
    result = run(*arguments)
    assert result.exit_code == 2 and said in result.output


def test_an_unknown_machine_is_one_message_with_exit_1() -> None:
    """The known names are in it, and no traceback."""
    result = run("gh2000")
    assert result.exit_code == 1
    assert "gh200" in result.output and "Traceback" not in result.output


def test_a_wrong_file_is_one_message_with_exit_1(tmp_path: Path) -> None:
    """The file and the key are named."""
    file = tmp_path / "mine.yaml"
    text = places.config_file("machines", "cpu.yaml").read_text(encoding="utf-8")
    file.write_text(text.replace("schema: 1", "schema: 1\ncolour: red"), encoding="utf-8")
    result = run(str(file))
    assert result.exit_code == 1
    assert "mine.yaml" in result.output and "colour" in result.output
