"""One decision for one configuration; whatever fails leaves the user's own as it is.

Fail-open lives here: whatever goes wrong in ours costs one warning, and the run starts with the user's own
configuration. ``"strict": true`` in the ``autotune_offload`` block raises instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from autotune_offload import records, switch
from autotune_offload.api import voice
from autotune_offload.api.foreseen import will_fail
from autotune_offload.api.given import (
    Asked,
    as_laid_out,
    filled_by_trainer,
    stepped_as_laid_out,
    trains,
    with_overrides,
    workload_of,
)
from autotune_offload.api.notices import DOCTOR, cause, say, warn
from autotune_offload.api.profile import profile_for
from autotune_offload.api.report import Report
from autotune_offload.config import block as config_block
from autotune_offload.config import equal_keys, reading, sections, tune
from autotune_offload.engine.status import Status
from autotune_offload.errors import ConfigError, UndecidedError
from autotune_offload.machine import host
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.profiles.lookup import limits_of_rank
from autotune_offload.ranks import group as ranks_group
from autotune_offload.ranks.agreement import Agreement
from autotune_offload.ranks.group import WAIT_SECONDS
from autotune_offload.records import Record

SWITCHED_OFF = "switched off"


# -- one decision ---------------------------------------------------------------------------------


class Decided(Record, frozen=True, kw_only=True):
    """A tuned configuration, or None where the user's own is to be used, and how it came about."""

    config: dict[str, Any] | None
    report: Report
    carry_path: bool = False
    makes_steps: bool = False
    """Whether the step is ours to make, if it is found to be faster."""
    device: AcceleratorDevice | None = None
    settings: records.Settings = records.Settings()
    strict: bool = False


def decided_or_not(given: object, asked: Asked) -> Decided:
    """Decide; whatever fails in that leaves the user's configuration as it is, on all ranks."""
    autotune = asked.autotune
    if switched_off(autotune):
        return untuned_by_switch(attaches=asked.attaches)
    with contextlib.suppress(Exception):  # whatever logging is set up to do, the run starts
        voice.set_up()
    strict = told_to_raise(autotune)
    agreement: Agreement | None = None
    try:
        agreement = _agreement(asked, _wait_seconds(given, asked))
        config = reading.read(given)
        _refuse_what_the_switch_does_not_know()
        strict = strict or sections.section(config, config_block.BLOCK).get("strict") is True
        return decided(config, asked, agreement)
    except UndecidedError:
        raise
    except Exception as error:  # fail open: whatever it is, the user's run starts
        if agreement is not None:
            agreement.decline(f"rank {agreement.group.rank}: {cause(error)}")
        if strict:
            raise
        return _survived(error)


def switched_off(autotune: Mapping[str, Any] | bool | None) -> bool:
    """Whether nothing of ours is to run, the arguments of the call not even looked at."""
    if autotune is False:
        return True
    with contextlib.suppress(ValueError):  # what it says neither way is refused where the others can be told
        return switch.is_off()
    return False


def _refuse_what_the_switch_does_not_know() -> None:
    try:
        switch.is_off()
    except ValueError as error:
        raise ConfigError(str(error)) from None


def untuned_by_switch(*, attaches: bool) -> Decided:
    """What a call gets that is switched off. The other ranks hear of it at once, where there is a group already."""
    with contextlib.suppress(Exception):
        agreement = _agreement(Asked(attaches=attaches), WAIT_SECONDS)
        if agreement is not None:
            agreement.decline(f"rank {agreement.group.rank}: {SWITCHED_OFF}")
    return Decided(config=None, report=Report(profile=None, notices=(SWITCHED_OFF,)))


def undecided(error: Exception, autotune: Mapping[str, Any] | bool | None) -> Decided:
    """What a call gets that could not even be looked at; the other ranks hear of it.

    Raises:
        Exception: `error` itself, where the call says ``strict``.
    """
    with contextlib.suppress(Exception):
        agreement = _agreement(Asked(attaches=True), WAIT_SECONDS)
        if agreement is not None:
            agreement.decline(f"rank {agreement.group.rank}: {cause(error)}")
    if told_to_raise(autotune):
        raise error
    return _survived(error)


def _survived(error: Exception) -> Decided:
    notice = f"not tuned, the run goes on with your own configuration: {cause(error)}; {DOCTOR}"
    warn(notice, error)
    return Decided(config=None, report=Report(profile=None, notices=(notice,)))


def told_to_raise(autotune: Mapping[str, Any] | bool | None) -> bool:
    """Whether the call itself says ``strict``; the block of a configuration may say so too."""
    return isinstance(autotune, Mapping) and bool(autotune.get("strict"))


def decided(config: dict[str, Any], asked: Asked, agreement: Agreement | None) -> Decided:
    """The decision itself; whatever it raises is the caller's to survive."""
    settings = config_block.settings(with_overrides(config, asked.autotune))
    why_not = _why_not(config, settings)
    if why_not is not None:
        if agreement is not None:
            agreement.decline(f"rank {agreement.group.rank}: {why_not}")
        if settings.enabled and asked.says:
            warn(f"not tuned: {why_not}")
        return Decided(config=None, report=Report(profile=None, notices=(why_not,)))
    device = AcceleratorDevice()
    found = profile_for(config, workload_of(config, asked), settings, device, agreement)
    profile = stepped_as_laid_out(found.profile, config, device)
    wanted = (
        asked.attaches
        and settings.path != "deepspeed"
        and profile.choice.beats_deepspeed
        and trains(asked.model)
    )
    why_no_path = sections.why_no_path(config)
    carry_path = wanted and why_no_path is None
    choice, too_late = as_laid_out(profile.choice, config, asked.model, device)
    tuned = tune.tune(
        found.config,
        choice,
        version=host.software().deepspeed,
        keep=settings.keep,
        filled=filled_by_trainer(config),
        carried=carry_path,
    )
    fails = tuple(
        will_fail(
            tuned.config,
            profile,
            limits_of_rank(device, profile.workload, settings),
            pin_backend=device.identity.pin_backend,
            version=host.software().deepspeed,
        )
    )
    report_ = Report(
        profile=profile,
        changes=tuned.changes,
        notices=(*found.loud, *found.notices, *fails, *too_late, *tuned.notices, *profile.warnings),
        source=found.source,
        path=None if carry_path or not wanted else Status(why_not=why_no_path),
    )
    decided = Decided(
        config=tuned.config,
        report=report_,
        carry_path=carry_path,
        makes_steps=asked.attaches and why_no_path is None,
        device=device,
        settings=settings,
        strict=settings.strict,
    )
    if agreement is not None:  # the last thing that may fail: from here on the others use it
        agreement.confirm(equal_keys.sizes_digest(tuned.config))
    if asked.says:
        say((*found.loud, *fails, *too_late, *tuned.notices), tuned.changes)
    return decided


def _why_not(config: Mapping[str, Any], settings: records.Settings) -> str | None:
    """Why this configuration is none of our business, if so: nothing is measured for it."""
    if not settings.enabled:
        return SWITCHED_OFF
    if not sections.offloads(config):
        return "nothing is offloaded at ZeRO stage 1 to 3, so there is nothing to tune"
    return None


# -- several ranks --------------------------------------------------------------------------------


def _agreement(asked: Asked, wait_seconds: float) -> Agreement | None:
    """Begun where this job has several ranks and a process group; None where one rank decides alone.

    Raises:
        AgreementError: several ranks without a way to agree.
    """
    if ranks_group.announced_ranks() == 1:
        return None
    if asked.group_is_made_by is not None:
        asked.group_is_made_by()
    group = ranks_group.present_group()
    if group is None:
        return None
    return Agreement(group, "initialize" if asked.attaches else "tune_config", wait_seconds)


def _wait_seconds(given: object, asked: Asked) -> float:
    """What the user set, where that can be read so early; what cannot is somebody else's to refuse."""
    with contextlib.suppress(Exception):
        wait = config_block.settings(with_overrides(reading.read(given), asked.autotune)).wait_seconds
        if not isinstance(wait, str):
            return wait
    return WAIT_SECONDS
