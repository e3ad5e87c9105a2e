"""A part in its process: however it ends, what it found is kept, and nothing that it started goes on."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from benchmarks.device.children import perform
from benchmarks.device.outcomes import Outcome
from benchmarks.device.parts import PARTS, asked_for, limit_seconds

SECONDS = 30.0


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """In Python's place: leaves a file as a part does, starts a process of its own, then does what LAST says."""
    file = tmp_path / "python"
    file.write_text(
        "#!/bin/sh\n"
        f"mkdir -p {tmp_path}/parts; echo '{{\"a\": 1}}' > {tmp_path}/parts/here.json\n"
        f"sleep 600 & echo $! > {tmp_path}/grandchild\n"
        'echo "a last word" >&2\n'
        'eval "$LAST"\n'
    )
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def _outcome() -> Outcome:
    return Outcome(name="here", title="What is here")


def _gone(number: int) -> bool:
    """Whether the process has ended; init reaps it a moment after."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("last", "limit", "state", "why"),
    [
        ("exit 0", SECONDS, "done", None),
        ("exit 3", SECONDS, "failed", "ended with exit status 3: a last word"),
        ("kill -9 $$", SECONDS, "failed", "ended by signal 9: a last word"),
        ("sleep 600", 0.5, "out of time", "was still running after 0 s, and was ended"),
    ],
)
def test_however_it_ends_what_it_found_is_kept(
    interpreter: Path, monkeypatch: pytest.MonkeyPatch, last: str, limit: float, state: str, why: str | None
) -> None:
    """By itself, by a signal, or by the clock; what it has started ends with it."""
    monkeypatch.setenv("LAST", last)
    outcome = _outcome()
    perform(outcome, interpreter.parent, limit, [], python=str(interpreter))
    assert (outcome.state, outcome.why) == (state, why)
    assert outcome.found == {"a": 1} and outcome.seconds > 0
    assert _gone(int((interpreter.parent / "grandchild").read_text()))


def test_an_interrupted_wait_ends_the_part(interpreter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interruption goes on to the caller, with what was found in the outcome."""
    monkeypatch.setenv("LAST", f"kill -INT {os.getpid()}; sleep 600")
    outcome = _outcome()
    with pytest.raises(KeyboardInterrupt):
        perform(outcome, interpreter.parent, SECONDS, [], python=str(interpreter))
    assert outcome.state == "interrupted" and outcome.found == {"a": 1}
    assert _gone(int((interpreter.parent / "grandchild").read_text()))


def test_a_part_that_cannot_be_started_is_told(tmp_path: Path) -> None:
    """And the next one goes on."""
    outcome = _outcome()
    perform(outcome, tmp_path, SECONDS, [], python=str(tmp_path / "no-python"))
    assert outcome.state == "failed" and "could not be started" in str(outcome.why)


def test_what_an_earlier_run_found_is_not_this_ones(
    interpreter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is used again begins empty."""
    monkeypatch.setenv("LAST", f"rm {interpreter.parent}/parts/here.json; exit 1")
    (interpreter.parent / "parts").mkdir()
    (interpreter.parent / "parts" / "here.json").write_text('{"old": 1}')
    outcome = _outcome()
    perform(outcome, interpreter.parent, SECONDS, [], python=str(interpreter))
    assert outcome.found == {}


def test_a_part_brings_along_what_it_goes_by() -> None:
    """The device, and for training what has to be compiled; in their order."""
    assert [part.name for part in asked_for(["sweep"])] == ["here", "sweep"]
    assert [part.name for part in asked_for(["memory", "copies"])] == ["here", "build", "copies", "memory"]
    assert asked_for([part.name for part in PARTS]) == PARTS


def test_time_that_is_not_used_goes_to_all_later_parts() -> None:
    """The shares of what is left; all of it for the last one, and never more than there is."""
    whole = [limit_seconds(480.0, PARTS[index:]) for index in range(len(PARTS))]
    assert whole == sorted(whole) or whole[-1] == 480.0
    left = 480.0
    for index in range(len(PARTS)):
        left -= limit_seconds(left, PARTS[index:])
    assert abs(left) < 1e-6
    assert limit_seconds(100.0, PARTS[-1:]) == 100.0
