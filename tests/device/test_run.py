"""The command as it is typed: interrupted, killed, and from end to end, on the CPU and on a stand-in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.device.parts import PARTS
from tests import CHECKOUT, op_builds, shared_memory

SECONDS = 60.0
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_buffers_left() -> Iterator[None]:
    """Of DeepSpeed's, whose process may be killed here."""
    before = shared_memory.buffers()
    yield
    shared_memory.remove_since(before)


def _start(folder: Path, *options: str, accelerator: str | None = "cpu") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.device", "--short", "-o", str(folder), *options],
        cwd=CHECKOUT,
        env={
            **os.environ,
            **op_builds.environment(),
            **({} if accelerator is None else {"DS_ACCELERATOR": accelerator}),
            "PYTHONPATH": str(CHECKOUT),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _running(folder: Path, name: str = "") -> list[int]:
    """Processes of parts of this run: all of them, or those of one part."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "benchmarks.device.part" in words and str(folder) in words and (not name or name in words):
            found.append(int(file.parent.name))
    return found


def _wait_for(condition: Any) -> Any:
    until = time.monotonic() + SECONDS
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.05)
    assert found
    return found


def _results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return found


def test_a_killed_part_and_an_interrupted_run_lose_nothing(tmp_path: Path) -> None:
    """SIGKILL of one part makes a line, the next one goes on; Ctrl-C then ends all, with what was found on disk."""
    run = _start(tmp_path, "--parts", "here", "copies", "probes", "described", "--minutes", "5")
    try:
        [victim] = _wait_for(lambda: _running(tmp_path, "probes"))
        os.kill(victim, signal.SIGKILL)
        _wait_for(lambda: _running(tmp_path, "copies"))
        # the third is under way
        _wait_for(lambda: (tmp_path / "parts" / "copies.json").exists())
        run.send_signal(signal.SIGINT)
        said, _ = run.communicate(timeout=SECONDS)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130, said
    found = _results(tmp_path)["parts"]
    assert found["here"]["state"] == "done" and found["here"]["found"]["kind"] == "cpu"
    assert found["probes"]["state"] == "failed" and "signal 9" in found["probes"]["why"]
    assert found["copies"]["state"] in {"interrupted", "done"} and "tflops" in found["copies"]["found"]
    assert found["described"]["state"] == "not run" or found["copies"]["state"] == "done"
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "ended by signal 9" in page and "interrupted" in said
    assert _running(tmp_path) == []


def test_a_run_that_is_killed_leaves_nothing_running(tmp_path: Path) -> None:
    """Not even where it can end nothing any more; what earlier parts found was written after each."""
    run = _start(tmp_path, "--parts", "here", "probes", "--minutes", "5")
    try:
        _wait_for(lambda: _running(tmp_path, "probes"))
        run.kill()
        run.wait()
        _wait_for(lambda: not _running(tmp_path))
    finally:
        run.kill()
        run.communicate()
    assert _results(tmp_path)["parts"]["here"]["state"] == "done"


@pytest.mark.long
@pytest.mark.accelerator
def test_all_parts_run_on_a_real_device(tmp_path: Path) -> None:
    """In the short form: each comes to its end, nothing fails in any, and bits are the same."""
    run = _start(tmp_path, "--minutes", "8", accelerator=os.environ.get("DS_ACCELERATOR"))
    said, _ = run.communicate(timeout=600)
    parts = _results(tmp_path)["parts"]
    assert {name: part["state"] for name, part in parts.items()} == {part.name: "done" for part in PARTS}, (
        said
    )
    assert not [failed for part in parts.values() for failed in part["found"].get("failed", [])]
    assert {case["difference"] for case in parts["identity"]["found"]["cases"]} == {None}
    assert "cannot be shown" not in (tmp_path / "page.md").read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("--fake", "cuda")], ids=["cpu", "stand-in"])
def test_all_parts_run_from_end_to_end(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Each comes to its end and finds the same bits; page, results, machine and traces are there."""
    run = _start(tmp_path, *options, "--minutes", "20")  # a busy machine may take long
    said, _ = run.communicate(timeout=1200)
    assert run.returncode in {0, 1}, said  # times that are this short may miss what is wanted of the choice
    found = _results(tmp_path)
    ended = {name: (part["state"], part["why"]) for name, part in found["parts"].items()}
    assert ended == {part.name: ("done", None) for part in PARTS}, said
    parts = {name: part["found"] for name, part in found["parts"].items()}
    assert not [f for part in parts.values() for f in part.get("failed", [])]
    assert {case["difference"] for case in parts["identity"]["cases"]} == {None}
    assert {
        pair["bit_identical"] for pair in parts["training"]["gradients"] + parts["training"]["steps"]
    } == {True}
    ways = {way["path"] for way in parts["profiled"]["ways"]}
    assert ways == ({None, "direct", "pinned", "staged"} if options else {None, "direct"})
    assert len(list(tmp_path.glob("trace-*.json"))) == len(parts["profiled"]["ways"])
    assert (tmp_path / "machine.yaml").exists() and parts["described"]["trials"]
    failing = {v["claim"] for v in found["verdicts"] if v["verdict"] == "does not hold"}
    assert all(claim.startswith("The choice takes") for claim in failing)
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "cannot be shown" not in page and all(f"### {part.title}" in page for part in PARTS)
