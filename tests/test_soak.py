"""Many engines in one process: nothing of ours stays behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import CHECKOUT


@pytest.mark.long
@pytest.mark.slow
def test_descriptors_threads_and_our_own_objects_stay_as_they_are(tmp_path: Path) -> None:
    """Twenty starts and ends with a path attached; `python -m tests.reliability.soak` runs 500."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(CHECKOUT),
        "OMP_NUM_THREADS": "1",
        "AUTOTUNE_OFFLOAD_CACHE": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.reliability.soak", "--cycles", "20"],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["paths_attached"] == 20
    for what in ("descriptors", "threads", "own_objects"):
        assert found[what]["at the end"] <= found[what]["at a tenth"], (what, found)
    # an engine that is kept has 6 MB; the allocator's own ups and downs are a tenth of that
    assert found["growth_bytes_a_cycle"] < 1_000_000
