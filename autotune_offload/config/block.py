"""Our own block of a ds_config, checked."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from autotune_offload import packaged
from autotune_offload.errors import ConfigError
from autotune_offload.records import PATHS, Settings

BLOCK = "autotune_offload"
"""Our top-level block. DeepSpeed ignores top-level keys that it does not know."""

UNIT_BYTES = {"b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


def settings(config: Mapping[str, Any]) -> Settings:
    """Our block of `config`, checked; the defaults where it is absent.

    Raises:
        ConfigError: one for everything that is wrong in the block, naming each key.
    """
    block = config.get(BLOCK, {})
    if not isinstance(block, Mapping):
        raise ConfigError(f'"{BLOCK}" is {_shown(block)}; expected an object such as {{"enabled": false}}')
    values: dict[str, Any] = {}
    problems = []
    for key, value in block.items():
        try:
            if key not in _CHECKS:
                raise ValueError(_unknown(key))
            if value != "auto":
                values[key] = _CHECKS[key](value)
        except ValueError as error:
            problems.append(f"{key} is {_shown(value)}, {error}" if key in _CHECKS else str(error))
    if problems:
        raise ConfigError(f'in "{BLOCK}": ' + "; ".join(problems))
    return Settings(**values)


def _unknown(key: object) -> str:
    near = difflib.get_close_matches(str(key), _CHECKS, n=1, cutoff=0.0)[0]
    return f'unknown key "{key}", the nearest known key is "{near}"'


def _shown(value: object) -> str:
    return json.dumps(value, default=repr)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _one_of(*names: str) -> Callable[[object], str]:
    def check(value: object) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError(f"expected one of {', '.join(('auto', *names))}")
        return value

    return check


def _path(value: object) -> str:
    own = (*PATHS, "deepspeed")
    return str(value) if value in own else _one_of(*own, *packaged.names())(value)


def _whole(least: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        number = _integral(value)
        if number is None or number < least:
            raise ValueError(f'expected "auto" or a whole number from {least}')
        return number

    return check


def _size(least: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        number = _bytes(value) if isinstance(value, str) else _integral(value)
        if number is None or number < least:
            raise ValueError(f'expected "auto" or bytes from {least}, as a number or a text such as "4MiB"')
        return number

    return check


def _integral(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1:
        return None  # infinities and nan fall out too: their floor is nan
    return int(value)


def _bytes(text: str) -> int | None:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text, re.ASCII | re.IGNORECASE)
    factor = UNIT_BYTES.get(match[2].lower()) if match else None
    return _integral(float(match[1]) * factor) if match and factor else None


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise ValueError('expected "auto" or a number of seconds above 0')
    return float(value)


def _keys(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(key, str) for key in value):
        raise ValueError('expected a list of dotted keys such as ["offload_param.pin_memory"]')
    return tuple(value)


_CHECKS: dict[str, Callable[[object], Any]] = {
    "enabled": _flag,
    "path": _path,
    "cast": _one_of("device", "host"),
    "buffer_bytes": _size(1),
    "buffer_count": _whole(1),
    "host_threads": _whole(0),
    "accumulate": _one_of("device", "host"),
    "step": _one_of("deepspeed", "fused"),
    "confirm": _flag,
    "confirm_rounds": _whole(1),
    "keep": _keys,
    "budget_seconds": _seconds,
    "max_pinned_bytes": _size(0),
    "wait_seconds": _seconds,
    "strict": _flag,
}
