"""The step in `show` and `explain`."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from autotune_offload.cli import cli
from autotune_offload.profiles.store import Store
from autotune_offload.records import Profile
from tests.factories import make_profile


def said(verb: str, profile: Profile, folder: Path, *arguments: str) -> str:
    """What a verb prints of a profile, in one line."""
    path = Store(folder).save(profile)
    result = CliRunner().invoke(cli, [verb, str(path), "--cache", str(folder), *arguments])
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def test_show_and_explain_tell_the_step(tmp_path: Path) -> None:
    """The decision, its reasons, what it was compared with, and the parts; `show` also what was timed."""
    for verb in ("show", "explain"):
        text = said(verb, make_profile(), tmp_path)
        assert "Optimizer step: one compiled pass with 8 threads" in text
        assert "should take 6.30 ms a step" in text and "DeepSpeed's own: scale gradients" in text
        assert ("pass, 8 threads" in text) == (verb == "show")


def test_an_older_profile_says_that_no_step_was_measured(tmp_path: Path) -> None:
    """And how to measure it."""
    for verb in ("show", "explain"):
        text = said(verb, make_profile(step=None, step_rates=None), tmp_path)
        assert "no step was measured" in text and "probe --refresh" in text


def test_the_documents_hold_it(tmp_path: Path) -> None:
    """`show --json` as the profile has it, `explain --json` with verdicts and parts; null in an older one."""
    shown = json.loads(said("show", make_profile(), tmp_path, "--json"))
    assert shown["step"]["threads"] == 8 and shown["step_rates"]["passes"]
    explained = json.loads(said("explain", make_profile(), tmp_path, "--json"))["step"]
    assert explained["gain"] > 10 and len(explained["alternatives"]) == 4
    assert set(explained["parts_seconds"]) == {"DeepSpeed's own", "chosen"}
    old = make_profile(step=None, step_rates=None)
    assert json.loads(said("explain", old, tmp_path, "--json"))["step"] is None
