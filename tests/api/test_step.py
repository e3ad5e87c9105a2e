"""What a report says of the step."""

from __future__ import annotations

import pytest

from autotune_offload.api.report import Report
from autotune_offload.engine.step import StepStatus
from autotune_offload.engine.step_check import StepCheck
from autotune_offload.engine.step_trials import StepChoice
from tests.factories import make_profile

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
