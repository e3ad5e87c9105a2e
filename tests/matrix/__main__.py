"""The driver's cases on several versions of DeepSpeed, each in a folder of its own beside one torch.

    python -m tests.matrix [VERSION ... | --half]

Installs what is missing into .cache/matrix/<version>, without C++ operations (the CPU Adam alone is compiled, when
its groups are first run, into .cache/matrix/<version>.ops) and without dependencies (those
are the ones beside this interpreter, which constraints.txt pins), trains, and prints a table of versions and
case groups. Exits 1 where anything differs from DeepSpeed's own code, or could not be run. Whatever ends it,
the processes that it started end, too.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests import op_builds, shared_memory
from tests.matrix.driver import MARKER
from tests.ports import free_port

VERSIONS = (
    "0.14.5",
    "0.15.2",
    "0.15.4",
    "0.16.2",
    "0.16.9",
    "0.17.6",
    "0.18.0",
    "0.18.9",
    "0.19.4",
    "0.19.8",
)
HALF = ("0.14.5", "0.15.4", "0.16.9", "0.18.9", "0.19.4")
"""One of each way to move a gradient, and both sides of each change in what is replaced: 0.14.5 is the oldest,
without two of the setters; 0.15.4 has the bounce buffer; 0.16.9 the plain upcast; from 0.18.9 micro-steps are
counted in the forward pass; 0.19.4 asks for a parameter's own rank, and is the last whose boundary is an
attribute. The default tests run the installed version, 0.19.8."""
LONGER = ("fp16", "habits")
"""Groups that together take half the time."""
GROUPS = ("bf16", "fp16", "fp32", "parameters", "checkpointing", "habits", "host", "ranks")
SUMS, STAGES = "sums", "stages"
"""Whether stages 1 and 2 accumulate all gradients, where `upstream` says that they do; and both with ours in them."""
STEP_GROUPS = ("step", "step_ranks")
"""With DeepSpeed's CPU Adam, which is compiled for each version, in about a minute: in the matrix only."""
CHECKOUT = Path(__file__).resolve().parents[2]
FOLDER = CHECKOUT / ".cache" / "matrix"
LIMIT_SECONDS = 1800
"""For one version's cases, and for one installation; a quiet 2-core machine takes a tenth of it."""

Result = dict[str, Any]


def installed(version: str) -> bool:
    """Whether this version lies in its folder."""
    return (FOLDER / version / "deepspeed").is_dir()


def install(version: str) -> None:
    """Put one version into its folder, whole or not at all."""
    if installed(version):
        return
    part = FOLDER / f"{version}.part"
    shutil.rmtree(part, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--target", str(part), f"deepspeed=={version}"]
    pip = subprocess.Popen(command, env=environment(None), start_new_session=True)
    try:
        if pip.wait(LIMIT_SECONDS):
            raise SystemExit(f"DeepSpeed {version} could not be installed: pip ended with {pip.returncode}")
    finally:
        _end(pip)
    part.rename(FOLDER / version)


def _end(process: subprocess.Popen[Any]) -> None:
    """With everything that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment(version: str | None, rank: int = 0, ranks: int = 1, port: int = 0) -> dict[str, str]:
    """Of one process that imports that version, on the CPU; None is the installed one."""
    first = [] if version is None else [str(FOLDER / version)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*first, str(CHECKOUT)]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "DS_ACCELERATOR": "cpu",
        "DS_BUILD_OPS": "0",
        **({} if version is None else {"TORCH_EXTENSIONS_DIR": str(FOLDER / f"{version}.ops")}),
        "LOCAL_SIZE": str(ranks),  # up to 0.15.4 DeepSpeed asks numactl otherwise
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",  # older versions pickle more than weights
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run(version: str | None, groups: Iterable[str], limit_seconds: float = LIMIT_SECONDS) -> list[Result]:
    """Every case of the groups on one version, on two cores.

    What a process printed last is a difference of its own where it ends early.
    """
    groups, deadline = list(groups), time.monotonic() + limit_seconds
    apart = {*LONGER, *STEP_GROUPS, SUMS, STAGES, "ranks"}
    halves = [[g for g in groups if g in LONGER], [g for g in groups if g not in apart]]
    results = _finished([_start(version, half, 0, 1, free_port()) for half in halves if half], deadline)
    below = [group for group in (SUMS, STAGES) if group in groups]
    results += _finished([_start(version, [group], 0, 1, free_port()) for group in below], deadline)
    if "step" in groups:
        results += _finished([_start(version, ["step"], 0, 1, free_port())], deadline)
    for group in ("ranks", "step_ranks"):
        if group in groups:
            port = free_port()
            results += _finished([_start(version, [group], rank, 2, port) for rank in range(2)], deadline)
    return results


def _start(version: str | None, groups: list[str], rank: int, ranks: int, port: int) -> subprocess.Popen[str]:
    module = f"tests.matrix.{groups[0]}" if groups[0] in (SUMS, STAGES) else "tests.matrix.driver"
    if set(groups) <= set(STEP_GROUPS):
        module = "tests.matrix.step"
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", module, *groups],
        cwd=CHECKOUT,
        env=environment(version, rank, ranks, port),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _finished(processes: list[subprocess.Popen[str]], deadline: float) -> list[Result]:
    with ThreadPoolExecutor(max(len(processes), 1)) as readers:  # a pipe that nobody reads fills up
        try:
            found = readers.map(lambda process: _results(process, deadline), processes)
            return [result for results in found for result in results]
        finally:  # before the readers are waited for: what they read ends with the processes
            for process in processes:
                _end(process)


def _results(process: subprocess.Popen[str], deadline: float) -> list[Result]:
    try:
        output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        ended = None if process.returncode in {0, 1} else f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        _end(process)
        output, _ = process.communicate()
        ended = "time limit"
    found = [json.loads(line[len(MARKER) :]) for line in output.splitlines() if line.startswith(MARKER)]
    if ended is None and not found:
        ended = "no case was run"
    if ended is not None:
        last = found[-1]["group"] if found else str(process.args[-1])  # type: ignore[index]  # a list, see _start
        found.append(
            {"group": last, "case": f"after {len(found)} cases", "difference": f"{ended}: {output[-500:]}"}
        )
    return found


def verdict(results: Iterable[Result]) -> str:
    """One cell of the table: how many cases are the same, and how many this DeepSpeed cannot do itself."""
    results = list(results)
    different = sum(result["difference"] is not None for result in results)
    impossible = sum(result.get("stock_failed") is not None for result in results)
    if different:
        return f"{different} DIFFER"
    same = f"ok {len(results) - impossible}" if results else "-"
    return f"{same}, n/a {impossible}" if impossible else same


def row(cells: Iterable[str]) -> str:
    """A line of the table."""
    return "  ".join(f"{cell:14s}" for cell in cells).rstrip()


def main() -> int:
    """Install, run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "versions", nargs="*", metavar="VERSION", help=f"of {', '.join(VERSIONS)}: all of them"
    )
    parser.add_argument("--half", action="store_true", help=f"{', '.join(HALF)}, which tell the most")
    every = (*GROUPS, SUMS, STAGES, *STEP_GROUPS)
    parser.add_argument("--groups", nargs="*", default=every, choices=every)
    options = parser.parse_args()
    versions = options.versions or (HALF if options.half else VERSIONS)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    atexit.register(shared_memory.remove_since, shared_memory.buffers())
    began = time.monotonic()
    remarks: list[str] = []
    print(row(["DeepSpeed", *options.groups, "seconds"]), flush=True)
    failed = False
    for version in versions:
        start = time.monotonic()
        install(version)
        op_builds.remove_stale_locks(FOLDER / f"{version}.ops")
        results = run(version, options.groups)
        cells = [verdict(r for r in results if r["group"] == group) for group in options.groups]
        print(row([version, *cells, f"{time.monotonic() - start:.0f}"]), flush=True)
        differing = [r for r in results if r["difference"] is not None]
        failed |= bool(differing)
        remarks += [f"{version}: {r['group']}: {r['case']}: {r['difference']}" for r in differing]
        remarks += [
            f"{version}: {r['group']}: {r['case']}: DeepSpeed's own code fails: {r['stock_failed']}"
            for r in results
            if r.get("stock_failed")
        ]
    print(f"{len(versions)} versions in {time.monotonic() - began:.0f} s", *remarks, sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
