"""Which Python `make device` runs in: `python -m benchmarks.device.environment FOLDER` prints its path.

Runs on any Python, with nothing installed.

* An environment whose torch sees an accelerator and that has everything else is used as it is.
* Where its torch sees one and packages are missing, these go into FOLDER, a virtual environment on top of it: its
  torch stays the one that is used, and it is not changed itself.
* Where it has no such torch but a driver has made a device here, FOLDER is set up anew, with the torch that the index
  gives by default; nothing of `constraints.txt` but DeepSpeed's version holds there.
* Where there is no device, it is `.venv`, as for the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
NODES = ("nvidia[0-9]*", "kfd", "accel/accel*", "davinci[0-9]*", "dri/renderD*", "dxg")
"""What drivers make in /dev: NVIDIA, AMD, Habana, Ascend, Intel (and others), GPUs under WSL."""

SEES = """
import torch
found = torch.cuda.is_available()
for name in ("xpu", "npu", "mlu", "musa", "hpu"):
    try:
        if name == "npu": import torch_npu
        if name == "hpu": import habana_frameworks.torch.hpu
    except ImportError:
        continue
    found = found or (hasattr(torch, name) and getattr(torch, name).is_available())
raise SystemExit(not found)
"""
HAS = "import deepspeed, autotune_offload.api.probe, autotune_offload.cli, optuna, psutil, yaml"


def main(folder: Path) -> Path:
    """The interpreter, set up where it has to be. Raises SystemExit where that fails."""
    mine = Path(sys.executable)
    if _works(mine, SEES):
        if _works(mine, HAS):
            return mine
        return _complete(mine, folder, with_torch=True)
    if _works(folder / "bin" / "python", SEES) and _works(folder / "bin" / "python", HAS):
        return folder / "bin" / "python"
    if driven(Path("/dev")):
        return _complete(mine, folder, with_torch=False)
    _say("no accelerator is to be seen here: this runs on the host itself, in .venv")
    _do([os.environ.get("MAKE", "make"), ".venv/.installed"])
    return CHECKOUT / ".venv" / "bin" / "python"


def driven(devices: Path) -> bool:
    """Whether a driver has made a device."""
    return any(next(devices.glob(pattern), None) is not None for pattern in NODES)


def commands(mine: Path, folder: Path, *, with_torch: bool) -> list[list[str]]:
    """What sets `folder` up; with the torch that `mine` has, or with the index's own."""
    pip = [
        str(folder / "bin" / "python"),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-input",
        "install",
        "-q",
    ]
    deepspeed = next(
        line
        for line in (CHECKOUT / "constraints.txt").read_text().splitlines()
        if line.startswith("deepspeed==")
    )
    torch = [] if with_torch else ["torch"]
    return [
        [str(mine), "-m", "venv", str(folder)],
        [*pip, *torch, "numpy", "ninja", "setuptools", "wheel", "hatchling"],
        # DeepSpeed comes as source only, and its set-up has to see the torch that it will run with
        [*pip, "--no-build-isolation", deepspeed, "--editable", f"{CHECKOUT}[nvidia]"],
    ]


def _complete(mine: Path, folder: Path, *, with_torch: bool) -> Path:
    python = folder / "bin" / "python"
    if not (_works(python, SEES) and _works(python, HAS)):
        _say(
            f"setting up {folder}: " + ("its torch is yours" if with_torch else "torch as the index gives it")
        )
        first, *others = commands(mine, folder, with_torch=with_torch)
        _do(first)
        if with_torch:
            _lie_on_top(mine, folder)
        for command in others:
            _do(command)
    return python


def _lie_on_top(mine: Path, folder: Path) -> None:
    """What `mine` can import can be imported in `folder`, too, after what is installed there."""
    script = "import sys; print(*(each for each in sys.path if each.endswith('-packages')), sep='\\n')"
    below = subprocess.run([str(mine), "-c", script], capture_output=True, text=True, check=True).stdout
    [packages] = folder.glob("lib/python3*/site-packages")
    (packages / "below.pth").write_text(below, encoding="utf-8")


def _works(python: Path, script: str) -> bool:
    """Whether it can run this; whatever it prints is nobody's business."""
    if not python.exists():
        return False
    try:
        done = subprocess.run(
            [str(python), "-c", script], cwd=CHECKOUT, capture_output=True, timeout=300, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def _do(command: Sequence[str]) -> None:
    environment = {**os.environ, "DS_BUILD_OPS": "0"}
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, stdout=sys.stderr, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(main(Path(sys.argv[1]).resolve()))
