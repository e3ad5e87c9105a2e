"""The buffers that timed copies rotate through."""

from __future__ import annotations

import contextlib
import itertools
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autotune_offload.errors import BudgetError, PinError
from autotune_offload.machine.device import Device
from autotune_offload.records import (
    Plan,
)

_ARENA_SHARE = 0.2
"""Of the measuring time at most for making the buffers."""


# -- buffers --------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Arenas:
    """Buffers of `size` bytes each, `pinned` perhaps fewer. All but `target` hold the same pattern."""

    size: int
    source: Tensor
    target: Tensor
    device: Tensor
    pinned: Tensor | None = field(default=None)


def slots(size: int, *arenas: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of `size` bytes at the same place in every arena, round and round."""
    count = max(min(arena.numel() for arena in arenas) // size, 1)
    for index in itertools.cycle(range(count)):
        yield tuple(arena[index * size : (index + 1) * size] for arena in arenas)


@contextlib.contextmanager
def open_arenas(
    device: Device, plan: Plan, seconds: float, cache_bytes: int, memory_bytes: int, pin_bytes: int
) -> Iterator[Arenas]:
    """Buffers for timing, given back at the end."""
    size = arena_bytes(device, plan, seconds, cache_bytes, memory_bytes)
    source = device.host_empty(size, torch.uint8)
    checked = min(size, device.checked_elements)
    torch.arange(checked // 4, dtype=torch.int32, device="cpu", out=source[:checked].view(torch.int32))
    target = device.host_empty(size, torch.uint8)
    on_device = device.empty(size, torch.uint8)
    device.h2d(on_device[:checked], source[:checked])
    arenas = Arenas(size=size, source=source, target=target, device=on_device)
    if pin_bytes >= plan.smallest_bytes:
        with contextlib.suppress(PinError):  # the curves then show that nothing pins at this size
            arenas.pinned = device.pinned_empty(min(size, power_of_two_below(pin_bytes)), torch.uint8)
            arenas.pinned[:checked].copy_(source[: arenas.pinned[:checked].numel()])
    try:
        yield arenas
    finally:
        if arenas.pinned is not None:
            device.release_pinned(arenas.pinned)


def arena_bytes(device: Device, plan: Plan, seconds: float, cache_bytes: int, memory_bytes: int) -> int:
    """As large as the plan's largest size and twice the cache, if time and memory allow: a power of two.

    Raises:
        BudgetError: the memory does not hold buffers of the plan's smallest size.
    """
    # source, target and pinned stay, a cold copy's target or what is being pinned comes and goes
    parts = 5 if device.shares_host_memory else 4
    share = memory_bytes // parts
    least = power_of_two_below(2 * mapped_bytes(plan.smallest_bytes) - 1)
    if share < least:
        raise BudgetError(
            f"{memory_bytes:,} bytes of host memory for measuring; expected at least {parts} buffers of "
            f"{least:,} bytes"
        )
    affordable = touched_per_second(device, min(8 << 20, share)) * seconds * _ARENA_SHARE / 3
    wanted = max(plan.largest_bytes, 2 * cache_bytes)
    return power_of_two_below(max(min(wanted, share, max(int(affordable), least, 1 << 20)), least))


def mapped_bytes(size: int) -> int:
    """What `size` bytes take of memory that comes in whole pages."""
    return max(-(-size // mmap.PAGESIZE), 1) * mmap.PAGESIZE


def touched_per_second(device: Device, size: int) -> float:
    """How fast new pages come, by touching so many bytes of them."""
    fresh = device.host_empty(size, torch.uint8, touched=False)
    before = device.now()
    fresh.zero_()
    return size / max(device.now() - before, 1e-9)


def power_of_two_below(size: int) -> int:
    """The largest power of two that is not above `size`; 1 at least."""
    return 1 << max(size.bit_length() - 1, 0)
