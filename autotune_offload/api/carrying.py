"""What is put into an engine that DeepSpeed has made: path, step and flag, each failing open by itself."""

from __future__ import annotations

import contextlib
from typing import Any

from msgspec import structs

from autotune_offload.api.confirming import put_in, put_step_in
from autotune_offload.api.deciding import SWITCHED_OFF, Decided
from autotune_offload.api.notices import DOCTOR, cause, warn
from autotune_offload.api.report import Report
from autotune_offload.config import equal_keys, lost_gradients
from autotune_offload.engine.one_flag import FlagStatus, attach_flag
from autotune_offload.engine.status import Status
from autotune_offload.engine.step import StepStatus
from autotune_offload.machine import host


def with_path(engine: Any, decided: Decided) -> Report:
    """Put the chosen path into the engine, where there is one to be put; the report with its status."""
    if not decided.carry_path or decided.report.profile is None:
        return decided.report
    choice = decided.report.profile.choice
    try:
        if choice.path == "pinned" and not engine.optimizer.offload_optimizer_pin_memory:
            status = Status(why_not="offload_optimizer.pin_memory stays false, as you wrote it")
        else:
            seed = equal_keys.sizes_digest(decided.config or {})
            status = put_in(engine, decided.report.profile, decided.settings, decided.device, seed)
    except Exception as error:  # fail open
        if decided.strict:
            raise
        warn(f"the {choice.path} path was not attached: {cause(error)}; {DOCTOR}", error)
        status = Status(why_not=cause(error))
    return structs.replace(decided.report, path=status)


def step_in(engine: Any, decided: Decided) -> StepStatus | None:
    """Make the engine's steps as decided; None where nothing was."""
    profile = decided.report.profile
    if not decided.makes_steps or profile is None:
        return None
    try:
        seed = equal_keys.sizes_digest(decided.config or {})
        return put_step_in(engine, profile, decided.settings, decided.device, seed)
    except Exception as error:  # fail open
        if decided.strict:
            raise
        warn(f"DeepSpeed makes the steps itself: {cause(error)}; {DOCTOR}", error)
        return StepStatus(why_not=cause(error))


def flag_in(engine: Any, decided: Decided) -> FlagStatus | None:
    """Look for overflows of stages 1 and 2 without waiting; None where that is not asked for."""
    if decided.device is None or decided.settings.path == "deepspeed":
        return None
    try:
        status = attach_flag(engine, decided.device)
    except Exception as error:  # fail open
        if decided.strict:
            raise
        warn(f"DeepSpeed looks for overflows itself: {cause(error)}; {DOCTOR}", error)
        return None
    return None if status.why_not is not None else status


def with_what_is_lost(engine: Any, report: Report) -> Report:
    """The report with a warning where this release of DeepSpeed will leave gradients out; of the engine itself."""
    with contextlib.suppress(Exception):  # an engine of another kind has no such optimizer
        if report.notices != (SWITCHED_OFF,) and engine.optimizer.cpu_offload:
            lost = lost_gradients.lost(
                host.software().deepspeed,
                int(engine.zero_optimization_stage()),
                int(engine.gradient_accumulation_steps()),
            )
            if lost is not None:
                warn(lost.sentence)
                return structs.replace(report, notices=(lost.sentence, *report.notices))
    return report
