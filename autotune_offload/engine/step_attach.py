"""Puts the compiled pass into a live engine's step, and takes it out: what others call."""

from __future__ import annotations

import weakref
from typing import Any, Literal

import msgspec

from autotune_offload.engine import step_stage3
from autotune_offload.engine.step import StepAttachment, StepStatus
from autotune_offload.engine.step_adam import FusedAdam, Guess, Operation
from autotune_offload.engine.step_check import repeats_powers
from autotune_offload.engine.step_contest import StepConfirm, StepContest, StepTell
from autotune_offload.errors import in_words
from autotune_offload.machine import adam
from autotune_offload.machine.accelerator import AcceleratorDevice
from autotune_offload.machine.device import Device
from autotune_offload.machine.ranges import keep_ranges
from autotune_offload.machine.spans import Kept
from autotune_offload.paths.pieces import Pieces, thread_counts
from autotune_offload.paths.step_stages import PIECE_ELEMENTS
from autotune_offload.records import Record

_MOST_REPLAYED = 1_000_000
"""Calls of DeepSpeed's operation that are followed to know its powers of beta where it has run before."""


class StepSpec(Record, frozen=True, kw_only=True):
    """How a step is to be made."""

    step: Literal["auto", "deepspeed", "fused"] = "auto"
    """"auto" is the faster of both, as measured in the running engine; "deepspeed" changes nothing."""
    threads: int | Literal["auto"] = "auto"
    """Host threads of the pass; "auto" is the best of 1, 2, 4 and so on, as measured."""
    begins_with: int | None = None
    """The number of threads that was decided on: it and its neighbours are compared. None compares all."""
    confirm: StepConfirm | None = StepConfirm()
    """None makes every step as given, where `threads` is."""
    page_lock: bool = True
    """Whether what goes to a device may pass through page-locked buffers, a few of half a megabyte."""
    piece_elements: int = PIECE_ELEMENTS
    """Of one piece: a multiple of 128."""


class _Entry(msgspec.Struct, frozen=True):
    """What is known of an engine; its optimizer keeps the attachment alive."""

    attachment: weakref.ref[StepAttachment]
    status: StepStatus
    pieces: Pieces | None
    kept: Kept


_entries: weakref.WeakKeyDictionary[Any, _Entry] = weakref.WeakKeyDictionary()


def attach_step(
    engine: Any,
    spec: StepSpec | None = None,
    device: Device | None = None,
    *,
    check: bool = True,
    tell: StepTell | None = None,
) -> StepStatus:
    """Make the steps of a running engine as `spec` says, in place of what was attached before.

    Args:
        engine: what `deepspeed.initialize` returned.
        spec: None is the default.
        device: None takes DeepSpeed's accelerator.
        check: compare with DeepSpeed's own step in the first ones. Without it, and with the number of threads
            given, the pass makes every step.
        tell: is told what is to be kept for the next start.

    Returns:
        The status, which goes on counting; its `why_not` says why DeepSpeed's own step stays, if so.
    """
    detach_step(engine)
    spec = spec or StepSpec()
    if spec.step == "deepspeed":
        return StepStatus(why_not="DeepSpeed's own step was asked for")
    if (why_not := step_stage3.why_not_attachable(engine, _is_ours)) is not None:
        return StepStatus(why_not=why_not)
    optimizer, device = engine.optimizer, device or AcceleratorDevice()
    try:
        fused = _fused(optimizer, device, spec)
    except Exception as error:  # whatever it is, DeepSpeed trains without us
        fused = f"the pass cannot be made: {in_words(error)}"
    attachment = _attachment(engine, device, fused, spec, check=check, tell=tell)
    attachment.replace_methods()
    pieces = fused.pieces if isinstance(fused, FusedAdam) else None
    _entries[engine] = _Entry(weakref.ref(attachment), attachment.status, pieces, keep_ranges(device))
    return attachment.status


def detach_step(engine: Any) -> bool:
    """Give the optimizer its own step back; False where it has it."""
    entry = _entries.pop(engine, None)
    attachment = None if entry is None else entry.attachment()
    return attachment is not None and attachment.remove()


def step_status(engine: Any) -> StepStatus | None:
    """What has become of the step of `engine`; None where nothing was attached."""
    entry = _entries.get(engine)
    return None if entry is None else entry.status


def kept_step_ranges(engine: Any) -> Kept | None:
    """The latest ranges of the step of `engine`; None where nothing was attached."""
    entry = _entries.get(engine)
    return None if entry is None else entry.kept


def step_pinned_bytes(engine: Any) -> int:
    """What the step of `engine` keeps page-locked for itself."""
    entry = _entries.get(engine)
    return 0 if entry is None or entry.pieces is None else entry.pieces.pinned_bytes


def _is_ours(what: object) -> bool:
    return isinstance(getattr(what, "__self__", what), (StepAttachment, Operation))


def _attachment(
    engine: Any,
    device: Device,
    fused: FusedAdam | str,
    spec: StepSpec,
    *,
    check: bool,
    tell: StepTell | None,
) -> StepAttachment:
    optimizer = engine.optimizer
    if isinstance(fused, str):
        attachment = StepAttachment(optimizer, device, None, None, checks=False)
        attachment.status.why_not = fused
        return attachment
    counts = _counts(device, spec)
    contest = None
    if spec.threads == "auto" or (check and spec.confirm is not None):
        confirm = spec.confirm or StepConfirm()
        contest = StepContest(
            counts, confirm, own_may_stay=spec.step == "auto", tell=tell, engine=weakref.ref(engine)
        )
    attachment = StepAttachment(optimizer, device, fused, contest, checks=check)
    attachment.threads = counts[0]
    attachment.status.threads = None if contest is not None else counts[0]
    return attachment


def _counts(device: Device, spec: StepSpec) -> tuple[int, ...]:
    """Numbers of threads that are compared, the one to begin with first."""
    if spec.threads != "auto":
        return (spec.threads,)
    counts = thread_counts(device.most_threads())
    if spec.begins_with not in counts:
        return counts
    at = counts.index(spec.begins_with)
    return (counts[at], *counts[max(at - 1, 0) : at], *counts[at + 1 : at + 2])


def _fused(optimizer: Any, device: Device, spec: StepSpec) -> FusedAdam | str:
    if (why_not := step_stage3.why_not_fused(optimizer, _is_ours)) is not None:
        return why_not
    inner = optimizer.optimizer
    decoupled = bool(inner.adam_w_mode)
    repeats = repeats_powers(inner, decoupled=decoupled)
    if isinstance(repeats, str):
        return repeats
    pieces = Pieces(device, page_lock=spec.page_lock, piece_elements=spec.piece_elements)
    sub_groups = len(optimizer.fp32_partitioned_groups_flat)
    return FusedAdam(pieces, _guesses(inner, sub_groups, repeats=repeats), decoupled=decoupled)


def _guesses(inner: Any, sub_groups: int, *, repeats: bool) -> list[Guess]:
    """The histories that DeepSpeed's operation may have: none, or every step so far of every sub-group."""
    fresh = adam.KeptPowers(*inner.defaults["betas"], repeats=repeats)
    steps = max((int(state.get("step", 0)) for state in inner.state.values()), default=0)
    if not 0 < steps * sub_groups <= _MOST_REPLAYED:
        return [Guess(fresh)]
    used = adam.KeptPowers(*inner.defaults["betas"], repeats=repeats)
    beta1, beta2 = inner.param_groups[0]["betas"]
    for step in range(1, steps + 1):
        setting = adam.Setting(
            step=step, rate=0.0, beta1=beta1, beta2=beta2, epsilon=0.0, weight_decay=0.0, corrects_bias=True
        )
        for _ in range(sub_groups):
            used.at(setting)
    return [Guess(used), Guess(fresh)]
