"""Faults among ranks and in what launchers say of them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from autotune_offload import workload
from autotune_offload.described.clocked import Faults
from autotune_offload.errors import ConfigError, DeviceError, MeasurementError
from autotune_offload.machine import limits
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.records import Limit
from autotune_offload.testing import FakeAccelerator
from tests.reliability.limits import rules, says
from tests.reliability.registry import fault
from tests.reliability.scenes import CONFIG, patched, probed, raising, shortened, simulated, start


@fault(
    area="ranks",
    name="a WORLD_SIZE that is no number",
    injected="WORLD_SIZE=eight",
    expected="the run starts untuned; the variable is named, without a traceback",
)
def _(folder: Path) -> str:
    seen = start(folder, CONFIG, environment={"WORLD_SIZE": "eight"})
    return seen.runs_untuned(CONFIG, "WORLD_SIZE", "eight")


@fault(
    area="ranks",
    name="a RANK that is no number",
    injected="RANK=first, and a failure to warn of",
    expected="the run starts untuned with its one warning",
)
def _(folder: Path) -> str:
    error = MeasurementError("timings cannot be trusted")
    seen = start(folder, CONFIG, probe=raising(error), environment={"RANK": "first"})
    return seen.runs_untuned(CONFIG, "timings cannot be trusted")


@fault(
    area="ranks",
    name="a LOCAL_RANK that is no number",
    injected="LOCAL_RANK=gpu0",
    expected="an error of ours that names the variable",
)
def _(folder: Path) -> str:
    with patched(folder, {"LOCAL_RANK": "gpu0"}), pytest.raises(DeviceError) as caught:
        AcceleratorDevice(FakeAccelerator("cuda"))
    assert "LOCAL_RANK" in str(caught.value)
    return shortened(str(caught.value))


@fault(
    area="ranks",
    name="a LOCAL_RANK beyond the devices",
    injected="LOCAL_RANK=7 with one visible device",
    expected="the current device is taken: launchers isolate ranks like that",
)
def _(folder: Path) -> str:
    with patched(folder, {"LOCAL_RANK": "7"}):
        device = AcceleratorDevice(FakeAccelerator("cuda", count=1))
    assert device.identity.index == 0
    return "device 0 is used"


@fault(
    area="ranks",
    name="a failure on every rank",
    injected="the same failure on ranks 0 and 3, told by RANK and by srun's variable",
    expected="one warning altogether, on rank 0",
)
def _(folder: Path) -> str:
    failing = raising(MeasurementError("timings cannot be trusted"))
    said = [
        len([r for r in start(folder, CONFIG, probe=failing, environment=given).records if _warns(r)])
        for given in ({"RANK": "0"}, {"RANK": "3"}, {"SLURM_PROCID": "3"})
    ]
    assert said == [1, 0, 0], said
    return "rank 0 warns once, the others not at all"


def _warns(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING


@fault(
    area="ranks",
    name="eight ranks on one host",
    injected="64 GB free, 7 billion parameters, one rank or eight",
    expected="what one rank may pin is divided by eight",
)
def _(folder: Path) -> str:
    ram = Limit(name="ram", bytes=64 * 10**9, source="MemAvailable", raise_by="use one with more RAM")
    one, eight = (limits.bounded([ram], [], ranks_per_host=ranks, max_pinned_bytes=None) for ranks in (1, 8))
    assert eight.pinnable_bytes == one.pinnable_bytes // 8
    return says(rules(7 * 10**9, eight).against_path("pinned"), "shared by 8 ranks")


@fault(
    area="ranks",
    name="a launcher that tells how many ranks share the host",
    injected="LOCAL_WORLD_SIZE=4, a world of 16, one visible device a rank",
    expected="four share the limits, not one and not 16",
)
def _(folder: Path) -> str:
    with patched(folder, {"LOCAL_WORLD_SIZE": "4"}):
        told = limits.ranks_here(16, 1)
    with patched(folder, {"LOCAL_WORLD_SIZE": "many"}):
        untold = limits.ranks_here(16, 8)
    assert (told, untold, limits.ranks_here(1, 8)) == (4, 8, 1)
    return "4 by the launcher; 8 by the devices where it tells none"


@fault(
    area="ranks",
    name="ranks of a described host share its memory",
    injected="eight ranks on a described H100 host against one",
    expected="an eighth of the memory is available to each",
)
def _(folder: Path) -> str:
    load = workload.from_parameter_count(10**9, world_size=8)
    shared = probed(simulated("h100_sxm_pcie5", ranks=8), workload=load).limits
    alone = probed(simulated("h100_sxm_pcie5")).limits
    assert shared.available_bytes == alone.available_bytes // 8
    return f"{shared.available_bytes / 1e9:.4g} GB each of {alone.available_bytes / 1e9:.4g}"


@fault(
    area="ranks",
    name="one slow rank",
    injected="rank 5 of 8 four times slower on a described A100 host",
    expected="it chooses as the others do: the path is decided by ratios",
)
def _(folder: Path) -> str:
    faults = Faults(slow_rank=5)
    load = workload.from_parameter_count(10**9, world_size=8)
    chosen = {
        rank: probed(simulated("a100_pcie4", faults, ranks=8, rank=rank), workload=load).choice
        for rank in (0, 5)
    }
    assert chosen[0].path == chosen[5].path and chosen[0].cast == chosen[5].cast
    return f"{chosen[0].path}, cast on the {chosen[0].cast}, on both"


@fault(
    area="ranks",
    name="no ranks at all",
    injected="limits asked for 0 ranks a host",
    expected="an error of ours that names the argument",
)
def _(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        limits.limits(ranks_per_host=0)
    return shortened(str(caught.value))
