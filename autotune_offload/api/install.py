"""Tunes DeepSpeed where somebody else calls it: a framework, or a script that stays as it is.

`install` puts a wrapper around `deepspeed.initialize` and around the constructor of `deepspeed.zero.Init`.
Both decide as `api.initialize` and `api.zero_init` do, and from the same stored profile.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune_offload.api import call as api_call
from autotune_offload.api import initialize as api_initialize
from autotune_offload.api import report, voice

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Installed:
    """What is in place now. A wrapper that somebody kept is DeepSpeed's own function while `active` is False."""

    active: bool = False
    autotune: Mapping[str, Any] | None = None
    places: list[tuple[Any, str, Any, Any]] = field(default_factory=list)
    """Holder, name, DeepSpeed's own, ours."""


_installed = _Installed()


def install(*, autotune: Mapping[str, Any] | None = None) -> None:
    """Tune every `deepspeed.initialize` and `deepspeed.zero.Init` of this process from now on.

    To be called before the framework builds the model. A second call changes the settings, and nothing
    else. ``from deepspeed import initialize`` done earlier keeps DeepSpeed's own function; a warning names
    the modules that did so.

    Args:
        autotune: settings that go over the ``autotune_offload`` block of each configuration.
    """
    import deepspeed

    _installed.autotune = autotune
    if not _installed.active:
        for module in _taken_earlier(deepspeed.initialize):
            _log.warning(
                'autotune-offload: module "%s" took deepspeed.initialize before install(), and calls it untuned; '
                "call install() before that import",
                module,
            )
        _put(deepspeed, "initialize", _initialize_around)
        _put(deepspeed.zero.Init, "__init__", _constructor_around)
        _installed.active = True


def uninstall() -> None:
    """Give DeepSpeed its own functions back. Engines that were tuned stay so."""
    _installed.active = False
    while _installed.places:
        holder, name, stock, ours = _installed.places.pop()
        if getattr(holder, name) is ours:  # else somebody wrapped it again, around one that now does nothing
            setattr(holder, name, stock)


def _put(holder: Any, name: str, around: Callable[[Any], Any]) -> None:
    stock = getattr(holder, name)
    ours = around(stock)
    setattr(holder, name, ours)
    _installed.places.append((holder, name, stock, ours))


def _initialize_around(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        if not _installed.active or api_call.at_work():
            return stock(*args, **kwargs)
        result, done = api_initialize.carried_out(args, kwargs, _installed.autotune)
        with contextlib.suppress(Exception):  # whatever a report stumbles over, the engine is the user's
            if _log.isEnabledFor(logging.INFO):
                _log.info("%s", report.report(result[0]).text())
            else:
                voice.tell(done)
        return result

    return initialize


def _constructor_around(stock: Callable[..., None]) -> Callable[..., None]:
    with_self = inspect.signature(stock)
    signature = with_self.replace(parameters=list(with_self.parameters.values())[1:])

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if not _installed.active or api_call.at_work():
            stock(self, *args, **kwargs)
            return
        rest, call = api_initialize.tuned_zero_init(signature, args, kwargs, _installed.autotune)
        with api_call.working():
            stock(self, *rest, **call)

    return __init__


def _taken_earlier(stock: Callable[..., Any]) -> Iterator[str]:
    """Modules of others in which a global name is `stock` already."""
    for name, module in list(sys.modules.items()):
        own = name.partition(".")[0] in ("deepspeed", "autotune_offload")
        if not own and any(value is stock for value in list(getattr(module, "__dict__", {}).values())):
            yield name
