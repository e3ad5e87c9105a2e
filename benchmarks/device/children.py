"""One part in a process of its own, which ends with all that it started, whatever ends it or the wait for it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from autotune_offload.descendants import end_session
from benchmarks.device import outcomes
from benchmarks.device.outcomes import Outcome
from benchmarks.device.scene import part_file
from tests import op_builds

CHECKOUT = Path(__file__).resolve().parents[2]
_SOFT_SHARE = 0.9
"""Of its limit after which a part begins nothing more: what it is at must come to its end."""

_LOOK_SECONDS = 0.05
_GONE_SECONDS = 5.0
_LAST_WORDS = 300


def perform(
    outcome: Outcome, folder: Path, limit_seconds: float, options: Sequence[str], python: str = sys.executable
) -> None:
    """Run one part until it ends or its time is over; `outcome` says how that went.

    Raises:
        BaseException: what interrupted the wait, once the part and all that it started are gone.
    """
    log = folder / "logs" / f"{outcome.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    part_file(folder, outcome.name).unlink(missing_ok=True)
    outcome.limit_seconds, outcome.state = limit_seconds, "interrupted"
    command = [python, "-W", "ignore", "-m", "benchmarks.device.part", outcome.name, "--folder", str(folder)]
    command += ["--seconds", f"{limit_seconds * _SOFT_SHARE:.1f}", *options]
    began = time.monotonic()
    try:
        with log.open("wb") as out:
            code = _wait(command, out.fileno(), began + limit_seconds)
        _judge(outcome, code, log)
    except OSError as error:
        outcome.state, outcome.why = "failed", f"could not be started: {error}"
    finally:
        outcome.seconds = time.monotonic() - began
        if not outcome.ended_well:  # a build that was ended leaves a lock that the next one would wait for
            op_builds.remove_stale_locks(Path(op_builds.environment()["TORCH_EXTENSIONS_DIR"]))
        outcome.found = outcomes.read(part_file(folder, outcome.name))


def _wait(command: Sequence[str], out: int, until: float) -> int | None:
    """Its exit status, negative for a signal; None where it was still running at `until`.

    It is looked at before it is reaped: until then its number is nobody else's, and its session can be ended by it.
    """
    process = subprocess.Popen(
        command,
        cwd=CHECKOUT,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={
            **os.environ,
            **op_builds.environment(),
            "PYTHONPATH": os.pathsep.join(_python_path()),
        },
    )
    ended = False
    try:
        while not ended and time.monotonic() < until:
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            if not ended:
                time.sleep(_LOOK_SECONDS)
    finally:
        end_session(process.pid)
        with contextlib.suppress(
            subprocess.TimeoutExpired
        ):  # one that hangs in a driver ends when that lets it
            process.wait(_GONE_SECONDS)
    return process.returncode if ended else None


def _python_path() -> list[str]:
    """This checkout first, so that what is measured is what lies here."""
    return [str(CHECKOUT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def _judge(outcome: Outcome, code: int | None, log: Path) -> None:
    if code == 0:
        outcome.state = "done"
    elif code is None:
        outcome.state = "out of time"
        outcome.why = f"was still running after {outcome.limit_seconds:.0f} s, and was ended"
    else:
        ended = f"ended by signal {-code}" if code < 0 else f"ended with exit status {code}"
        outcome.state, outcome.why = "failed", f"{ended}: {_last_words(log)}"


def _last_words(log: Path) -> str:
    """The last line that says something."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return said[-1][:_LAST_WORDS] if said else "it said nothing"
