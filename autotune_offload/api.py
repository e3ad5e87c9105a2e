"""What people call: one line around `deepspeed.initialize`, and the parts of it.

Fail-open lives here: whatever goes wrong in ours costs one warning, and the run starts with the
user's own configuration. ``"strict": true`` in the ``autotune_offload`` block raises instead.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import logging
import os
import statistics
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from autotune_offload import agree, ds_config, equal_keys, host, zero3
from autotune_offload import workload as workloads
from autotune_offload.agree import Agreement
from autotune_offload.attach import Status, attach
from autotune_offload.device import AcceleratorDevice
from autotune_offload.errors import AgreementError, AutotuneError, ProfileError, UndecidedError
from autotune_offload.interruption import cleaned_up
from autotune_offload.probing import load_plan, lookup, probe
from autotune_offload.records import Change, Choice, Profile, Record, Workload, ZeroSizes
from autotune_offload.store import Miss, Store

SWITCH = "AUTOTUNE_OFFLOAD"
"""Environment variable: 0 switches everything off, for a run to compare with."""

_SWITCHED_OFF = "switched off"
_DOCTOR = "`autotune-offload doctor` tells what stands in the way on this host"
_FORESEEN = (AutotuneError, OSError, MemoryError)
"""Ours, and what a host may do to anybody: no traceback is shown for it."""

_log = logging.getLogger("autotune_offload")

_reports: weakref.WeakKeyDictionary[Any, Report] = weakref.WeakKeyDictionary()

_at_work: ContextVar[bool] = ContextVar("autotune_offload.at_work", default=False)


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

    Raises:
        UndecidedError: the store of the job's first rank died while this rank had agreed and the others may
            have: it alone would train differently.
    """
    import deepspeed

    rest, call = named(inspect.signature(deepspeed.initialize), args, kwargs)
    given = _configuration(call)
    if given is None:
        with working():
            return deepspeed.initialize(*args, **kwargs)
    asked = _Asked(
        model=call.get("model"),
        autotune=autotune,
        attaches=True,
        group_is_made_by=lambda: _init_distributed(call),
        data_parallel_ranks=_data_parallel_ranks(call.get("mpu")),
    )
    decided = _decided_or_not(given, asked)
    config = ds_config.accepted(given) if decided.config is None else decided.config
    with working():
        if config is given:
            result = deepspeed.initialize(*args, **kwargs)
        else:
            _hand_over(call, config)
            result = deepspeed.initialize(*rest, **call)
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
    measured times decide about pinning. In a job of several ranks without a process group, sizes stay as
    they are: they must be the same on all hosts, which cannot be agreed yet.

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
    decided = _decided_or_not(given, _Asked(model=model, autotune=autotune, workload=workload))
    for notice in decided.report.notices:
        _log.info("%s", notice)
    return given if decided.config is None else decided.config


def zero_init(*args: Any, autotune: Mapping[str, Any] | bool | None = None, **kwargs: Any) -> Any:
    """`deepspeed.zero.Init` with the ``pin_memory`` chosen for this machine.

    Parameters are laid out in host memory while the model is built, so that what `initialize` decides
    about ``offload_param.pin_memory`` comes too late for them.

    Args:
        *args: as for `deepspeed.zero.Init`.
        autotune: as for `initialize`.
        **kwargs: as for `deepspeed.zero.Init`. The configuration is not changed.

    Returns:
        The context, as DeepSpeed made it.
    """
    import deepspeed

    rest, call = tuned_zero_init(inspect.signature(deepspeed.zero.Init), args, kwargs, autotune)
    with working():
        return deepspeed.zero.Init(*rest, **call)


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


class _Asked(Record, frozen=True, kw_only=True):
    """What a decision is about, beside the configuration."""

    model: Any = None
    autotune: Mapping[str, Any] | bool | None = None
    workload: Workload | None = None
    attaches: bool = False
    says: bool = True
    """Off where the same will be said at another call."""
    group_is_made_by: Callable[[], object] | None = None
    """Makes the process group where there is none yet; None leaves that to others, later."""
    data_parallel_ranks: int | None = None
    """That share a parameter, where these are not all."""


def _decided_or_not(given: object, asked: _Asked) -> _Decided:
    """Decide; whatever fails in that leaves the user's configuration as it is, on all ranks."""
    autotune = asked.autotune
    if autotune is False or os.environ.get(SWITCH) == "0":
        _decline_unasked(given, asked)
        return _Decided(config=None, report=Report(profile=None, notices=(_SWITCHED_OFF,)))
    strict = isinstance(autotune, Mapping) and bool(autotune.get("strict"))
    agreement: Agreement | None = None
    try:
        agreement = _agreement(given, asked)
        config = ds_config.read(given)
        block = config.get(ds_config.BLOCK)
        strict = strict or (isinstance(block, Mapping) and block.get("strict") is True)
        return _decided(config, asked, agreement)
    except UndecidedError:
        raise
    except Exception as error:  # fail open: whatever it is, the user's run starts
        if agreement is not None:
            agreement.decline(f"rank {agreement.group.rank}: {_cause(error)}")
        if strict:
            raise
        notice = f"not tuned, the run goes on with your own configuration: {_cause(error)}; {_DOCTOR}"
        _warn(notice, error)
        return _Decided(config=None, report=Report(profile=None, notices=(notice,)))


def _cause(error: Exception) -> str:
    return str(error) if isinstance(error, AutotuneError) else f"{type(error).__name__}: {error}"


def _warn(notice: str, error: Exception | None = None) -> None:
    """On one rank; with a traceback only where a failure was not foreseen."""
    if agree.present_rank() == 0:
        unforeseen = error is not None and not isinstance(error, _FORESEEN)
        _log.warning("autotune-offload: %s", notice, exc_info=unforeseen)


def _decided(config: dict[str, Any], asked: _Asked, agreement: Agreement | None) -> _Decided:
    settings = ds_config.settings(_with_overrides(config, asked.autotune))
    why_not = _why_not(config, settings)
    if why_not is not None:
        if agreement is not None:
            agreement.decline(f"rank {agreement.group.rank}: {why_not}")
        if settings.enabled and asked.says:
            _warn(f"not tuned: {why_not}")
        return _Decided(config=None, report=Report(profile=None, notices=(why_not,)))
    device = AcceleratorDevice()
    found = _profile(config, _workload(config, asked), settings, device, agreement)
    profile = found.profile
    carry_path = (
        asked.attaches
        and zero3.takes_a_path(config)
        and settings.path != "deepspeed"
        and profile.choice.beats_deepspeed
    )
    choice, too_late = _as_laid_out(profile.choice, config, asked.model, device)
    tuned = zero3.tune(
        found.config,
        choice,
        version=host.software().deepspeed,
        keep=settings.keep,
        filled=_filled_by_trainer(config),
        carried=carry_path,
    )
    report_ = Report(
        profile=profile,
        changes=tuned.changes,
        notices=(*found.loud, *found.notices, *too_late, *tuned.notices, *profile.warnings),
        source=found.source,
    )
    decided = _Decided(
        config=tuned.config, report=report_, carry_path=carry_path, device=device, strict=settings.strict
    )
    if agreement is not None:  # the last thing that may fail: from here on the others use it
        agreement.confirm(equal_keys.sizes_digest(tuned.config))
    if asked.says:
        _say((*found.loud, *too_late, *tuned.notices), tuned.changes)
    return decided


def _say(notices: Iterable[str], changes: Iterable[Change]) -> None:
    for notice in notices:
        _warn(notice)
    for change in changes:
        _log.info("%s: %s -> %s (%s)", change.key, change.before, change.after, change.reason)


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
    return None


def _workload(config: Mapping[str, Any], asked: _Asked) -> Workload | None:
    if asked.workload is not None or asked.model is None:
        return asked.workload
    return workloads.from_module(
        asked.model,
        world_size=asked.data_parallel_ranks or agree.announced_ranks(),
        accumulation_steps=_accumulation(config),
        dtype=_dtype(config),
    )


class _Found(Record, frozen=True, kw_only=True):
    """A profile, where it comes from, and the configuration that it is for."""

    profile: Profile
    config: Mapping[str, Any]
    source: str
    notices: tuple[str, ...] = ()
    loud: tuple[str, ...] = ()


def _profile(
    config: dict[str, Any],
    workload: Workload | None,
    settings: ds_config.Settings,
    device: AcceleratorDevice,
    agreement: Agreement | None,
) -> _Found:
    """The stored profile of this environment, or a new one that is stored if it can be; agreed by all ranks."""
    store = Store()
    budget = None if isinstance(settings.budget_seconds, str) else settings.budget_seconds

    missed: list[Miss] = []

    def look() -> Profile | None:
        found = lookup(store, workload, device, settings)
        if not isinstance(found, Miss):
            return found
        missed.append(found)
        return None

    def measured(ranks_per_host: int) -> Profile:
        why_not = store.why_not_writable()
        if why_not is not None:
            _warn(f"measuring this host without a cache: {why_not}")
        elif missed:
            _log.info("measuring this host: %s", missed[-1].reason)
        with cleaned_up():
            return probe(
                workload=workload,
                budget_seconds=budget,
                settings=settings,
                device=device,
                missed=missed[-1] if missed else None,
                ranks_per_host=ranks_per_host,
            )

    if agreement is None and agree.announced_ranks() == 1:
        found = look()
        if found is not None:
            return _Found(profile=found, config=config, source=_from_store(found))
        profile = measured(1)
        return _Found(profile=profile, config=config, **_kept(store, profile))
    seconds = budget or load_plan("standard").budget_seconds
    if agreement is not None:
        return _agreed(config, look(), measured, agreement, device, store, seconds)
    return _for_this_host(config, look, measured, store, seconds)


def _agreed(
    config: dict[str, Any],
    found: Profile | None,
    measured: Callable[[int], Profile],
    agreement: Agreement,
    device: AcceleratorDevice,
    store: Store,
    measure_seconds: float,
) -> _Found:
    agreed = agree.agree(
        agreement,
        found,
        measured,
        config=config,
        device=device.identity,
        measure_seconds=measure_seconds,
    )
    where: dict[str, Any] = {"source": "measured now by all ranks"}
    if not agreed.measured:
        where = {"source": _from_store(agreed.profile)}
    elif agreed.keeper:
        where = _kept(store, agreed.own)
    return _Found(profile=agreed.profile, config=agreed.config, loud=agreed.notices, **where)


def _for_this_host(
    config: dict[str, Any],
    look: Callable[[], Profile | None],
    measured: Callable[[int], Profile],
    store: Store,
    measure_seconds: float,
) -> _Found:
    """One profile for all ranks of this host, through the store; without sizes, which other hosts must share."""
    found, where = look(), None
    if found is None:
        with agree.turn_on_host(store.folder, agree.turn_seconds(measure_seconds)):
            found = look()
            if found is None:
                found = measured(1)
                where = _kept(store, found)
    kept = "left as it is, since the ranks cannot agree on it before there is a process group"
    sizes = ZeroSizes(reasons=dict.fromkeys(found.choice.sizes.reasons, kept))
    profile = replace(found, choice=replace(found.choice, sizes=sizes))
    return _Found(profile=profile, config=config, **(where or {"source": _from_store(found)}))


def _from_store(profile: Profile) -> str:
    return f"stored profile of {profile.created}"


def _kept(store: Store, profile: Profile) -> dict[str, Any]:
    """Store a profile; where it is now, or why it is not."""
    why_not = store.why_not_writable()
    if why_not is None:
        try:
            with cleaned_up():
                return {"source": f"measured now, stored in {store.save(profile)}"}
        except ProfileError as error:  # a disk that has filled up since
            why_not = str(error)
            _warn(f"the profile was not stored: {why_not}")
    return {"source": "measured now", "notices": (f"the profile was not stored: {why_not}",)}


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


# -- several ranks --------------------------------------------------------------------------------


def _agreement(given: object, asked: _Asked) -> Agreement | None:
    """Begun where this job has several ranks and a process group; None where one rank decides alone.

    Raises:
        AgreementError: several ranks without a way to agree.
    """
    if agree.announced_ranks() == 1:
        return None
    if asked.group_is_made_by is not None:
        asked.group_is_made_by()
    group = agree.present_group()
    if group is None:
        return None
    return Agreement(group, "initialize" if asked.attaches else "tune_config", _wait_seconds(given, asked))


def _decline_unasked(given: object, asked: _Asked) -> None:
    """Let the others know at once, where that takes no more than what is there already."""
    with contextlib.suppress(AutotuneError):
        agreement = _agreement(given, replace(asked, group_is_made_by=None))
        if agreement is not None:
            agreement.decline(f"rank {agreement.group.rank}: {_SWITCHED_OFF}")


def _wait_seconds(given: object, asked: _Asked) -> float:
    """What the user set, where that can be read so early; what cannot is somebody else's to refuse."""
    with contextlib.suppress(Exception):
        wait = ds_config.settings(_with_overrides(ds_config.read(given), asked.autotune)).wait_seconds
        if not isinstance(wait, str):
            return wait
    return agree.WAIT_SECONDS


def _init_distributed(call: Mapping[str, Any]) -> None:
    """The process group, as `deepspeed.initialize` itself would make it in its first lines.

    Raises:
        AgreementError: the launcher set no RANK: DeepSpeed would have to look for MPI.
    """
    import deepspeed
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    if dist.is_initialized():
        return
    if not os.environ.get("RANK"):
        raise AgreementError(
            f"{agree.announced_ranks()} ranks were started without RANK in the environment, so they cannot agree; "
            "call deepspeed.init_distributed() before this"
        )
    given = {name: call[name] for name in ("distributed_port", "dist_init_required") if name in call}
    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name(), **given)


def _data_parallel_ranks(mpu: Any) -> int | None:
    """How many ranks share a parameter, where a model-parallel unit says so."""
    size = getattr(mpu, "get_data_parallel_world_size", None)
    return None if size is None else int(size())


# -- the call -------------------------------------------------------------------------------------


@contextlib.contextmanager
def working() -> Iterator[None]:
    """DeepSpeed is called from here: what it calls in turn has been decided already."""
    token = _at_work.set(True)
    try:
        yield
    finally:
        _at_work.reset(token)


def at_work() -> bool:
    """Whether this is inside a call that was decided here."""
    return _at_work.get()


def named(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, by name as far as `signature` tells; the rest stays positional.

    Somebody else's wrapper may take ``*args, **kwargs`` and say no more.
    """
    open_ended = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values())
    if open_ended:
        return args, dict(kwargs)
    return (), dict(signature.bind_partial(*args, **kwargs).arguments)


def tuned_zero_init(
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    autotune: Mapping[str, Any] | bool | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a `zero.Init` as in `named`, its configuration tuned where it has one that acts."""
    rest, call = named(signature, args, kwargs)
    given = call.get("config") if call.get("config") is not None else call.get("config_dict_or_path")
    if given is None or not call.get("enabled", True):
        return rest, call
    asked = _Asked(model=call.get("module"), autotune=autotune, attaches=True, says=False)
    decided = _decided_or_not(given, asked)
    call.pop("config", None)
    call["config_dict_or_path"] = ds_config.accepted(given) if decided.config is None else decided.config
    return rest, call


_IN_ARGS = ("deepspeed_config", "deepscale_config")


def _configuration(call: Mapping[str, Any]) -> object:
    """The configuration by DeepSpeed's own order: config, config_params, then that of `args`."""
    given = (call.get("config"), call.get("config_params"), *_in_args(call).values())
    return next((each for each in given if each is not None), None)


def _in_args(call: Mapping[str, Any]) -> dict[str, Any]:
    held: dict[str, Any] = {name: getattr(call.get("args"), name, None) for name in _IN_ARGS}
    return {name: value for name, value in held.items() if value is not None}


def _hand_over(call: dict[str, Any], tuned: object) -> None:
    """Put the tuned configuration where DeepSpeed reads it first, and take the others out.

    What is given in two places stays there, for DeepSpeed to refuse.
    """
    in_args = _in_args(call)
    given_directly = call.get("config") is not None or call.get("config_params") is not None
    if len(in_args) == 1 and not given_directly:
        call["args"] = copy.copy(call["args"])
        for name in in_args:
            setattr(call["args"], name, None)
    call["config"] = tuned
    call.pop("config_params", None)


def _filled_by_trainer(config: Mapping[str, Any]) -> frozenset[str]:
    """Keys of ``zero_optimization`` that the user left "auto" and the Hugging Face Trainer made numbers.

    The configuration that transformers holds for `from_pretrained` still says "auto" then
    (`transformers.integrations.deepspeed.deepspeed_config`). It counts only where all else is the same.
    """
    integration = sys.modules.get("transformers.integrations.deepspeed")
    held: Mapping[str, Any] | None = getattr(integration, "deepspeed_config", dict)()
    written, filled = (held or {}).get(zero3.ZERO), config.get(zero3.ZERO)
    if not isinstance(written, Mapping) or not isinstance(filled, Mapping):
        return frozenset()
    autos = {name for name, value in written.items() if value == "auto"}
    same = all(filled.get(name) == value for name, value in written.items() if name not in autos)
    return frozenset(autos) if same else frozenset()


_LOOKED_AT = 16
"""Partitions that are asked whether they are page-locked: `zero.Init` treats all alike."""


def _as_laid_out(
    choice: Choice, config: Mapping[str, Any], model: Any, device: AcceleratorDevice
) -> tuple[Choice, tuple[str, ...]]:
    """The choice as far as it can still be had for parameters that `zero.Init` has partitioned already.

    Returns it with a notice where they lie otherwise than was chosen.
    """
    pinned = _partitions_pinned(model, device) if zero3.offloads_parameters(config) else None
    if pinned is None or pinned is choice.pin_parameters:
        return choice, ()
    memory = "page-locked" if pinned else "pageable"
    notice = (
        f"the parameters were partitioned before this, by zero.Init, in {memory} memory and stay there: "
        f"offload_param.pin_memory {_shown(choice.pin_parameters)} comes too late for them. Build the model "
        "under autotune_offload.zero_init(...), or give zero.Init what autotune_offload.tune_config returns"
    )
    reasons = (f"offload_param lies in {memory} memory since zero.Init", *choice.reasons)
    unsettled = tuple(name for name in choice.unsettled_pins if name != "pin_parameters")
    return replace(choice, pin_parameters=pinned, unsettled_pins=unsettled, reasons=reasons), (notice,)


def _partitions_pinned(model: Any, device: AcceleratorDevice) -> bool | None:
    """Whether partitions on the host are page-locked; None where `zero.Init` has not made any."""
    parameters: Iterable[Any] = getattr(model, "parameters", tuple)()
    partitions = (getattr(parameter, "ds_tensor", None) for parameter in parameters)
    on_host = (each for each in partitions if each is not None and each.device.type == "cpu" and each.numel())
    looked_at = [device.is_pinned(each) for each in itertools.islice(on_host, _LOOKED_AT)]
    return any(looked_at) if looked_at else None


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
