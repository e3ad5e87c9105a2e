"""The ZeRO keys that follow from a choice, and where each acts."""

from __future__ import annotations

from typing import Literal

from packaging.version import Version

from autotune_offload.records import Record
from autotune_offload.upstream import (
    OLDEST,
    PERSISTENCE_ELEMENTS,
    PINS_BY_DEFAULT_SINCE,
    PREFETCH_BUCKET_ELEMENTS,
    REDUCE_BUCKET_ELEMENTS,
    SUB_GROUP_ELEMENTS,
    Section,
)


class Key(Record, frozen=True, kw_only=True):
    """One ZeRO key that follows from a `Choice`, and where it acts."""

    spellings: tuple[str, ...]
    """DeepSpeed takes any one of them; the first is written where none is present."""
    section: Section
    """The offload section whose device decides whether the key acts."""
    nested: bool
    """True where the key lives inside that section, False where it lives beside it."""
    unit: Literal["flag", "elements"]
    stages: frozenset[int]
    devices: frozenset[str]
    field: str
    """The field of `Choice` (flags) or of `ZeroSizes` (elements) that holds the value."""
    defaults: tuple[tuple[str, int], ...]
    """DeepSpeed's own value, by the version it came with, oldest first (`runtime/zero/*config.py`)."""
    least: int = 0
    """The smallest value that DeepSpeed takes and that makes sense."""

    @property
    def overrides(self) -> bool:
        """True for the keys that replace a user's own value; the others fill what is absent or "auto"."""
        return self.unit == "flag"

    def names(self) -> tuple[str, ...]:
        """Its dotted names relative to ``zero_optimization``."""
        return tuple(f"{self.section}.{name}" if self.nested else name for name in self.spellings)

    def default(self, version: Version) -> int:
        """DeepSpeed's own value in `version`."""
        return [value for since, value in self.defaults if Version(since).release <= version.release][-1]


def _pin(section: Section, chosen: str, stages: set[int]) -> Key:
    return Key(
        spellings=("pin_memory",),
        section=section,
        nested=True,
        unit="flag",
        stages=frozenset(stages),
        devices=frozenset({"cpu", "nvme"}),
        field=chosen,
        defaults=((OLDEST, False), (PINS_BY_DEFAULT_SINCE, True)),
    )


def _size(section: Section, chosen: str, stages: set[int], default: int, least: int, *spellings: str) -> Key:
    return Key(
        spellings=spellings,
        section=section,
        nested=False,
        unit="elements",
        stages=frozenset(stages),
        devices=frozenset({"cpu"}),  # what was measured is host memory, not a disk
        field=chosen,
        defaults=((OLDEST, default),),
        least=least,
    )


KEYS = (
    _pin("offload_optimizer", "pin_optimizer", {1, 2, 3}),
    _pin("offload_param", "pin_parameters", {3}),
    _size(
        "offload_optimizer", "reduce_bucket_elements", {2, 3}, REDUCE_BUCKET_ELEMENTS, 1, "reduce_bucket_size"
    ),
    _size(
        "offload_param",
        "prefetch_bucket_elements",
        {3},
        PREFETCH_BUCKET_ELEMENTS,
        0,
        "stage3_prefetch_bucket_size",
        "prefetch_bucket_size",
    ),
    _size(
        "offload_param",
        "persistence_threshold_elements",
        {3},
        PERSISTENCE_ELEMENTS,
        0,
        "stage3_param_persistence_threshold",
        "param_persistence_threshold",
    ),
    _size("offload_optimizer", "sub_group_elements", {3}, SUB_GROUP_ELEMENTS, 0, "sub_group_size"),
)
"""Every key that `tune` may write."""

NAMES = {key.field: key.spellings[0] for key in KEYS if not key.nested}
"""What a ds_config calls each field of `ZeroSizes`."""
