"""The stand-ins that are shipped: real tensors, calls in order, and nothing that the real ones do not have."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator

import pytest
import torch

from autotune_offload.decide.candidates import grid
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.measure.bench import Bench
from autotune_offload.paths.build import build
from autotune_offload.paths.path import destination_memory
from autotune_offload.records import Settings
from autotune_offload.testing import Calls, FakeAccelerator, FakeAcceleratorDevice, habana, junk
from tests.described.test_simulated import small

OWN = {"kind", "count", "pinning", "calls", "current"}
"""What a FakeAccelerator has beside the calls it stands for."""


@pytest.mark.parametrize("kind", ["cuda", "hpu", "xpu"])
def test_every_path_runs_on_real_tensors(kind: str) -> None:
    """Paths bring the right bits on each kind of accelerator, with streams and events in use."""
    accelerator = FakeAccelerator(kind)
    with habana(accelerator.calls):
        device = FakeAcceleratorDevice(accelerator)
        bench = Bench(device, small(3000, 3), 100_000)
        for candidate in grid(device, small(3000, 3), Settings()):
            bench.check(build(device, candidate, bench.dtype), destination_memory(candidate.path))
        bench.close()
    called = {call[0] for call in accelerator.calls}
    assert {"pin_memory", "event.record", "event.synchronize", "enter", "stream.wait_event"} <= called
    assert ("mark_step" in called) == (kind == "hpu")


def test_what_deepspeeds_accelerators_do_not_have_does_not_exist() -> None:
    """Every public call of the stand-in is one of a DeepSpeedAccelerator's, with arguments that it takes."""
    from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

    fake = FakeAccelerator()
    public = {name for name in dir(fake) if not name.startswith("_")} - OWN
    assert public
    for name in public:
        real = inspect.getattr_static(DeepSpeedAccelerator, name)
        if not isinstance(real, property):
            count = len(inspect.signature(getattr(fake, name)).parameters)
            assert count <= len(inspect.signature(real).parameters) - 1, name
    with pytest.raises(AttributeError):
        fake.synchronise()  # type: ignore[attr-defined]


def test_a_wrong_call_fails() -> None:
    """Waiting for an event that was never recorded, and a device that is not there, raise."""
    accelerator = FakeAccelerator(count=2)
    with pytest.raises(ValueError, match="never recorded"):
        accelerator.Event().synchronize()
    with pytest.raises(ValueError, match="never recorded"):
        accelerator.current_stream().wait_event(accelerator.Event())
    with pytest.raises(ValueError, match="device 2 of 2"):
        accelerator.set_device(2)


def test_habana_is_there_inside_and_gone_afterwards() -> None:
    """The modules can be imported inside only, and an undocumented call does not exist."""
    before = dict(sys.modules)
    with habana([]) as modules:
        import habana_frameworks.torch.core as core
        import habana_frameworks.torch.hpu as hpu

        assert core.hpu is hpu is modules["habana_frameworks.torch.hpu"]
        assert hpu.device_count() == 8
        with pytest.raises(AttributeError):
            hpu.wait_for_everything()
    assert not {name for name in sys.modules if name.startswith("habana")} - set(before)


@pytest.fixture
def deepspeeds_hpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AcceleratorDevice, Calls]]:
    """DeepSpeed's own HPU accelerator on the stand-in, and the calls that reach it."""
    for name in ("PT_HPU_LAZY_ACC_PAR_MODE", "PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))
    deterministic = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    calls: Calls = []
    with habana(calls):
        from deepspeed.accelerator.hpu_accelerator import HPU_Accelerator

        try:
            yield FakeAcceleratorDevice(HPU_Accelerator()), calls
        finally:
            torch.use_deterministic_algorithms(deterministic)
            torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def test_deepspeeds_own_hpu_accelerator_runs_on_it(
    deepspeeds_hpu: tuple[AcceleratorDevice, Calls],
) -> None:
    """The device finds Gaudi's name and memory through it, and steps before each wait and change of stream."""
    device, calls = deepspeeds_hpu
    assert (device.identity.kind, device.identity.name, device.identity.count) == ("hpu", "GAUDI2", 8)
    assert device.identity.memory_bytes == 96 << 30
    calls.clear()
    with device.on(device.new_stream()):
        device.record_event().synchronize()
    device.synchronize()
    names = [call[0] for call in calls]
    assert names == [
        *("Stream", "mark_step", "enter", "mark_step", "event.record", "event.synchronize"),
        *("mark_step", "leave", "mark_step", "synchronize"),
    ]


def test_memory_that_was_just_allocated_holds_junk() -> None:
    """Nothing reads zeros by chance."""
    assert set(junk(3, torch.int32).view(torch.uint8).tolist()) == {0x5A}
