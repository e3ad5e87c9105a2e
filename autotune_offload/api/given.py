"""What a decision reads of the caller's own: the model, the configuration, what a framework did to either."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import structs

from autotune_offload import upstream
from autotune_offload import workload as workloads
from autotune_offload.api.report import shown
from autotune_offload.config import batches, sections
from autotune_offload.config import block as config_block
from autotune_offload.config.layout import layout_of
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.machine.device import Device
from autotune_offload.ranks import group as ranks_group
from autotune_offload.records import Choice, Profile, Record, Workload


class Asked(Record, frozen=True, kw_only=True):
    """What a decision is about, beside the configuration."""

    model: Any = None
    autotune: Mapping[str, Any] | bool | None = None
    workload: Workload | None = None
    attaches: bool = False
    says: bool = True
    """Off where the same will be said at another call."""
    group_is_made_by: Callable[[], object] | None = None
    """Makes the process group where there is none yet; None leaves that to others, later."""
    mpu: Any = None
    """The caller's model-parallel unit. Asked only within the guard, and only where there are several ranks."""
    mesh: Any = None
    """`mesh_param` of the call: ranks of data, and of sequence parallelism."""


def workload_of(config: Mapping[str, Any], asked: Asked) -> Workload | None:
    """What will be trained; None where neither a workload nor a model was handed in."""
    if asked.workload is not None or asked.model is None:
        return asked.workload
    return workloads.from_module(
        asked.model,
        world_size=_partition_ranks(asked),
        accumulation_steps=batches.accumulation_steps(config, _batch_ranks(config, asked)),
        dtype=_dtype(config),
    )


def trains(model: Any) -> bool:
    """Whether gradients will leave this model; one that is not known yet is taken to train."""
    return model is None or any(parameter.requires_grad for parameter in model.parameters())


def with_overrides(config: Mapping[str, Any], autotune: Mapping[str, Any] | bool | None) -> dict[str, Any]:
    """The configuration with the settings of a call over those of its block."""
    block = config.get(config_block.BLOCK)
    if not isinstance(autotune, Mapping):
        return dict(config)
    if isinstance(block, Mapping):
        return {**config, config_block.BLOCK: {**block, **autotune}}
    return {**config, config_block.BLOCK: dict(autotune)}


def _dtype(config: Mapping[str, Any]) -> str | None:
    """The gradients' dtype by the configuration; None leaves it to the module's own parameters."""
    for name, dtype in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        enabled = sections.section(config, name).get("enabled")
        if enabled == "auto":
            return None
        if sections.as_flag(enabled) is True:
            return dtype
    return "float32"


def _partition_ranks(asked: Asked) -> int:
    """How many ranks share a parameter: a model-parallel unit may say that these are not all."""
    ranks = ranks_group.announced_ranks()
    size = getattr(asked.mpu, "get_data_parallel_world_size", None) if ranks > 1 else None
    return ranks if size is None else int(size())


def _batch_ranks(config: Mapping[str, Any], asked: Asked) -> int:
    """How many ranks share a batch, by the rule of `deepspeed.runtime.config.DeepSpeedConfig`.

    Ranks of one sequence share its parameters' partitions and not the batch.
    """
    ranks = ranks_group.announced_ranks()
    if ranks == 1:
        return 1
    if asked.mpu is not None:
        if hasattr(asked.mpu, "get_data_parallel_world_size"):
            return _partition_ranks(asked)
        return ranks // int(asked.mpu.get_sequence_parallel_world_size())
    if asked.mesh:
        return int(asked.mesh[0])
    if "sequence_parallel_size" in config:
        return ranks // int(config["sequence_parallel_size"])
    return ranks


def filled_by_trainer(config: Mapping[str, Any]) -> frozenset[str]:
    """Keys of ``zero_optimization`` that the user left "auto" and the Hugging Face Trainer made numbers.

    The configuration that transformers holds for `from_pretrained` still says "auto" then
    (`transformers.integrations.deepspeed.deepspeed_config`). It counts only where all else is the same.
    """
    integration = sys.modules.get("transformers.integrations.deepspeed")
    held: Mapping[str, Any] | None = getattr(integration, "deepspeed_config", dict)()
    written, filled = sections.section(held, upstream.ZERO), sections.section(config, upstream.ZERO)
    autos = {name for name, value in written.items() if value == "auto"}
    same = all(filled.get(name) == value for name, value in written.items() if name not in autos)
    return frozenset(autos) if same else frozenset()


_LOOKED_AT = 16
"""Partitions that are asked whether they are page-locked: `zero.Init` treats all alike."""


def stepped_as_laid_out(profile: Profile, config: Mapping[str, Any], device: Device) -> Profile:
    """The profile with the step decided for where this configuration keeps 16-bit weights.

    One profile serves configurations with and without `offload_param`, which its curves do not depend on.
    """
    layout = layout_of(config)
    in_place = device.shares_host_memory or layout.parameters == "cpu"
    if profile.step is None or in_place == (profile.step.own.back == "in place"):
        return profile
    from autotune_offload.decide.step import decide_step

    step = decide_step(
        device,
        profile.measurements,
        profile.workload,
        profile.limits,
        profile.choice,
        layout=layout,
        version=profile.software.deepspeed,
    )
    return structs.replace(profile, step=step)


def as_laid_out(
    choice: Choice, config: Mapping[str, Any], model: Any, device: AcceleratorDevice
) -> tuple[Choice, tuple[str, ...]]:
    """The choice as far as it can still be had for parameters that `zero.Init` has partitioned already.

    Returns it with a notice where they lie otherwise than was chosen.
    """
    pinned = _partitions_pinned(model, device) if sections.offloads_parameters(config) else None
    if pinned is None or pinned is choice.pin_parameters:
        return choice, ()
    memory = "page-locked" if pinned else "pageable"
    notice = (
        f"the parameters were partitioned before this, by zero.Init, in {memory} memory and stay there: "
        f"offload_param.pin_memory {shown(choice.pin_parameters)} comes too late for them. Build the model "
        "under autotune_offload.zero_init(...), or give zero.Init what autotune_offload.tune_config returns"
    )
    reasons = (f"offload_param lies in {memory} memory since zero.Init", *choice.reasons)
    unsettled = tuple(name for name in choice.unsettled_pins if name != "pin_parameters")
    return structs.replace(choice, pin_parameters=pinned, unsettled_pins=unsettled, reasons=reasons), (
        notice,
    )


def _partitions_pinned(model: Any, device: AcceleratorDevice) -> bool | None:
    """Whether partitions on the host are page-locked; None where `zero.Init` has not made any."""
    parameters: Iterable[Any] = getattr(model, "parameters", tuple)()
    partitions = (getattr(parameter, "ds_tensor", None) for parameter in parameters)
    on_host = (each for each in partitions if each is not None and each.device.type == "cpu" and each.numel())
    looked_at = [device.is_pinned(each) for each in itertools.islice(on_host, _LOOKED_AT)]
    return any(looked_at) if looked_at else None
