"""What could hang or abort this process is tried in a child: real children.

Those that block, abort and die are in `reliability.device`, where the table of faults has them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune_offload.api import probe
from autotune_offload.described import machine
from autotune_offload.described.clocked import Faults
from autotune_offload.described.simulated import SimulatedDevice
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.measure import rehearsal
from autotune_offload.measure.rehearsal import Rehearsed, rehearse, sizes
from tests.reliability import devices

BLOCKS = sizes(4 << 20)


def in_child(name: str, seconds: float = 2.0) -> Rehearsed | None:
    """A rehearsal of that device in a real child; nothing of it is left afterwards."""
    before = _left()
    try:
        return rehearse(devices.Honest(), BLOCKS, seconds=seconds, made_by=f"{devices.HERE}:{name}")
    finally:
        assert _left() == before


def _left() -> tuple[list[psutil.Process], int]:
    own = psutil.Process()
    return own.children(recursive=True), own.num_fds()


def test_sizes_are_powers_of_two_up_to_the_cap() -> None:
    """From one page on, and none beyond the cap."""
    assert sizes(20_000) == [4096, 8192, 16384]
    assert sizes(16384)[-1] == 16384
    assert sizes(4095) == []


def test_what_goes_well_bounds_nothing() -> None:
    """All blocks were locked and copied."""
    assert in_child("Honest") == Rehearsed(largest_bytes=4 << 20)


def test_without_a_child_nothing_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more processes are allowed: unproven, so it is left alone."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    found = in_child("Honest")
    assert found is not None and found.largest_bytes == 0 and "temporarily unavailable" in str(found.reason)


def test_the_cpu_starts_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can hang there, so nothing is added to the time."""
    device = AcceleratorDevice()
    monkeypatch.setattr(subprocess, "Popen", None)
    before = time.monotonic()
    assert rehearse(device, BLOCKS, seconds=1.0) is None
    assert time.monotonic() - before < 0.05


def test_the_native_backend_needs_a_rehearsal_on_the_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It aborts where it cannot lock."""
    assert not rehearsal.needed(AcceleratorDevice())
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")
    assert rehearsal.needed(AcceleratorDevice())


def test_a_device_that_no_other_process_could_make_is_not_rehearsed() -> None:
    """A caller's own accelerator object lives here only."""
    assert rehearse(devices.Honest(), BLOCKS, seconds=1.0) is None


# -- what a probe makes of it ---------------------------------------------------------------------


@pytest.mark.parametrize("above", [0, 1 << 20])
def test_a_probe_of_a_device_whose_pinned_copies_hang_chooses_without_them(above: int) -> None:
    """The probe ends, uses what does not hang, and says what did."""
    device = SimulatedDevice(machine.load("gh200"), faults=Faults(pinned_copy_hangs_above_bytes=above))
    profile = probe.probe(plan="quick", budget_seconds=0.5, device=device)
    assert profile.choice.path != "pinned" and not profile.choice.pin_optimizer
    assert profile.pin.largest_bytes == above and not profile.pin.capped
    assert "never completes" in str(profile.pin.reason)
    pinned = [c.rejected for c in profile.candidates if c.path == "pinned"]
    assert pinned and all("never completes" in str(why) for why in pinned)


_BUILDS = f"""
from autotune_offload.interruption import cleaned_up
from autotune_offload.measure.rehearsal import rehearse
from tests.reliability import devices
with cleaned_up():
    rehearse(devices.Honest(), [4096], seconds=300, made_by="{devices.HERE}:Builds")
"""


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT], ids=lambda number: number.name
)
def test_a_compiler_ends_with_the_process_that_needed_it(tmp_path: Path, number: signal.Signals) -> None:
    """However that ends, and though the compiler is in a process group of its own."""
    started = tmp_path / "started"
    parent = subprocess.Popen([sys.executable, "-c", _BUILDS], env={**os.environ, "HANGS": str(started)})
    try:
        deadline = time.monotonic() + 60
        while not started.exists():
            assert time.monotonic() < deadline and parent.poll() is None
            time.sleep(0.05)
        compiler = psutil.Process(int(started.read_text()))
        parent.send_signal(number)
        parent.wait(30)
        _, alive = psutil.wait_procs([compiler], timeout=20)
        assert not alive
    finally:
        parent.kill()
        parent.wait()


def test_a_twin_is_as_the_device_itself() -> None:
    """The same machine, ranks and faults; its own clock."""
    faults = Faults(pin_fails_above_bytes=1 << 20)
    device = SimulatedDevice(machine.load("gaudi2"), ranks=4, rank=2, faults=faults, noise=0.2)
    device.synchronize()
    twin = device.twin()
    assert (twin.machine, twin.ranks, twin.faults, twin.identity) == (
        device.machine,
        device.ranks,
        device.faults,
        device.identity,
    )
    assert twin.now() == 0.0
