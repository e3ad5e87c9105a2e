"""What a rehearsal tries, block by block, saying each step before it is taken."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from autotune_offload.errors import AutotuneError, PinError
from autotune_offload.machine.device import Device

_OF_THE_TIME = 0.8
"""A block of the model's own size is tried where it can be expected to be over by this part of the time."""


_COPIED_BYTES = 64 << 20
"""Of such a block so much is copied: device memory is for the model."""


def sizes(most_bytes: int) -> list[int]:
    """The blocks to try: powers of two from one page on, as the pin sweep takes them."""
    return [1 << power for power in range(mmap.PAGESIZE.bit_length() - 1, most_bytes.bit_length())]


def beyond(swept: Sequence[int], whole_bytes: int) -> list[int]:
    """The blocks to try after those: doubling up to the one that a model really needs, and that one."""
    last = swept[-1] if swept else mmap.PAGESIZE
    rising = [1 << power for power in range(last.bit_length(), max(whole_bytes - 1, 0).bit_length())]
    return [*rising, whole_bytes] if swept and whole_bytes > last else []


# -- what is tried --------------------------------------------------------------------------------

Said = dict[str, Any]
"""One line of the child's: what it does next, what went well, or how it ended."""


def attempts(device: Device, blocks: Sequence[int], whole_bytes: int, seconds: float) -> Iterator[Said]:
    """Say each step before it is taken, so that the last word tells where it ended."""
    started, per_byte = device.now(), 0.0
    try:
        with device.selected(), device.timed_only():
            yield {"next": "answer", "bytes": mmap.PAGESIZE}
            _copy_both_ways(device, device.host_empty(mmap.PAGESIZE, torch.uint8), non_blocking=False)
            for size in blocks:
                before = device.now()
                yield {"next": "lock", "bytes": size}
                pinned = device.pinned_empty(size, torch.uint8)
                per_byte = (device.now() - before) / size
                yield {"next": "copy", "bytes": size}
                _copy_both_ways(device, pinned, non_blocking=True)
                device.release_pinned(pinned)
                del pinned
                yield {"well": size}
            yield from _large(device, blocks, whole_bytes, per_byte, started + seconds * _OF_THE_TIME)
        yield {"end": "done"}
    except PinError as error:
        yield {"end": "pin", "error": str(error)}
    except (AutotuneError, RuntimeError, OSError, MemoryError) as error:
        yield {"end": "error", "error": f"{error}"}


def _large(
    device: Device, blocks: Sequence[int], whole_bytes: int, per_byte: float, deadline: float
) -> Iterator[Said]:
    """The model's own block at once, else as large ones as go, as long as each can be expected to be over in time.

    Raises:
        PinError: the model's own could not be locked, or none as large as was tried.
    """
    *rising, whole = beyond(blocks, whole_bytes) or [0]
    copied, failed = min(blocks[-1] if blocks else 0, _COPIED_BYTES), None
    for size in [whole, *rising] * bool(whole):
        before = device.now()
        if before + per_byte * size > deadline:
            if size == whole:
                continue
            break
        yield {"next": "lock", "bytes": size}
        try:
            device.try_lock(size, copied)
        except PinError as error:
            failed = failed or error
            if size != whole:
                break
            continue
        per_byte = (device.now() - before) / size
        yield {"well": size}
        if size == whole:
            break
    if failed is not None:
        raise failed


def _copy_both_ways(device: Device, host: torch.Tensor, *, non_blocking: bool) -> None:
    on_device = device.empty(host.numel(), torch.uint8)
    device.h2d(on_device, host, non_blocking=non_blocking)
    device.d2h(host, on_device, non_blocking=non_blocking)
    device.record_event().synchronize()
    device.synchronize()
