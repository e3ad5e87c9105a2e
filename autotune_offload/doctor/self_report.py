"""What torch, DeepSpeed and the device say of themselves, asked in a process of its own.

A library that does not match its driver can take a process down, and a device that hangs never answers.
The child writes one line of JSON before and after each question, so what it said before it died counts.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from autotune_offload.descendants import end_session, run_in_session

DEADLINE_SECONDS = 120.0
"""Longer than any import or driver start that was seen (40 s on a loaded host of two cores)."""

_COMPILE_SECONDS = 30.0
_BUILD = "TORCH_EXTENSIONS_DIR"
_KILLED_SECONDS = 5.0  # a process that is stuck in the kernel does not die even then
# not -m: with it Python puts the working directory first, where a file named torch.py may lie
_START = (
    "import sys; sys.path[:] = sys.argv[1:]; from autotune_offload.doctor.self_report import answer; answer()"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What the child said, by question; a question has an answer, an error or, if it was not reached, none."""

    answers: Mapping[str, Any] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    died: str | None = None
    """How the child ended where it did not end by itself, and what it was being asked."""


def ask(
    *,
    config: Mapping[str, Any] | None = None,
    cache: Path | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> Answers:
    """Start the child, and collect what it says until it ends or the deadline has passed.

    Args:
        config: a ds_config that DeepSpeed's own parser is to judge; None asks nothing of the kind.
        cache: the folder of the profiles, for the one that fits; None is the default one.
        deadline_seconds: the child is killed then.
    """
    asked = json.dumps(
        {"config": config, "cache": None if cache is None else str(cache), "seconds": deadline_seconds},
        default=str,
    )
    try:
        return _asked(asked, deadline_seconds)
    except OSError as error:  # no room for a file, no permission to start Python
        return Answers(died=f"could not be started: {error}")


def _asked(asked: str, deadline_seconds: float) -> Answers:
    # files and no pipes: a grandchild that holds a pipe open would be waited for
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+") as said, _words() as words:
        given.write(asked)
        given.seek(0)
        ended = _run(given, said, words, deadline_seconds)
        said.seek(0)
        words.seek(0)
        return _collected(said.readlines(), ended, words.read())


def _words() -> Any:
    return tempfile.TemporaryFile("w+", errors="replace")


def _run(given: TextIO, said: TextIO, words: TextIO, deadline_seconds: float) -> str | None:
    """None where the child ended by itself and well, else how it ended."""
    child = subprocess.Popen(
        [sys.executable, "-c", _START, *sys.path],
        stdin=given,
        stdout=said,
        stderr=words,
        start_new_session=True,  # a compiler that it started ends with it
    )
    try:
        status = child.wait(deadline_seconds)
    except subprocess.TimeoutExpired:
        return f"did not answer within {deadline_seconds:g} s and was ended"
    finally:
        end_session(child.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_KILLED_SECONDS)
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}" if status else None


def _collected(lines: list[str], ended: str | None, words: str) -> Answers:
    answers: dict[str, Any] = {}
    errors: dict[str, str] = {}
    asking = "its start"
    for line in lines:
        with contextlib.suppress(ValueError):  # cut short when it was killed
            entry = json.loads(line)
            asking = entry.get("asking", asking)
            if "answer" in entry:
                answers[asking] = entry["answer"]
            elif "error" in entry:
                errors[asking] = entry["error"]
    if ended is None:
        return Answers(answers=answers, errors=errors)
    last = [line.strip() for line in words.splitlines() if line.strip()][-1:]
    heard = f"; its last words: {last[0][:300]}" if last else ""
    return Answers(answers=answers, errors=errors, died=f"{ended} while it was asked about {asking}{heard}")


# -- in the child ---------------------------------------------------------------------------------


def answer() -> None:
    """Answer every question on the descriptor that was stdout; what libraries print goes to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    asked = json.load(sys.stdin)
    signal.alarm(math.ceil(asked["seconds"]) + 1)  # ends it where nobody is left to do so
    for name, question in _questions(asked):
        _write(out, asking=name)
        try:
            _write(out, answer=question())
        except Exception as error:  # whatever it is, the next question is asked
            _write(out, error=f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
    os._exit(0)  # a driver's exit handlers may hang, and all is said


def _write(out: TextIO, **entry: Any) -> None:
    out.write(json.dumps(entry, default=str) + "\n")
    out.flush()


def _questions(asked: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "torch", _torch
    yield "deepspeed", _deepspeed
    if asked["config"] is not None:
        yield "config", lambda: _refusals(asked["config"])
    yield "compiler", _why_not_fused
    yield "host_passes", _host_passes
    yield "native_pins", _why_not_native
    yield "device", _device
    yield "link", _nvml_link
    yield "profile", lambda: _fitting_profile(asked["cache"])


def _torch() -> dict[str, Any]:
    import torch

    built_for = {name: getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")}
    return {"threads": torch.get_num_threads(), **built_for}


def _deepspeed() -> str:
    import deepspeed

    return str(deepspeed.__version__)


def _device() -> dict[str, Any]:
    from autotune_offload.machine.accelerator import AcceleratorDevice
    from autotune_offload.records import to_plain

    identity = AcceleratorDevice().identity
    return {**to_plain(identity), "integrated": _integrated(identity.kind, identity.index)}


def _integrated(kind: str, index: int) -> bool:
    """Whether the device has no memory of its own, as far as torch says."""
    import torch

    try:
        properties = getattr(torch, kind).get_device_properties(index)
    except (AttributeError, RuntimeError, AssertionError, TypeError, ValueError):
        return False  # the CPU, and a device whose properties torch does not have
    return any(bool(getattr(properties, name, False)) for name in ("is_integrated", "is_integrated_gpu"))


def _nvml_link() -> dict[str, int] | None:
    from autotune_offload.machine.accelerator import AcceleratorDevice
    from autotune_offload.machine.identity import nvml_link

    device = AcceleratorDevice()
    return nvml_link(device.identity.index) if device.identity.kind == "cuda" else None


def _why_not_fused() -> str | None:
    import torch

    from autotune_offload.machine import host_pass

    return host_pass.why_not_fused(torch.bfloat16)


def _host_passes() -> dict[str, str]:
    """Where each compiled pass comes from, or why there is none."""
    import torch

    from autotune_offload.machine import adam, compiled, host_pass

    host_pass.why_not_fused(torch.bfloat16)
    adam.why_not_compiled(torch.bfloat16)
    return compiled.used()


def _why_not_native() -> str | None:
    """Why DeepSpeed's own code for page-locking could not be built, where it is asked for; nothing is built."""
    if os.environ.get("DS_PIN_MEMORY_BACKEND", "").strip().lower() != "native":
        return None
    from deepspeed.ops import op_builder

    builder = getattr(op_builder, "PinMemoryBuilder", None)
    if builder is None:
        return None  # a DeepSpeed that does not read the variable
    from deepspeed.git_version_info import installed_ops

    return None if installed_ops.get("pin_memory") else _why_no_extension(builder())


def _why_no_extension(builder: Any) -> str | None:
    """What torch lacks to build an extension of C++: the sources, ninja, a compiler, Python's headers, a folder."""
    from torch.utils import cpp_extension

    if not builder.is_compatible():
        return f"it is not for this system: {builder.error_log}"
    missing = [name for name in builder.sources() if not Path(builder.deepspeed_src_path(name)).exists()]
    if missing:
        return f"DeepSpeed was installed without its sources ({missing[0]})"
    if not cpp_extension.is_ninja_available():
        return "ninja is not installed"
    folder = Path(os.environ.get(_BUILD) or cpp_extension.get_default_build_root())
    there = next((place for place in (folder, *folder.absolute().parents) if place.exists()), folder)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return f"{there}, where torch builds ({_BUILD}), is no folder that can be written to"
    return _why_no_compiler(os.environ.get("CXX") or "c++")


def _why_no_compiler(compiler: str) -> str | None:
    """None where a file that includes Python's headers passes the compiler's check of its syntax."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "check.cpp")
        source.write_text("#include <Python.h>\n#include <vector>\n")
        include = sysconfig.get_path("include")
        command = [*shlex.split(compiler), "-std=c++17", "-fsyntax-only", f"-I{include}", str(source)]
        try:
            run_in_session(command, seconds=_COMPILE_SECONDS)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            words = (getattr(error, "stderr", None) or str(error)).strip().splitlines() or ["no word"]
            return f"the C++ compiler `{compiler}` fails: {words[0][:200]}"
    return None


def _fitting_profile(cache: str | None) -> dict[str, str]:
    from autotune_offload.profiles.lookup import lookup
    from autotune_offload.profiles.store import Miss, Store

    store = Store(None if cache is None else Path(cache))
    found = lookup(store, None)
    if isinstance(found, Miss):
        return {"miss": found.reason}
    return {"path": str(store.path_of(found.fingerprint))}


_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _refusals(config: dict[str, Any]) -> list[str]:
    """What DeepSpeed's parser refuses, a sentence each; batch sizes, which depend on the ranks, are left out.

    So is what is "auto" outside ``zero_optimization``, which a framework fills in before it hands it over.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    rest = {name: value for name, value in config.items() if name not in _BATCH}
    rest = {name: value if name == "zero_optimization" else _filled(value) for name, value in rest.items()}
    try:
        DeepSpeedConfig({**rest, "train_micro_batch_size_per_gpu": 1})
    except Exception as error:  # pydantic's, DeepSpeed's own, and a bare assertion or type error
        return list(_sentences(error))
    return []


def _filled(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _filled(item) for name, item in value.items() if item != "auto"}
    return value


def _sentences(error: Exception) -> Iterator[str]:
    details = getattr(error, "errors", None)
    if not callable(details):
        yield f"{type(error).__name__}: {' '.join(str(error).split())}"
        return
    where = getattr(error, "title", "").removeprefix("DeepSpeed").removesuffix("Config").lower()
    for detail in details():
        dotted = ".".join(
            str(part) for part in ("zero_optimization" if where == "zero" else where, *detail["loc"])
        )
        yield f"{dotted} is {json.dumps(detail['input'], default=str)}: {detail['msg']}"
