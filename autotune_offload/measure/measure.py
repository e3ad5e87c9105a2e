"""Timing loops over a Device: bandwidth curves, casts, synchronize and pin costs.

Every number is a median over samples that are kept, with their interquartile range. Buffers rotate
through an arena larger than the last-level cache where time and memory allow, and the bytes of each
point are checked.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from autotune_offload.errors import BudgetError
from autotune_offload.machine.device import Device
from autotune_offload.measure.arenas import open_arenas
from autotune_offload.measure.costs import check_synchronize, pin_cost, sync_cost, why_nothing_pins
from autotune_offload.measure.curves import Curve, Session, silent
from autotune_offload.measure.rehearsal import Rehearsed
from autotune_offload.measure.step import STEP_SHARE, step_rates
from autotune_offload.records import (
    Kind,
    Measurements,
    Memory,
    Plan,
    Progress,
    State,
    Transfer,
)

_PIN_SHARE = 0.15
"""Of the measuring time at most for pinning ever larger blocks."""

_STEADY_SPREAD = 0.10
"""IQR over median up to which a point counts as steady in the verdict (pyperf warns at the same 10 %)."""

_TELLING_SAMPLES = 3
"""A point with fewer says nothing about its spread."""


def measure(
    device: Device,
    plan: Plan,
    *,
    dtype: torch.dtype,
    cache_bytes: int,
    memory_bytes: int,
    pinnable_bytes: int,
    rehearsed: Rehearsed | None = None,
    step: bool = False,
    progress: Progress | None = None,
) -> Measurements:
    """Measure one device and the host beside it within the plan's share of its budget.

    Args:
        device: what to measure; it must be the current one.
        plan: sizes, samples and seconds.
        dtype: low-precision dtype of the casts.
        cache_bytes: last-level cache that buffers rotate beyond.
        memory_bytes: host memory that the buffers may take altogether.
        pinnable_bytes: page-locked memory that may be taken at once.
        rehearsed: how far page-locking went where it was tried before; it goes no further here.
        step: whether the optimizer's step is looked at too, in a part of the time.
        progress: told what is being measured.

    Raises:
        MeasurementError: a copy gave wrong bytes, or a synchronize did not wait.
        BudgetError: not even the smallest size could be timed.
    """
    started, report = device.now(), progress or silent
    whole = plan.budget_seconds * plan.measure_share
    seconds = whole * (1 - STEP_SHARE) if step else whole
    check_synchronize(device)
    pin_bytes = pin_cap_bytes(plan, pinnable_bytes, memory_bytes)
    why_not_pinned = why_nothing_pins(device, pin_bytes, rehearsed)
    pin = pin_cost(device, pin_bytes, why_not_pinned, device.now() + seconds * _PIN_SHARE, rehearsed)
    with open_arenas(device, plan, seconds, cache_bytes, memory_bytes, pin.largest_bytes) as arenas:
        session = Session(device, plan, arenas, started + seconds, dtype, _until(report, seconds / whole))
        transfers = session.transfers()
        casts = session.casts()
        sync = sync_cost(device, plan.max_samples, started + seconds)
    rates = None
    if step:
        report("the optimizer's pass", 1 - STEP_SHARE)
        rates = step_rates(
            device, plan, dtype, cache_bytes=cache_bytes, memory_bytes=memory_bytes, deadline=started + whole
        )
    if not transfers:
        raise BudgetError(
            f"no copy of {plan.smallest_bytes:,} bytes could be timed: expected a plan whose sizes begin "
            f"below its largest, {plan.largest_bytes:,} bytes"
        )
    return Measurements(
        transfers=transfers,
        casts=casts,
        sync=sync,
        pin=pin,
        stability=stability(transfers),
        seconds=device.now() - started,
        step=rates,
    )


def _until(report: Progress, share: float) -> Progress:
    """For a part of the whole that is so much of it."""
    return lambda what, done: report(what, done * share)


def pin_cap_bytes(plan: Plan, pinnable_bytes: int, memory_bytes: int) -> int:
    """What is page-locked at most: half of the memory, since pin_memory copies, so that there are two blocks."""
    return min(plan.pin_cap_bytes, pinnable_bytes, memory_bytes // 2)


def curve(
    device: Device,
    plan: Plan,
    *,
    kind: Kind,
    memory: Memory = "pageable",
    state: State = "warm",
    threads: int = 0,
    cache_bytes: int,
    memory_bytes: int,
) -> tuple[Transfer, ...]:
    """One curve alone, as `measure` measures it, within the plan's share of its budget.

    Raises:
        MeasurementError: a copy gave wrong bytes.
        BudgetError: the memory is too little for the plan's smallest size.
    """
    seconds = plan.budget_seconds * plan.measure_share
    deadline = device.now() + seconds
    pin_bytes = min(plan.pin_cap_bytes, memory_bytes // 2) if memory == "pinned" else 0
    with open_arenas(device, plan, seconds, cache_bytes, memory_bytes, pin_bytes) as arenas:
        session = Session(device, plan, arenas, deadline, torch.float32, silent)
        return session.curve(Curve(kind=kind, memory=memory, state=state, threads=threads), deadline)


def stability(transfers: Sequence[Transfer]) -> tuple[str, ...]:
    """Whether these curves can be trusted, in sentences with their numbers and what to do next."""
    told = [(_spread(t), t) for t in transfers if t.samples >= _TELLING_SAMPLES]
    loose = [(spread, t) for spread, t in told if spread > _STEADY_SPREAD]
    steady = len(told) - len(loose)
    typical = f", typically {statistics.median(s for s, _ in told):.1%}" if told else ""
    counted = f"{steady} of {len(transfers)} points spread by at most {_STEADY_SPREAD:.0%}"
    if steady * 4 >= len(transfers) * 3:
        return (f"steady: {counted} (IQR over median){typical}",)
    verdict = [f"unsteady: only {counted} (IQR over median){typical}"]
    if loose:
        worst, point = max(loose, key=lambda pair: pair[0])
        verdict.append(
            f"the worst is {point.kind} {point.memory} {point.state} of {point.bytes:,} bytes with "
            f"{worst:.0%}; stop other work on this host"
        )
    if len(told) < len(transfers):
        few = f"{len(transfers) - len(told)} points have fewer than {_TELLING_SAMPLES} samples"
        verdict.append(f"{few}; give a longer --budget")
    return tuple(verdict)


def _spread(point: Transfer) -> float:
    return point.iqr_seconds / max(point.median_seconds, 1e-12)
