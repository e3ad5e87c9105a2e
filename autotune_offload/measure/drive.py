"""A folder on a drive, written and read the way DeepSpeed swaps, within bounds that are told beforehand.

Everything happens in child processes, one for each rank, in a folder of our own that goes with them. What a SIGKILL has
left is cleared by the next one, told by a lock that the system takes back from whoever is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

from autotune_offload import units
from autotune_offload.descendants import end_session
from autotune_offload.errors import BudgetError, ConfigError, MeasurementError
from autotune_offload.records import AioSetting

What = Literal["write", "read", "both"]

PREFIX = "autotune-offload-nvme-"
"""Of the folders of ours."""

_LOCK = "in-use"
START_SECONDS = 400.0
"""For the children's imports, and for a first build of DeepSpeed's async_io, which takes minutes."""

_SPARE = 1.1
"""So many times what is written must be free."""


PROGRAM = (sys.executable, "-m", "autotune_offload.measure.aio_child")
"""What each child runs."""


class Bench:
    """Files of one rank or several, whose transfers are timed together.

    Args:
        folder: where DeepSpeed would swap.
        ranks: that write and read at once.
        files: that a rank submits together.
        file_bytes: of each, a multiple of 1 MiB.
        most_written_bytes: by all of them, all in all.
        seconds: a single transfer may take, else the drive counts as hung.
    """

    def __init__(
        self,
        folder: Path,
        *,
        ranks: int = 1,
        files: int = 4,
        file_bytes: int = 32 << 20,
        most_written_bytes: int = 4 << 30,
        seconds: float = 20.0,
    ) -> None:
        self.ranks, self.files, self.file_bytes = ranks, files, file_bytes
        self.most_written_bytes, self.written_bytes = most_written_bytes, 0
        self.deepspeed = ""
        self._folder, self._seconds = folder, seconds
        self._children: list[_Child] = []

    @property
    def round_bytes(self) -> int:
        """Of one transfer of all files."""
        return self.ranks * self.files * self.file_bytes

    @property
    def kept_bytes(self) -> int:
        """On the drive while this is open: files to be read, and files to be written."""
        return 2 * self.round_bytes

    @property
    def rounds_left(self) -> int:
        """Rounds of all three transfers, two of which write, before the bound on what is written."""
        return max((self.most_written_bytes - self.written_bytes) // (2 * self.round_bytes), 0)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Bench]:
        """With children at work in a folder of our own; nothing of either is left afterwards.

        Raises:
            ConfigError: the folder is none, or cannot be written.
            BudgetError: too little is free.
            MeasurementError: files cannot be written there the way DeepSpeed does.
        """
        clear_left_behind(self._folder)
        with _own_folder(self._folder) as own, tempfile.TemporaryFile() as output:
            free = shutil.disk_usage(own).free
            if free < _SPARE * self.kept_bytes:
                raise BudgetError(
                    f"{self._folder} has {units.size(free)} free, and measuring takes {units.size(self.kept_bytes)}; "
                    "free some space, or name another folder"
                )
            try:
                for rank in range(self.ranks):
                    self._children.append(_Child(own / f"rank{rank}", self.files, self.file_bytes, output))
                for child in self._children:
                    said = child.answer(START_SECONDS)
                    self.deepspeed = str(said["ready"])
                self.written_bytes += self.round_bytes
                yield self
            finally:
                for child in self._children:
                    child.end()
                self._children.clear()

    def time(self, what: What, setting: AioSetting) -> float:
        """Seconds until the last rank is done.

        Raises:
            BudgetError: it would write more than was allowed.
            MeasurementError: it failed, hung, ended a child, or other bytes came back.
        """
        if what != "read":
            if self.written_bytes + self.round_bytes > self.most_written_bytes:
                raise BudgetError(f"{units.size(self.most_written_bytes)} were to be written at most")
            self.written_bytes += self.round_bytes
        for child in self._children:
            child.ask(what=what, setting=list(in_order(setting)))
        return max(float(child.answer(self._seconds)["seconds"]) for child in self._children)


def in_order(setting: AioSetting) -> tuple[int, int, bool, bool, int]:
    """As `aio_handle` takes them, by position in every release."""
    return (
        setting.block_bytes,
        setting.queue_depth,
        setting.single_submit,
        setting.overlap_events,
        setting.threads,
    )


def clear_left_behind(folder: Path) -> int:
    """Remove what measurements that were killed have left in `folder`; how many there were."""
    cleared = 0
    for left in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), open(left / _LOCK, "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)
            cleared += 1
    return cleared


@contextlib.contextmanager
def _own_folder(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; name one on the drive that DeepSpeed is to swap to")
    try:
        own = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
    except OSError as error:
        raise ConfigError(f"nothing can be written in {folder}: {error.strerror}") from None
    try:
        with open(own / _LOCK, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


class _Child:
    """One rank."""

    def __init__(self, folder: Path, files: int, file_bytes: int, output: IO[bytes]) -> None:
        folder.mkdir()
        self._output = output
        self._process = subprocess.Popen(
            PROGRAM,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,  # Ctrl-C is for this process, which ends the child
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.ask(folder=str(folder), files=files, file_bytes=file_bytes)

    def ask(self, **asked: Any) -> None:
        """Whatever it does with it; an answer that does not come says that it is gone."""
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any]:
        """Its next one. Raises MeasurementError where none comes, or it says what failed."""
        assert self._process.stdout is not None
        deadline, line = time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise MeasurementError(f"the drive did not answer within {seconds:g} s")
            chunk = os.read(self._process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise MeasurementError(self._last_words())
            line += chunk
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise MeasurementError(f"DeepSpeed's aio cannot be used here: {said['error']}")
        return said

    def end(self) -> None:
        """Whatever it is doing."""
        end_session(self._process.pid)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _last_words(self) -> str:
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._output.seek(0)
        lines = [line for line in self._output.read().decode(errors="replace").splitlines() if line.strip()]
        tail = f" ({lines[-1].strip()[:200]})" if lines else ""
        return f"DeepSpeed's aio ended the process that tried it with {how}{tail}"
