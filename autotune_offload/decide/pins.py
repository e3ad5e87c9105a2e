"""The two `pin_memory` keys of a choice, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autotune_offload import units
from autotune_offload.decide.reasons import NOT_HERE
from autotune_offload.decide.verdict import RUN_STEPS, Verdict
from autotune_offload.paths.pinned_blocks import parameter_blocks
from autotune_offload.workload import DTYPE_BYTES, middle_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Whether one of the two `pin_memory` keys is on, why, and whether the noise left it open."""

    pinned: bool
    reason: str
    unsettled: bool = False

    @classmethod
    def measured(
        cls, section: str, what: str, pageable: float, pinned: float, noise: float, locking: Locking
    ) -> Pin:
        """On where the seconds from or into pinned memory are fewer beyond the noise, locking included."""
        gain = pageable / (pinned + locking.share_seconds)
        on = gain > 1 + noise
        times = (
            f"{what} {units.duration(pageable)} with pageable and {units.duration(pinned)} with pinned memory"
        )
        settled = on or gain < 1 / (1 + noise)
        return cls(
            pinned=on,
            unsettled=not settled,
            reason=f"{section} is {'' if on else 'not '}pinned: {times}"
            + ("" if settled else f", the same within the noise of {noise:.1%}{locking.counted}")
            + locking.words(pageable - pinned),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Locking:
    """What page-locking takes at each start, and the part of it that falls on one of the times compared."""

    seconds: float
    share_seconds: float

    @property
    def counted(self) -> str:
        """Beside a comparison that it takes part in."""
        return " with locking counted" if self.share_seconds > 0 else ""

    def words(self, gain_seconds: float) -> str:
        """Where it can be told from nothing: how long, and after how many steps it is earned back."""
        if self.share_seconds <= 0:
            return ""
        said = f"; locking takes {units.duration(self.seconds)} at each start"
        if gain_seconds <= 0:
            return said
        steps = max(round(RUN_STEPS * self.share_seconds / gain_seconds), 1)
        return f"{said}, earned back in {steps:,} step{'s' if steps > 1 else ''} of the {RUN_STEPS:,} counted"


def optimizer_pin(verdict: Verdict, alone: Pin) -> Pin:
    """Our path says where its destination is; where DeepSpeed's own code stays, `alone` holds."""
    path = verdict.chosen.record.path
    if verdict.gain <= 1 + verdict.noise:
        return alone
    on = path == "pinned"
    others = [e for e in verdict.near if (e.record.path == "pinned") is not on]
    unsettled = bool(others) and verdict.rules.against_path("pinned") is None
    if on is alone.pinned:
        return replace(alone, unsettled=unsettled)
    section, _, why = alone.reason.partition(" is ")
    reason = (
        f"{section} is {'' if on else 'not '}pinned for the path {path}; for DeepSpeed's own code it is {why}"
    )
    return Pin(pinned=on, unsettled=unsettled, reason=reason)


def own_pin(verdict: Verdict) -> Pin:
    """Where DeepSpeed's own code carries the gradients, its own two times decide."""
    section, what = "offload_optimizer", "DeepSpeed's own copies take"
    limit = verdict.rules.against_path("pinned")
    if limit is not None:
        cause = NOT_HERE if verdict.rules.not_on_offer else limit
        return Pin(pinned=False, reason=f"{section} is not pinned: {cause}")
    if verdict.steer.path not in ("auto", "deepspeed"):
        on = verdict.steer.path == "pinned"
        fixed = f"{section} is {'' if on else 'not '}pinned: you fixed the path {verdict.steer.path}"
        return Pin(pinned=on, reason=fixed)
    stock = [b for b in verdict.outcome.baselines if b.record.name == verdict.outcome.installed.record.name]
    times = {b.memory: b for b in verdict.outcome.own if b.timed}
    if len(times) < 2:  # one of them was not timed over accumulations
        times = {b.memory: b for b in stock if b.timed}
    if len(times) < 2:
        missing = "pinned" if "pinned" not in times else "pageable"
        return Pin(
            pinned=False,
            reason=f"{section} is not pinned: DeepSpeed's own copies into {missing} memory were not timed",
        )
    pageable, pinned = times["pageable"], times["pinned"]
    noise = verdict.noise_between(pageable, pinned)
    seconds = verdict.rules.lock_seconds(verdict.rules.optimizer_blocks)
    locking = Locking(seconds=seconds, share_seconds=verdict.lock_share)
    return Pin.measured(
        section, what, verdict.counted(pageable.median), verdict.counted(pinned.median), noise, locking
    )


def parameters_pin(verdict: Verdict, *, with_optimizer: bool) -> Pin:
    """Parameters are fetched h2d: their own two curves decide, at the size that most bytes have."""
    section, model = "offload_param", verdict.outcome.model
    if verdict.rules.not_on_offer is not None:
        return Pin(pinned=False, reason=f"{section} is not pinned: {NOT_HERE}")
    limit = verdict.rules.against_parameters(with_optimizer=with_optimizer)
    if limit is None and not model.rates.measured("h2d", "pinned"):
        limit = "no copies from page-locked memory were measured"
    if limit is not None:
        return Pin(pinned=False, reason=f"{section} is not pinned: {limit}")
    workload = model.workload
    elements = -(-middle_elements(workload.parameters) // workload.world_size)
    size = DTYPE_BYTES[workload.dtype] * elements
    pageable, pinned = (model.rates.line("h2d", m).seconds(size) for m in ("pageable", "pinned"))
    seconds = verdict.rules.lock_seconds(parameter_blocks(workload))
    fetched = max(workload.parameter_elements // workload.world_size, 1)
    fetches = RUN_STEPS * workload.accumulation_steps * fetched
    locking = Locking(seconds=seconds, share_seconds=seconds * elements / fetches)
    what = f"a fetch of {units.size(size)} takes"
    return Pin.measured(section, what, pageable, pinned, verdict.noise, locking)
