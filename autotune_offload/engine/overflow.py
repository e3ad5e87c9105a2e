"""DeepSpeed's check of the accumulation buffer for an overflow, in one pass instead of five.

`has_overflow` asks `torch.isinf(buffer).any()` and `torch.isnan(buffer).any()`, each through fresh temporaries as long
as the buffer (`runtime/zero/stage3.py`, 0.14.5 to 0.19.8). The least and the greatest value are finite exactly where
all values are, since an infinity is one of the two and a NaN becomes both; so it is asked about those two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autotune_offload.upstream import FLAT_LOW_PRECISION


def by_extremes(optimizer: Any, has_overflow: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `has_overflow` of `optimizer` returns with these arguments, with all its effects.

    Everything that goes to the buffer must have arrived.
    """
    buffer = getattr(optimizer, FLAT_LOW_PRECISION, None)
    if not isinstance(buffer, Tensor) or buffer.device.type != "cpu" or buffer.numel() <= 2:
        return has_overflow(*args, **kwargs)
    extremes = torch.stack(torch.aminmax(buffer))
    setattr(optimizer, FLAT_LOW_PRECISION, extremes)
    try:
        return has_overflow(*args, **kwargs)
    finally:
        setattr(optimizer, FLAT_LOW_PRECISION, buffer)
