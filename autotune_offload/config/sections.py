"""What one ds_config says of its offload sections, by stage and device; single values as DeepSpeed reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from autotune_offload.records import Change
from autotune_offload.upstream import LEGACY, SECTION_STAGES, ZERO, Section, pins_by_default


def section(config: object, *names: str) -> Mapping[str, Any]:
    """The section under these names, one within the other; empty where there is none, or no mapping."""
    for name in names:
        config = config.get(name) if isinstance(config, Mapping) else None
    return config if isinstance(config, Mapping) else {}


def offloads(config: Mapping[str, Any]) -> bool:
    """Whether anything is offloaded where `tune` can act: without that, there is nothing to measure."""
    zero = section(config, ZERO)
    switched = (name for flag, name in LEGACY.items() if as_flag(zero.get(flag)) is True)
    return any(device_of(zero, name) for name in SECTION_STAGES) or any(
        stage_of(zero) in SECTION_STAGES[name] for name in switched
    )


def offloads_parameters(config: Mapping[str, Any]) -> bool:
    """Whether stage 3 keeps its parameter partitions in host memory."""
    zero = section(config, ZERO)
    switched = stage_of(zero) == 3 and as_flag(zero.get("cpu_offload_param")) is True
    return switched or device_of(zero, "offload_param") == "cpu"


def why_no_path(config: Mapping[str, Any]) -> str | None:
    """None where gradients leave by a path that can be attached, else why DeepSpeed's own code will carry them.

    What the configuration tells beforehand of what a live engine is refused for (`engine.stage3`): the keys then
    follow DeepSpeed's own copies from the start.
    """
    zero = section(config, ZERO)
    optimizer = section(zero, "offload_optimizer")
    if stage_of(zero) != 3:
        return "paths are for ZeRO stage 3"
    if optimizer.get("device") != "cpu" and as_flag(zero.get("cpu_offload")) is not True:
        return "the optimizer is not offloaded to the CPU"
    if as_flag(optimizer.get("super_offload")) is True:
        return "SuperOffload offloads gradients in its own way"
    if isinstance(zero.get("zenflow"), Mapping):
        return "ZenFlow offloads gradients in its own way"
    if (as_number(zero.get("mics_shard_size")) or 0) > 0:
        return "MiCS reduces gradients in its own way"
    if str(section(config, "optimizer").get("type")).lower() == "muon":
        return "Muon rewrites the gradients between backward and step"
    if as_flag(section(config, "compile").get("deepcompile")) is True:
        return "DeepCompile reduces gradients past partition_grads"
    if sixteen_bit_masters(config):
        return "the master gradients have 16 bits, not fp32"
    return None


def sixteen_bit_masters(config: Mapping[str, Any]) -> bool:
    """Whether master weights and gradients are kept in 16 bits (`deepspeed/runtime/precision_config.py`)."""
    names = (("bf16", "bf16_master_weights_and_grads"), ("fp16", "fp16_master_weights_and_grads"))
    return any(as_flag(section(config, name).get(key)) is True for name, key in names)


def nested(changes: Iterable[Change]) -> dict[str, Any]:
    """What `changes` write, nested as in a ds_config: ``{"zero_optimization": {...}}``."""
    written: dict[str, Any] = {}
    for change in changes:
        if change.after is not None:
            *parents, name = change.key.split(".")
            holder = written
            for parent in parents:
                holder = holder.setdefault(parent, {})
            holder[name] = change.after
    return written


def page_locks(config: Mapping[str, Any], version: str) -> dict[Section, bool]:
    """The sections that offload to the CPU, each with whether DeepSpeed `version` page-locks for it.

    Raises:
        ConfigError: if `version` is not a version.
    """
    zero, default, locks = section(config, ZERO), pins_by_default(version), dict[Section, bool]()
    for name in SECTION_STAGES:
        if device_of(zero, name) == "cpu":
            given = as_flag(section(zero, name).get("pin_memory"))
            locks[name] = default if given is None else given
    for flag, name in LEGACY.items():
        if as_flag(zero.get(flag)) is True and stage_of(zero) in SECTION_STAGES[name]:
            locks.setdefault(name, default)
    return locks


def relative(keep: Collection[str]) -> tuple[str, ...]:
    """Entries of `keep` as names within ``zero_optimization``."""
    entries = (keep,) if isinstance(keep, str) else keep
    return tuple(entry.removeprefix(ZERO).removeprefix(".") for entry in entries)


def covers(entry: str, name: str) -> bool:
    """Whether an entry of `keep` protects this key."""
    return entry in ("", name) or name.startswith(f"{entry}.")


def device_of(zero: Mapping[str, Any], name: Section) -> str | None:
    """Where this offload section offloads to, or None where it does not or has no effect at this stage."""
    device = section(zero, name).get("device")
    return device if stage_of(zero) in SECTION_STAGES[name] and device in ("cpu", "nvme") else None


def stage_of(zero: Mapping[str, Any]) -> int:
    """The ZeRO stage; 0 where it is absent or no number."""
    number = as_number(zero.get("stage", 0))
    return int(number) if number is not None and math.isfinite(number) else 0


def as_flag(value: object) -> bool | None:
    """`value` as DeepSpeed's parser reads a boolean (pydantic's lax mode), or None where it refuses."""
    text = str(value).lower() if isinstance(value, (bool, int, str)) else ""
    if value == 0.0 or text in ("0", "off", "f", "false", "n", "no"):
        return False
    return True if value == 1.0 or text in ("1", "on", "t", "true", "y", "yes") else None


def as_number(value: object) -> float | None:
    """`value` as a number, a text that spells one included; None for all else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):  # no number, or one that no float holds
        return None


def shown(value: object) -> str:
    """A value as its file spells it."""
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value, default=repr)
