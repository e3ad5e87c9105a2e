"""`probe` where the environment speaks of more ranks than there are."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from autotune_offload.errors import AgreementError
from autotune_offload.ranks import group as ranks_group
from tests.ports import free_port

_PROBE = [sys.executable, "-m", "autotune_offload", "probe", "--params", "125M", "--budget", "1", "--no-save"]


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks are announced, by variables that a shell exports, and nobody else comes."""
    for name in ranks_group.ANNOUNCED:
        monkeypatch.delenv(name, raising=False)
    port = str(free_port())
    for name, value in {
        "WORLD_SIZE": "2",
        "RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }.items():
        monkeypatch.setenv(name, value)
    return


@pytest.mark.usefixtures("exported")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_probe_that_waits_for_ranks_hears_a_signal(number: signal.Signals, code: int) -> None:
    """It has said what it waits for, and ends at once."""
    process = subprocess.Popen(_PROBE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = next(line for line in process.stderr if "waiting" in line)
        before = time.monotonic()
        process.send_signal(number)
        rest = process.communicate(timeout=30)[1]
        took = time.monotonic() - before
    finally:
        process.kill()
        process.wait()
    assert "WORLD_SIZE=2 says that 2 ranks were started" in said
    assert "unset WORLD_SIZE to probe this host alone" in said
    assert process.returncode == code, rest
    assert "nothing was saved" in rest and "Traceback" not in rest
    assert took < 20  # of the 300 s for which ranks are waited


@pytest.mark.usefixtures("exported")
def test_ranks_that_never_come_are_named_with_the_way_out() -> None:
    """The variable that spoke of them, what a launcher would set, and how to go on alone."""
    with pytest.raises(AgreementError, match="WORLD_SIZE=2 says that 2 ranks were started") as refused:
        ranks_group.launched_group(0.5)
    assert "unset WORLD_SIZE to probe this host alone" in str(refused.value)


def test_every_variable_that_speaks_of_ranks_is_to_be_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launchers one inside the other leave two."""
    for name in ranks_group.ANNOUNCED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert "unset WORLD_SIZE and SLURM_STEP_NUM_TASKS" in ranks_group.alone()
    assert ranks_group.told() == "WORLD_SIZE=4 says that 4 ranks were started"
