"""Wheels and sdists, built by the backend itself: no isolated environment, so no network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import CHECKOUT


def built(target: str, folder: Path, *, root: Path = CHECKOUT, **environment: str) -> Path:
    """The one file that a build of "wheel" or "sdist" leaves in `folder`."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    variables = {**os.environ, "AUTOTUNE_OFFLOAD_WHEEL": "pure", **environment}
    done = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (file,) = (file for file in folder.iterdir() if file.suffix in (".whl", ".gz"))
    return file
