"""Loops in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

from tests import CHECKOUT


def apart(module: str, *arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """`python -m tests.engine.MODULE` with these arguments, on the CPU accelerator."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "DS_ACCELERATOR": "cpu"}
    environment.pop("RANK", None)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.engine.{module}", *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=environment,
        check=False,
    )
