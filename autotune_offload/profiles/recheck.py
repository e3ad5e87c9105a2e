"""What is looked at before a stored profile is used: what it pins fits today, and one copy is still as fast.

Both find a machine that has changed under an unchanged key. `docs/cache.md` gives the rule and its reasons.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autotune_offload.config.layout import PLAIN, Layout
from autotune_offload.errors import PinError
from autotune_offload.machine.device import Device
from autotune_offload.paths.path import page_locks
from autotune_offload.profiles.store import Miss
from autotune_offload.records import Limits, Memory, Profile, Transfer

if TYPE_CHECKING:
    from autotune_offload.paths.page_locking import PinRules


TOLERANCE = 3
"""How many times the stored time a copy may take. Ranks that share a link halve its rate
(NVIDIA/cuda-samples#357: 56 GB/s alone, 25 to 45 together), so a factor of two must pass."""

MOST_BYTES = 4 << 20
ONE_COPY_SECONDS = 0.25e-3
"""Of the stored copies up to this size and time the largest is repeated: it says most about the rate."""

MOST_SECONDS = 0.02
LEAST_COPIES = 5
"""All copies together take MOST_SECONDS, or as long as LEAST_COPIES take: one that was interrupted by another
process says nothing. On an unchanged machine the first or second is fast enough and ends the re-check."""


def doubt(profile: Profile, device: Device, limits: Limits, layout: Layout = PLAIN) -> Miss | None:
    """Why a stored profile is not to be used on this machine as it is now, or None.

    Args:
        profile: what is stored under the present key.
        device: the running device; a block of at most MOST_BYTES is allocated on it and freed again.
        limits: what this process may page-lock now.
        layout: what the present configuration says of stage, devices and sizes.
    """
    why = _too_large(profile, limits, layout)
    if why is not None:
        return Miss(reason=f"the profile of {profile.created} does not fit any more: it {why}")
    with device.selected():
        return _slower(profile, device)


def _pins(profile: Profile) -> bool:
    choice = profile.choice
    return page_locks(choice.path) or choice.pin_optimizer or choice.pin_parameters


def _too_large(profile: Profile, limits: Limits, layout: Layout) -> str | None:
    if not _pins(profile):
        return None
    from autotune_offload.paths.page_locking import PinRules

    rules = PinRules(
        pin=profile.pin,
        limits=limits,
        workload=profile.workload,
        layout=layout,
        version=profile.software.deepspeed,
    )
    return _against(profile, rules)


def _against(profile: Profile, rules: PinRules) -> str | None:
    choice = profile.choice
    why = rules.against(choice)
    if why is None and choice.pin_optimizer:
        why = rules.against_optimizer()
    if why is None and choice.pin_parameters:
        why = rules.against_parameters(with_optimizer=choice.pin_optimizer)
    return why


def _slower(profile: Profile, device: Device) -> Miss | None:
    point = _point(profile, device)
    if point is None:
        return None
    stored = max(point.median_seconds + point.iqr_seconds, profile.rechecked_seconds or 0.0)
    try:
        seconds = _fastest_copy(device, point, TOLERANCE * stored + profile.sync.event_seconds)
    except PinError as error:
        return Miss(reason=f"the profile of {profile.created} uses page-locked memory, but now {error}")
    if seconds is None:
        return None
    return Miss(
        reason=(
            f"this machine has changed since the profile of {profile.created}: the fastest copy of "
            f"{point.bytes:,} bytes to {point.memory} memory takes {seconds * 1e3:.3g} ms, "
            f"and took {stored * 1e3:.3g} ms (up to {TOLERANCE} times as long passes)"
        ),
        rechecked_seconds=seconds,
    )


def _point(profile: Profile, device: Device) -> Transfer | None:
    """The largest stored copy to the memory that the choice uses, of those that can be repeated often.

    Where device memory is host memory, a copy in one thread: several wait for the last of them, which another
    process may keep off its core for longer than all this takes.
    """
    kind, threads = ("h2h", 1) if device.shares_host_memory else ("d2h", 0)
    pinned = page_locks(profile.choice.path) or profile.choice.pin_optimizer
    memory: Memory = "pinned" if pinned else "pageable"
    fitting = [
        point
        for point in profile.transfers
        if (point.kind, point.memory, point.state, point.threads) == (kind, memory, "warm", threads)
        and not point.duplex
        and 0 < point.bytes <= MOST_BYTES
        and point.median_seconds <= ONE_COPY_SECONDS
    ]
    return max(fitting, key=lambda point: point.bytes, default=None)


def _fastest_copy(device: Device, point: Transfer, enough_seconds: float) -> float | None:
    """Seconds of the fastest copy of all that fit the time; None as soon as one is fast enough.

    Raises:
        PinError: the memory cannot be page-locked.
    """
    source = device.empty(point.bytes, torch.uint8)
    with _host_block(device, point) as target, device.intraop(point.threads):
        seconds: list[float] = []
        started = device.now()
        while len(seconds) < LEAST_COPIES or device.now() - started < MOST_SECONDS:
            seconds.append(_copy_seconds(device, target, source, point))
            if seconds[-1] <= enough_seconds:
                return None
    return min(seconds)


def _copy_seconds(device: Device, target: Tensor, source: Tensor, point: Transfer) -> float:
    before = device.now()
    if point.kind == "h2h":
        device.h2h(target, source)
    else:
        device.d2h(target, source, non_blocking=point.memory == "pinned")
        device.record_event().synchronize()
    return device.now() - before


@contextlib.contextmanager
def _host_block(device: Device, point: Transfer) -> Iterator[Tensor]:
    if point.memory == "pageable":
        yield device.host_empty(point.bytes, torch.uint8)
        return
    pinned = device.pinned_empty(point.bytes, torch.uint8)
    try:
        yield pinned
    finally:
        device.release_pinned(pinned)
