"""What will happen inside `deepspeed.initialize`, said before it: a process that aborts there leaves no report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from autotune_offload.config.layout import layout_of
from autotune_offload.config.sections import page_locks
from autotune_offload.paths.page_locking import PinRules
from autotune_offload.records import Limits, Profile
from autotune_offload.upstream import ZERO


def will_fail(
    config: Mapping[str, Any], profile: Profile, limits: Limits, *, pin_backend: str, version: str
) -> Iterator[str]:
    """What DeepSpeed is going to page-lock for this configuration and cannot, a sentence each.

    Args:
        config: what DeepSpeed will get.
        profile: whose workload and largest block count.
        limits: of this rank, now.
        pin_backend: of the device; "none" locks nothing.
        version: DeepSpeed's.
    """
    if pin_backend == "none":
        return
    layout = layout_of(config)
    rules = PinRules(
        workload=profile.workload, pin=profile.pin, limits=limits, layout=layout, version=version
    )
    why = rules.against_deepspeeds_own()
    if why is not None and layout.stage == 3 and layout.parameters is not None:
        yield (
            f"with {ZERO}.offload_param DeepSpeed page-locks a flat copy of the parameters whatever pin_memory says: "
            f"it {why}; this run will fail here, take offload_param out"
        )
    elif why is not None:
        yield f"DeepSpeed {version} page-locks its own buffers whatever pin_memory says: it {why}; this run will fail"
    if page_locks(config, version).get("offload_optimizer"):
        why = rules.not_on_offer or rules.against_optimizer()
        if why is not None:
            yield f"{ZERO}.offload_optimizer.pin_memory is true and will fail here: {why}; set it to false"
