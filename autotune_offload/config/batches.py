"""What DeepSpeed derives of a configuration's three batch keys, by asking it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from autotune_offload.config.sections import as_number

_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def accumulation_steps(config: Mapping[str, object], ranks: int) -> int:
    """Micro-steps of one step, as DeepSpeed will have them with so many data-parallel ranks.

    It derives what is not given of `train_batch_size`, micro-batch and accumulation from the other two. A key that
    is still "auto" is not given; where the keys contradict each other or say too little, 1, and DeepSpeed speaks.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    rule = DeepSpeedConfig.__new__(DeepSpeedConfig)
    rule.world_size = ranks
    for key in _KEYS:
        value = config.get(key)
        setattr(rule, key, None if value == "auto" else value)
    with contextlib.suppress(AssertionError, TypeError, ValueError, ArithmeticError):
        rule._set_batch_related_parameters()  # leaves what was given where the others say too little
    steps = as_number(rule.gradient_accumulation_steps)
    return int(steps) if steps is not None and steps >= 1 and steps.is_integer() else 1
