"""What torch, DeepSpeed and the device say of themselves: a child that dies costs no answer before that."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time
from pathlib import Path

import pytest

from autotune_offload.doctor.self_report import Answers, ask

WRONG = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1.5}, "train_batch_size": "auto"}


def module(folder: Path, name: str, body: str) -> None:
    """A module of that name which is found before the real one."""
    (folder / f"{name}.py").write_text(body)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What this very machine says, with a config to judge and another torch in the working directory."""
    cwd = Path.cwd()
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    module(elsewhere, "torch", "raise SystemExit('the wrong torch')")
    try:
        os.chdir(elsewhere)
        return ask(config=WRONG, cache=elsewhere / "cache")
    finally:
        os.chdir(cwd)


def test_a_healthy_machine_answers_everything(healthy: Answers) -> None:
    """No error, no death, and a module in the working directory is not taken for the real one."""
    assert (dict(healthy.errors), healthy.died) == ({}, None)
    told = {
        "torch",
        "deepspeed",
        "config",
        "compiler",
        "host_passes",
        "device",
        "native_pins",
        "link",
        "profile",
    }
    assert set(healthy.answers) == told
    assert set(healthy.answers["host_passes"]) == {"adam", "widen"}
    assert healthy.answers["deepspeed"] == importlib.metadata.version("deepspeed")
    assert healthy.answers["torch"]["threads"] >= 1


def test_the_parsers_refusal_is_one_sentence_a_key(healthy: Answers) -> None:
    """The dotted key, the value and the parser's own words; batch sizes that are "auto" are not judged."""
    (sentence,) = healthy.answers["config"]
    assert sentence.startswith("zero_optimization.reduce_bucket_size is 1.5: ")
    assert "\n" not in sentence


def test_an_import_that_fails_is_an_error_and_the_rest_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed's own message comes through, and torch still answers."""
    module(tmp_path, "deepspeed", "raise ImportError('libcudart.so.11: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = ask()
    assert "libcudart.so.11" in found.errors["deepspeed"]
    assert "threads" in found.answers["torch"]
    assert found.died is None


def test_a_library_that_takes_the_process_down_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal, the question and the last line on stderr; nothing of it reaches this process."""
    module(tmp_path, "deepspeed", "import os, sys\nsys.stderr.write('assertion failed: x\\n')\nos.abort()")
    module(tmp_path, "torch", "class version: cuda = hip = None\ndef get_num_threads(): return 4")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = ask()
    assert found.died is not None
    assert "SIGABRT while it was asked about deepspeed; its last words: assertion failed: x" in found.died
    assert found.answers["torch"]["threads"] == 4


def test_a_library_that_hangs_is_ended_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is what it started: nothing is waited for longer."""
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    module(tmp_path, "torch", child)
    monkeypatch.syspath_prepend(str(tmp_path))
    started = time.monotonic()
    found = ask(deadline_seconds=1.0)
    assert time.monotonic() - started < 10
    assert found.died is not None
    assert found.died.startswith("did not answer within 1 s and was ended while it was asked about torch")


def test_a_child_that_cannot_be_started_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that this user may not run."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert str(ask().died).startswith("could not be started: ")


def test_what_libraries_print_is_not_taken_for_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed logs to stdout at import."""
    module(tmp_path, "torch", "print('{\"answer\": 1}')\nraise ImportError('none here')")
    module(tmp_path, "deepspeed", "raise ImportError('no torch')")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = ask()
    assert "torch" not in found.answers
    assert found.errors["torch"] == "ImportError: none here"
