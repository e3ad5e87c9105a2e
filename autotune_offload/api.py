"""What people call: one line around `deepspeed.initialize`, and the parts of it.

Fail-open lives here: whatever goes wrong in ours costs one warning, and the run starts with the
user's own configuration. ``"strict": true`` in the ``autotune_offload`` block raises instead.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import os
import statistics
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from autotune_offload import ds_config, host, zero3
from autotune_offload import workload as workloads
from autotune_offload.attach import Status, attach
from autotune_offload.device import AcceleratorDevice
from autotune_offload.errors import AutotuneError, ConfigError, ProfileError
from autotune_offload.interruption import cleaned_up
from autotune_offload.probing import lookup, probe
from autotune_offload.records import Change, Profile, Record, Workload
from autotune_offload.store import Miss, Store

_SWITCHED_OFF = "switched off"
_DOCTOR = "`autotune-offload doctor` tells what stands in the way on this host"
_FORESEEN = (AutotuneError, OSError, MemoryError)
"""Ours, and what a host may do to anybody: no traceback is shown for it."""

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Where launchers put a process's rank: torchrun and DeepSpeed, Open MPI, MVAPICH2, Hydra, srun."""

_log = logging.getLogger("autotune_offload")

_reports: weakref.WeakKeyDictionary[Any, Report] = weakref.WeakKeyDictionary()


class Report(Record, frozen=True, kw_only=True):
    """What was done to one configuration, and why.

    `profile` is None where nothing was tuned; `notices` then say why.
    """

    profile: Profile | None
    changes: tuple[Change, ...] = ()
    notices: tuple[str, ...] = ()
    source: str = ""
    """Where the profile comes from: measured now, or a file."""
    path: Status | None = None
    """What the attached path has done; None where nothing was to be attached."""
    pinned_bytes: Mapping[str, int] = msgspec.field(default_factory=dict)
    """What is really page-locked for this engine, by buffer."""

    def text(self) -> str:
        """The report in plain lines: choice, reasons, changed keys, notices."""
        return "\n".join([*self._choice_lines(), *self._change_lines(), *self._other_lines()])

    def _choice_lines(self) -> list[str]:
        if self.profile is None:
            return ["autotune-offload: the configuration is unchanged"]
        choice = self.profile.choice
        words = f"path {choice.path}, cast on the {choice.cast}"
        lines = [f"autotune-offload: {words} ({self.source})", f"carried out {self.carrier()}", "why:"]
        return lines + [f"  - {reason}" for reason in choice.reasons]

    def carrier(self) -> str:
        """By whom gradients are moved, and what is known of it so far, in a few words."""
        if self.path is None:
            return "by DeepSpeed's own code, with the keys below"
        if self.path.why_not is not None:
            return f"by DeepSpeed's own code, with the keys below: {self.path.why_not}"
        words = "in the running optimizer"
        check = self.path.check
        if check is not None and check.partitions and check.mismatch is None:
            words += f"; the first {check.partitions} partitions were DeepSpeed's own to the last bit"
        words += self._times(self.path)
        if self.path.stock_link_bytes:
            share = self.path.link_bytes / self.path.stock_link_bytes
            words += f"; {share:.0%} of the bytes that DeepSpeed would move over the link"
        return words

    def _times(self, path: Status) -> str:
        """With the path and without; means, since the passes of one accumulation differ."""
        ours, stock = path.backward_seconds, path.stock_backward_seconds
        if not ours:
            return ""
        words = f"; {statistics.fmean(ours) * 1e3:.3g} ms of host time in a backward pass"
        if not stock:
            return words
        passes = "the one" if len(stock) == 1 else f"the {len(stock)}"
        without = f"{statistics.fmean(stock) * 1e3:.3g} ms without it"
        return f"{words}, {without} (in {passes} after the self-check, left to DeepSpeed's own code)"

    def _change_lines(self) -> list[str]:
        if not self.changes:
            return ["config: nothing to change"] if self.profile is not None else []
        return ["config:"] + [
            f"  {change.key}: {_shown(change.before)} -> {_shown(change.after)}" for change in self.changes
        ]

    def _other_lines(self) -> list[str]:
        pinned = [
            f"  {name}: {count:,} bytes page-locked" for name, count in self.pinned_bytes.items() if count
        ]
        notes = [f"  - {notice}" for notice in self.notices]
        return ["page-locked:", *pinned] * bool(pinned) + ["notes:", *notes] * bool(notes)


def initialize(*args: Any, autotune: Mapping[str, Any] | bool | None = None, **kwargs: Any) -> Any:
    """`deepspeed.initialize` with the offload keys chosen for this machine.

    Args:
        *args: as for `deepspeed.initialize`.
        autotune: settings that go over the ``autotune_offload`` block of the configuration; False
            passes everything through untouched.
        **kwargs: as for `deepspeed.initialize`. Neither the configuration nor `args` is changed.

    Returns:
        Engine, optimizer, dataloader and scheduler, as DeepSpeed made them.
    """
    import deepspeed

    call = inspect.signature(deepspeed.initialize).bind_partial(*args, **kwargs).arguments
    given = _configuration(call)
    if given is None:
        return deepspeed.initialize(*args, **kwargs)
    decided = _decided_or_not(given, call.get("model"), autotune, attaches=True)
    if decided.config is None:
        result = deepspeed.initialize(*args, **kwargs)
    else:
        _hand_over(call, decided.config)
        result = deepspeed.initialize(**call)
    carried = _carried_out(result[0], decided)
    with contextlib.suppress(TypeError):  # an engine that takes no weak reference has no report
        _reports[result[0]] = carried
    return result


def tune_config(
    config: object,
    *,
    model: Any = None,
    workload: Workload | None = None,
    autotune: Mapping[str, Any] | bool | None = None,
) -> dict[str, Any]:
    """A configuration with the offload keys chosen for this machine, before anything is initialized.

    For whoever calls `deepspeed.initialize` itself: its own code then carries the gradients, and its own
    measured times decide about pinning.

    Args:
        config: every form that `deepspeed.initialize` takes, and `pathlib.Path`. Not changed.
        model: the module that will be trained, for its real partition sizes.
        workload: instead of `model`, where it does not exist yet; with neither, the newest stored
            profile of this host decides, or a decoder of a billion parameters.
        autotune: settings that go over the ``autotune_offload`` block; False changes nothing.

    Raises:
        ConfigError: the configuration cannot be read.
    """
    given = ds_config.read(config)
    decided = _decided_or_not(given, model, autotune, workload, attaches=False)
    for notice in decided.report.notices:
        _log.info("%s", notice)
    return given if decided.config is None else decided.config


def load_profile(path: str | Path | None = None) -> Profile:
    """A stored profile: that of the file, or the newest in the cache.

    Raises:
        ProfileError: no such profile, or one that cannot be used.
    """
    store = Store()
    if path is not None:
        return store.load(Path(path))
    for entry in store.entries():
        if entry.profile is not None:
            return entry.profile
    raise ProfileError(f"no stored profile in {store.folder}; make one with `autotune-offload probe`")


def report(engine: Any) -> Report:
    """What was chosen for an engine, why, what was changed, and what DeepSpeed really page-locked."""
    try:
        known = _reports.get(engine)
    except TypeError:  # nothing that an engine could be
        known = None
    if known is None:
        known = Report(profile=None, notices=("this engine was not made by autotune_offload.initialize",))
    return replace(known, pinned_bytes=_really_pinned(engine))


# -- one decision ---------------------------------------------------------------------------------


class _Decided(Record, frozen=True, kw_only=True):
    """A tuned configuration, or None where the user's own is to be used, and how it came about."""

    config: dict[str, Any] | None
    report: Report
    carry_path: bool = False
    device: AcceleratorDevice | None = None
    strict: bool = False


def _decided_or_not(
    given: object,
    model: Any,
    autotune: Mapping[str, Any] | bool | None,
    workload: Workload | None = None,
    *,
    attaches: bool,
) -> _Decided:
    """Decide; whatever fails in that leaves the user's configuration as it is."""
    if autotune is False:
        return _Decided(config=None, report=Report(profile=None, notices=(_SWITCHED_OFF,)))
    strict = isinstance(autotune, Mapping) and bool(autotune.get("strict"))
    try:
        config = ds_config.read(given)
        block = config.get(ds_config.BLOCK)
        strict = strict or (isinstance(block, Mapping) and block.get("strict") is True)
        return _decided(config, model, autotune, workload, attaches=attaches)
    except Exception as error:  # fail open: whatever it is, the user's run starts
        if strict:
            raise
        notice = f"not tuned, the run goes on with your own configuration: {_cause(error)}; {_DOCTOR}"
        _warn(notice, error)
        return _Decided(config=None, report=Report(profile=None, notices=(notice,)))


def _cause(error: Exception) -> str:
    return str(error) if isinstance(error, AutotuneError) else f"{type(error).__name__}: {error}"


def _warn(notice: str, error: Exception | None = None) -> None:
    """On one rank; with a traceback only where a failure was not foreseen."""
    if _rank() == 0:
        unforeseen = error is not None and not isinstance(error, _FORESEEN)
        _log.warning("autotune-offload: %s", notice, exc_info=unforeseen)


def _decided(
    config: dict[str, Any],
    model: Any,
    autotune: Mapping[str, Any] | bool | None,
    workload: Workload | None,
    *,
    attaches: bool,
) -> _Decided:
    settings = ds_config.settings(_with_overrides(config, autotune))
    why_not = _why_not(config, settings)
    if why_not is not None:
        if settings.enabled:
            _warn(f"not tuned: {why_not}")
        return _Decided(config=None, report=Report(profile=None, notices=(why_not,)))
    if workload is None and model is not None:
        workload = workloads.from_module(
            model, accumulation_steps=_accumulation(config), dtype=_dtype(config)
        )
    device = AcceleratorDevice()
    profile, source, notices = _profile(workload, settings, device)
    carry_path = (
        attaches
        and zero3.takes_a_path(config)
        and settings.path != "deepspeed"
        and profile.choice.beats_deepspeed
    )
    tuned = zero3.tune(
        config,
        profile.choice,
        version=host.software().deepspeed,
        keep=settings.keep,
        carried=carry_path,
    )
    for notice in tuned.notices:
        _warn(notice)
    for change in tuned.changes:
        _log.info("%s: %s -> %s (%s)", change.key, change.before, change.after, change.reason)
    report_ = Report(
        profile=profile,
        changes=tuned.changes,
        notices=(*notices, *tuned.notices, *profile.warnings),
        source=source,
    )
    return _Decided(
        config=tuned.config, report=report_, carry_path=carry_path, device=device, strict=settings.strict
    )


def _carried_out(engine: Any, decided: _Decided) -> Report:
    """Put the chosen path into the engine, where there is one to be put; the report with its status."""
    if not decided.carry_path or decided.report.profile is None:
        return decided.report
    choice = decided.report.profile.choice
    try:
        if choice.path == "pinned" and not engine.optimizer.offload_optimizer_pin_memory:
            status = Status(why_not="offload_optimizer.pin_memory stays false, as you wrote it")
        else:
            status = attach(engine, choice, decided.device)
    except Exception as error:  # fail open
        if decided.strict:
            raise
        _warn(f"the {choice.path} path was not attached: {_cause(error)}; {_DOCTOR}", error)
        status = Status(why_not=_cause(error))
    return replace(decided.report, path=status)


def _why_not(config: Mapping[str, Any], settings: ds_config.Settings) -> str | None:
    """Why this configuration is none of our business, if so: nothing is measured for it."""
    if not settings.enabled:
        return _SWITCHED_OFF
    if not zero3.offloads(config):
        return "nothing is offloaded at ZeRO stage 1 to 3, so there is nothing to tune"
    if _world_size() > 1:
        return (
            f"{_world_size()} ranks: this version tunes runs of one rank, since sizes that differ between "
            "ranks would hang the job"
        )
    return None


def _profile(
    workload: Workload | None, settings: ds_config.Settings, device: AcceleratorDevice
) -> tuple[Profile, str, tuple[str, ...]]:
    """The stored profile of this environment, or a new one that is stored if it can be."""
    store = Store()
    found = lookup(store, workload, device, settings)
    if not isinstance(found, Miss):
        return found, f"stored profile of {found.created}", ()
    why_not = store.why_not_writable()
    if why_not is not None:
        _warn(f"measuring this host without a cache: {why_not}")
    else:
        _log.info("measuring this host: %s", found.reason)
    budget = None if isinstance(settings.budget_seconds, str) else settings.budget_seconds
    with cleaned_up():
        profile = probe(
            workload=workload, budget_seconds=budget, settings=settings, device=device, missed=found
        )
        if why_not is not None:
            return profile, "measured now", (f"the profile was not stored: {why_not}",)
        try:
            return profile, f"measured now, stored in {store.save(profile)}", ()
        except ProfileError as error:  # a disk that has filled up since
            notice = f"the profile was not stored: {error}"
            _warn(notice)
            return profile, "measured now", (notice,)


def _with_overrides(config: Mapping[str, Any], autotune: Mapping[str, Any] | bool | None) -> dict[str, Any]:
    block = config.get(ds_config.BLOCK)
    if not isinstance(autotune, Mapping):
        return dict(config)
    if isinstance(block, Mapping):
        return {**config, ds_config.BLOCK: {**block, **autotune}}
    return {**config, ds_config.BLOCK: dict(autotune)}


def _dtype(config: Mapping[str, Any]) -> str | None:
    """The gradients' dtype by the configuration; None leaves it to the module's own parameters."""
    for section, dtype in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        enabled = config.get(section, {})
        if isinstance(enabled, Mapping):
            if enabled.get("enabled") is True:
                return dtype
            if enabled.get("enabled") == "auto":
                return None
    return "float32"


def _accumulation(config: Mapping[str, Any]) -> int:
    steps = config.get("gradient_accumulation_steps", 1)
    return steps if isinstance(steps, int) and steps > 0 else 1


def _world_size() -> int:
    """Of the process group where there is one, else what a launcher announced."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    told = os.environ.get("WORLD_SIZE", "").strip() or "1"
    if not told.isdecimal() or int(told) < 1:
        raise ConfigError(f'WORLD_SIZE is "{told}"; expected the number of ranks, or no such variable')
    return int(told)


def _rank() -> int:
    """By the launcher; 0 where none says it in a number: a warning too many is better than none."""
    said = (os.environ.get(name, "").strip() for name in _RANKS)
    return next((int(text) for text in said if text.isdecimal()), 0)


# -- the call -------------------------------------------------------------------------------------


def _configuration(call: Mapping[str, Any]) -> object:
    """The configuration by DeepSpeed's own order: config, config_params, args.deepspeed_config."""
    for name in ("config", "config_params"):
        if call.get(name) is not None:
            return call[name]
    return getattr(call.get("args"), "deepspeed_config", None)


def _hand_over(call: dict[str, Any], tuned: dict[str, Any]) -> None:
    """Put the tuned configuration where DeepSpeed reads it first, and take the others out."""
    in_args = getattr(call.get("args"), "deepspeed_config", None)
    given_directly = call.get("config") is not None or call.get("config_params") is not None
    if in_args is not None and not given_directly:
        call["args"] = copy.copy(call["args"])
        call["args"].deepspeed_config = None
    call["config"] = tuned
    call.pop("config_params", None)


def _really_pinned(engine: Any) -> dict[str, int]:
    """Bytes of DeepSpeed's own host buffers that are page-locked, by what they are for."""
    optimizer = getattr(engine, "optimizer", None)
    buffers = {
        "gradient accumulation": [getattr(optimizer, "grad_partitions_flat_buffer", None)],
        "fp32 gradients": [p.grad for p in getattr(optimizer, "fp32_partitioned_groups_flat", None) or []],
        "16-bit parameters": [getattr(optimizer, "lp_param_buffer", None)],
    }
    return {name: sum(_pinned_bytes(t) for t in tensors) for name, tensors in buffers.items()}


def _pinned_bytes(tensor: Any) -> int:
    if tensor is None or tensor.device.type != "cpu" or not tensor.numel():
        return 0
    return int(tensor.nbytes) if tensor.is_pinned() else 0


def _shown(value: object) -> str:
    return "absent" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
