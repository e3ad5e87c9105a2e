"""The candidates and DeepSpeed's own sequences of a profile side by side, each with its verdict."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune_offload import units

if TYPE_CHECKING:
    from autotune_offload.records import Baseline, Candidate, Choice, Profile


_BY_PREDICTION = "not tried: "
"""How a rejection begins that is no limit's: put far behind by the model, or out of time (`candidates`, `verdict`)."""
_QUANTITY = re.compile(r"\d[\w.,]*( ?(ns|us|ms|s|[kKMGT]i?B)\b)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One way that was weighed: a candidate of ours or a sequence of DeepSpeed's own.

    `stock` marks DeepSpeed's own, `installed` the one that the installed version runs by default.
    `group` is what `explain` takes the best of. `times_chosen` is this cost over the chosen one's.
    """

    way: Candidate | Baseline
    name: str
    detail: str
    group: str
    stock: bool
    installed: bool
    chosen: bool
    predicted_seconds: float | None
    measured_seconds: float | None
    spread: float | None
    samples: int
    rejected: str | None
    times_chosen: float | None = None

    @property
    def rejected_by_prediction(self) -> bool:
        """Whether nothing forbade it: it was put aside before it was timed."""
        return self.rejected is not None and self.rejected.startswith(_BY_PREDICTION)

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Sorts measured before predicted before rejected, and each by cost."""
        cost = self.measured_seconds if self.measured_seconds is not None else self.predicted_seconds
        return (
            self.rejected is not None,
            self.measured_seconds is None,
            cost if cost is not None else float("inf"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Deciding:
    """The two times that the choice rests on, and what they are of; None where one was not measured."""

    over: str
    own_seconds: float | None
    chosen_seconds: float | None


def deciding(profile: Profile) -> Deciding:
    """Those of whole accumulations where such were timed, else of backward passes."""
    if profile.accumulations:
        own = next((row.measured_seconds for row in profile.accumulations if row.installed), None)
        chosen = next((row.measured_seconds for row in profile.accumulations if row.chosen), None)
        steps = profile.accumulations[0].micro_steps
        return Deciding(
            over=f"an accumulation of {steps} micro-steps", own_seconds=own, chosen_seconds=chosen
        )
    candidate = chosen_candidate(profile)
    return Deciding(
        over="a backward pass",
        own_seconds=next((each.measured_seconds for each in profile.baselines if each.installed), None),
        chosen_seconds=candidate.measured_seconds if candidate else None,
    )


def alternatives(profile: Profile) -> list[Alternative]:
    """Everything that was weighed, cheapest first."""
    chosen = chosen_candidate(profile)
    rows = [_of_candidate(each, profile, chosen=each is chosen) for each in profile.candidates]
    rows += [_of_baseline(each, chosen) for each in profile.baselines]
    return sorted(rows, key=lambda row: row.order)


def best_of_each(rows: Iterable[Alternative]) -> list[Alternative]:
    """The first of each group, and always the chosen one; the order is kept."""
    seen: set[str] = set()
    kept = []
    for row in sorted(rows, key=lambda row: (not row.chosen, row.order)):
        if row.group not in seen:
            seen.add(row.group)
            kept.append(row)
    return sorted(kept, key=lambda row: row.order)


def rejections(profile: Profile) -> list[list[Alternative]]:
    """The rejected candidates, those together whose reasons differ in numbers only; cheapest first."""
    found: dict[str, list[Alternative]] = {}
    for row in alternatives(profile):
        if row.rejected is not None:
            found.setdefault(_QUANTITY.sub("#", row.rejected), []).append(row)
    return list(found.values())


def chosen_candidate(profile: Profile) -> Candidate | None:
    """The candidate that became the choice, or None where the choice was never a trial."""
    choice = profile.choice
    same_path = [each for each in profile.candidates if (each.path, each.cast) == (choice.path, choice.cast)]
    exact = [each for each in same_path if _parameters(each) == _parameters(choice)]
    return next(iter(exact), None)


def verdict(row: Alternative, profile: Profile) -> str:
    """Why `row` is or is not the choice, in one clause with its numbers."""
    choice = profile.choice
    if row.chosen:
        return "chosen"
    if row.rejected is not None:
        return row.rejected
    if row.times_chosen is None:
        return "not tried"
    if row.measured_seconds is None:
        return f"not tried: predicted {units.times(row.times_chosen)} the chosen cost"
    excess, noise = row.times_chosen - 1, f"the noise of {units.percent(choice.noise)}"
    if excess > choice.noise:
        return f"slower by {units.percent(excess)}, beyond {noise}"
    if profile.accumulations:
        near = f"within {noise}" if excess >= -choice.noise else f"faster by {units.percent(-excess)}"
        return f"{near} in a backward pass; whole accumulations decide"
    return _tied(row, noise) if excess >= -choice.noise else _faster(row, -excess)


def _tied(row: Alternative, noise: str) -> str:
    if row.stock:
        return f"within {noise}: no gain over it"
    return f"within {noise}: a near tie goes to what pins less, then to the smaller buffers"


def _faster(row: Alternative, share: float) -> str:
    less = f"faster by {units.percent(share)} in {row.samples} trials"
    if row.installed:
        return f"{less}: no candidate gains over it"
    return f"{less}, but " + (
        "the installed DeepSpeed does not run it" if row.stock else "not in the rounds that decided"
    )


def name_of(path: str, cast: str) -> str:
    """``staged, cast device``."""
    return f"{path}, cast {cast}"


def detail_of(each: Candidate | Choice) -> str:
    """What the path uses of buffers and threads: ``4 x 32 MiB, 2 threads``, ``pieces of 4 MiB``."""
    parts = []
    if each.path == "staged":
        parts.append(f"{each.buffer_count} x {units.size(each.buffer_bytes)}")
    elif each.cast == "device" and each.buffer_bytes:
        parts.append(f"pieces of {units.size(each.buffer_bytes)}")
    if each.host_threads:
        parts.append(units.threads(each.host_threads))
    return ", ".join(parts)


def _parameters(each: Candidate | Choice) -> tuple[int, int, int]:
    return each.buffer_bytes, each.buffer_count, each.host_threads


def _of_candidate(each: Candidate, profile: Profile, *, chosen: bool) -> Alternative:
    return Alternative(
        way=each,
        name=name_of(each.path, each.cast),
        detail=detail_of(each),
        group=name_of(each.path, each.cast),
        stock=False,
        installed=False,
        chosen=chosen,
        predicted_seconds=each.predicted_seconds,
        measured_seconds=each.measured_seconds,
        spread=each.spread,
        samples=each.samples,
        rejected=each.rejected,
        times_chosen=_ratio(each, chosen_candidate(profile)),
    )


def _of_baseline(each: Baseline, chosen: Candidate | None) -> Alternative:
    return Alternative(
        way=each,
        name=each.name,
        detail=f"{each.versions}, {each.memory}",
        group=f"{each.name}, {each.memory}",
        stock=True,
        installed=each.installed,
        chosen=False,
        predicted_seconds=each.predicted_seconds,
        measured_seconds=each.measured_seconds,
        spread=each.spread,
        samples=each.samples,
        rejected=None,
        times_chosen=_ratio(each, chosen),
    )


def _ratio(each: Candidate | Baseline, chosen: Candidate | None) -> float | None:
    """This cost over the chosen one's: measured against measured, else predicted against predicted."""
    if chosen is None:
        return None
    if each.measured_seconds is not None and chosen.measured_seconds:
        return each.measured_seconds / chosen.measured_seconds
    if each.predicted_seconds is not None and chosen.predicted_seconds:
        return each.predicted_seconds / chosen.predicted_seconds
    return None
