"""What the environment sets of torch's allocator of page-locked memory (`c10/core/AllocatorConfig.h`)."""

from __future__ import annotations

import os
from collections.abc import Mapping

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""torch reads the first of them that is set."""

_UNROUNDED_ABOVE = ("pinned_max_round_threshold_mb", "pinned_max_cached_size_mb")
"""A block that is larger than either is not rounded up (`ATen/core/CachingHostAllocator.h`)."""

_SLOWS_COPIES = ("CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING", "PT_HPU_LAZY_MODE", "ASCEND_LAUNCH_BLOCKING")
"""What makes a device wait for each operation, or gather them."""


def settings(environ: Mapping[str, str] | None = None) -> str:
    """What changes how memory is page-locked and copied, as ``name:value, name:value``; "" where nothing is set."""
    environ = os.environ if environ is None else environ
    told = {name: environ[name].strip().lower() for name in _SLOWS_COPIES if environ.get(name, "").strip()}
    return ", ".join(f"{name}:{value}" for name, value in sorted((_pinned(environ) | told).items()))


def rounded_up_to(environ: Mapping[str, str] | None = None) -> int | None:
    """The largest block in bytes that is rounded up to a power of two; None where all are."""
    given = _pinned(os.environ if environ is None else environ)
    bounds = [given[name] for name in _UNROUNDED_ABOVE if name in given]
    return min((int(text) << 20 for text in bounds if text.isascii() and text.isdecimal()), default=None)


def rounding() -> str:
    """How a block is rounded up, in words."""
    most = rounded_up_to()
    return "rounded up to a power of two" + ("" if most is None else f" up to {most >> 20:,} MiB")


def _pinned(environ: Mapping[str, str]) -> dict[str, str]:
    text = next((environ[name] for name in _VARIABLES if environ.get(name)), "")
    pairs = (part.partition(":") for part in text.split(","))
    found = {name.strip(): value.strip().lower() for name, _, value in pairs}
    return {name: value for name, value in found.items() if name.startswith("pinned_")}
