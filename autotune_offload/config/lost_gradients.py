"""DeepSpeed releases that lose gradients at stage 2: who is hit, told by a configuration or by a live engine.

Training goes on there without a word, with the gradients of the first and the last micro-step alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from autotune_offload.config.mistakes import Mistake
from autotune_offload.config.sections import as_flag, as_number, device_of, section, stage_of
from autotune_offload.upstream import SUMS_RIGHT_SINCE, ZERO, loses_gradients

_STEPS = "gradient_accumulation_steps"
_FIX = f"take DeepSpeed {SUMS_RIGHT_SINCE} or newer, or stage 1 or 3, or {_STEPS} of 1 or 2 with a larger micro-batch"


def lost(version: str, stage: int, accumulation_steps: int) -> Mistake | None:
    """What DeepSpeed `version` loses with the optimizer on the host; None where it loses nothing.

    Raises:
        ConfigError: if `version` is no version.
    """
    if not loses_gradients(version, stage, accumulation_steps):
        return None
    middle = accumulation_steps - 2
    return Mistake(
        found=f"DeepSpeed {version} loses gradients: at stage 2 with offload_optimizer, of {accumulation_steps} "
        f"accumulated micro-steps only the first and the last count, and {middle} in the middle "
        f"{'is' if middle == 1 else 'are'} left out, without an error",
        fix=_FIX,
    )


def lost_by(config: Mapping[str, Any], version: str) -> Mistake | None:
    """The same for a ds_config, as far as its text tells how many micro-steps there will be.

    One that leaves it open ("auto", or absent beside both batch sizes) may be hit: that is told as a possibility, with
    `refused` False.

    Raises:
        ConfigError: if `version` is no version.
    """
    zero = section(config, ZERO)
    offloaded = device_of(zero, "offload_optimizer") or as_flag(zero.get("cpu_offload")) is True
    if not offloaded:
        return None
    given = config.get(_STEPS)
    steps = as_number(given)
    if steps is not None:
        if not math.isfinite(steps):
            return None  # DeepSpeed refuses it
        return lost(version, stage_of(zero), int(steps))
    open_ = given == "auto" or ({"train_batch_size", "train_micro_batch_size_per_gpu"} <= set(config))
    if not open_ or not loses_gradients(version, stage_of(zero), 3):
        return None
    return Mistake(
        found=f"DeepSpeed {version} loses gradients at stage 2 with offload_optimizer where 3 or more micro-steps are "
        f"accumulated (only the first and the last count), and this file leaves {_STEPS} open",
        fix=_FIX,
        refused=False,
    )
