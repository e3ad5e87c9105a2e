"""`probe --nvme` and what `apply` makes of it, with children that only pretend to write."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from autotune_offload.cli import cli, shapes
from autotune_offload.measure import drive
from autotune_offload.profiles.store import Store
from tests.cli.json_schema import problems
from tests.factories import make_profile

CHILD = """
import json, sys
for number, line in enumerate(sys.stdin):
    asked = json.loads(line)
    if not number:
        print(json.dumps({"ready": "0.19.8"}), flush=True)
        continue
    block, depth, single, overlap, threads = asked["setting"]
    print(json.dumps({"seconds": 0.8 / min(depth, 32)}), flush=True)
"""
DIES = "import os; os.abort()"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of its own; and children of the test's."""
    monkeypatch.setenv("AUTOTUNE_OFFLOAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(drive, "PROGRAM", (sys.executable, "-c", CHILD))
    return tmp_path / "cache"


def run(*arguments: object) -> Result:
    """The command line."""
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def test_it_prints_a_table_the_reason_and_a_section_to_paste(tmp_path: Path) -> None:
    """What will be written is said before it is; nothing of it stays."""
    result = run("probe", "--nvme", tmp_path, "--budget", "2")
    assert result.exit_code == 0, result.output
    assert "4 GiB are written at most" in result.stderr and "apply" in result.stderr
    assert " for all" in result.stdout or "as they come" in result.stdout
    section = json.loads(result.stdout[result.stdout.index("{") :])
    assert section["aio"]["queue_depth"] == 32 and section["aio"]["intra_op_parallelism"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_its_document_is_as_the_schema_says(tmp_path: Path) -> None:
    """One on stdout, with the section in it."""
    result = run("probe", "--nvme", tmp_path, "--budget", "2", "--json", "--no-save")
    document = json.loads(result.stdout)
    assert document["aio"]["queue_depth"] == 32 and document["drive"]["gain"] == pytest.approx(4, rel=0.02)
    assert list(problems(shapes.schema("probe"), document, closed=True)) == []
    assert [path.name for path in tmp_path.iterdir()] == []


@pytest.mark.parametrize("why", ["dies", "no folder"])
def test_what_cannot_be_measured_ends_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """With exit code 1, and no file."""
    monkeypatch.setattr(drive, "PROGRAM", (sys.executable, "-c", DIES))
    result = run("probe", "--nvme", tmp_path / "none" if why == "no folder" else tmp_path)
    said = [line for line in result.stderr.splitlines() if line.startswith("Error")]
    assert result.exit_code == 1 and len(said) == 1
    assert ("is no folder" if why == "no folder" else "SIGABRT") in said[0]
    assert "Traceback" not in result.output and list(tmp_path.iterdir()) == []


def applied(tmp_path: Path, folder: Path, **zero: Any) -> Any:
    """`apply --json` on a configuration that swaps to `folder`."""
    where = {"device": "nvme", "nvme_path": str(folder)}
    file = tmp_path / "ds.json"
    section = {"stage": 3, "offload_optimizer": where, "offload_param": where, **zero}
    file.write_text(json.dumps({"zero_optimization": section}))
    result = run("apply", file, "--json", "--profile", Store().files()[0])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_apply_writes_what_was_measured_of_the_drive(tmp_path: Path, cache: Path) -> None:
    """And the sizes that follow from model and memory; without a measured drive, the command that measures."""
    Store().save(make_profile())
    before = applied(tmp_path, tmp_path)
    assert "aio" not in before["config"]
    assert any("probe --nvme" in notice for notice in before["notices"])
    run("probe", "--nvme", tmp_path, "--budget", "2")
    after = applied(tmp_path, tmp_path)
    assert after["config"]["aio"]["queue_depth"] == 32
    assert "buffer_count" in after["config"]["zero_optimization"]["offload_optimizer"]
    assert {change["key"] for change in after["changes"]} >= {"aio.queue_depth", "aio.block_size"}
