"""Taking a call of `deepspeed.initialize` or `zero.Init` apart, and putting it together with another configuration."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from autotune_offload.errors import AgreementError
from autotune_offload.ranks import group

_at_work: ContextVar[bool] = ContextVar("autotune_offload.at_work", default=False)


def init_distributed(call: Mapping[str, Any]) -> None:
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
            f"{group.announced_ranks()} ranks were started without RANK in the environment, so they cannot agree; "
            "call deepspeed.init_distributed() before this"
        )
    given = {name: call[name] for name in ("distributed_port", "dist_init_required") if name in call}
    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name(), **given)


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


_IN_ARGS = ("deepspeed_config", "deepscale_config")


def configuration(call: Mapping[str, Any]) -> object:
    """The configuration by DeepSpeed's own order: config, config_params, then that of `args`."""
    given = (call.get("config"), call.get("config_params"), *_in_args(call).values())
    return next((each for each in given if each is not None), None)


def _in_args(call: Mapping[str, Any]) -> dict[str, Any]:
    held: dict[str, Any] = {name: getattr(call.get("args"), name, None) for name in _IN_ARGS}
    return {name: value for name, value in held.items() if value is not None}


def emptied(call: dict[str, Any]) -> None:
    """Take the configuration out of all places where it was given, so that ``call["config"]`` alone counts.

    What is given in two places stays there, for DeepSpeed to refuse.
    """
    in_args = _in_args(call)
    given_directly = call.get("config") is not None or call.get("config_params") is not None
    if len(in_args) == 1 and not given_directly:
        call["args"] = copy.copy(call["args"])
        for name in in_args:
            setattr(call["args"], name, None)
    call.pop("config_params", None)
