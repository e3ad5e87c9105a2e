"""What of a configuration decides how much DeepSpeed page-locks, and in which blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, cast

from autotune_offload.config.sections import (
    as_flag,
    as_number,
    device_of,
    sixteen_bit_masters,
    stage_of,
)
from autotune_offload.records import Record
from autotune_offload.upstream import (
    LEGACY,
    MAX_IN_CPU_ELEMENTS,
    SECTION_STAGES,
    SUB_GROUP_ELEMENTS,
    ZERO,
    Section,
)

Device = Literal["cpu", "nvme"]

_BYTES = {"fp32": 4, "float32": 4, "fp16": 2, "float16": 2, "bf16": 2, "bfloat16": 2}


class Layout(Record, frozen=True, kw_only=True):
    """Stage, devices and sizes. As it stands: stage 3, both offloads on the CPU, DeepSpeed's own sizes."""

    stage: int = 3
    optimizer: Device | None = "cpu"
    parameters: Device | None = "cpu"
    sub_group_elements: int | None = None
    """`sub_group_size` as the user wrote it, who is not overruled; None where it is absent or "auto"."""
    max_in_cpu_elements: int = MAX_IN_CPU_ELEMENTS
    sums_bytes: int | None = None
    """Of one element of the accumulation buffer; None where it has the gradients' own dtype."""
    master_bytes: int = 4
    """Of one element of the master weights and their gradients."""

    def differing(self, elements: int) -> str | None:
        """How it differs, for so many elements a rank, in what decides about page-locking; None where it does not."""
        said = []
        if self.stage in (1, 2):
            said.append(f"stage={self.stage}")
        elif self.sub_group_elements is not None:
            given, own = (min(size, elements) for size in (self.sub_group_elements, SUB_GROUP_ELEMENTS))
            if given > 0 and round(math.log2(given)) != round(math.log2(own)):
                said.append(f"sub_group_size=2^{round(math.log2(given))}")
        if self.sums_bytes is not None:
            said.append(f"sums={self.sums_bytes}")
        if self.master_bytes != 4:
            said.append(f"master={self.master_bytes}")
        return " ".join(said) or None


PLAIN = Layout()
"""What is taken where there is no configuration."""


def layout_of(config: Mapping[str, Any] | None) -> Layout:
    """What a configuration says, as far as it can be read; the plain one without any.

    What DeepSpeed refuses is taken as absent: it says so itself.
    """
    zero = (config or {}).get(ZERO)
    if config is None or not isinstance(zero, Mapping):
        return PLAIN
    section = zero.get("offload_param")
    in_cpu = as_number(section.get("max_in_cpu")) if isinstance(section, Mapping) else None
    return Layout(
        stage=stage_of(zero),
        optimizer=_device(zero, "offload_optimizer"),
        parameters=_device(zero, "offload_param"),
        sub_group_elements=_whole(zero.get("sub_group_size")),
        max_in_cpu_elements=MAX_IN_CPU_ELEMENTS if in_cpu is None else max(int(in_cpu), 0),
        sums_bytes=_sums_bytes(config),
        master_bytes=2 if sixteen_bit_masters(config) else 4,
    )


def _device(zero: Mapping[str, Any], section: Section) -> Device | None:
    flags = [flag for flag, stands_for in LEGACY.items() if stands_for == section]
    if any(as_flag(zero.get(flag)) is True for flag in flags) and stage_of(zero) in SECTION_STAGES[section]:
        return "cpu"
    return cast("Device | None", device_of(zero, section))


def _whole(value: object) -> int | None:
    number = as_number(value)
    return int(number) if number is not None and math.isfinite(number) and number >= 1 else None


def _sums_bytes(config: Mapping[str, Any]) -> int | None:
    types = config.get("data_types")
    return _BYTES.get(str(types.get("grad_accum_dtype"))) if isinstance(types, Mapping) else None
