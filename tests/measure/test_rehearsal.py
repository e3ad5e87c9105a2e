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

import msgspec
import psutil
import pytest

from autotune_offload.api import probe
from autotune_offload.described import machine
from autotune_offload.described.clocked import Faults
from autotune_offload.described.simulated import SimulatedDevice
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.measure import attempts, rehearsal
from autotune_offload.measure.attempts import sizes
from autotune_offload.measure.rehearsal import Rehearsed, rehearse
from autotune_offload.workload import from_parameter_count
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


# -- blocks of the model's own size ----------------------------------------------------------------


def test_the_models_own_block_is_tried_after_the_others() -> None:
    """Doubling up to it; nothing where a model needs no more than what was tried."""
    assert attempts.beyond(BLOCKS, 21 << 20) == [8 << 20, 16 << 20, 21 << 20]
    assert attempts.beyond(BLOCKS, 16 << 20) == [8 << 20, 16 << 20]
    assert attempts.beyond(BLOCKS, 4 << 20) == attempts.beyond([], 1 << 30) == []


def test_a_real_child_locks_the_models_own_block() -> None:
    """Of which only a piece is copied."""
    found = rehearse(
        devices.Honest(), BLOCKS, seconds=5.0, whole_bytes=(9 << 20) + 8, made_by=f"{devices.HERE}:Honest"
    )
    assert found == Rehearsed(largest_bytes=(9 << 20) + 8)


@pytest.mark.parametrize(
    ("pin", "largest", "fails"),
    [
        ({"ms_per_gib": 100, "largest_bytes": 4 << 30}, 4 << 30, True),
        ({"ms_per_gib": 100, "largest_bytes": None}, 7 << 30, False),
        ({"ms_per_gib": 20_000, "largest_bytes": None}, 64 << 20, False),
    ],
    ids=["none above 4 GiB", "all", "too slow to try"],
)
def test_what_is_too_large_or_too_slow_is_not_assumed(pin: dict[str, Any], largest: int, fails: bool) -> None:
    """A failure is the reason; what there is no time for is neither proven nor refused."""
    described = machine.load("h100_sxm_pcie5")
    described = msgspec.structs.replace(described, pin=msgspec.structs.replace(described.pin, **pin))
    found = rehearse(SimulatedDevice(described), sizes(32 << 20), seconds=5.0, whole_bytes=7 << 30)
    assert found is not None and found.largest_bytes == largest
    assert ("invalid argument" in str(found.reason)) is fails


def test_a_probe_keeps_what_was_tried_apart_from_what_it_measured() -> None:
    """The sweep's own blocks bound the buffers; the model's own bounds what is assumed."""
    profile = probe.probe(
        device=SimulatedDevice(machine.load("h100_sxm_pcie5")),
        workload=from_parameter_count(5 * 10**8),
        budget_seconds=2,
    )
    assert profile.pin.largest_bytes <= 1 << 28 < profile.pin.tried_bytes == profile.pin.proven_bytes
    assert profile.choice.untried_pins == ()
