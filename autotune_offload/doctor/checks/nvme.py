"""What stands in the way of swapping to NVMe, as far as a look at config, folder and memory tells."""

from __future__ import annotations

import ctypes.util
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune_offload import units
from autotune_offload.config import nvme as config_nvme
from autotune_offload.doctor.checks.case import Case
from autotune_offload.machine import host
from autotune_offload.profiles import drives
from autotune_offload.records import Finding, Limits, Workload

_ID = "nvme"
_SWAPPED_BYTES = 18
"""Of a parameter on the drive: weights, both moments and gradients in fp32, and 16-bit weights."""

_WRITTEN_BYTES = 16
"""Of a parameter in each step: weights, both moments and gradients in fp32."""

_RATED_BYTES = 600 * 10**12
"""What a consumer drive of 1 TB is commonly rated for."""


def nvme(case: Case, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Keys, libraries, folders and memory of a configuration that swaps to NVMe; nothing where none does."""
    if not config_nvme.on_nvme(config):
        return
    for found, fix, stops in config_nvme.mistakes(config, case.version):
        yield Finding(id=_ID, severity="will break" if stops else "costs", found=found, fix=fix)
    if ctypes.util.find_library("aio") is None:
        yield Finding(
            id=_ID,
            severity="will break",
            found="libaio was not found, and DeepSpeed's async_io is built with it",
            fix="apt-get install libaio-dev, or its like; with conda, CFLAGS and LDFLAGS name its folders",
        )
    folders = config_nvme.folders(config)
    if not folders:
        yield Finding(
            id=_ID,
            severity="will break",
            found="no nvme_path is given for what is offloaded to nvme",
            fix='write "nvme_path": a folder on the drive, into the section',
        )
    profile = case.profile()
    workload = profile.workload if profile is not None else None
    for folder in folders:
        yield from _folder(case, Path(folder), workload)
    if workload is not None:
        yield from _memory(config, workload, case.limits(workload), case.version)
        yield Finding(
            id=_ID,
            severity="notice",
            found=f"each step writes {units.size(_WRITTEN_BYTES * workload.elements)} a rank to the drive",
            costs=f"a drive that is rated for {_RATED_BYTES / 1e12:g} TB lasts "
            f"{_RATED_BYTES // (_WRITTEN_BYTES * max(workload.elements, 1)):,} steps of one rank",
            fix="look up the drive's rating (TBW), or keep the optimizer on the CPU if it fits",
        )


def _folder(case: Case, folder: Path, workload: Workload | None) -> Iterator[Finding]:
    if not os.path.isdir(folder):  # False, too, for what can be no path
        yield Finding(
            id=_ID,
            severity="notice",
            found=f"nvme_path {folder} does not exist here",
            costs="DeepSpeed makes it, on whatever file system it then lies",
            fix="mount the drive first, and make the folder",
        )
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        yield Finding(
            id=_ID,
            severity="will break",
            found=f"nvme_path {folder} cannot be written",
            fix="make it yours, or name another",
        )
        return
    if (left := folder / "zero_stage_3").exists():
        yield Finding(
            id=_ID,
            severity="notice",
            found=f"{left} is there already: another run's, at work or ended",
            costs="DeepSpeed removes what it finds there, also under a run that is at work",
            fix="give each run a folder of its own, and remove those of runs that have ended",
        )
    free = shutil.disk_usage(folder).free
    if workload is not None and free < (needed := _SWAPPED_BYTES * workload.elements * case.ranks):
        yield Finding(
            id=_ID,
            severity="will break",
            found=f"{folder} has {units.size(free)} free, and this model's states take {units.size(needed)}",
            costs="writes fall short, and DeepSpeed stops in the middle of a step",
            fix="free space, or name a larger drive",
        )
    if drives.measured(case.store, host.facts().name, folder) is None:
        yield Finding(
            id=_ID,
            severity="notice",
            found=f"the drive of {folder} was not measured",
            costs="DeepSpeed's own settings keep 8 requests in flight on one thread, far below most drives",
            fix=f"autotune-offload probe --nvme {folder}",
        )


def _memory(config: Mapping[str, Any], workload: Workload, limits: Limits, version: str) -> Iterator[Finding]:
    """What the sizes in the configuration cannot hold, in the words of what `apply` would say."""
    for notice in config_nvme.fitted(config, None, workload, limits, version=version).notices:
        if "will stop" in notice or "are locked" in notice:
            yield Finding(
                id=_ID,
                severity="will break" if "will stop" in notice else "costs",
                found=notice,
                fix="take the size out: `autotune-offload apply` fills it in from model and memory",
            )
