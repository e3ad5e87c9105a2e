"""What people call: one line around `deepspeed.initialize`, and the parts of it."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import structs

from autotune_offload import switch
from autotune_offload.api import reached, voice
from autotune_offload.api.call import configuration, emptied, init_distributed, named, working
from autotune_offload.api.carrying import flag_in, step_in, with_path, with_what_is_lost
from autotune_offload.api.deciding import (
    Decided,
    decided_or_not,
    switched_off,
    undecided,
    untuned_by_switch,
)
from autotune_offload.api.given import Asked
from autotune_offload.api.notices import cause, log, warn
from autotune_offload.api.report import Report, reports, shown
from autotune_offload.config import lost_gradients, reading
from autotune_offload.errors import ProfileError
from autotune_offload.machine import host
from autotune_offload.profiles.store import Store
from autotune_offload.ranks import group
from autotune_offload.records import Profile, Record, Workload

_ENGINES = re.compile(r"deepspeed\.runtime\.(.*\.)?(hybrid_)?engine$")
"""Modules whose code runs once `deepspeed.initialize` makes an engine."""


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
    result, carried = carried_out(args, kwargs, autotune)
    with contextlib.suppress(Exception):
        voice.tell(carried)
    return result


def carried_out(
    args: tuple[Any, ...], kwargs: dict[str, Any], autotune: Mapping[str, Any] | bool | None
) -> tuple[Any, Report]:
    """What `initialize` gives, and what was done for it, of which nothing has been said yet."""
    import deepspeed

    call = _taken(deepspeed.initialize, args, kwargs, autotune)
    try:
        with working():
            result = deepspeed.initialize(*call.args, **call.kwargs)
    except Exception as error:
        result, call = _started_as_the_user_has_it(call, deepspeed.initialize, error)
    with contextlib.suppress(Exception):  # an engine that takes no weak reference has no report
        reports[result[0]] = call.decided.report
    carried = structs.replace(
        with_path(result[0], call.decided),
        step=step_in(result[0], call.decided),
        flag=flag_in(result[0], call.decided),
    )
    carried = with_what_is_lost(result[0], carried)
    reached.say(None if carried.profile is not None else "; ".join(carried.notices))
    with contextlib.suppress(Exception):
        reports[result[0]] = carried
    return result, carried


class _Call(Record, frozen=True, kw_only=True):
    """What DeepSpeed is called with, and the decision behind it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    decided: Decided
    own: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """The arguments with the user's own configuration, where they differ."""


def _started_as_the_user_has_it(
    call: _Call, stock: Callable[..., Any], error: Exception
) -> tuple[Any, _Call]:
    """What DeepSpeed makes of the user's own configuration, after it failed with keys of ours, where that is safe.

    Safe is one process, and a failure before an engine was begun: then nothing of the caller's was changed, and no
    other rank waits in a collective. Later, the model is partitioned, hooks are in it and an optimizer is emptied.

    Raises:
        Exception: `error` itself, where no key is ours, it is not safe, or the user's own configuration fails too.
    """
    changes = call.decided.report.changes
    if call.own is None or not changes:
        raise error
    keys = ", ".join(f"{change.key} {shown(change.before)} -> {shown(change.after)}" for change in changes)
    failed = f"deepspeed.initialize failed ({cause(error)}) with keys that were written here: {keys}"
    if call.decided.strict or group.announced_ranks() > 1 or _engine_begun(error):
        warn(
            f"{failed}; {switch.NAME}=0 in the environment starts the run without them, and `keep` in the "
            "autotune_offload block protects a single key"
        )
        raise error
    args, kwargs = call.own
    try:
        with working():
            result = stock(*args, **kwargs)
    except Exception:
        raise error from None  # then it is none of ours
    warn(f"{failed}; it started with your own configuration instead")
    report = Report(profile=None, notices=(failed,))
    return result, _Call(args=args, kwargs=kwargs, decided=Decided(config=None, report=report))


def _engine_begun(error: Exception) -> bool:
    """Whether an engine's own code is among what was running."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(_ENGINES.match(str(frame.f_globals.get("__name__"))) for frame in frames)


def _taken(
    stock: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    autotune: Mapping[str, Any] | bool | None,
) -> _Call:
    """The call with the configuration decided; as it came where it is switched off, or anything fails here.

    Everything that looks at a caller's object is in here, and what is needed to hand a tuned configuration over
    is done before it is decided: once the ranks have agreed on one, all of them have to use it.
    """
    if switched_off(autotune):
        rest, call = _in_deepspeeds_form(stock, args, kwargs)
        return _Call(args=rest, kwargs=call, decided=untuned_by_switch(attaches=True))
    try:
        rest, call = named(inspect.signature(stock), args, kwargs)
        given = configuration(call)
        if given is None:
            return _Call(args=args, kwargs=kwargs, decided=Decided(config=None, report=Report(profile=None)))
        untuned, tuned = reading.accepted(given), dict(call)
        emptied(tuned)
        asked = Asked(
            model=call.get("model"),
            autotune=autotune,
            attaches=True,
            group_is_made_by=lambda: init_distributed(call),
            mpu=call.get("mpu"),
            mesh=call.get("mesh_param"),
        )
    except Exception as error:
        return _Call(args=args, kwargs=kwargs, decided=undecided(error, autotune))
    decided = decided_or_not(given, asked)
    config = untuned if decided.config is None else decided.config
    if config is given:
        return _Call(args=args, kwargs=kwargs, decided=decided)
    own = (args, kwargs) if untuned is given else (rest, {**tuned, "config": untuned})
    return _Call(args=rest, kwargs={**tuned, "config": config}, decided=decided, own=own)


def _in_deepspeeds_form(
    stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call as it came, but for a configuration in a form that only this package reads.

    Told by its type alone: of an object of any other no attribute is asked.
    """
    with contextlib.suppress(Exception):
        rest, call = named(inspect.signature(stock), args, kwargs)
        given = call.get("config")
        if issubclass(type(given), (str, os.PathLike, Mapping)):
            config = reading.accepted(given)
            if config is not given:
                return rest, {**call, "config": config}
    return args, kwargs


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
    given = reading.read(config)
    decided = decided_or_not(given, Asked(model=model, autotune=autotune, workload=workload))
    lost = None if switched_off(autotune) else lost_gradients.lost_by(given, host.software().deepspeed)
    if lost is not None:
        warn(lost.sentence)
    for notice in decided.report.notices:
        log.info("%s", notice)
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


def tuned_zero_init(
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    autotune: Mapping[str, Any] | bool | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a `zero.Init`, its configuration tuned where it has one that acts; else as they came."""
    if switched_off(autotune):
        return args, kwargs
    try:
        rest, call = named(signature, args, kwargs)
        given = call.get("config") if call.get("config") is not None else call.get("config_dict_or_path")
        if given is None or not call.get("enabled", True):
            return args, kwargs
        untuned = reading.accepted(given)
        asked = Asked(model=call.get("module"), autotune=autotune, attaches=True, says=False)
    except Exception as error:
        undecided(error, autotune)
        return args, kwargs
    decided = decided_or_not(given, asked)
    if decided.config is None and untuned is given:
        return args, kwargs
    call.pop("config", None)
    call["config_dict_or_path"] = untuned if decided.config is None else decided.config
    return rest, call
