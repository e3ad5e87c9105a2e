"""Training with parameters and optimizer state on a drive, in real processes with DeepSpeed's aio.

Left out, with the reason, where DeepSpeed's async_io cannot be had: it is built once, in some minutes.
"""

from __future__ import annotations

import ctypes.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune_offload.config.nvme import fitted
from autotune_offload.decide.drive import choose
from autotune_offload.measure.drive import PREFIX, Bench
from autotune_offload.records import AioSetting, Drive, Limits
from autotune_offload.workload import from_parameter_count
from tests import CHECKOUT
from tests.config.test_nvme import DRIVE
from tests.matrix.__main__ import environment
from tests.ports import free_port

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        ctypes.util.find_library("aio") is None,
        reason="no libaio on this host: apt-get install libaio-dev, which DeepSpeed's async_io is built with",
    ),
]

MIB = 1 << 20
MODEL = from_parameter_count(2_400_000, world_size=1, accumulation_steps=1, dtype="bfloat16")
ROOM = Limits(available_bytes=8 << 30, pinnable_bytes=8 << 30)


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Drive:
    """Measured for a moment, with DeepSpeed's own handle."""
    folder = tmp_path_factory.mktemp("drive")
    bench = Bench(folder, file_bytes=MIB, most_written_bytes=1 << 30, seconds=120.0)
    try:
        found = choose(folder, bench, seconds=3.0)
    except Exception as error:
        if "O_DIRECT" in str(error):
            pytest.skip(f"the folder of these tests: {error}")
        raise
    assert list(folder.iterdir()) == []
    return found


def test_a_real_drive_is_measured_within_its_bounds(drive: Drive) -> None:
    """Rounds with DeepSpeed's own setting in each; every byte came back as it was sent."""
    assert drive.written_bytes <= 1 << 30 and drive.deepspeed
    own, *others = drive.times
    assert own.setting == AioSetting() and others
    rounds = sum(len(each.write_seconds) for each in others)
    assert len(own.write_seconds) <= rounds and drive.of(drive.chosen).read_seconds


def test_two_ranks_write_at_once(tmp_path: Path) -> None:
    """Each into a folder of its own."""
    with Bench(tmp_path, ranks=2, files=2, file_bytes=MIB, seconds=120.0).opened() as bench:
        assert len(list(tmp_path.glob(f"{PREFIX}*/rank*"))) == 2
        seconds = [bench.time(what, AioSetting(threads=2)) for what in ("write", "read", "both")]
        assert all(0 < each < 120 for each in seconds)
    assert list(tmp_path.iterdir()) == []


def trained(folder: Path, config: dict[str, Any]) -> list[str]:
    """The losses of a run, exactly."""
    folder.mkdir()
    file = folder / "ds.json"
    file.write_text(json.dumps(config))
    process = subprocess.run(
        [sys.executable, "-m", "tests.engine.swapped", str(file)],
        cwd=CHECKOUT,
        env=environment(None, port=free_port()) | {"DS_BUILD_OPS": "0"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    losses: list[str] = json.loads(process.stdout.splitlines()[-1])["losses"]
    return losses


def config(folder: Path) -> dict[str, Any]:
    """Parameters and optimizer on the drive, all else as DeepSpeed has it."""
    where = {"device": "nvme", "nvme_path": str(folder)}
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "sub_group_size": 1_200_000,
        "offload_optimizer": dict(where),
        "offload_param": {**where, "buffer_size": 1_000_000},
    }
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": optimizer,
        "zero_optimization": zero,
    }


def test_a_run_with_the_written_keys_trains_as_without(tmp_path: Path, drive: Drive) -> None:
    """Both pipeline flags, their buffers, and the drive's or another setting: the same losses to the last bit."""
    plain = trained(tmp_path / "plain", config(tmp_path / "plain"))
    assert len(set(plain)) > 1
    for name, measured in (("measured", drive), ("another", DRIVE)):
        folder = tmp_path / name
        written = fitted(config(folder), measured, MODEL, ROOM, version=drive.deepspeed).config
        section = written["zero_optimization"]["offload_optimizer"]
        assert section["pipeline_read"] is section["pipeline_write"] is True and section["buffer_count"] == 12
        assert trained(folder, written) == plain, name
