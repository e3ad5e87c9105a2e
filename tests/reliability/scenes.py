"""Where faults happen: a start on a stubbed DeepSpeed, a child process, a mount of its own, a simulated machine."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from autotune_offload.api import probe as api_probe
from autotune_offload.api import profile as api_profile
from autotune_offload.described import machine as described_machine
from autotune_offload.described.clocked import Faults
from autotune_offload.described.simulated import SimulatedDevice
from autotune_offload.profiles import lookup
from autotune_offload.records import Profile
from autotune_offload.workload import default_workload
from tests.factories import make_profile
from tests.reliability.registry import NotPossible

ROOT = Path(__file__).resolve().parents[2]
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu"},
    },
}
RANK_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_PROCID")


# -- a start --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Start:
    """What a call of `initialize` led to: what DeepSpeed got, and what was said meanwhile."""

    config: Any = None
    error: BaseException | None = None
    records: list[logging.LogRecord] = field(default_factory=list)
    report: Any = None

    @property
    def warnings(self) -> list[str]:
        """Our warnings."""
        return [r.getMessage() for r in self.records if r.levelno >= logging.WARNING]

    @property
    def traced(self) -> bool:
        """Whether a traceback was shown."""
        return any(r.exc_info for r in self.records)

    def runs_untuned(self, given: Any, *words: str) -> str:
        """Checks that DeepSpeed got what the user gave, after one warning that names cause and verb."""
        assert self.error is None, f"raised {self.error!r}"
        assert self.config is given or self.config == given, f"DeepSpeed got {self.config}"
        assert len(self.warnings) == 1, f"{len(self.warnings)} warnings: {self.warnings}"
        said = self.warnings[0]
        assert "autotune-offload doctor" in said, f"no way to help is named: {said}"
        assert not self.traced, f"a traceback was shown with: {said}"
        for word in words:
            assert word in said, f'"{word}" is not in: {said}'
        return f"DeepSpeed started with the user's own configuration; one warning: {shortened(said)}"


class _Engine:
    optimizer = None


@contextlib.contextmanager
def patched(folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[pytest.MonkeyPatch]:
    """One rank with an empty cache in `folder`, and what else a fault changes."""
    with pytest.MonkeyPatch.context() as patch:
        for name in RANK_VARIABLES:
            patch.delenv(name, raising=False)
        patch.setenv("AUTOTUNE_OFFLOAD_CACHE", str(folder / "profiles"))
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        yield patch


def start(
    folder: Path,
    config: Any,
    *,
    probe: Any = None,
    environment: Mapping[str, str] | None = None,
    model: Any = None,
    **arguments: Any,
) -> Start:
    """`initialize` with DeepSpeed's own replaced by one that takes note; `probe` replaces ours, where given."""
    import deepspeed
    import torch

    from autotune_offload.api import initialize as api_initialize
    from autotune_offload.api import report as api_report

    seen = Start()
    signature = inspect.signature(deepspeed.initialize)

    def initialize(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs).arguments
        seen.config = call.get("config")
        return _Engine(), None, None, None

    initialize.__signature__ = signature  # type: ignore[attr-defined]  # what inspect.signature reads
    with patched(folder, environment) as patch, heard(seen.records):
        patch.setattr(deepspeed, "initialize", initialize)
        if probe is not None:
            patch.setattr(api_profile, "probe", probe)
        try:
            model = torch.nn.Linear(64, 64) if model is None else model
            engine, *_ = api_initialize.initialize(model=model, config=config, **arguments)
            seen.report = api_report.report(engine)
        except (Exception, KeyboardInterrupt) as error:
            seen.error = error
    return seen


def raising(error: BaseException) -> Any:
    """A probe that raises."""

    def probe(**arguments: Any) -> Profile:
        raise error

    return probe


def answering(**changes: Any) -> Any:
    """A probe that gives the profile of an H200 host for this environment, with these changes."""

    def probe(*, workload: Any, device: Any, settings: Any, **others: Any) -> Profile:
        workload = workload or default_workload()
        present = lookup.present_fingerprint(device, workload, settings)
        return make_profile(fingerprint=present, workload=workload, **changes)

    return probe


@contextlib.contextmanager
def heard(records: list[logging.LogRecord]) -> Iterator[None]:
    """What our loggers say goes into `records`."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger, handler = logging.getLogger("autotune_offload"), Handler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def shortened(text: str, most: int = 230) -> str:
    """One line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 4] + " ..."


# -- the command line, in this process ------------------------------------------------------------


def verb(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a verb; an exception that escapes is an AssertionError."""
    from click.testing import CliRunner

    from autotune_offload.cli import cli

    with patched(folder):
        done = CliRunner().invoke(cli, list(arguments), prog_name="autotune-offload")
    assert done.exception is None or isinstance(done.exception, SystemExit), f"raised {done.exception!r}"
    assert "Traceback" not in done.stderr + done.stdout
    return done.exit_code, done.stdout, done.stderr


# -- children -------------------------------------------------------------------------------------


def environment(**changes: str) -> dict[str, str]:
    """A child's: this checkout is imported, one thread, nothing of a launcher's."""
    kept = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **changes}


def child(source: str, *, before: str = "", seconds: float = 60, **changes: str) -> Any:
    """What a Python child prints, as JSON. `before` is put in front of the command by a shell."""
    command = [sys.executable, "-c", source]
    if before:
        command = ["unshare", "-m", "sh", "-ec", f'{before}\nexec "$@"', "sh", *command]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, env=environment(**changes), cwd=ROOT
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-400:]}"
    assert "Traceback" not in done.stderr, done.stderr[-400:]
    return json.loads(done.stdout.splitlines()[-1])


def as_root(what: str) -> None:
    """Raises NotPossible where this user may not do `what`."""
    if os.geteuid() != 0:
        raise NotPossible(f"only root may {what}, and this user is not")


def may_mount(folder: Path) -> None:
    """Raises NotPossible where no file system can be mounted in a namespace of its own."""
    as_root("mount a file system")
    try_it = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64k none "$0"', str(folder)]
    try:
        done = subprocess.run(try_it, capture_output=True, text=True, timeout=20)
    except OSError as error:
        raise NotPossible(f"unshare cannot be run: {error}") from error
    if done.returncode:
        raise NotPossible(f"no mounts are allowed here: {shortened(done.stderr)}")


UNPRIVILEGED = """
import os
if os.geteuid() == 0:
    os.setgroups([]); os.setgid({uid}); os.setuid({uid})
"""
"""In a child: no capabilities from here on. What is imported later may not be readable any more."""


def without_ipc_lock(source: str, *, memlock_bytes: int) -> str:
    """A program that has this memlock limit and not CAP_IPC_LOCK, and then is `source`; the user stays."""
    return (
        "import ctypes, os, resource, sys\n"
        "ctypes.CDLL(None).prctl(24, 14)\n"  # PR_CAPBSET_DROP, CAP_IPC_LOCK: in effect after an exec
        f"resource.setrlimit(resource.RLIMIT_MEMLOCK, ({memlock_bytes}, {memlock_bytes}))\n"
        f"os.execv(sys.executable, [sys.executable, '-c', {source!r}])\n"
    )


# -- described machines ---------------------------------------------------------------------------


def simulated(machine: str, faults: Faults | None = None, **arguments: Any) -> SimulatedDevice:
    """A shipped machine with faults."""
    return SimulatedDevice(described_machine.load(machine), faults=faults, **arguments)


def probed(device: SimulatedDevice, **arguments: Any) -> Profile:
    """A short probe of a described machine."""
    return api_probe.probe(**{"plan": "quick", "budget_seconds": 0.5, "device": device, **arguments})


def faked_root(folder: Path, files: Mapping[str, str]) -> Path:
    """A directory in which /proc and /sys say this."""
    for name, text in files.items():
        path = folder / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "root"


def other_threads() -> set[str]:
    """Names of the threads beside the main one."""
    return {thread.name for thread in threading.enumerate() if thread is not threading.main_thread()}
