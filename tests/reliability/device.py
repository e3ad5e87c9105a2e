"""Faults of the device: copies that never complete, pins that fail, abort or kill, times and bytes that lie."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from autotune_offload import workload
from autotune_offload.api import probe as api_probe
from autotune_offload.described.clocked import Faults
from autotune_offload.described.simulated import SimulatedDevice
from autotune_offload.errors import DeviceError, MeasurementError
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.measure import rehearsal
from autotune_offload.measure.attempts import sizes
from autotune_offload.measure.costs import check_synchronize
from autotune_offload.measure.rehearsal import Rehearsed, rehearse
from autotune_offload.testing import FakeAccelerator, FakeAcceleratorDevice
from tests.reliability import devices
from tests.reliability.registry import NotPossible, fault
from tests.reliability.scenes import (
    CONFIG,
    environment,
    probed,
    raising,
    shortened,
    simulated,
    start,
    without_ipc_lock,
)

_DIRECT = "direct is chosen, and the reason names what happened"


def in_child(name: str, seconds: float = 2.0) -> Rehearsed | None:
    """A rehearsal of that device in a real child, of which nothing is left afterwards."""
    before = _left()
    try:
        return rehearse(devices.Honest(), sizes(4 << 20), seconds=seconds, made_by=f"{devices.HERE}:{name}")
    finally:
        assert _left() == before, "a child or a file descriptor is left"


def in_this_process(name: str) -> Rehearsed | None:
    """What a child would do and what becomes of its words, for faults that only raise."""
    made_by = f"{devices.HERE}:{name}"
    given = {"made_by": made_by, "index": 0, "blocks": sizes(4 << 20), "whole_bytes": 0, "seconds": 60}
    return rehearsal._followed(rehearsal._steps(given), devices.Honest())


def _left() -> tuple[list[psutil.Process], int]:
    own = psutil.Process()
    return own.children(recursive=True), own.num_fds()


def cut_at(found: Rehearsed | None, largest: int, said: str) -> str:
    """Where the rehearsal ended and why, as it must be."""
    assert found is not None and found.largest_bytes == largest, found
    assert found.reason is not None and re.search(said, found.reason), found.reason
    return f"locked up to {largest:,} bytes; {shortened(found.reason)}"


@contextlib.contextmanager
def error_of(kind: type[Exception], *words: str) -> Iterator[list[str]]:
    """An error of ours with these words; its text is put into the list."""
    said: list[str] = []
    with pytest.raises(kind) as caught:
        yield said
    said.append(shortened(str(caught.value)))
    for word in words:
        assert word in str(caught.value), caught.value


@fault(
    area="device",
    name="a pinned copy that never completes",
    injected="a child's copy of more than 1 MiB blocks and ignores SIGTERM",
    expected="cut at the deadline of 1 s; what was copied before counts; nothing is left",
)
def _(folder: Path) -> str:
    before = time.monotonic()
    found = in_child("PinnedCopyHangs", seconds=1.0)
    assert time.monotonic() - before < 45
    return cut_at(found, 1 << 20, "2,097,152 bytes did not complete within 1 s")


@fault(
    area="device",
    name="a device that stops answering",
    injected="a child's first copy blocks",
    expected="an error of ours at the deadline, which says where to look",
)
def _(folder: Path) -> str:
    with error_of(DeviceError, "does not answer", "within 0.5 s", "dmesg") as said:
        in_child("NeverAnswers", seconds=0.5)
    return said[0]


@fault(
    area="device",
    name="a driver that never comes up",
    injected="a child blocks before it has a device",
    expected="an error of ours at the deadline",
)
def _(folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rehearsal, "START_SECONDS", 4.0)
        with error_of(DeviceError, "could not be started", "within 4 s") as said:
            in_child("starts_never")
    return said[0]


@fault(
    area="device",
    name="page-locking that aborts the process",
    injected="abort() in a child's second pin, as DeepSpeed's native backend does beyond memlock",
    expected="only the child ends; one page counts as locked",
)
def _(folder: Path) -> str:
    return cut_at(in_child("AbortsInPin"), 4096, r"ended .* SIGABRT \(Assertion")


@fault(
    area="device",
    name="DeepSpeed's native backend beyond memlock",
    injected="DS_PIN_MEMORY_BACKEND=native, memlock of 256 KiB, no CAP_IPC_LOCK, where the backend is compiled",
    expected="no more than the limit is tried, and the process lives",
)
def _(folder: Path) -> str:
    if not any(Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("**/*pin_memory*.so")):
        raise NotPossible("DeepSpeed's native pin backend is not compiled here, which takes two minutes")
    source = (
        "from autotune_offload import probe\n"
        'found = probe(plan="quick", budget_seconds=0.5)\n'
        "print(found.pin.largest_bytes, found.choice.path, found.limits.pinnable_bytes)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", without_ipc_lock(source, memlock_bytes=1 << 18)],
        capture_output=True,
        text=True,
        timeout=80,
        env=environment(DS_PIN_MEMORY_BACKEND="native", DS_ACCELERATOR="cpu"),
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {shortened(done.stderr[-300:])}"
    largest, path, bound = done.stdout.split()[-3:]
    assert int(largest) <= int(bound) <= 1 << 18
    return f"locked up to {int(largest):,} bytes of {int(bound):,}; path {path}"


@fault(
    area="device",
    name="a process that is killed for its memory while it pins",
    injected="SIGKILL in a child that locks more than 64 KiB",
    expected="only the child ends; 64 KiB count as locked",
)
def _(folder: Path) -> str:
    return cut_at(in_child("KilledInPin"), 1 << 16, "ended .* SIGKILL")


@fault(
    area="device",
    name="a pin that fails above a size",
    injected="CUDA's invalid argument above 64 KiB in the steps of a rehearsal",
    expected="64 KiB count as locked, the error is the reason",
)
def _(folder: Path) -> str:
    return cut_at(in_this_process("PinFails"), 1 << 16, "invalid argument")


@fault(
    area="device",
    name="a device in exclusive mode",
    injected="a rehearsal's runtime raises that the device is busy",
    expected="nothing is proven, and this process goes on with its own context",
)
def _(folder: Path) -> str:
    assert in_this_process("CannotStart") is None
    return "the rehearsal proves nothing; measuring goes on"


@fault(
    area="device",
    name="no more processes are allowed",
    injected="fork fails with EAGAIN",
    expected="nothing is page-locked, with the reason",
)
def _(folder: Path) -> str:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        return cut_at(in_child("Honest"), 0, "no child process could be started .*unavailable")


@fault(
    area="device",
    name="SIGKILL to the process that rehearses",
    injected="kill -9 to a parent whose child hangs in a copy",
    expected="the child goes too, and with it its hold on the device",
)
def _(folder: Path) -> str:
    told = folder / "child"
    source = (
        "import subprocess\n"
        "from autotune_offload.measure.attempts import sizes\n"
        "from autotune_offload.measure.rehearsal import rehearse\n"
        "from tests.reliability import devices\n"
        "real = subprocess.Popen\n"
        "def popen(*args, **kwargs):\n"
        "    child = real(*args, **kwargs)\n"
        f"    open({str(told)!r}, 'w').write(str(child.pid))\n"
        "    return child\n"
        "subprocess.Popen = popen\n"
        f"rehearse(devices.Honest(), sizes(1 << 20), seconds=300, made_by='{devices.HERE}:NeverAnswers')\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", source], env=environment(HANGS=str(folder / "hangs")))
    try:
        until(lambda: told.exists() and told.read_text() != "")
        child = psutil.Process(int(told.read_text()))
        until(lambda: (folder / "hangs").exists())
    finally:
        parent.kill()
        parent.wait()
    child.wait(10)
    return "the child was gone within seconds"


def until(true: Any, seconds: float = 60.0) -> None:
    """Wait for it."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


# -- on described machines ------------------------------------------------------------------------


@fault(
    area="device",
    name="a machine whose pinned copies hang above 1 MiB",
    injected="a described GH200 with that fault",
    expected="the probe ends; nothing larger is pinned or copied, with the reason",
)
def _(folder: Path) -> str:
    profile = probed(simulated("gh200", Faults(pinned_copy_hangs_above_bytes=1 << 20)))
    assert profile.pin.largest_bytes == 1 << 20 and not profile.choice.pin_optimizer
    assert profile.choice.path != "pinned"
    return _rejection(profile, "never completes")


def _rejection(profile: Any, word: str) -> str:
    why = next(c.rejected for c in profile.candidates if c.path == "pinned" and c.rejected)
    assert word in why, why
    return f"{profile.choice.path} is chosen; pinned: {shortened(why)}"


@fault(
    area="device",
    name="a machine on which no pinned copy completes",
    injected="a described GH200 with that fault",
    expected=_DIRECT,
)
def _(folder: Path) -> str:
    profile = probed(simulated("gh200", Faults(pinned_copy_hangs_above_bytes=0)))
    assert profile.choice.path == "direct" and not profile.choice.pin_parameters
    return _rejection(profile, "never completes")


@fault(
    area="device",
    name="a model that needs a larger block than pins",
    injected="1,776,255,488 fp32 elements, pins failing above 1 GiB on a described H100",
    expected=_DIRECT,
)
def _(folder: Path) -> str:
    load = workload.from_parameter_count(1_776_255_488)
    device = simulated("h100_sxm_pcie5", Faults(pin_fails_above_bytes=32 << 20))
    profile = probed(device, workload=load)
    assert profile.choice.path != "pinned" and not profile.choice.pin_optimizer
    return _rejection(profile, "the largest that could be locked here is 33,554,432")


@fault(
    area="device",
    name="page-locking fails for every size",
    injected="a described H100 in confidential computing: every pin fails",
    expected=_DIRECT,
)
def _(folder: Path) -> str:
    profile = probed(simulated("h100_sxm_pcie5", Faults(pin_fails_above_bytes=0)))
    assert profile.choice.path == "direct" and profile.pin.largest_bytes == 0
    return _rejection(profile, "not on offer")


@fault(
    area="device",
    name="everything slow in the first 200 ms",
    injected="a described A100 that is five times slower at the start",
    expected="the choice of the same machine without it",
)
def _(folder: Path) -> str:
    slow = probed(simulated("a100_pcie4", Faults(slow_start_seconds=0.2))).choice
    usual = probed(simulated("a100_pcie4")).choice
    assert (slow.path, slow.cast) == (usual.path, usual.cast)
    return f"{slow.path}, cast on the {slow.cast}, in both"


@fault(
    area="device",
    name="a machine where pinning is slower",
    injected="a described Gaudi 2, whose host copies cost more than pinned d2h saves",
    expected="explicit pin_memory values, the optimizer's with both times or the limit",
)
def _(folder: Path) -> str:
    profile = probed(simulated("gaudi2"))
    written: Any = profile.zero_optimization
    assert isinstance(written["offload_optimizer"]["pin_memory"], bool)
    assert isinstance(written["offload_param"]["pin_memory"], bool)
    return shortened(next(r for r in profile.choice.reasons if r.startswith("offload_optimizer")))


@fault(
    area="device",
    name="a synchronize that waits for nothing",
    injected="a described device whose synchronize returns at once",
    expected="refused: its timings would be wrong; the run starts untuned",
)
def _(folder: Path) -> str:
    class Lying(SimulatedDevice):
        def synchronize(self) -> None:
            return None

    from autotune_offload.described import machine

    computing = msgspec.structs.replace(machine.load("a100_pcie4"), compute=machine.Compute(tflops=100.0))
    with error_of(MeasurementError, "does not wait", "driver") as said:
        check_synchronize(Lying(computing))
    return start(folder, CONFIG, probe=raising(MeasurementError(said[0]))).runs_untuned(
        CONFIG, "does not wait"
    )


@fault(
    area="device",
    name="bytes that arrive wrong",
    injected="one flipped byte in every copy of a described device",
    expected="refused with the number of bytes; the run starts untuned",
)
def _(folder: Path) -> str:
    class Flipping(SimulatedDevice):
        def _land(self, destination: Any, source: Any, *, at_once: bool) -> None:
            super()._land(destination, source, at_once=at_once)
            if at_once:
                destination.view(-1)[-1:] += 1

    from autotune_offload.described import machine

    def probe(**arguments: Any) -> Any:
        return probed(Flipping(machine.load("t4_pcie3")))

    return start(folder, CONFIG, probe=probe).runs_untuned(CONFIG, "bytes differ", "do not train")


@fault(
    area="device",
    name="torch without any accelerator",
    injected="the real CPU accelerator, whose pin_memory locks nothing",
    expected="direct, both keys written false, no exception and no child process",
)
def _(folder: Path) -> str:
    def no_child(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a child process was started")

    device = AcceleratorDevice(FakeAccelerator("cpu", pinning="same object"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rehearsal, "_child", no_child)
        profile = api_probe.probe(plan="quick", budget_seconds=0.5, device=device)
    assert profile.choice.path == "direct" and profile.pin.largest_bytes == 0
    return (
        f"{profile.choice.path}; {shortened(next(r for r in profile.choice.reasons if 'not on offer' in r))}"
    )


@fault(
    area="device",
    name="an accelerator that hands pageable memory out as pinned",
    injected="a fake CUDA accelerator whose pin_memory copies and locks nothing",
    expected="found out by asking; not on offer",
)
def _(folder: Path) -> str:
    why = FakeAcceleratorDevice(FakeAccelerator("cuda", pinning="pageable")).why_not_pinned()
    assert why is not None and "returned pageable memory" in why
    return why


@fault(
    area="device",
    name="torch built without the device",
    injected="pin_memory raises AssertionError, as a CPU build of torch does",
    expected="not on offer, no exception",
)
def _(folder: Path) -> str:
    error = AssertionError("Torch not compiled with CUDA enabled")
    why = FakeAcceleratorDevice(FakeAccelerator("cuda", pinning=error)).why_not_pinned()
    assert why is not None and "not compiled" in why
    return why


@fault(
    area="device",
    name="no memory on the device in the middle of measuring",
    injected="CUDA out of memory raised from the probe",
    expected="the run starts with the user's own configuration after one warning",
)
def _(folder: Path) -> str:
    seen = start(folder, CONFIG, probe=raising(RuntimeError("CUDA error: out of memory")))
    assert seen.error is None and seen.config == CONFIG and len(seen.warnings) == 1
    assert "CUDA error: out of memory" in seen.warnings[0] and "doctor" in seen.warnings[0]
    return f"one warning: {shortened(seen.warnings[0])}"


@fault(
    area="device",
    name="DeepSpeed cannot load its accelerator",
    injected="DeviceError from the accelerator's own loading",
    expected="the run starts with the user's own configuration after one warning",
)
def _(folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        from autotune_offload.machine import accelerator

        def refuse() -> Any:
            raise DeviceError("DeepSpeed cannot load its accelerator: DS_ACCELERATOR must be one of ...")

        patch.setattr(accelerator, "deepspeed_accelerator", refuse)
        return start(folder, CONFIG, probe=raising(AssertionError())).runs_untuned(CONFIG, "DS_ACCELERATOR")
