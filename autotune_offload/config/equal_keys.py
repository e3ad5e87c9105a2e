"""The ZeRO keys that must be equal on all ranks: digests of them, and one rank's sizes put into another's config.

Ranks that differ in a size hang or abort in the first steps; what may differ by rank is page-locking, the
place of an NVMe drive, and whether communication overlaps (all tried on DeepSpeed 0.19.8 with two ranks).
Pure, like `keys`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from autotune_offload.config.reading import plain
from autotune_offload.config.sections import section
from autotune_offload.upstream import ZERO

SIZES: dict[str, tuple[str, ...]] = {
    "reduce_bucket_size": ("reduce_bucket_size",),
    "allgather_bucket_size": ("allgather_bucket_size",),
    "sub_group_size": ("sub_group_size",),
    "prefetch_bucket_size": ("stage3_prefetch_bucket_size", "prefetch_bucket_size"),
    "param_persistence_threshold": ("stage3_param_persistence_threshold", "param_persistence_threshold"),
    "model_persistence_threshold": ("stage3_model_persistence_threshold", "model_persistence_threshold"),
    "max_live_parameters": ("stage3_max_live_parameters", "max_live_parameters"),
    "max_reuse_distance": ("stage3_max_reuse_distance", "max_reuse_distance"),
    "module_granularity_threshold": ("stage3_module_granularity_threshold", "module_granularity_threshold"),
}
"""Sizes by one name, with the spellings that DeepSpeed takes (`runtime/zero/config.py`)."""

_MAY_DIFFER = frozenset(
    {"pin_memory", "nvme_path", "overlap_comm", "cpu_offload_use_pin_memory", "buffer_count", "buffer_size"}
)
_SPELLINGS = frozenset(name for names in SIZES.values() for name in names)
_DIGEST_DIGITS = 8


def sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that `config` sets, by their one name. "auto" is DeepSpeed's own, as where a key is absent."""
    zero = section(config, ZERO)
    found = {}
    for name, spellings in SIZES.items():
        given = [zero[spelling] for spelling in spellings if zero.get(spelling, "auto") != "auto"]
        if given:
            found[name] = _number(given[0])
    return found


def with_sizes(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `config` whose sizes are those of another rank, as `sizes` gives them."""
    changed: dict[str, Any] = plain(config)
    zero = changed.get(ZERO)
    if not isinstance(zero, dict):
        return changed
    for spelling in _SPELLINGS & set(zero):
        if zero[spelling] != "auto":
            del zero[spelling]
    for name, value in given.items():
        spelling = next((s for s in SIZES[name] if s in zero), SIZES[name][0])
        zero[spelling] = value
    return changed


def sizes_digest(config: Mapping[str, Any]) -> str:
    """Equal for configurations whose sizes are equal to DeepSpeed."""
    return _digest(sizes(config))


def rest_digest(config: Mapping[str, Any]) -> str:
    """Equal for configurations whose ZeRO sections differ in no more than sizes and what may differ by rank."""
    return _digest(_rest(config.get(ZERO)))


def _rest(value: object) -> object:
    if isinstance(value, Mapping):
        kept = {str(k): v for k, v in value.items() if k not in _SPELLINGS and k not in _MAY_DIFFER}
        return {key: _rest(inner) for key, inner in kept.items() if inner != "auto"}
    return _number(value)


def _number(value: Any) -> Any:
    """5e8, 500000000 and "500000000" are one size to DeepSpeed."""
    if isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and value.strip().isdecimal():
        with suppress(ValueError):  # Python reads no more than some thousand digits
            return int(value)
    return value


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_DIGITS]
