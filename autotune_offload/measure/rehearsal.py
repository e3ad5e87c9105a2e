"""Tries in a child process what could hang this one for ever, or end it.

A copy that never completes blocks in the driver, where no exception and no signal handler reaches, and
DeepSpeed's native pin backend aborts the process where it cannot lock. So page-locking and copying are tried
in a child first, size by size, and this process goes no further than the child came. The child is a new
interpreter, not a fork: it has a context of its own on the device and shares nothing with this process.

Where nothing can hang or abort (the CPU, unless the native backend is chosen), no child is started.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from autotune_offload.descendants import end_session
from autotune_offload.errors import DeviceError
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.machine.device import Device
from autotune_offload.measure.attempts import Said, attempts

START_SECONDS = 60.0
"""For the child's imports and its context on the device. They take seconds; this process has just read the same
files."""

BUILD_SECONDS = 300.0
"""The same where DeepSpeed compiles its native pin backend first, which took two minutes on two cores."""


_GONE_SECONDS = 2.0
"""How long a killed child is waited for: one that is stuck in the driver goes when the driver lets it."""

_OWN = "autotune_offload.machine.accelerator:AcceleratorDevice"
_PROGRAM = (
    "import json, sys; given = json.load(sys.stdin); sys.path[:] = given['path']; "
    "from autotune_offload.measure import rehearsal; rehearsal.perform(given)"
)
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG in linux/prctl.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """How far page-locking went: the largest block that was locked and copied, and why no larger one was.

    `reason` is None where all that was asked for went well.
    """

    largest_bytes: int
    reason: str | None = None


def needed(device: Device) -> bool:
    """Whether an operation on this device could hang or end the process."""
    return not device.synchronous or _native(device)


def _native(device: Device) -> bool:
    return device.identity.pin_backend.startswith("native")


def rehearse(
    device: Device,
    blocks: Sequence[int],
    *,
    seconds: float,
    whole_bytes: int = 0,
    made_by: str = _OWN,
) -> Rehearsed | None:
    """Lock and copy blocks of these sizes in bytes where it does no harm; None where that proves nothing.

    Args:
        device: what this process will use. A described one is tried on its twin.
        blocks: rising sizes.
        seconds: for all of it, the child's start not counted.
        whole_bytes: a block that the model really needs, tried after the others as far as the time allows; of such
            large ones only a piece is copied.
        made_by: "module:callable" that makes the child's device, called with `index`.

    Raises:
        DeviceError: the device does not answer at all.
    """
    if not needed(device):
        return None
    twin = device.twin()
    if twin is not None:
        return _followed(attempts(twin, blocks, whole_bytes, seconds), device)
    if made_by == _OWN and not (isinstance(device, AcceleratorDevice) and device.deepspeeds_own):
        return None  # another process could not make the same device
    try:
        with _child(device, blocks, whole_bytes, seconds, made_by) as told:
            return _followed(told, device)
    except OSError as error:
        return Rehearsed(largest_bytes=0, reason=f"no child process could be started to try it in: {error}")


def _followed(told: Iterator[Said], device: Device) -> Rehearsed | None:
    """What the words of a rehearsal add up to."""
    step: Said = {"next": "start", "bytes": 0}
    largest = 0
    for said in told:
        if "next" in said:
            step = said
        elif "well" in said:
            largest = said["well"]
        elif said["end"] == "done":
            return Rehearsed(largest_bytes=largest)
        elif said["end"] == "pin":
            return Rehearsed(largest_bytes=largest, reason=said["error"])
        elif step["next"] in ("start", "answer") and said["end"] == "error":
            return None  # what raises does so here, too, and is told there
        else:
            return _ended(step, said, largest, device)
    raise AssertionError("a rehearsal ends with its outcome")


def _ended(step: Said, said: Said, largest: int, device: Device) -> Rehearsed:
    how, kind = said["error"], device.identity.kind
    if step["next"] == "start" and _native(device):
        why = f"DeepSpeed's native pin backend {how}; a killed build may have left its lock behind"
        return Rehearsed(largest_bytes=0, reason=f"{why}, which `autotune-offload doctor` finds")
    if step["next"] == "start":
        raise DeviceError(f"the {kind} device could not be started in a child process: {how}")
    if step["next"] == "answer":
        raise DeviceError(
            f"the {kind} device does not answer: a copy of {step['bytes']:,} bytes {how}; look at the "
            "kernel's log (dmesg) and the driver, and reset the device"
        )
    what = "page-locking" if step["next"] == "lock" else "copying page-locked memory of"
    return Rehearsed(largest_bytes=largest, reason=f"{what} {step['bytes']:,} bytes {how}")


# -- the child, seen from here --------------------------------------------------------------------


@contextlib.contextmanager
def _child(
    device: Device, blocks: Sequence[int], whole_bytes: int, seconds: float, made_by: str
) -> Iterator[Iterator[Said]]:
    """The words of a child process, which is gone at the end whatever it was doing."""
    start_seconds = BUILD_SECONDS if _native(device) else START_SECONDS
    mine, theirs = os.pipe()
    its_life, our_life = os.pipe()
    with (
        open(mine, "rb", buffering=0) as pipe,
        open(our_life, "wb", buffering=0),
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as compilers,  # a killed one leaves its files
    ):
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(theirs, its_life),
                start_new_session=True,  # Ctrl-C is for this process, which ends the child
                env={"DS_ACCELERATOR": device.identity.kind, **os.environ, "TMPDIR": compilers},
            )
        finally:
            os.close(theirs)
            os.close(its_life)
        try:
            given = {
                "path": sys.path,
                "made_by": made_by,
                "index": device.identity.index,
                "blocks": list(blocks),
                "whole_bytes": whole_bytes,
                "seconds": seconds,
                "pipe": theirs,
                "life": its_life,
                "life_seconds": math.ceil(start_seconds + seconds + _GONE_SECONDS),
            }
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # type: ignore[union-attr]  # PIPE
                stdin.write(json.dumps(given).encode())
            yield _words(process, pipe, output, start_seconds, seconds)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    end_session(process.pid)
    if process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GONE_SECONDS)


def _words(
    process: subprocess.Popen[bytes], pipe: IO[bytes], output: IO[bytes], start_seconds: float, seconds: float
) -> Iterator[Said]:
    """Each line as it comes; the last one says how it ended, whoever could not say so itself."""
    allowed, deadline, rest = start_seconds, time.monotonic() + start_seconds, b""
    started = False
    while True:
        ready, _, _ = select.select([pipe], [], [], max(deadline - time.monotonic(), 0.0))
        if not ready:
            yield {"end": "hung", "error": f"did not complete within {allowed:g} s, and was given up"}
            return
        chunk = pipe.read(1 << 16)
        if not chunk:
            yield {"end": "died", "error": _last_words(process, output)}
            return
        if not started:
            started, allowed, deadline = True, seconds, time.monotonic() + seconds
        *lines, rest = (rest + chunk).split(b"\n")
        yield from map(json.loads, lines)


def _last_words(process: subprocess.Popen[bytes], output: IO[bytes]) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GONE_SECONDS)
    code = process.returncode
    how = f"with {signal.Signals(-code).name}" if code and code < 0 else f"with exit code {code}"
    output.seek(0)
    lines = [line for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    return f"ended the child process that tried it {how}" + (f" ({lines[-1].strip()[:200]})" if lines else "")


# -- the child itself -----------------------------------------------------------------------------


def perform(given: dict[str, Any]) -> None:
    """The child's whole life: try, say each step into the pipe, go. It does not outlive its parent."""
    threading.Thread(target=_end_with_parent, args=(given["life"],), daemon=True).start()
    signal.alarm(given["life_seconds"])
    with open(given["pipe"], "wb", buffering=0) as pipe:
        for said in _steps(given):
            pipe.write(json.dumps(said).encode() + b"\n")
        os._exit(0)  # a device's own clean-up may hang as well


def _end_with_parent(life: int) -> None:
    """Wait for the parent's end of a pipe to close, which it does however the parent ends."""
    os.read(life, 1)
    end_session(os.getpid())  # compilers that it has started, and itself


def _end_at_once_with_parent() -> None:
    """By the kernel, from where a thread of this process may not run again: in a driver that holds it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, int(signal.SIGKILL))


def _steps(given: dict[str, Any]) -> Iterator[Said]:
    module, _, name = given["made_by"].partition(":")
    try:
        device = getattr(importlib.import_module(module), name)(index=given["index"])
        if _native(device):
            device.why_not_pinned()  # compiles the backend
    except Exception as error:
        yield {"end": "error", "error": f"{error}"}
        return
    _end_at_once_with_parent()
    yield from attempts(device, given["blocks"], given["whole_bytes"], given["seconds"])
