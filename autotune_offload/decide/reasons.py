"""A verdict in words and numbers."""

from __future__ import annotations

from collections.abc import Iterator

from autotune_offload import units
from autotune_offload.decide.entrant import Entrant
from autotune_offload.decide.verdict import Verdict
from autotune_offload.machine import limits
from autotune_offload.records import PATHS, Baseline, Candidate, Choice

NOT_HERE = "page-locked memory is not on offer here"


def words(record: Candidate | Baseline) -> str:
    """A candidate or baseline in words, with the parameters that have an effect."""
    if isinstance(record, Baseline):
        return f"{record.name} into {record.memory} memory"
    said = f"{record.path} with the cast on the {record.cast}"
    if record.path == "staged":
        said += f" through {record.buffer_count} buffers of {units.size(record.buffer_bytes)}"
    elif record.cast == "device":
        said += f" in pieces of {units.size(record.buffer_bytes)}"
    if not record.host_threads:
        return said
    return said + f", {record.host_threads} host thread{'s' if record.host_threads > 1 else ''}"


def reasons(verdict: Verdict) -> Iterator[str]:
    """Why this path: against DeepSpeed's own code, the other paths and casts, and what was not tried."""
    chosen, best = verdict.chosen, verdict.best
    yield from _against_own(verdict)
    if chosen is not best:
        yield (
            f"{_named(verdict, best)} was fastest with {units.duration(best.median)}, within the noise of "
            f"{_named(verdict, chosen)}: a near tie goes to what pins less, then to the smaller buffers"
        )
    yield from _other_paths(verdict)
    yield from _other_cast(verdict)
    yield from _not_tried(verdict)


def _named(verdict: Verdict, entrant: Entrant[Candidate]) -> str:
    on_host = " and micro-steps added up on the host" if entrant.place == "host" else ""
    return words(entrant.record) + on_host


def _against_own(verdict: Verdict) -> Iterator[str]:
    chosen, own = verdict.chosen, verdict.outcome.installed
    adds = f"{_named(verdict, chosen)} adds {units.duration(chosen.median)} to {verdict.over}"
    own_words = f"DeepSpeed's own {words(own.record)}"
    if not own.timed:
        yield f"{adds}; {own_words} {own.failed or 'was not timed'}, so nothing is compared with it"
        return
    times = f"{own_words} adds {units.duration(own.median)}"
    if verdict.steer.path == "deepspeed":
        yield f"you fixed the path deepspeed, so DeepSpeed's own code is kept: {times}; {adds}"
        return
    counted = ""
    if chosen.memory != own.memory and verdict.lock_share > 0:
        counted = f", {units.duration(verdict.lock_share)} of locking counted for pinned memory"
    yield f"{adds}; {times} ({verdict.gain:.2f}x, noise {verdict.noise:.1%}{counted})"
    if verdict.gain < 1 / (1 + verdict.noise):
        yield "DeepSpeed's own code is faster, and is kept"
    elif verdict.gain <= 1 + verdict.noise:
        yield "that is no gain beyond the noise over DeepSpeed's own code, which is kept"


def _other_paths(verdict: Verdict) -> Iterator[str]:
    """The best of each other path that was clearly slower."""
    told = {verdict.chosen.record.path, *(e.record.path for e in verdict.near)}
    for other in sorted(verdict.outcome.finalists, key=lambda e: e.median):
        if other.record.path not in told:
            told.add(other.record.path)
            times = f"{verdict.ratio(other, verdict.chosen):.2f} times as much"
            yield f"{_named(verdict, other)} adds {units.duration(other.median)}, {times}"


def _other_cast(verdict: Verdict) -> Iterator[str]:
    """The best of the same path with the cast elsewhere, where that is clearly slower in a backward pass."""
    record = verdict.chosen.record
    if verdict.chosen.place == "host":  # nothing is left to cast where sums end on the host
        return
    same = [e for e in verdict.outcome.candidates if e.timed and e.record.path == record.path]
    ours = next((e for e in same if e.record == record), verdict.chosen)
    best = min((e for e in same if e.record.cast != record.cast), key=lambda e: e.median, default=None)
    if best is not None and verdict.ratio(best, ours) > 1 + verdict.noise:
        where = f"with the cast on the {best.record.cast} the same path adds {units.duration(best.median)}"
        passes = "" if verdict.outcome.micro_steps == 1 else " to a backward pass"
        yield f"{where}{passes}, {verdict.ratio(best, ours):.2f} times as much"


def _not_tried(verdict: Verdict) -> Iterator[str]:
    if verdict.rules.not_on_offer is not None:
        why = f"{NOT_HERE}: {verdict.rules.not_on_offer}"
        yield f"{why}; so the paths pinned and staged were not tried"
        return
    for path in dict.fromkeys([*PATHS, *(e.record.path for e in verdict.outcome.candidates)]):
        entrants = [e for e in verdict.outcome.candidates if e.record.path == path]
        causes = [e.failed or e.record.rejected for e in entrants]
        failed = any(e.failed for e in entrants)
        if entrants and all(causes):
            yield f"{path} {'was put aside' if failed else 'was not tried'}: {causes[0]}"


def place_reasons(verdict: Verdict) -> Iterator[str]:
    """Why the chosen path adds up micro-steps where it does, if both places were to be tried."""
    chosen = verdict.chosen
    every = [*verdict.outcome.finalists, *verdict.outcome.others]
    there = [e for e in every if e.record.path == chosen.record.path and e.place != chosen.place]
    if not there:
        return
    other = min(there, key=lambda e: e.median)
    where = f"micro-steps are added up on the {chosen.place}"
    if not other.timed:
        why = other.failed or f"there was no time to try the {other.place}"
        as_deepspeed = ", as DeepSpeed does" if chosen.place == "device" else ""
        yield f"{where}{as_deepspeed}: {why}"
        return
    device, host_ = (chosen, other) if chosen.place == "device" else (other, chosen)
    yield (
        f"{where}: over {verdict.over}, adding on the host adds {units.duration(host_.median)} and on the device, as "
        f"DeepSpeed does, {units.duration(device.median)} "
        f"({verdict.ratio(device, host_):.2f}x, noise {verdict.noise_between(device, host_):.1%})"
    )


def untried_reasons(verdict: Verdict) -> Iterator[str]:
    """What was chosen from smaller blocks than a run will need."""
    rules = verdict.rules
    if rules.untried:
        yield (
            f"offload_optimizer needs a page-locked block of {rules.largest_optimizer_bytes:,} bytes, and "
            f"blocks up to {rules.pin.proven_bytes:,} were tried here: a false of yours stays"
        )


def warnings(verdict: Verdict, choice: Choice) -> Iterator[str]:
    """What failed of DeepSpeed's own, and what it page-locks whatever is chosen."""
    for baseline in verdict.outcome.baselines:
        if baseline.failed:
            yield f"DeepSpeed's own {words(baseline.record)} {baseline.failed}"
    if verdict.rules.locks:
        yield from _pinned_in_any_case(verdict, choice)


def _pinned_in_any_case(verdict: Verdict, choice: Choice) -> Iterator[str]:
    rules = verdict.rules
    if not rules.own_blocks:
        return
    below = rules.layout.stage in (1, 2)
    what = (
        "with offload_param on, DeepSpeed page-locks its flat copy of the parameters whatever pin_memory says"
    )
    if below:
        what = "this DeepSpeed page-locks its fp32 weights whatever pin_memory says"
    limit = rules.against_deepspeeds_own()
    if limit is not None:
        yield f"{what}: it {limit}" + ("" if below else "; DeepSpeed will fail here: take offload_param out")
    elif choice.path != "pinned" and not choice.pin_optimizer:
        yield f"{what}: {units.size(sum(map(limits.pinned_block_bytes, rules.own_blocks)))}"
