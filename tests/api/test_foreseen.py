"""What is said before `deepspeed.initialize`, since nothing may come back from it."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch

from autotune_offload.api import deciding
from autotune_offload.api import initialize as api_initialize
from autotune_offload.api.foreseen import will_fail
from autotune_offload.api.profile import Found
from autotune_offload.records import Limit, Limits, PinCost
from autotune_offload.upstream import NEWEST
from autotune_offload.workload import from_parameter_count
from tests.factories import make_choice, make_profile

MEMLOCK = Limit(name="memlock", bytes=1 << 20, source="RLIMIT_MEMLOCK", raise_by="ulimit -l unlimited")
PLENTY = Limits(available_bytes=1 << 50, pinnable_bytes=1 << 50)
ON, OFF = {"device": "cpu", "pin_memory": True}, {"device": "cpu", "pin_memory": False}


def said(zero: dict[str, Any], *, limits: Limits = PLENTY, backend: str = "torch", **pin: Any) -> list[str]:
    """The sentences for a billion parameters."""
    cost = PinCost(**{"seconds_per_gib": 0.3, "largest_bytes": 1 << 40, "capped": True, **pin})
    profile = make_profile(workload=from_parameter_count(10**9), pin=cost)
    config = {"zero_optimization": {"stage": 3, **zero}}
    return list(will_fail(config, profile, limits, pin_backend=backend, version=NEWEST))


def test_what_fits_is_not_spoken_of() -> None:
    """Nor what a device that locks nothing cannot lock."""
    both = {"offload_optimizer": ON, "offload_param": ON}
    assert said(both) == []
    assert said(both, backend="none", largest_bytes=0, capped=False, reason="nothing pins") == []


def test_the_flat_copy_is_held_against_memlock_and_the_largest_block() -> None:
    """It is made whatever `pin_memory` says; without `offload_param` it is not."""
    memlock = Limits(available_bytes=1 << 50, pinnable_bytes=1 << 20, bounds=(MEMLOCK,))
    for found in (
        said({"offload_optimizer": OFF, "offload_param": OFF}, limits=memlock, backend="native"),
        said(
            {"offload_optimizer": OFF, "offload_param": OFF},
            largest_bytes=32 << 20,
            capped=False,
            reason="no more",
        ),
    ):
        (sentence,) = found
        assert "flat copy" in sentence and "take offload_param out" in sentence
    assert said({"offload_optimizer": OFF}, limits=memlock, backend="native") == []


def test_a_pin_that_stays_and_cannot_be_had_is_named() -> None:
    """As one that `keep` protects."""
    (sentence,) = said({"offload_optimizer": ON}, largest_bytes=32 << 20, capped=False, reason="no more")
    assert "offload_optimizer.pin_memory is true and will fail here" in sentence


def test_it_is_said_before_deepspeed_is_called(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An abort in there leaves nothing to read a report from."""
    before: list[str] = []

    def abort(*args: Any, **kwargs: Any) -> None:
        before.extend(record.getMessage() for record in caplog.records)
        raise SystemExit(134)

    found = Found(profile=make_profile(choice=make_choice(gain=1.0)), config={}, source="test")
    monkeypatch.setattr(
        deciding,
        "profile_for",
        lambda config, *args: Found(profile=found.profile, config=config, source="test"),
    )
    monkeypatch.setattr(deciding, "will_fail", lambda *args, **kwargs: iter(["it will fail"]))
    monkeypatch.setattr(deepspeed, "initialize", abort)
    zero = {"stage": 3, "offload_optimizer": ON}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    with pytest.raises(SystemExit):
        api_initialize.initialize(model=torch.nn.Linear(8, 8), config=config)
    assert any("it will fail" in message for message in before)
