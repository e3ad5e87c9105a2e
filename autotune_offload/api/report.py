"""What was done to one configuration, and what an engine has carried out of it."""

from __future__ import annotations

import statistics
import weakref
from collections.abc import Mapping
from html import escape
from typing import Any

import msgspec
from msgspec import structs

from autotune_offload import markup
from autotune_offload.engine.attachment import Status
from autotune_offload.engine.step import StepStatus
from autotune_offload.records import Change, Profile, Record

reports: weakref.WeakKeyDictionary[Any, Report] = weakref.WeakKeyDictionary()


class Report(Record, frozen=True, kw_only=True):
    """What was done to one configuration, and why.

    `profile` is None where nothing was tuned; `notices` then say why.
    """

    profile: Profile | None
    changes: tuple[Change, ...] = ()
    notices: tuple[str, ...] = ()
    source: str = ""
    """Where the profile comes from: measured now, or a file."""
    path: Status | None = None
    """What the attached path has done; None where nothing was to be attached."""
    step: StepStatus | None = None
    """What has become of the step; None where it is DeepSpeed's without a question."""
    pinned_bytes: Mapping[str, int] = msgspec.field(default_factory=dict)
    """What is really page-locked for this engine, by buffer."""

    def text(self) -> str:
        """The report in plain lines: choice, reasons, changed keys, notices."""
        return "\n".join([*self._choice_lines(), *self._change_lines(), *self._other_lines()])

    def _repr_html_(self) -> str:
        """For a notebook: the choice as a table, and the whole report as it stands in a terminal."""
        choice = "" if self.profile is None else markup.table("Choice", self.profile.choice.in_rows())
        return f"{choice}<pre>{escape(self.text())}</pre>"

    def _choice_lines(self) -> list[str]:
        if self.profile is None:
            return ["autotune-offload: the configuration is unchanged"]
        choice = self.profile.choice
        words = f"path {choice.path}, cast on the {choice.cast}"
        lines = [f"autotune-offload: {words} ({self.source})", f"carried out {self.carrier()}"]
        lines += [f"steps made {self.stepper()}"] * (self.step is not None)
        lines.append("why:")
        return lines + [f"  - {reason}" for reason in choice.reasons]

    def carrier(self) -> str:
        """By whom gradients are moved, and what is known of it so far, in a few words."""
        if self.path is None:
            return "by DeepSpeed's own code, with the keys below"
        if self.path.why_not is not None:
            return f"by DeepSpeed's own code, with the keys below: {self.path.why_not}"
        words = "in the running optimizer"
        check = self.path.check
        if check is not None and check.partitions and check.mismatch is None:
            words += f"; the first {check.partitions} partitions were DeepSpeed's own to the last bit"
        words += self._times(self.path)
        if self.path.stock_link_bytes:
            share = self.path.link_bytes / self.path.stock_link_bytes
            words += f"; {share:.0%} of the bytes that DeepSpeed would move over the link"
        return words

    def stepper(self) -> str:
        """By whom optimizer steps are made, and what is known of it so far, in a few words."""
        step = self.step
        if step is None or step.why_not is not None:
            why_not = "" if step is None else f": {step.why_not}"
            return f"by DeepSpeed's own code{why_not}"
        if step.check is None:
            return "by DeepSpeed's own code, beside which one compiled pass is being compared"
        steps = f"the first {step.check.steps} steps"
        words = f"{step.check.elements:,} values of {steps} were DeepSpeed's own to the last bit"
        if step.choice is None:
            return f"in turn by DeepSpeed's own code and by one compiled pass, which are being timed; {words}"
        return f"by one compiled pass; {words}; {step.choice.reason}"

    def _times(self, path: Status) -> str:
        """With the path and without; means, since the passes of one accumulation differ."""
        ours, stock = path.backward_seconds, path.stock_backward_seconds
        if not ours:
            return ""
        words = f"; {statistics.fmean(ours) * 1e3:.3g} ms of host time in a backward pass"
        if not stock:
            return words
        passes = "the one" if len(stock) == 1 else f"the {len(stock)}"
        without = f"{statistics.fmean(stock) * 1e3:.3g} ms without it"
        return f"{words}, {without} (in {passes} after the self-check, left to DeepSpeed's own code)"

    def _change_lines(self) -> list[str]:
        if not self.changes:
            return ["config: nothing to change"] if self.profile is not None else []
        return ["config:"] + [
            f"  {change.key}: {shown(change.before)} -> {shown(change.after)}" for change in self.changes
        ]

    def _other_lines(self) -> list[str]:
        pinned = [
            f"  {name}: {count:,} bytes page-locked" for name, count in self.pinned_bytes.items() if count
        ]
        notes = [f"  - {notice}" for notice in self.notices]
        return ["page-locked:", *pinned] * bool(pinned) + ["notes:", *notes] * bool(notes)


def report(engine: Any) -> Report:
    """What was chosen for an engine, why, what was changed, and what DeepSpeed really page-locked."""
    try:
        known = reports.get(engine)
    except TypeError:  # nothing that an engine could be
        known = None
    if known is None:
        known = Report(profile=None, notices=("this engine was not made by autotune_offload.initialize",))
    return structs.replace(known, pinned_bytes=_really_pinned(engine))


def _really_pinned(engine: Any) -> dict[str, int]:
    """Bytes of DeepSpeed's own host buffers that are page-locked, by what they are for."""
    optimizer = getattr(engine, "optimizer", None)
    sums = getattr(optimizer, "accumulated_grads_in_cpu", None) or {}
    weights = getattr(optimizer, "single_partition_of_fp32_groups", None) or []
    fp32 = [*(getattr(optimizer, "fp32_partitioned_groups_flat", None) or []), *weights]
    buffers = {
        "gradient accumulation": [getattr(optimizer, "grad_partitions_flat_buffer", None), *sums.values()],
        "fp32 gradients": [partition.grad for partition in fp32],
        "16-bit parameters": [
            getattr(optimizer, "lp_param_buffer", None),
            *(getattr(optimizer, "param_buffer_of_bit16_for_cpu_offload_groups", None) or []),
        ],
        "fp32 weights": weights,
        "one gradient": [getattr(optimizer, "temp_grad_buffer_for_cpu_offload", None)],
    }
    return {name: sum(_pinned_bytes(t) for t in tensors) for name, tensors in buffers.items()}


def _pinned_bytes(tensor: Any) -> int:
    if tensor is None or tensor.device.type != "cpu" or not tensor.numel():
        return 0
    return int(tensor.nbytes) if tensor.is_pinned() else 0


def shown(value: object) -> str:
    """A value of a configuration in a line of text."""
    return "absent" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
