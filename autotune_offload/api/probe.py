"""The whole flow on this host: facts, limits, measurements, decision, profile."""

from __future__ import annotations

import datetime
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from autotune_offload import documents
from autotune_offload.config.layout import PLAIN, Layout
from autotune_offload.config.tune import written_keys
from autotune_offload.errors import BudgetError, ConfigError
from autotune_offload.interruption import cleaned_up
from autotune_offload.machine import host
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.machine.device import Device
from autotune_offload.places import config_file
from autotune_offload.profiles.environment import Environment, release
from autotune_offload.profiles.store import Miss
from autotune_offload.records import SCHEMA, Plan, Profile, Settings, Workload
from autotune_offload.workload import default_workload

if TYPE_CHECKING:
    from autotune_offload.records import Progress
from autotune_offload.profiles.lookup import capped, limits_of_rank

_DECIDE_BY = 0.9
"""Trials end at this part of the budget; the round under way, the rules and the profile need the rest."""

_LEAST_SECONDS = 0.2


def load_plan(name: str, budget_seconds: float | None = None) -> Plan:
    """A shipped probe plan, with another time budget if one is given.

    Raises:
        ConfigError: no such plan, or a budget that is too small to measure anything.
    """
    file = config_file("probe_plans", f"{name}.yaml")
    try:
        text, _ = documents.read_text(file)
        plan = msgspec.convert(documents.parse(text), Plan)
    except (documents.Refused, msgspec.ValidationError) as error:
        raise ConfigError(f'probe plan "{file}" cannot be used: {error}') from error
    if budget_seconds is None:
        return plan
    if not _LEAST_SECONDS <= budget_seconds < float("inf"):
        raise BudgetError(f"a budget of {budget_seconds:g} s; expected at least {_LEAST_SECONDS:g} s")
    return structs.replace(plan, budget_seconds=budget_seconds)


@cleaned_up()
def probe(
    *,
    workload: Workload | None = None,
    plan: str = "standard",
    budget_seconds: float | None = None,
    max_pinned_bytes: int | None = None,
    settings: Settings | None = None,
    device: Device | None = None,
    progress: Progress | None = None,
    missed: Miss | None = None,
    ranks_per_host: int = 1,
    layout: Layout = PLAIN,
) -> Profile:
    """Measure this host, choose, and return the profile. Saves nothing.

    Args:
        workload: what is to be offloaded; None takes a decoder of a billion parameters.
        plan: "quick", "standard" or "thorough".
        budget_seconds: instead of the plan's own, imports excluded.
        max_pinned_bytes: page-locked memory that this process may take at most.
        settings: what the user fixed in the ``autotune_offload`` block.
        device: None takes the accelerator that DeepSpeed chooses. One that is described brings its host along.
        progress: called with what is being measured and the fraction done.
        missed: what `lookup` said of the stored profile; a re-check's time is kept for the next start.
        ranks_per_host: processes that call this at the same time on this host, so that each gets its share of
            the memory, and the contention between them is in the times. Nothing here waits for another.
        layout: what the configuration says of stage, devices and sizes; None is stage 3 with both offloads on the CPU.

    Raises:
        ConfigError: a plan or a fixed setting that cannot be used.
        BudgetError: too little time to measure anything.
        DeviceError: DeepSpeed's accelerator cannot be loaded or used.
        MeasurementError: copies or timings that cannot be trusted.
    """
    # here, so that a start with a stored profile loads none of it, and the imports are not the budget's
    import optuna  # noqa: F401
    import torch

    from autotune_offload.decide.decide import decide
    from autotune_offload.decide.step import decide_step
    from autotune_offload.measure.attempts import sizes
    from autotune_offload.measure.measure import measure, pin_cap_bytes
    from autotune_offload.measure.rehearsal import rehearse
    from autotune_offload.paths.page_locking import largest_needed

    device = device or AcceleratorDevice()
    steer = capped(settings or Settings(), max_pinned_bytes)
    loaded = load_plan(plan, budget_seconds)
    workload = workload or default_workload()
    facts, software = device.host_facts() or host.facts(), host.software()
    limits = limits_of_rank(device, workload, steer, ranks_per_host=ranks_per_host)
    report, share = progress or _silent, loaded.measure_share
    memory_bytes = limits.measuring_bytes
    pin_bytes = pin_cap_bytes(loaded, limits.pinnable_bytes, memory_bytes)
    # before the clock starts: a child's life is its imports, and they are not the budget's either
    rehearsed = rehearse(
        device,
        sizes(pin_bytes),
        seconds=loaded.budget_seconds,
        whole_bytes=largest_needed(workload, limits, layout, software.deepspeed),
    )
    dtype: torch.dtype = getattr(torch, workload.dtype)
    device.why_no_pass(dtype)  # compiles it, where it was not yet
    started = device.now()
    with measuring(device):
        measurements = measure(
            device,
            loaded,
            dtype=dtype,
            cache_bytes=facts.last_level_cache_bytes,
            memory_bytes=memory_bytes,
            pinnable_bytes=limits.pinnable_bytes,
            rehearsed=rehearsed,
            step=layout.stage == 3 and layout.optimizer == "cpu",
            progress=lambda what, done: report(what, done * share),
        )
        decision = decide(
            device,
            loaded,
            measurements,
            workload,
            limits,
            deepspeed_version=release(software.deepspeed),
            steer=steer,
            cache_bytes=facts.last_level_cache_bytes,
            deadline=started + loaded.budget_seconds * _DECIDE_BY,
            progress=lambda what, done: report(what, share + done * (1 - share)),
            layout=layout,
        )
    step = decide_step(
        device,
        measurements,
        workload,
        limits,
        decision.choice,
        layout=layout,
        version=software.deepspeed,
    )
    report("done", 1.0)
    return Profile(
        schema=SCHEMA,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        fingerprint=Environment(
            host=facts,
            device=device.identity,
            software=software,
            limits=limits,
            workload=workload,
            settings=steer,
            layout=layout,
        ).fingerprint(),
        host=facts,
        device=device.identity,
        software=software,
        limits=limits,
        workload=workload,
        transfers=measurements.transfers,
        casts=measurements.casts,
        sync=measurements.sync,
        pin=measurements.pin,
        baselines=decision.baselines,
        candidates=decision.candidates,
        choice=decision.choice,
        zero_optimization=written_keys(decision.choice, software.deepspeed),
        plan=loaded.name,
        stability=measurements.stability,
        elapsed_seconds=device.now() - started,
        warnings=decision.warnings,
        rechecked_seconds=missed.rechecked_seconds if missed is not None else None,
        ranks_copying=ranks_per_host,
        accumulations=decision.accumulations,
        step_rates=measurements.step,
        step=step,
    )


def _silent(what: str, fraction: float) -> None:
    del what, fraction


@contextmanager
def measuring(device: Device) -> Iterator[Any]:
    """The right device current, and no garbage collection in the middle of a sample."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with device.selected():
            yield device
    finally:
        if collecting:
            gc.enable()
