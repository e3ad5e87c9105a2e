"""The driver's cases on several versions of DeepSpeed, each in a folder of its own beside one torch.

    python -m tests.matrix [VERSION ...]

Installs what is missing into .cache/matrix/<version>, without dependencies and without C++ operations,
trains, and prints a table of versions and case groups. Exits 1 where anything differs from DeepSpeed's own
code, or could not be run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.matrix.driver import MARKER

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
GROUPS = ("bf16", "fp16", "fp32", "parameters", "checkpointing", "habits", "ranks")
CHECKOUT = Path(__file__).resolve().parents[2]
FOLDER = CHECKOUT / ".cache" / "matrix"
LIMIT_SECONDS = 600
"""For one version's cases; a quiet 2-core machine takes a fifth of it."""

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
    subprocess.run(command, env=environment(None), check=True, timeout=LIMIT_SECONDS)
    part.rename(FOLDER / version)


def environment(version: str | None, rank: int = 0, ranks: int = 1, port: int = 0) -> dict[str, str]:
    """Of one process that imports that version, on the CPU; None is the installed one."""
    first = [] if version is None else [str(FOLDER / version)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*first, str(CHECKOUT)]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "DS_ACCELERATOR": "cpu",
        "DS_BUILD_OPS": "0",
        "LOCAL_SIZE": str(ranks),  # up to 0.15.4 DeepSpeed asks numactl otherwise
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run(version: str | None, groups: Iterable[str], limit_seconds: float = LIMIT_SECONDS) -> list[Result]:
    """Every case of the groups on one version.

    What the processes print besides is shown when one of them ends early, as a difference of its own.
    """
    groups = list(groups)
    alone = [group for group in groups if group != "ranks"]
    deadline = time.monotonic() + limit_seconds
    results = _processes(version, alone, 1, deadline) if alone else []
    return results + (_processes(version, ["ranks"], 2, deadline) if "ranks" in groups else [])


def _processes(version: str | None, groups: list[str], ranks: int, deadline: float) -> list[Result]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.matrix.driver", *groups],
            cwd=CHECKOUT,
            env=environment(version, rank, ranks, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    results: list[Result] = []
    try:
        for process in started:
            results += _results(process, groups[0], deadline)
    finally:
        for process in started:
            process.kill()
            process.wait()
    return results


def _results(process: subprocess.Popen[str], group: str, deadline: float) -> list[Result]:
    try:
        output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        ended = None if process.returncode in {0, 1} else f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        ended = "time limit"
    found = [json.loads(line[len(MARKER) :]) for line in output.splitlines() if line.startswith(MARKER)]
    if ended is None and not found:
        ended = "no case was run"
    if ended is not None:
        found.append(
            {"group": group, "case": f"after {len(found)} cases", "difference": f"{ended}: {output[-500:]}"}
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
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="VERSION")
    parser.add_argument("--groups", nargs="*", default=GROUPS, choices=GROUPS)
    options = parser.parse_args()
    began = time.monotonic()
    remarks: list[str] = []
    print(row(["DeepSpeed", *options.groups, "seconds"]), flush=True)
    failed = False
    for version in options.versions:
        start = time.monotonic()
        install(version)
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
    print(f"{len(options.versions)} versions in {time.monotonic() - began:.0f} s", *remarks, sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
