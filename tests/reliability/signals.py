"""Ctrl-C, SIGTERM and SIGKILL in the middle: nothing is left, and nothing waits."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune_offload.api import initialize
from autotune_offload.api import probe as api_probe
from autotune_offload.api import profile as api_profile
from autotune_offload.interruption import Terminated, raising
from autotune_offload.measure.attempts import sizes
from autotune_offload.measure.rehearsal import rehearse
from tests.factories import make_profile
from tests.reliability import devices
from tests.reliability.registry import fault
from tests.reliability.scenes import CONFIG, answering, environment, other_threads, shortened, start

_NOTHING = "no file, no child, no thread is left"


def signalled(folder: Path, number: int, command: list[str], when: str, **changes: str) -> tuple[int, str]:
    """Exit code and stderr of a child that got a signal once it had written `when`; nothing may be left of it."""
    temporary = folder / "tmp"
    temporary.mkdir()
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(TMPDIR=str(temporary), AUTOTUNE_OFFLOAD_CACHE=str(folder / "profiles"), **changes),
    )
    assert process.stderr is not None
    said = ""
    try:
        for line in process.stderr:
            said += line
            if when in line:
                break
        time.sleep(0.3)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        said += process.communicate(timeout=30)[1]
    finally:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive, f"children are left: {alive}"
    left = [str(path) for place in (temporary, folder / "profiles") for path in place.rglob("*.tmp")]
    assert not left and not any(temporary.iterdir()), f"files are left: {left or list(temporary.iterdir())}"
    assert "Traceback" not in said, shortened(said)
    return process.returncode, said


_PROBE = [sys.executable, "-m", "autotune_offload", "probe", "--budget", "60", "--refresh"]


@fault(
    area="signals",
    name="Ctrl-C in autotune-offload probe",
    injected="SIGINT to a real process that measures",
    expected="exit 130 and one line; " + _NOTHING,
)
def _(folder: Path) -> str:
    code, said = signalled(folder, signal.SIGINT, _PROBE, "measuring this host")
    assert code == 130 and "interrupted; nothing was saved" in said
    return f"exit {code}: {said.splitlines()[-1]}"


@fault(
    area="signals",
    name="SIGTERM in autotune-offload probe",
    injected="SIGTERM to a real process that measures",
    expected="exit 143 and one line; " + _NOTHING,
)
def _(folder: Path) -> str:
    code, said = signalled(folder, signal.SIGTERM, _PROBE, "measuring this host")
    assert code == 143 and "terminated; nothing was saved" in said
    return f"exit {code}: {said.splitlines()[-1]}"


_LIBRARY = """
import sys
from autotune_offload import probe
def said(what, done):
    print("measuring", what, file=sys.stderr, flush=True)
probe(budget_seconds=60, progress=said)
"""


@fault(
    area="signals",
    name="SIGTERM in a library call",
    injected="SIGTERM to a real process inside probe()",
    expected="it ends by the signal as it would have without us; " + _NOTHING,
)
def _(folder: Path) -> str:
    code, _ = signalled(folder, signal.SIGTERM, [sys.executable, "-c", _LIBRARY], "measuring")
    assert code == -signal.SIGTERM, code
    return "ended by SIGTERM"


_REHEARSES = f"""
import sys
from autotune_offload.interruption import cleaned_up
from autotune_offload.measure.attempts import sizes
from autotune_offload.measure.rehearsal import rehearse
from tests.reliability import devices
with cleaned_up():
    print("rehearsing", file=sys.stderr, flush=True)
    rehearse(devices.Honest(), sizes(1 << 20), seconds=300, made_by="{devices.HERE}:NeverAnswers")
"""


@fault(
    area="signals",
    name="SIGTERM while a child process hangs in a copy",
    injected="SIGTERM to a real process in the middle of a rehearsal",
    expected="it ends by the signal, and the child with it",
)
def _(folder: Path) -> str:
    code, _ = signalled(folder, signal.SIGTERM, [sys.executable, "-c", _REHEARSES], "rehearsing")
    assert code == -signal.SIGTERM, code
    return "ended by SIGTERM; the child is gone"


@fault(
    area="signals",
    name="Ctrl-C while a child process hangs in a copy",
    injected="SIGINT to this process half a second into a rehearsal",
    expected="KeyboardInterrupt comes through, and the child is gone",
)
def _(folder: Path) -> str:
    own = psutil.Process()
    before = own.children(recursive=True), own.num_fds()
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        rehearse(devices.Honest(), sizes(1 << 20), seconds=60, made_by=f"{devices.HERE}:NeverAnswers")
    timer.join()
    assert (own.children(recursive=True), own.num_fds()) == before
    return "KeyboardInterrupt; no child, no descriptor is left"


@fault(
    area="signals",
    name="Ctrl-C in the middle of a library call",
    injected="SIGINT to this process while paths are tried, on the real CPU device",
    expected="KeyboardInterrupt comes through; no thread, no descriptor; the collector is as before",
)
def _(folder: Path) -> str:
    own = psutil.Process()
    api_probe.probe(plan="quick", budget_seconds=0.3)  # torch's own threads and files are there from now on
    before = other_threads(), own.num_fds(), gc.isenabled()

    def progress(what: str, done: float) -> None:
        if done > 0.6:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        api_probe.probe(plan="quick", budget_seconds=0.5, progress=progress)
    assert (other_threads(), own.num_fds(), gc.isenabled()) == before
    return "KeyboardInterrupt; nothing is left"


@fault(
    area="signals",
    name="Ctrl-C in initialize",
    injected="KeyboardInterrupt out of the probe",
    expected="it is the user's wish and no failure of ours: it comes through, and nothing is warned of",
)
def _(folder: Path) -> str:
    def probe(**arguments: Any) -> Any:
        raise KeyboardInterrupt

    seen = start(folder, CONFIG, probe=probe)
    assert isinstance(seen.error, KeyboardInterrupt) and seen.warnings == [] and seen.config is None
    return "KeyboardInterrupt; DeepSpeed was not called"


@fault(
    area="signals",
    name="a program with a SIGTERM handler of its own",
    injected="SIGTERM to this process inside a start, with such a handler set",
    expected="the program's handler is called, and is still there afterwards",
)
def _(folder: Path) -> str:
    called: list[int] = []

    def handler(number: int, frame: Any) -> None:
        called.append(number)

    answer = answering()

    def probe(**arguments: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return answer(**arguments)

    before = signal.signal(signal.SIGTERM, handler)
    try:
        seen = start(folder, CONFIG, probe=probe)
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert called == [signal.SIGTERM] and seen.error is None
    return "its handler was called once, and the run went on"


@fault(
    area="signals",
    name="SIGTERM is as before after a call",
    injected="a start without any signal",
    expected="the disposition that the program had",
)
def _(folder: Path) -> str:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        start(folder, CONFIG, probe=answering())
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with pytest.raises(Terminated), raising():
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    return "SIG_DFL before and after"


@fault(
    area="signals",
    name="a start in another thread than the main one",
    injected="initialize in a worker thread, where no handler may be set",
    expected="it works as in the main thread",
)
def _(folder: Path) -> str:
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api_profile, "probe", answering())
        patch.setenv("AUTOTUNE_OFFLOAD_CACHE", str(folder / "profiles"))
        thread = threading.Thread(target=lambda: found.append(initialize.tune_config(CONFIG)))
        thread.start()
        thread.join(60)
    assert found and found[0]["zero_optimization"]["offload_param"]["pin_memory"] is True
    return "tuned"


@fault(
    area="signals",
    name="SIGKILL in the middle of a probe",
    injected="kill -9 to a real process that measures, then a start",
    expected="nothing that the next start would wait for",
)
def _(folder: Path) -> str:
    process = subprocess.Popen(
        _PROBE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(AUTOTUNE_OFFLOAD_CACHE=str(folder / "profiles")),
    )
    assert process.stderr is not None
    try:
        next(line for line in process.stderr if "measuring this host" in line)
    finally:
        process.kill()
        process.communicate()
    before = time.monotonic()
    seen = start(folder, CONFIG, probe=answering())
    assert seen.error is None and seen.report.profile is not None
    return f"the next start took {time.monotonic() - before:.1f} s with a stubbed probe"


@fault(
    area="signals",
    name="the reader of the output goes away",
    injected="autotune-offload show into a pipe whose other end is closed",
    expected="quiet: no traceback",
)
def _(folder: Path) -> str:
    from autotune_offload.profiles.store import Store

    Store(folder / "profiles").save(make_profile())
    process = subprocess.Popen(
        [sys.executable, "-m", "autotune_offload", "show"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(AUTOTUNE_OFFLOAD_CACHE=str(folder / "profiles")),
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    said = process.stderr.read().decode()
    process.wait(60)
    process.stderr.close()
    assert "Traceback" not in said, shortened(said)
    return f"exit {process.returncode}, {'nothing' if not said else shortened(said)} on stderr"
