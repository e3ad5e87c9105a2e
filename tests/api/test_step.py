"""What a report says of the step."""

from __future__ import annotations

from typing import Any

import pytest

from autotune_offload.api import deciding
from autotune_offload.api.given import stepped_as_laid_out
from autotune_offload.api.report import Report
from autotune_offload.engine.step import StepStatus
from autotune_offload.engine.step_attach import StepSpec
from autotune_offload.engine.step_check import StepCheck
from autotune_offload.engine.step_trials import StepChoice
from autotune_offload.records import Settings, StepDecision
from autotune_offload.testing import FakeAccelerator, FakeAcceleratorDevice
from tests.factories import make_profile, make_step

CHECK = StepCheck(steps=3, elements=5000)
CHOICE = StepChoice(threads=2, seconds={0: 0.2, 2: 0.1}, reason="100 ms against 200 ms")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (StepStatus(why_not="the moments are not kept in fp32"), "by DeepSpeed's own code: the moments"),
        (StepStatus(), "is being compared"),
        (StepStatus(check=CHECK), "are being timed; 5,000 values of the first 3 steps were DeepSpeed's own"),
        (StepStatus(check=CHECK, choice=CHOICE), "by one compiled pass; 5,000 values"),
        (StepStatus(check=CHECK, choice=CHOICE), "100 ms against 200 ms"),
    ],
)
def test_a_report_says_who_makes_the_steps(status: StepStatus, words: str) -> None:
    """At every stage, in one line before the reasons."""
    (line,) = [
        line
        for line in Report(profile=make_profile(), step=status).text().splitlines()
        if "steps made" in line
    ]
    assert words in line


def test_a_report_without_a_step_says_nothing_of_it() -> None:
    """As before ZeRO-3."""
    assert "steps made" not in Report(profile=make_profile()).text()


def test_a_report_gives_the_reasons_of_the_step_where_steps_were_looked_at() -> None:
    """What was predicted, and what with; nothing of it where a profile has none, or nothing was put in."""
    reason = make_step().reasons[0]
    assert reason in Report(profile=make_profile(), step=StepStatus()).text()
    assert reason not in Report(profile=make_profile()).text()
    assert reason not in Report(profile=make_profile(step=None), step=StepStatus()).text()


@pytest.mark.parametrize(
    ("settings", "decided", "spec"),
    [
        ({}, make_step(), StepSpec(begins_with=8)),
        ({"step": "fused"}, make_step(), StepSpec(step="fused", begins_with=8)),
        ({}, make_step(back="direct"), StepSpec(begins_with=8, page_lock=False)),
        ({"max_pinned_bytes": 0}, make_step(), StepSpec(begins_with=8, page_lock=False)),
        ({}, make_step(way="deepspeed", threads=0, back="direct"), StepSpec()),
        ({"step": "deepspeed"}, make_step(), StepSpec(step="deepspeed", begins_with=8)),
        ({}, None, StepSpec()),
        ({"max_pinned_bytes": 0}, None, StepSpec(page_lock=False)),
    ],
)
def test_the_running_engine_begins_with_what_was_decided(
    settings: dict[str, Any], decided: StepDecision | None, spec: StepSpec
) -> None:
    """Threads and ring are the decision's; whether the pass stays, its own trials say."""
    assert deciding._step(Settings(**settings), decided) == spec


def laid_out(kind: str, **sections: Any) -> StepDecision | None:
    """The step of a stored profile, in which weights went to a device, for such a configuration."""
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, **sections}
    device = FakeAcceleratorDevice(FakeAccelerator(kind))
    return stepped_as_laid_out(make_profile(), {"zero_optimization": zero}, device).step


def test_a_stored_step_is_decided_anew_for_where_weights_are_kept() -> None:
    """One profile serves both: with offload_param, and on the CPU, they are written in place."""
    assert laid_out("cuda") == make_step()
    for step in (laid_out("cuda", offload_param={"device": "cpu"}), laid_out("cpu")):
        assert step is not None and (step.back, step.own.back, step.threads) == ("in place", "in place", 8)
        assert "cast to 16 bits" in step.reasons[0]


def test_a_profile_without_a_step_stays_without() -> None:
    """Nothing was measured that a decision could come from."""
    old = make_profile(step=None, step_rates=None)
    assert stepped_as_laid_out(old, {}, FakeAcceleratorDevice(FakeAccelerator("cpu"))) is old
