"""The look at a stored profile before it is used: what is found, what passes, and that it ends."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from autotune_offload.api import probe
from autotune_offload.config.layout import Layout
from autotune_offload.described import machine as described_machine
from autotune_offload.described.simulated import SimulatedDevice
from autotune_offload.machine import host
from autotune_offload.machine import limits as machine_limits
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.measure import measure
from autotune_offload.profiles import lookup
from autotune_offload.profiles.recheck import MOST_BYTES, MOST_SECONDS, doubt
from autotune_offload.profiles.store import Miss, Store
from autotune_offload.records import Limits, PinCost, Profile, Settings, Transfer, Workload
from autotune_offload.testing import FakeAccelerator
from autotune_offload.workload import from_parameter_count
from tests.factories import make_choice, make_profile
from tests.fakes import DeferredDevice

PLENTY = Limits(available_bytes=1 << 50, pinnable_bytes=1 << 50)
UNPINNED = make_choice(path="direct", pin_optimizer=False, pin_parameters=False)


def with_link(machine: described_machine.Machine, part: float) -> described_machine.Machine:
    """The same machine with a part of its rates to host memory."""
    lines = {
        name: msgspec.structs.replace(line, bandwidth_gbps=line.bandwidth_gbps * part)
        for name, line in (("pinned", machine.d2h.pinned), ("pageable", machine.d2h.pageable))
    }
    h2h = msgspec.structs.replace(machine.h2h, bandwidth_gbps=machine.h2h.bandwidth_gbps * part)
    return msgspec.structs.replace(machine, d2h=msgspec.structs.replace(machine.d2h, **lines), h2h=h2h)


@pytest.fixture(scope="module", params=["t4_pcie3", "gh200", "cpu"])
def stored(request: pytest.FixtureRequest) -> tuple[described_machine.Machine, Profile]:
    """A described machine, and the profile of a quick probe on it."""
    machine = described_machine.load(request.param)
    return machine, probe.probe(plan="quick", budget_seconds=0.5, device=SimulatedDevice(machine))


def test_an_unchanged_machine_passes(stored: tuple[described_machine.Machine, Profile]) -> None:
    """With noise of 10 % too, and long before its time is over."""
    machine, profile = stored
    for seed in range(10):
        device = SimulatedDevice(machine, noise=0.1, seed=seed)
        before = device.now()
        assert doubt(profile, device, PLENTY) is None
        assert device.now() - before < MOST_SECONDS / 4


def test_half_the_rate_passes(stored: tuple[described_machine.Machine, Profile]) -> None:
    """Ranks that start at once share a link."""
    machine, profile = stored
    assert doubt(profile, SimulatedDevice(with_link(machine, 0.5)), PLENTY) is None


def test_a_much_slower_link_is_found_with_both_times(
    stored: tuple[described_machine.Machine, Profile],
) -> None:
    """The time for it is bounded, and what was seen is kept."""
    machine, profile = stored
    device = SimulatedDevice(with_link(machine, 0.1))
    before = device.now()
    miss = doubt(profile, device, PLENTY)
    assert device.now() - before < 0.03
    assert isinstance(miss, Miss) and miss.rechecked_seconds is not None
    assert "this machine has changed" in miss.reason and miss.reason.count(" ms") == 2


def test_what_led_to_a_new_profile_does_not_lead_to_another(
    stored: tuple[described_machine.Machine, Profile],
) -> None:
    """A start that is always slow costs one measurement, though that one was as fast as the first."""
    machine, profile = stored
    busy = SimulatedDevice(with_link(machine, 0.1))
    miss = doubt(profile, busy, PLENTY)
    assert miss is not None
    again = structs.replace(profile, rechecked_seconds=miss.rechecked_seconds)
    assert doubt(again, busy, PLENTY) is None


def test_a_probe_keeps_what_the_recheck_saw() -> None:
    """It is in the new profile, for the next start."""
    device = SimulatedDevice(described_machine.load("t4_pcie3"))
    missed = Miss(reason="changed", rechecked_seconds=0.25)
    assert (
        probe.probe(plan="quick", budget_seconds=0.5, device=device, missed=missed).rechecked_seconds == 0.25
    )


def test_a_profile_without_a_copy_to_repeat_passes() -> None:
    """Nothing was measured at a size that a start can afford."""
    large = tuple(row for row in make_profile().transfers if row.bytes > MOST_BYTES)
    for transfers in ((), large):
        profile = make_profile(choice=UNPINNED, transfers=transfers)
        assert doubt(profile, DeferredDevice(), PLENTY) is None


# -- what it pins ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (make_choice(pin_parameters=False), "needs 0.0671 GB of page-locked memory"),
        (make_choice(path="direct", pin_parameters=True), "page-locked memory"),
        (make_choice(path="direct", pin_parameters=False, pin_optimizer=True), "page-locked memory"),
        (make_choice(path="pinned", pin_parameters=False), "page-locked memory"),
    ],
)
def test_what_does_not_fit_today_is_said_with_both_numbers(choice: Any, said: str) -> None:
    """Each way in which a choice pins; no device is touched for it."""
    here = Limits(available_bytes=1 << 24, pinnable_bytes=1 << 24, bounds=make_profile().limits.bounds)
    miss = doubt(make_profile(choice=choice), DeferredDevice(), here)
    assert miss is not None and miss.rechecked_seconds is None
    assert said in miss.reason and "0.0168 GB" in miss.reason and "to raise it" in miss.reason


def test_a_choice_that_pins_nothing_fits_always() -> None:
    """Whatever the limits are."""
    nothing = Limits(available_bytes=0, pinnable_bytes=0)
    assert doubt(make_profile(choice=UNPINNED, transfers=()), DeferredDevice(), nothing) is None


def test_memory_that_cannot_be_page_locked_any_more_is_a_doubt() -> None:
    """Not a failure of the start."""
    device = DeferredDevice()
    device.largest_pin_bytes = 1000
    miss = doubt(make_profile(), device, PLENTY)
    assert miss is not None and "page-locking 4,194,304 bytes failed" in miss.reason


def test_the_pinned_block_is_given_back() -> None:
    """After a doubt and after none."""
    for rechecked in (None, 10.0):
        device = DeferredDevice()
        doubt(make_profile(rechecked_seconds=rechecked), device, PLENTY)
        assert device.count("pinned_empty") == 1
        assert not device.pinned


# -- on this machine ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def here() -> Profile:
    """A profile with this machine's own pageable curve."""
    device = AcceleratorDevice()
    plan = probe.load_plan("quick", 1.0)
    points = measure.curve(
        device,
        plan,
        kind="h2h",
        threads=1,
        cache_bytes=host.facts().last_level_cache_bytes,
        memory_bytes=1 << 28,
    )
    return make_profile(choice=UNPINNED, transfers=points)


@pytest.fixture
def busy() -> Iterator[None]:
    """Four processes that compute and copy all the time."""
    code = "import os\nblock = bytearray(1 << 26)\nwhile os.getppid() == {}:\n    bytes(block)\n"
    code = code.format(__import__("os").getpid())
    children = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
    time.sleep(0.3)
    yield
    for child in children:
        child.kill()
        child.wait()


def test_a_busy_host_is_no_changed_machine(here: Profile, busy: None) -> None:
    """Measured in the quiet, started 30 times beside four processes that copy."""
    device = AcceleratorDevice()
    assert [doubt(here, device, PLENTY) for _ in range(30)] == [None] * 30


def test_a_machine_that_was_ten_times_as_fast_is_found(here: Profile) -> None:
    """On the real clock, in under 30 ms of processor time: the least of three, since others disturb it."""

    def faster(point: Transfer) -> Transfer:
        return structs.replace(
            point, median_seconds=point.median_seconds / 30, iqr_seconds=point.iqr_seconds / 30
        )

    profile = structs.replace(
        here,
        transfers=tuple(map(faster, here.transfers)),
        sync=structs.replace(here.sync, event_seconds=0.0),
    )
    device = AcceleratorDevice()
    seconds = []
    for _ in range(3):
        started = time.process_time()
        miss = doubt(profile, device, PLENTY)
        seconds.append(time.process_time() - started)
        assert miss is not None and miss.rechecked_seconds is not None
    assert min(seconds) < 0.03


# -- the bounds of one rank -----------------------------------------------------------------------


@pytest.fixture
def with_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[float], None]:
    """A host with so many GB free, for 8 ranks that a launcher has started."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    monkeypatch.setattr(machine_limits, "limits", functools.partial(machine_limits.limits, root=tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")

    def free(gigabytes: float) -> None:
        (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {int(gigabytes * 1e9 / 1024)} kB\n")

    return free


def pinned_in_store(store: Store, device: AcceleratorDevice, workload: Workload) -> None:
    """A profile whose path pins, with nothing to be copied again."""
    present = lookup.present_fingerprint(device, workload, Settings())
    pin = PinCost(seconds_per_gib=0.3, largest_bytes=1 << 40, capped=True)
    choice = make_choice(path="pinned", pin_optimizer=True, pin_parameters=False)
    store.save(make_profile(fingerprint=present, workload=workload, pin=pin, choice=choice, transfers=()))


def test_a_rank_has_its_share_of_the_host(with_memory: Callable[[float], None], tmp_path: Path) -> None:
    """What fits one process and not eight is not used; the same bounds as a probe's."""
    device = AcceleratorDevice(FakeAccelerator("cuda", count=8))
    workload = from_parameter_count(7_000_000_000, world_size=8)
    store = Store(tmp_path / "profiles")
    with_memory(400)
    pinned_in_store(store, device, workload)
    assert isinstance(lookup.lookup(store, workload, device), Profile)
    with_memory(60)
    miss = lookup.lookup(store, workload, device)
    assert isinstance(miss, Miss) and "shared by 8 ranks" in miss.reason
    assert isinstance(lookup.lookup(store, None, device), Miss)  # the stored workload says how many
    shared = lookup.limits_of_rank(device, workload, Settings())
    assert shared == lookup.limits_of_rank(device, workload, Settings(), ranks_per_host=8)
    assert shared.available_bytes <= 60e9 / 8


def test_what_a_user_allows_bounds_the_stored_choice(
    with_memory: Callable[[float], None], tmp_path: Path
) -> None:
    """`max_pinned_bytes` of today; a profile for that very bound must fit it too."""
    device = AcceleratorDevice(FakeAccelerator("cuda", count=8))
    with_memory(4000)
    capped = Settings(max_pinned_bytes=1 << 20)
    bounds = lookup.limits_of_rank(device, from_parameter_count(10**9), capped)
    assert bounds.pinnable_bytes == 1 << 20
    profile = make_profile(choice=make_choice(path="pinned", pin_optimizer=True), transfers=())
    miss = doubt(profile, device, bounds)
    assert miss is not None and "max_pinned_bytes" in miss.reason


@pytest.mark.parametrize(
    ("layout", "fits"),
    [
        (Layout(parameters=None), True),
        (Layout(parameters=None, sub_group_elements=10**12), False),
        (Layout(parameters=None, stage=2), False),
    ],
    ids=["stage 3", "one sub-group", "stage 2"],
)
def test_what_fits_depends_on_the_present_configuration(layout: Layout, fits: bool) -> None:
    """One sub-group of everything exists twice while it is locked; stage 2 locks 10 bytes a parameter."""
    device = AcceleratorDevice(FakeAccelerator("cuda"))
    workload = from_parameter_count(7_000_000_000)
    pin = PinCost(seconds_per_gib=0.3, largest_bytes=1 << 40, capped=True)
    choice = make_choice(path="pinned", pin_optimizer=True, pin_parameters=False)
    profile = make_profile(workload=workload, pin=pin, choice=choice, transfers=())
    limits = Limits(available_bytes=145 * 10**9, pinnable_bytes=60 * 10**9)
    assert (doubt(profile, device, limits, layout) is None) is fits
