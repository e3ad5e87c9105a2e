"""What waiting costs and what page-locking costs, and whether a synchronize waits at all."""

from __future__ import annotations

import mmap
import statistics
from collections.abc import Callable

import torch

from autotune_offload.errors import MeasurementError, PinError
from autotune_offload.machine.device import Device
from autotune_offload.measure.rehearsal import Rehearsed
from autotune_offload.records import (
    PinCost,
    SyncCost,
)

_TELLING_SECONDS = 2e-3
"""Work queued for at least this long tells a synchronize that waits from one that does not."""

_FEW_SAMPLES = 5

_LAST_LOCKS = 3
"""The least a GiB of so many blocks counts: what comes in between while one is locked only ever takes longer."""

_SQUARE = 2048
"""Side of the matrices that are multiplied for it: 17 GFLOP in fp32."""


def check_synchronize(device: Device) -> None:
    """Find out whether the device's synchronize waits, by what a read-back costs with and without it.

    Work is queued, then one element is read. After an honest synchronize the read is short; where it
    lasts as long as without one, although the work was queued and not done, nothing was waited for. A device
    that works while it is called has nothing queued, and nothing to wait for.

    Raises:
        MeasurementError: the synchronize returned before the device was idle.
    """
    if device.synchronous:
        return
    left = device.empty(_SQUARE * _SQUARE, torch.float32).zero_().view(_SQUARE, _SQUARE)
    out = device.empty(_SQUARE * _SQUARE, torch.float32).view(_SQUARE, _SQUARE)
    seen = torch.empty(1, dtype=torch.float32, device="cpu")

    def read_after(wait: Callable[[], None], products: int) -> float:
        for _ in range(products):
            device.matmul(out, left, left)
        wait()
        before = device.now()
        device.d2h(seen, out.view(-1)[:1])
        return device.now() - before

    read_after(device.synchronize, 1)  # the first use loads kernels
    products, without = 4, 0.0
    while without < _TELLING_SECONDS and products < 1024:
        products *= 2
        before = device.now()
        without = read_after(_nothing, products)
        if device.now() - before > 100 * max(without, _TELLING_SECONDS):
            return
    # the shortest of each, since a busy host makes reads longer and never shorter
    without = min([without, *(read_after(_nothing, products) for _ in range(2))])
    after = min(read_after(device.synchronize, products) for _ in range(3))
    if without >= _TELLING_SECONDS / 2 and after > without / 2:
        raise MeasurementError(
            f"synchronize on the {device.identity.kind} device does not wait: a read after it took "
            f"{after * 1e3:.1f} ms, without it {without * 1e3:.1f} ms; timings would be wrong. Update the "
            "device's driver or its DeepSpeed accelerator"
        )


def _nothing() -> None:
    return None


def sync_cost(device: Device, samples: int, deadline: float) -> SyncCost:
    """Median cost of waiting, by scope, with a tiny operation queued before each; few samples after the deadline."""
    tiny = device.empty(64, torch.float32)
    other = device.empty(64, torch.float32)

    def cost(wait: Callable[[], None]) -> float:
        taken = []
        for sample in range(max(samples, _FEW_SAMPLES)):
            if sample >= _FEW_SAMPLES and device.now() >= deadline:
                break
            device.cast(tiny, other)
            before = device.now()
            wait()
            taken.append(device.now() - before)
        return statistics.median(taken)

    return SyncCost(
        device_seconds=cost(device.synchronize),
        stream_seconds=cost(device.synchronize_stream),
        event_seconds=cost(lambda: device.record_event().synchronize()),
    )


def why_nothing_pins(device: Device, pin_bytes: int, rehearsed: Rehearsed | None) -> str | None:
    """Limits first: DeepSpeed's native backend ends the process where a lock goes over memlock."""
    if rehearsed is not None and not rehearsed.largest_bytes and rehearsed.reason is not None:
        return rehearsed.reason
    if pin_bytes < mmap.PAGESIZE:
        return f"the limits leave {pin_bytes:,} bytes to page-lock; expected at least {mmap.PAGESIZE:,}"
    return device.why_not_pinned()


def pin_cost(
    device: Device,
    cap_bytes: int,
    why_not: str | None,
    deadline: float,
    rehearsed: Rehearsed | None = None,
) -> PinCost:
    """Pin blocks of doubling size, freeing each, until one fails, the cap is reached or time is up."""
    if why_not is not None:
        return PinCost(seconds_per_gib=None, largest_bytes=0, capped=False, reason=why_not)
    size, largest = mmap.PAGESIZE, 0
    per_gib: list[float] = []
    reason = None
    while size <= cap_bytes:
        if rehearsed is not None and rehearsed.reason is not None and size > rehearsed.largest_bytes:
            reason = rehearsed.reason
            break
        before = device.now()
        try:
            pinned = device.pinned_empty(size, torch.uint8)
        except PinError as error:
            reason = str(error)
            break
        largest = size
        per_gib.append((device.now() - before) / size * 2**30)
        device.release_pinned(pinned)
        del pinned
        taken = device.now() - before
        if device.now() + 2 * taken > deadline:
            break
        size *= 2
    tried = 0 if rehearsed is None else rehearsed.largest_bytes
    if rehearsed is not None and reason is None:  # what failed there lies beyond what was tried here
        reason = rehearsed.reason
    return PinCost(
        seconds_per_gib=min(per_gib[-_LAST_LOCKS:], default=None),
        largest_bytes=largest,
        capped=reason is None,
        reason=reason,
        tried_bytes=tried,
    )
