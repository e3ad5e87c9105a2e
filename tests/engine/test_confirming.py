"""Real training in which paths take turns: the same bits as DeepSpeed alone, and the best one stays."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune_offload.engine.visible import GAIN, SECONDS, SWITCHES
from autotune_offload.machine.ranges import PREFIX
from tests import CHECKOUT
from tests.engine.confirming import CASES
from tests.matrix.__main__ import environment
from tests.ports import free_port

OWN, STORED, BEST = "DeepSpeed's own code", "with the cast on the device", "direct with the cast on the host"

pytestmark = pytest.mark.slow


def started(folder: Path, rank: int, ranks: int, port: int) -> subprocess.Popen[str]:
    """One process of the driver."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.engine.confirming", str(folder)],
        env=environment(None, rank, ranks, port),
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For what the monitor and the profiler write."""
    return tmp_path_factory.mktemp("confirming")


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, Any]:
    """Every case, and a run that is watched, in one process."""
    process = started(folder, 0, 1, free_port())
    out, problems = process.communicate(timeout=900)
    assert process.returncode == 0, problems[-4000:]
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def results(said: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each case."""
    found: dict[str, dict[str, Any]] = said["results"]
    return found


@pytest.mark.parametrize("case", CASES)
def test_training_is_the_same_to_the_bit_through_every_switch(
    results: dict[str, dict[str, Any]], case: str
) -> None:
    """Gradients, weights, losses, overflows, loss scales: with accumulation, clipping, and from a checkpoint."""
    found = results[case]
    assert found["difference"] is None
    assert found["why_not"] is None and found["left_to_deepspeed"] == 0
    assert (found["overflows"] > 5) == (case == "fp16 overflow")
    assert len(set(found["carried"])) == 4


@pytest.mark.parametrize("case", CASES)
def test_a_stored_choice_that_is_wrong_is_left_for_the_best(
    results: dict[str, dict[str, Any]], case: str
) -> None:
    """Within five rounds; DeepSpeed's own code is in every round, and what was slower is remembered."""
    found = results[case]
    stored = found["carried"].index(next(name for name in found["carried"] if name.endswith(STORED)))
    assert stored < 4
    assert not [name for name in found["carried"][4 * 5 :] if name.endswith(STORED)]
    assert found["carriers"] == [found["winner"]] and found["switches"] == 1
    assert ("staged" if case == "late" else BEST) in found["winner"]
    assert found["carried"].count(OWN) == found["rounds"] == 6
    assert len(found["wrong"]) == 2


@pytest.mark.usefixtures("said")
def test_the_monitor_gets_what_an_accumulation_took_the_gain_and_the_switches(folder: Path) -> None:
    """As DeepSpeed's own numbers, by samples; the gain once there is one."""
    rows = {
        label: list(csv.reader((folder / "job" / f"{label.replace('/', '_')}.csv").open(encoding="utf-8")))
        for label in (SECONDS, GAIN, SWITCHES)
    }
    assert rows[SECONDS][0] == ["step", "seconds"]
    assert {float(value) for _, value in rows[SECONDS][1:]} == {2 * 2.0, 2 * 1.0}
    assert [int(samples) for samples, _ in rows[SWITCHES][1:]] == [8 * step for step in range(6)]
    assert {float(value) for _, value in rows[GAIN][1:]} == {2.0}


def test_a_trace_shows_who_carries_and_what_is_waited_for(said: dict[str, Any]) -> None:
    """As the profiler reads it: in each of two micro-steps all leaves, and is waited for, in the epilogue."""
    epilogue = f"{PREFIX}epilogue"
    micro_step = [[epilogue], [epilogue, f"{PREFIX}{BEST}"], [epilogue, f"{PREFIX}wait for {BEST}"]]
    assert said["ranges"] == 2 * micro_step


@pytest.mark.usefixtures("said")
def test_what_ran_can_be_written_without_a_profiler(folder: Path) -> None:
    """Six steps of two micro-steps: the epilogue, in it who carries, and the wait."""
    document = json.loads((folder / "run.json").read_text("utf-8"))
    complete = [event for event in document["traceEvents"] if event["ph"] == "X"]
    epilogues = [event for event in complete if event["name"] == "epilogue"]
    waits = [event for event in complete if event["name"].startswith("wait for ")]
    assert len(epilogues) == len(waits) == 6 * 2
    for epilogue, wait in zip(epilogues, waits, strict=True):
        assert epilogue["ts"] <= wait["ts"]
        assert wait["ts"] + wait["dur"] <= epilogue["ts"] + epilogue["dur"] + 1e-3
    assert {event["name"] for event in complete} >= {OWN, BEST}


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_with_delays_of_their_own_all_finish(tmp_path: Path, count: int) -> None:
    """Nobody waits for another, whatever each concludes; they train the same weights."""
    port = free_port()
    processes = [started(tmp_path, rank, count, port) for rank in range(count)]
    problems = [process.communicate(timeout=600)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * count, problems
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(count)]
    assert [(rank["why_not"], rank["difference"]) for rank in ranks] == [(None, None)] * count
    assert all(rank["concluded"] and rank["rounds"] <= 5 for rank in ranks)
