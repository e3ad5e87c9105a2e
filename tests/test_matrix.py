"""Older versions of DeepSpeed, where `make matrix` has installed them, and the matrix itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from autotune_offload.upstream import STOCK_SEQUENCES, stock_sequence
from tests.matrix.__main__ import CHECKOUT, GROUPS, HALF, STAGES, SUMS, VERSIONS, installed, run, verdict


@pytest.mark.matrix
@pytest.mark.parametrize("version", ["0.15.4", "0.16.9"])
def test_an_older_deepspeed_trains_the_same_to_the_bit(version: str) -> None:
    """One with the bounce buffer in its gradient path, and one without."""
    if not installed(version):
        pytest.skip(f"DeepSpeed {version} is not in .cache/matrix; `make matrix` installs it")
    results = run(version, GROUPS)
    assert [(result["case"], result["difference"]) for result in results if result["difference"]] == []
    assert {result["group"] for result in results if not result["stock_failed"]} == set(GROUPS)


@pytest.mark.long
def test_stages_1_and_2_train_the_same_and_as_plain_torch_adds_up() -> None:
    """On the installed version: with the flag and without, and against gradients that are added up by hand."""
    results = run(None, [SUMS, STAGES])
    assert [(result["case"], result["difference"]) for result in results if result["difference"]] == []
    assert {result["group"] for result in results if not result["stock_failed"]} == {SUMS, STAGES}


@pytest.mark.parametrize(
    ("results", "cell"),
    [
        ([], "-"),
        ([{"difference": None, "stock_failed": None}] * 3, "ok 3"),
        (
            [{"difference": None, "stock_failed": None}, {"difference": None, "stock_failed": "x"}],
            "ok 1, n/a 1",
        ),
        ([{"difference": None, "stock_failed": None}, {"difference": "loss"}], "1 DIFFER"),
    ],
)
def test_a_cell_of_the_table_says_what_was_found(results: list[dict[str, object]], cell: str) -> None:
    """A difference is never hidden by what is the same."""
    assert verdict(results) == cell


def test_half_of_the_versions_has_every_way_to_move_a_gradient() -> None:
    """Together with the newest, which the default tests train on."""
    assert set(HALF) < set(VERSIONS) and len(HALF) == len(VERSIONS) // 2
    versions = [tuple(map(int, version.split("."))) for version in (*HALF, VERSIONS[-1])]
    assert {stock_sequence((a, b, c)).name for a, b, c in versions} == {s.name for s in STOCK_SEQUENCES}


SCRIPT = """
import sys
from tests.matrix import __main__ as matrix
matrix.install = lambda version: None  # the one that is installed runs in its place
sys.argv = ["matrix", "0.0.0", "--groups", "bf16", "fp16"]
sys.exit(matrix.main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_matrix_that_is_ended_leaves_no_process(number: signal.Signals) -> None:
    """Whoever ends it waits for nothing, and finds nothing at work afterwards."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    matrix = subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment, stderr=subprocess.DEVNULL)
    itself = psutil.Process(matrix.pid)
    _until(lambda: len(itself.children()) == 2)
    children = itself.children(recursive=True)
    matrix.send_signal(number)
    assert matrix.wait(30) not in {0, 1} or number == signal.SIGINT
    _until(lambda: not any(child.is_running() for child in children))


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "still not so after 60 s"
        time.sleep(0.05)
