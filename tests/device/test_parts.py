"""What the parts are made of: links, sleeping streams, cases, and the time that they have."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from autotune_offload.machine.bus import BusDevice
from autotune_offload.records import DeviceIdentity
from autotune_offload.testing import FakeAccelerator, FakeAcceleratorDevice, habana_modules
from benchmarks.device import copies, identity, memory, probes
from benchmarks.device.link import ceiling
from benchmarks.device.profiled import nameless
from benchmarks.device.scene import SHORT, Scene
from benchmarks.device.sleeps import MOST_CYCLES, SleepyDevice, hold_up_backward, sleeper


def _identity(**more: Any) -> DeviceIdentity:
    return DeviceIdentity(kind="cuda", name="a card", count=1, index=0, **more)


def _on_bus(width: int | None = 16, slot: float | None = 16.0, card: float | None = 32.0) -> BusDevice:
    return BusDevice(
        address="0000:01:00.0",
        vendor="NVIDIA",
        link_width=width,
        device_link_width=16,
        slot_speed=slot,
        device_speed=card,
        numa_node=0,
    )


def test_the_ceiling_is_nvmls_word_else_that_of_the_bus() -> None:
    """The slower of slot and card, in the generation's rate."""
    told = ceiling(_identity(link_generation=5, link_width=8), [_on_bus()])
    assert told is not None and told["name"] == "PCIe 5 x8" and told["gbps"] == pytest.approx(31.5, rel=0.01)
    told = ceiling(_identity(), [_on_bus(), _on_bus()])
    assert told is not None and told["name"] == "PCIe 4 x16" and told["source"] == "/sys"


@pytest.mark.parametrize(
    "on_bus",
    [
        [],
        [_on_bus(), _on_bus(width=8)],
        [_on_bus(width=None)],
        [_on_bus(slot=None, card=None)],
        [_on_bus(slot=7.0)],
    ],
)
def test_there_is_no_ceiling_where_nobody_tells_it(on_bus: list[BusDevice]) -> None:
    """Nothing on the bus, several links that differ, or a speed of no generation."""
    assert ceiling(_identity(), on_bus) is None


class Sleepy(SleepyDevice, FakeAcceleratorDevice):
    """On the host; sleeps are written down."""


def test_streams_are_held_up_and_values_stay() -> None:
    """Before copies, casts, sums, norms and events, for drawn times, the same for the same seed."""
    drawn: list[list[int]] = [[], []]
    for cycles in drawn:
        device = Sleepy(cycles.append, 3, FakeAccelerator("cuda"))
        low, high = torch.arange(8).bfloat16(), torch.empty(8)
        for _ in range(20):
            device.d2h(high, low)
            device.h2d(low, high)
            device.cast(high, low)
            device.add(high, low)
            device.record_event()
        assert high.tolist() == [2.0 * each for each in range(8)]
        assert float(device.norm(high)) == pytest.approx(float(high.double().norm()))
        assert device.slept == len(cycles)
    assert drawn[0] == drawn[1] and 10 < len(drawn[0]) < 91
    assert all(0 < each < MOST_CYCLES for each in drawn[0])


def test_the_compute_stream_is_held_up_in_backward() -> None:
    """And gradients are what they were."""
    cycles: list[int] = []
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(30)))
    rows = torch.randn(2, 4)
    module(rows).sum().backward()
    expected = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    module.zero_grad()
    hold_up_backward(module, Sleepy(cycles.append, 0, FakeAccelerator("cuda")))
    loss = module(rows).sum()
    assert not cycles
    loss.backward()
    assert cycles
    assert all(
        torch.equal(p.grad, e)
        for p, e in zip(module.parameters(), expected, strict=True)
        if p.grad is not None
    )


def test_only_cuda_and_rocm_have_a_way_to_sleep() -> None:
    """The others train without, and the page says so."""
    assert sleeper("cuda") is torch.cuda._sleep and sleeper("hpu") is None and sleeper("cpu") is None


@pytest.mark.parametrize("locks", [True, False])
def test_the_first_cases_cover_what_is_claimed(locks: bool) -> None:
    """Every path where memory locks; overflow, checkpoint, both places to add up, a path that comes and goes."""
    cases = list(identity.chosen(locks=locks))
    first = cases[:8]
    assert {case.spec.path for case in first} == ({"direct", "pinned", "staged"} if locks else {"direct"})
    assert any(case.overflow and case.dtype == "fp16" for case in first)
    assert {"checkpoint", "coming_and_going"} <= {case.habit for case in first}
    assert {case.spec.accumulate for case in first if case.accumulation > 1} == {"device", "host"}
    assert len({case.name for case in cases}) == len(cases)


def test_cases_become_shorter_before_any_is_left_out(tmp_path: Path) -> None:
    """By what a step has taken so far; below twenty steps a case tells nothing."""
    ran = [{"seconds": 100.0, "steps": 200}]
    for seconds, expected in ((1000.0, 200), (100.0, 100), (25.0, 25), (15.0, None)):
        scene = Scene(name="identity", folder=tmp_path, seconds=seconds + 0.5)
        found = identity.affordable(scene, ran)
        assert found == expected or (
            found is not None and expected is not None and abs(found - expected) <= 1
        )
        assert identity.affordable(scene, []) == 200


def test_a_trace_names_nobody(tmp_path: Path) -> None:
    """Kineto writes the host's name and where the file lies."""
    file = tmp_path / "trace-x.json"
    file.write_text('{"host_name": "rosalind", "traceName": "/home/r/trace-x.json", "traceEvents": []}')
    nameless(file)
    assert json.loads(file.read_text()) == {"host_name": "HOST", "traceName": file.name, "traceEvents": []}


def test_a_part_begins_nothing_that_it_does_not_expect_to_end(tmp_path: Path) -> None:
    """Going by the longest so far; the first is always begun, and what is left out is kept."""
    scene, begun = Scene(name="x", folder=tmp_path, seconds=0.0), []
    for each in scene.in_time("abc"):
        begun.append(each)
        time.sleep(0.01)
    assert begun == ["a"]
    assert scene.found["left_out"] == ["b", "c"] and scene.told("x") == scene.found
    scene = Scene(name="y", folder=tmp_path, seconds=1000.0)
    assert list(scene.in_time("abc")) == ["a", "b", "c"] and "left_out" not in scene.found


@pytest.mark.parametrize("kind", ["cuda", "xpu", "npu", "hpu"])
def test_copies_are_timed_on_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """By the host's clock where the device has none that torch knows; all bytes are checked by our measurement."""
    for name in habana_modules([]):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    scene = Scene(name="copies", folder=tmp_path, seconds=60.0, sizes=SHORT, fake=kind)
    copies.run(scene)
    found = scene.told("copies")
    timed = {(each["bytes"], each["kind"], each["memory"]) for each in found["copies"]}
    assert len(timed) == 2 * 2 * len(SHORT.copies) and found["pinned_left_out"] is None
    assert {each["plain_device_gbps"] for each in found["copies"]} == {None}
    assert all(
        len(each["plain"]) == len(each["raw_our_seconds"]) == copies.REPEATS for each in found["copies"]
    )


def test_flips_are_counted_against_the_most_frequent() -> None:
    """Five probes of which one differs are one flip."""
    assert probes.flips(["a", "a", "b", "a", "a"]) == {"other": 1, "of": 5, "ways": {"a": 4, "b": 1}}
    assert probes.flips([])["of"] == 0


def test_page_locked_bytes_are_the_drivers_where_torch_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where DeepSpeed's native backend locks past torch; then the kernel is asked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "host_memory_stats", lambda: {"allocated_bytes.current": 77}, raising=False
    )
    name, ask = memory.host_counter()
    assert "host_memory_stats" in name and ask() == 77
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")
    name, ask = memory.host_counter()
    assert "VmLck" in name and ask() >= 0


def test_the_kernels_counts_are_added_up(tmp_path: Path) -> None:
    """What the process locks and what drivers pin."""
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmLck:\t       8 kB\nVmPin:\t      16 kB\n")
    assert memory._of_kernel(status) == 24 * 1024
    assert memory._of_kernel(tmp_path / "none") == 0
