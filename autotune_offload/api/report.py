"""What was done to one configuration, and what an engine has carried out of it."""

from __future__ import annotations

import json
import statistics
import weakref
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from autotune_offload import markup, units
from autotune_offload.api.page_locked import page_locked
from autotune_offload.engine import attach
from autotune_offload.engine.attach import kept_ranges
from autotune_offload.engine.entrants import OWN_NAME
from autotune_offload.engine.one_flag import FlagStatus
from autotune_offload.engine.status import Status
from autotune_offload.engine.step import StepStatus
from autotune_offload.engine.step_attach import kept_step_ranges
from autotune_offload.engine.tally import Carried, Shares
from autotune_offload.errors import ConfigError
from autotune_offload.machine import compiled
from autotune_offload.machine.ranges import as_trace
from autotune_offload.machine.spans import numbered
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
    flag: FlagStatus | None = None
    """At stages 1 and 2: how overflows are looked for; None where DeepSpeed does so."""
    pinned_bytes: Mapping[str, int] = msgspec.field(default_factory=dict)
    """What is really page-locked for this engine, by buffer."""
    passes: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Where the compiled passes that this process has asked for come from, or why there is none."""
    ranges: tuple[int, ...] = ()
    """Under which numbers the latest ranges of path and step are kept in this process (see `machine.spans`)."""

    def text(self) -> str:
        """The report in plain lines: choice, reasons, changed keys, notices."""
        return "\n".join([*self._choice_lines(), *self._change_lines(), *self._other_lines()])

    def _repr_html_(self) -> str:
        """For a notebook: the choice as a table, and the whole report as it stands in a terminal."""
        choice = "" if self.profile is None else markup.table("Choice", self.profile.choice.in_rows())
        return f"{choice}<pre>{escape(self.text())}</pre>"

    def trace(self, file: str | Path) -> None:
        """Write the latest ranges of path and step as they ran on this rank, for chrome://tracing or ui.perfetto.dev.

        What carries, pieces, and what is waited for, on the host's clock. Replaces `file`.

        Raises:
            ConfigError: nothing ran here that is ours, or the file cannot be written.
        """
        kept = numbered(self.ranges)
        if not any(each.spans for each in kept):
            raise ConfigError(
                "there is nothing to trace: no path and no step of autotune-offload has run in this engine"
            )
        try:
            Path(file).write_text(json.dumps(as_trace(kept)), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {file}: {error.strerror}; name another file") from error

    def _choice_lines(self) -> list[str]:
        if self.profile is None:
            return ["autotune-offload: the configuration is unchanged"]
        choice = self.profile.choice
        words = f"path {choice.path}, cast on the {choice.cast}"
        lines = [f"autotune-offload: {words} ({self.source})", f"carried out {self.carrier()}"]
        lines += [self.carried()] * bool(self.carried())
        lines += [f"steps made {self.stepper()}"] * (self.step is not None)
        lines += [f"overflows {self.looker()}"] * (self.flag is not None)
        lines.append("why:")
        decided = self.profile.step if self.step is not None else None
        reasons = (*choice.reasons, *(decided.reasons if decided is not None else ()))
        return lines + [f"  - {reason}" for reason in reasons]

    def carrier(self) -> str:
        """By whom gradients are moved, and what is known of it so far, in a few words."""
        path = self.path
        if path is None:
            return "by DeepSpeed's own code, with the keys below"
        words = [_by_whom(path)]
        if path.why_not is not None or path.ended is not None or path.replaced:
            return words[0]  # what was found and timed was the path's
        check = path.check
        if check is not None and check.partitions and check.mismatch is None:
            words.append(f"the first {check.partitions} partitions were DeepSpeed's own to the last bit")
        if path.confirmed is not None or path.accumulation_seconds:
            words.append(self._times(path))
        if path.stock_link_bytes:
            share = path.link_bytes / path.stock_link_bytes
            words.append(f"{share:.0%} of the bytes that DeepSpeed would move over the link")
        return "; ".join(words)

    def carried(self) -> str:
        """Who has taken how much to fp32, now and since the start, in a few words; empty before anything was."""
        return "" if self.path is None else "; ".join(_counted(self.path))

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
        if step.threads is None and step.confirmed is None:
            return f"in turn by DeepSpeed's own code and by one compiled pass, which are being timed; {words}"
        if step.confirmed is None:
            return f"by one compiled pass; {words}"
        again = ", which is being timed again" if step.threads is None else ""
        return f"by one compiled pass{again}; {words}; {step.confirmed.sentence()}"

    def looker(self) -> str:
        """Who looks for overflows at stages 1 and 2, in a few words."""
        flag = self.flag
        if flag is None or flag.why_not is not None:
            return f"looked for by DeepSpeed's own code{'' if flag is None else f': {flag.why_not}'}"
        return (
            "looked for without waiting for the device, and read once a step; the first "
            f"{flag.checked} gradients were found as by DeepSpeed's own code"
        )

    def _times(self, path: Status) -> str:
        """With the path and without; medians of accumulations."""
        if path.confirmed is not None:
            return f"confirmed on your own steps: {path.confirmed.sentence()}"
        ours, stock = path.accumulation_seconds, path.stock_accumulation_seconds
        words = f"{statistics.median(ours) * 1e3:.3g} ms an accumulation"
        if not stock:
            return words
        passes = "the one" if len(stock) == 1 else f"{len(stock)}"
        without = f"{statistics.median(stock) * 1e3:.3g} ms without it"
        return f"{words}, {without} (in {passes} that DeepSpeed's own code carried)"

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
        passes = [f"  {name}: {origin}" for name, origin in self.passes.items()]
        notes = [f"  - {notice}" for notice in self.notices]
        sections = (("page-locked:", pinned), ("passes over host memory:", passes), ("notes:", notes))
        return [line for heading, lines in sections if lines for line in (heading, *lines)]


def _by_whom(path: Status) -> str:
    """What is so now, and nothing else."""
    over = path.why_not or path.ended
    if path.replaced:
        others = f"by somebody else's {' and '.join(path.replaced)}, put in place after the path was attached"
        return f"{others}; {over}" if over else others
    if over is not None:
        return f"by DeepSpeed's own code, with the keys below: {over}"
    if len(path.carriers) > 1:
        turns = f"{', '.join(path.carriers[:-1])} and {path.carriers[-1]}"
        return f"in the running optimizer, in turn by {turns}, until the fastest of them is known"
    if path.carriers == (OWN_NAME,):
        return f"by {OWN_NAME}"
    last = path.tally.last_accumulation
    if last.deepspeed.partitions and not last.path.partitions and not last.compared.partitions:
        summed = ", added up by the path before" if last.path.summed_partitions else ""
        return f"by DeepSpeed's own code in the last accumulation{summed}"
    return "in the running optimizer"


def _counted(path: Status) -> list[str]:
    """Who has taken how much to fp32, now and since the start."""
    start, last = path.tally.since_start, path.tally.last_accumulation
    words = []
    if start != Shares():
        over = path.why_not is not None or path.ended is not None
        words = [
            f"taken to fp32 until then: {_shares(start)}"
            if over
            else f"taken to fp32 in the last accumulation: {_shares(last)}; since the start: {_shares(start)}"
        ]
    if path.left_to_deepspeed:
        left = f"{path.left_to_deepspeed:,} times a partition was left to DeepSpeed's own code"
        words.append(f"{left}, since the path does not do it exactly or has failed")
    return words


def _shares(shares: Shares) -> str:
    names = (
        ("by the path", shares.path),
        ("by DeepSpeed's own code", shares.deepspeed),
        ("by both, compared", shares.compared),
    )
    return " and ".join(f"{_partitions(of)} {by}" for by, of in names if of.partitions) or "none"


def _partitions(of: Carried) -> str:
    plural = "s" * (of.partitions != 1)
    return f"{of.partitions:,} partition{plural} ({units.size(of.bytes)})"


def report(engine: Any) -> Report:
    """What was chosen for an engine, why, what was changed, and what is really page-locked; from any thread."""
    try:
        known = reports.get(engine)
    except TypeError:  # nothing that an engine could be
        return _FOREIGN
    attach.status(engine)  # which looks who is called now
    kept = {id(each): each for each in (kept_ranges(engine), kept_step_ranges(engine)) if each is not None}
    ranges = tuple(each.number for each in kept.values())
    return structs.replace(
        known or _FOREIGN, pinned_bytes=page_locked(engine), passes=compiled.used(), ranges=ranges
    )


_FOREIGN = Report(profile=None, notices=("this engine was not made by autotune_offload.initialize",))


def shown(value: object) -> str:
    """A value of a configuration in a line of text."""
    return "absent" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
