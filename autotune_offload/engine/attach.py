"""Puts a gradient path into a live engine, and takes it out."""

from __future__ import annotations

import weakref
from typing import Any

import msgspec

from autotune_offload.engine import stage3
from autotune_offload.engine.attachment import Attachment
from autotune_offload.engine.entrants import Confirm, Tell
from autotune_offload.engine.status import Status
from autotune_offload.errors import in_words
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.machine.device import Device
from autotune_offload.machine.ranges import keep_ranges
from autotune_offload.machine.spans import Kept
from autotune_offload.paths.path import Spec


class _Entry(msgspec.Struct, frozen=True):
    """What is known of an engine.

    The optimizer's replaced methods keep the attachment alive. The optimizer may hold the engine, so that
    a strong reference here would keep all three for ever.
    """

    attachment: weakref.ref[Attachment]
    status: Status
    kept: Kept


_entries: weakref.WeakKeyDictionary[Any, _Entry] = weakref.WeakKeyDictionary()


def attach(
    engine: Any,
    choice: Spec,
    device: Device | None = None,
    check: bool = True,
    confirm: Confirm | None = None,
    tell: Tell | None = None,
) -> Status:
    """Carry out `choice` in a running engine, in place of a path that is attached already.

    Args:
        engine: what `deepspeed.initialize` returned.
        choice: a `Choice` or `Candidate`; the latter adds micro-steps up on the device.
        device: None takes DeepSpeed's accelerator.
        check: compare with DeepSpeed's own code in the first backward pass, and time that code in the
            accumulation after it.
        confirm: let the path, others and DeepSpeed's own code take turns until the fastest is known, which stays.
        tell: is told what a next start should know.

    Returns:
        The status, which goes on counting; its `why_not` says why nothing was replaced, if so.
    """
    why_not = why_not_attachable(engine)
    if why_not is not None:
        return Status(why_not=why_not)
    detach(engine)
    try:
        attachment = Attachment(
            engine, choice, device or AcceleratorDevice(), check=check, confirm=confirm, tell=tell
        )
    except Exception as error:  # whatever it is, DeepSpeed trains without us
        return Status(why_not=f"the {choice.path} path cannot be built: {in_words(error)}")
    kept = keep_ranges(attachment.device)
    attachment.replace_methods()
    _entries[engine] = _Entry(weakref.ref(attachment), attachment.status, kept)
    return attachment.status


def detach(engine: Any) -> bool:
    """Give the optimizer its own methods back; False where none were replaced."""
    entry = _entries.pop(engine, None)
    attachment = None if entry is None else entry.attachment()
    return attachment is not None and attachment.remove("the path was taken out")


def status(engine: Any) -> Status | None:
    """What the path attached to `engine` has done, or did until it failed; None where there was none."""
    entry = _entries.get(engine)
    if entry is None:
        return None
    attachment = entry.attachment()
    if attachment is not None:
        attachment.look()
    return entry.status


def kept_ranges(engine: Any) -> Kept | None:
    """The latest ranges of the path attached to `engine`, also of one that has been taken out; None where none was."""
    entry = _entries.get(engine)
    return None if entry is None else entry.kept


def pinned_bytes(engine: Any) -> dict[str, int]:
    """What the path attached to `engine` keeps page-locked, by what it is for."""
    entry = _entries.get(engine)
    attachment = None if entry is None else entry.attachment()
    return {} if attachment is None else attachment.pinned_bytes


def why_not_attachable(engine: Any) -> str | None:
    """None where the paths do exactly what this engine's own code does, else what stands against it."""
    return stage3.why_not_attachable(
        engine, lambda method: isinstance(getattr(method, "__self__", None), Attachment)
    )
