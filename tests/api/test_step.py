"""What a report says of the step."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from autotune_offload.api import confirming
from autotune_offload.api.given import stepped_as_laid_out
from autotune_offload.api.report import Report
from autotune_offload.engine.confirmation import MOST_ROUNDS, ROUNDS_AGAIN, Conclusion
from autotune_offload.engine.entrants import Confirmed
from autotune_offload.engine.step import StepStatus
from autotune_offload.engine.step_attach import StepSpec
from autotune_offload.engine.step_check import StepCheck
from autotune_offload.engine.step_contest import OWN_STEP, StepConfirm
from autotune_offload.profiles.outcomes import FoundStep
from autotune_offload.records import Settings, StepDecision
from autotune_offload.testing import FakeAccelerator, FakeAcceleratorDevice
from tests.factories import make_profile, make_step

CHECK = StepCheck(steps=3, elements=5000)
CONFIRMED = Confirmed(
    entrants=(OWN_STEP, "the pass with 2 host threads"),
    conclusion=Conclusion(winner=1, before=1, seconds=(0.2, 0.1), gain=2.0, noise=0.01, rounds=6, behind=()),
    of="a step",
)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (StepStatus(why_not="the moments are not kept in fp32"), "by DeepSpeed's own code: the moments"),
        (StepStatus(), "is being compared"),
        (StepStatus(check=CHECK), "are being timed; 5,000 values of the first 3 steps were DeepSpeed's own"),
        (StepStatus(check=CHECK, confirmed=CONFIRMED, threads=2), "by one compiled pass; 5,000 values"),
        (
            StepStatus(check=CHECK, confirmed=CONFIRMED, threads=2),
            "the pass with 2 host threads takes 100 ms a step, DeepSpeed's own step 200 ms: 2.00x",
        ),
        (StepStatus(check=CHECK, confirmed=CONFIRMED), "which is being timed again"),
        (StepStatus(check=CHECK, threads=2), "by one compiled pass; 5,000 values"),
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


FIRST = StepConfirm(seed="seed step")
AGAIN = StepConfirm(seed="seed step", fewest_rounds=ROUNDS_AGAIN)
OWN_AGAIN = StepConfirm(seed="seed step", fewest_rounds=ROUNDS_AGAIN, begins_with_own=True)
OWN_DECIDED = make_step(way="deepspeed", threads=0, back="direct")
FOUND_FOUR = FoundStep(threads=4, words="four were the fastest")
FOUND_OWN = FoundStep(threads=0, words="DeepSpeed's own step stays")


@pytest.mark.parametrize(
    ("settings", "decided", "known", "spec"),
    [
        ({}, make_step(), None, StepSpec(begins_with=8, confirm=FIRST)),
        ({"step": "fused"}, make_step(), None, StepSpec(step="fused", begins_with=8, confirm=FIRST)),
        ({}, make_step(back="direct"), None, StepSpec(begins_with=8, page_lock=False, confirm=FIRST)),
        ({"max_pinned_bytes": 0}, make_step(), None, StepSpec(begins_with=8, page_lock=False, confirm=FIRST)),
        ({"step": "deepspeed"}, make_step(), None, StepSpec(step="deepspeed", begins_with=8, confirm=FIRST)),
        ({}, None, None, StepSpec(confirm=FIRST)),
        ({"max_pinned_bytes": 0}, None, None, StepSpec(page_lock=False, confirm=FIRST)),
        ({}, make_step(), FOUND_FOUR, StepSpec(begins_with=4, confirm=AGAIN)),
        ({}, make_step(), FOUND_OWN, StepSpec(begins_with=8, confirm=OWN_AGAIN)),
        (
            {"confirm_rounds": 9},
            make_step(),
            None,
            StepSpec(begins_with=8, confirm=structs.replace(FIRST, most_rounds=9)),
        ),
        ({"confirm": False}, make_step(), FOUND_FOUR, StepSpec(begins_with=8, threads=8, confirm=None)),
        ({"confirm": False}, None, None, StepSpec()),
    ],
)
def test_the_running_engine_begins_with_what_was_decided_or_found(
    settings: dict[str, Any], decided: StepDecision | None, known: FoundStep | None, spec: StepSpec
) -> None:
    """Threads and ring are the decision's or the former run's; whether the pass stays, real steps say."""
    assert spec.confirm is None or spec.confirm.most_rounds in (MOST_ROUNDS, 9)
    assert confirming.step_spec(Settings(**settings), decided, known, "seed") == spec


def test_where_deepspeeds_own_step_was_decided_the_next_best_is_confirmed_against_it() -> None:
    """Without confirmation it simply stays, unless the pass is asked for."""
    best = next(each.threads for each in OWN_DECIDED.candidates if each.threads)
    assert confirming.step_spec(Settings(), OWN_DECIDED, None, "seed").begins_with == best
    off = Settings(confirm=False)
    assert confirming.step_spec(off, OWN_DECIDED, None, "seed").step == "deepspeed"
    fused = confirming.step_spec(structs.replace(off, step="fused"), OWN_DECIDED, None, "seed")
    assert (fused.step, fused.threads, fused.confirm) == ("fused", best, None)


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
