"""The block to paste into an issue: what is in it, and what is not."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autotune_offload.cli import cli
from autotune_offload.doctor import examine
from autotune_offload.doctor.examine import Examination
from autotune_offload.doctor.pasted import MARKER, Hidden, block
from autotune_offload.doctor.self_report import Answers
from autotune_offload.records import Finding
from tests.factories import make_profile

DEVICE = {"kind": "cuda", "name": "NVIDIA H200", "count": 8, "index": 0, "pin_backend": "torch"}


def pasted_block(*findings: Finding, **said: Any) -> str:
    """The block of these findings on the host of a made profile."""
    given = make_profile()
    answers = Answers(answers={"device": {**DEVICE, "driver": "570.1", "memory_bytes": 141 << 30}} | said)
    found = Examination(findings=findings, checks=("memlock", "link"), said=answers)
    return block(found, given.host, given.software)


def finding(found: str, fix: str = "nothing") -> Finding:
    """A finding of one check."""
    return Finding(id="memlock", severity="notice", found=found, fix=fix)


def test_it_begins_with_the_marker_and_is_one_fence() -> None:
    """The marker is the first line, and all else lies between the two lines of a fence."""
    lines = pasted_block(finding("a limit")).splitlines()
    assert lines[0] == MARKER and lines[0].startswith("<!--") and lines[0].endswith("-->")
    assert lines[1] == "```text" and lines[-1] == "```"
    assert not [line for line in lines[2:-1] if line.startswith("```")]


def test_it_has_versions_device_host_and_every_finding() -> None:
    """What whoever answers asks for first."""
    given, text = make_profile(), pasted_block(finding("a limit of 8 MiB", "raise it"))
    for version in (given.software.deepspeed, given.software.torch, given.software.python):
        assert version in text
    assert "NVIDIA H200" in text and "driver 570.1" in text and "141 GiB" in text
    assert given.host.cpu_model in text
    assert "notice: memlock\n  found: a limit of 8 MiB\n  fix: raise it\n" in text
    assert "nothing found by: link" in text


def test_a_device_that_did_not_answer_is_told_with_the_reason() -> None:
    """The child's own words stand in its place."""
    given = make_profile()
    died = Answers(died="was ended by SIGSEGV while it was asked about device")
    text = block(Examination(findings=(), checks=(), said=died), given.host, given.software)
    assert "device: no answer: was ended by SIGSEGV" in text


def test_backticks_of_a_finding_do_not_end_the_fence() -> None:
    """The fence is longer than any run of them."""
    lines = pasted_block(finding("```` in a name")).splitlines()
    assert lines[1] == "`````text" and lines[-1] == "`````"


def test_the_name_of_this_host_is_not_in_it() -> None:
    """Neither the fact nor a finding gives it away."""
    here, given = platform.node(), make_profile()
    text = pasted_block(finding(f"on {here} a limit"))
    assert given.host.name not in text
    assert here in ("", "localhost") or f"on {here}" not in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/srv/ann/.cache/x is old", "~/.cache/x is old"),
        ("/srv/ann-other/x", "/srv/ann-other/x"),
        ("in /home/bob/x and /Users/c.d/y", "in /home/USER/x and /Users/USER/y"),
        ("/scratch/ann/x", "/scratch/USER/x"),
        ("ann@node7 says", "USER@HOST says"),
        ("a word like ann stays", "a word like ann stays"),
        ("node7.cluster and node71", "HOST.cluster and node71"),
        ("two\nlines", "two lines"),
    ],
)
def test_names_are_hidden(text: str, shown: str) -> None:
    """Homes, users in paths and the host; a longer name that begins alike is somebody else's."""
    hidden = Hidden(homes=frozenset({"/srv/ann"}), users=frozenset({"ann", "root", ""}), host="node7")
    assert hidden.out_of(text) == shown


def test_names_are_those_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The home in force and the user in the environment count."""
    monkeypatch.setenv("HOME", str(tmp_path / "ann"))
    monkeypatch.setenv("USER", "annabel")
    assert Hidden.here().out_of(f"{tmp_path}/ann/x, /data/annabel/y") == "~/x, /data/USER/y"


def test_no_home_at_all_hides_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user may have none."""

    def none() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", none)
    monkeypatch.setenv("USER", "annabel")
    assert Hidden.here().out_of("/data/annabel") == "/data/USER"


def test_the_verb_prints_the_block_and_fails_where_a_run_will(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else on stdout, and the exit status of doctor; beside --json it is refused."""
    worst = Finding(id="memlock", severity="will break", found="a limit", fix="raise it")
    found = Examination(findings=(worst,), checks=("memlock",))
    monkeypatch.setattr(examine, "examine", lambda config, cache: found)
    result = CliRunner().invoke(cli, ["doctor", "--markdown"])
    assert result.exit_code == 1
    assert result.stdout.splitlines()[0] == MARKER and result.stdout.endswith("```\n")
    assert "will break: memlock" in result.stdout
    both = CliRunner().invoke(cli, ["doctor", "--markdown", "--json"])
    assert both.exit_code == 2 and "name one" in both.stderr
