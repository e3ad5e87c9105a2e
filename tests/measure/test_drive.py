"""Measuring a drive: bounds, children of every kind, and what is left afterwards. No test here times a drive."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from autotune_offload.errors import AutotuneError, BudgetError, ConfigError, MeasurementError
from autotune_offload.measure import drive
from autotune_offload.measure.drive import PREFIX, Bench, clear_left_behind, in_order
from autotune_offload.records import AioSetting

MIB = 1 << 20

GOOD = """
import json, sys
for number, line in enumerate(sys.stdin):
    asked = json.loads(line)
    print(json.dumps({"seconds": 0.5, "asked": asked} if number else {"ready": "9.9"}), flush=True)
"""
DIES = "import os; print('Assertion failed: it is full', file=__import__('sys').stderr); os.abort()"
HANGS = 'import time; print(\'{"ready": "9.9"}\', flush=True); time.sleep(100)'
REFUSES = 'input(); print(\'{"error": "OSError: files there cannot be opened with O_DIRECT"}\', flush=True)'


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has every rank run a program of the test's."""
    return lambda text: monkeypatch.setattr(drive, "PROGRAM", (sys.executable, "-c", text))


def bench(folder: Path, **given: int | float) -> Bench:
    """A small one."""
    sizes = {"files": 2, "file_bytes": MIB, "most_written_bytes": 1 << 30, **given}
    return Bench(folder, **sizes)  # type: ignore[arg-type]


def test_all_ranks_are_asked_and_the_last_one_counts(tmp_path: Path, child: Callable[[str], None]) -> None:
    """Nothing is left of their folder."""
    child(GOOD)
    with bench(tmp_path, ranks=2).opened() as opened:
        (own,) = tmp_path.glob(f"{PREFIX}*")
        assert {each.name for each in own.iterdir()} == {"in-use", "rank0", "rank1"}
        assert opened.time("both", AioSetting(threads=3)) == 0.5 and opened.deepspeed == "9.9"
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_is_bounded(tmp_path: Path, child: Callable[[str], None]) -> None:
    """Files to read once at the start, then each write; reads cost nothing."""
    child(GOOD)
    with bench(tmp_path, most_written_bytes=7 * MIB).opened() as opened:
        assert opened.written_bytes == 2 * MIB and opened.rounds_left == 1
        opened.time("read", AioSetting())
        opened.time("write", AioSetting())
        opened.time("both", AioSetting())
        assert opened.rounds_left == 0
        with pytest.raises(BudgetError, match="written at most"):
            opened.time("write", AioSetting())
    assert opened.written_bytes == 6 * MIB


@pytest.mark.parametrize(
    ("program", "error", "words"),
    [
        (DIES, MeasurementError, "ended the process that tried it with SIGABRT .*it is full"),
        (HANGS, MeasurementError, "did not answer within 0.5 s"),
        (
            REFUSES,
            MeasurementError,
            "cannot be used here: OSError: files there cannot be opened with O_DIRECT",
        ),
    ],
    ids=["aborts", "hangs", "refuses"],
)
def test_a_drive_that_cannot_be_measured_ends_in_one_sentence(
    tmp_path: Path, child: Callable[[str], None], program: str, error: type[AutotuneError], words: str
) -> None:
    """And leaves nothing, neither files nor processes."""
    child(program)
    before = {each.pid for each in psutil.Process().children()}
    with pytest.raises(error, match=words), bench(tmp_path, seconds=0.5).opened() as opened:
        opened.time("write", AioSetting())
    assert list(tmp_path.iterdir()) == []
    assert {each.pid for each in psutil.Process().children()} <= before


def test_a_folder_that_is_none_or_too_small(
    tmp_path: Path, child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told before anything is written."""
    child(GOOD)
    with pytest.raises(ConfigError, match="is no folder"), bench(tmp_path / "none").opened():
        pass
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=4 * MIB))
    with (
        pytest.raises(BudgetError, match="has 4 MiB free, and measuring takes 4 MiB"),
        bench(tmp_path).opened(),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """In words."""
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="nothing can be written"), bench(tmp_path).opened():
        pass


KILLED = """
import os, pathlib, signal, sys
from autotune_offload.measure import drive
drive.PROGRAM = (sys.executable, "-c", sys.argv[2])
with drive.Bench(pathlib.Path(sys.argv[1]), files=1, file_bytes=1 << 20).opened():
    print("open", flush=True)
    input()
"""


def test_a_measurement_that_is_killed_leaves_its_folder_to_the_next(tmp_path: Path) -> None:
    """Its children end with it; a folder that somebody still holds stays."""
    script = [sys.executable, "-c", KILLED, str(tmp_path), GOOD]
    killed, working = (
        subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)
    )
    for process in (killed, working):
        assert process.stdout is not None and process.stdout.readline() == b"open\n"
    children = psutil.Process(killed.pid).children(recursive=True)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    deadline = time.monotonic() + 30
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
        assert time.monotonic() < deadline, "a child outlives its parent"
        time.sleep(0.05)
    assert len(list(tmp_path.iterdir())) == 2
    assert clear_left_behind(tmp_path) == 1
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(PREFIX)
    working.communicate(b"\n", timeout=30)
    assert list(tmp_path.iterdir()) == []


def test_a_setting_is_handed_over_as_every_release_takes_it() -> None:
    """`aio_handle(block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)`."""
    setting = AioSetting(block_bytes=1, queue_depth=2, threads=3, single_submit=True, overlap_events=False)
    assert in_order(setting) == (1, 2, True, False, 3)
    assert json.loads(json.dumps(in_order(setting))) == [1, 2, True, False, 3]
