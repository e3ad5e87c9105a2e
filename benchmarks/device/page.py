"""The page of a run in Markdown: verdicts first, then what was measured, part by part.

It can be pasted into an issue and into `benchmarks/LOG.md`: it names no user, no host and no home.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from autotune_offload import units
from autotune_offload.doctor.pasted import Hidden
from benchmarks.device.answers import FAILS, HOLDS, UNKNOWN
from benchmarks.device.cells import table
from benchmarks.device.claims import Verdict
from benchmarks.device.page_parts import SECTIONS

_MARKS = {HOLDS: "holds", FAILS: "**does not hold**"}

_NAMED = 4


def page(document: dict[str, Any]) -> str:
    """All of it, as far as the run has come."""
    hidden = Hidden.here()
    lines = [*_head(document), "", *_verdicts(document["verdicts"]), "", *_parts(document)]
    for name, part in document["parts"].items():
        if part["found"]:
            lines += ["", f"### {part['title']}", "", *_section(name, part["found"], document)]
    return "\n".join(line if line.startswith("```") else _kept(line, hidden) for line in lines) + "\n"


def verdict_lines(verdicts: Sequence[Verdict]) -> str:
    """A line a claim, for a terminal; those that do not hold at the end."""
    order = (UNKNOWN, HOLDS, FAILS)
    ordered = sorted(verdicts, key=lambda each: order.index(each.verdict))
    counts = [f"{sum(v.verdict == word for v in verdicts)} {word}" for word in reversed(order)]
    lines = [f"{each.verdict.upper()}: {each.claim} ({each.where}) {each.measured}" for each in ordered]
    return "\n".join([*lines, ", ".join(counts)])


def _kept(line: str, hidden: Hidden) -> str:
    """Without names; the spaces at a line's beginning stay."""
    inside = line.lstrip()
    return line[: len(line) - len(inside)] + hidden.out_of(inside) if inside else ""


def _head(document: dict[str, Any]) -> Iterator[str]:
    here = document["parts"].get("here", {}).get("found", {})
    device, software = here.get("device", {}), here.get("software", {})
    yield f"## {document['date'][:10]}: {device.get('name') or 'an unknown device'}, `python -m benchmarks.device`"
    yield ""
    if document["fake"]:
        yield f"**A stand-in for a {document['fake']} accelerator, on the host: no number here is a measurement.**"
    if document["short"]:
        yield "**Short, as tests run it: no time here means anything.**"
    if here.get("training_kind") == "cpu" and not document["fake"]:
        yield "**There is no accelerator here, or torch does not see it: this is the host itself.**"
    told = [
        f"{document['minutes']:g} minutes",
        f"autotune-offload {software.get('autotune_offload', '?')} at {document['commit'] or 'no commit'}",
        f"DeepSpeed {software.get('deepspeed', '?')}",
        f"torch {software.get('torch', '?')}",
        f"Python {software.get('python', '?')}",
    ]
    yield ", ".join(told) + "."


def _verdicts(verdicts: list[dict[str, Any]]) -> Iterator[str]:
    order = (FAILS, HOLDS, UNKNOWN)
    counts = [f"{sum(v['verdict'] == word for v in verdicts)} {word}" for word in order]
    yield f"### Claims: {', '.join(counts)}"
    yield ""
    judged = sorted(
        (v for v in verdicts if v["verdict"] != UNKNOWN), key=lambda each: order.index(each["verdict"])
    )
    rows = [(v["claim"], v["where"], _MARKS[v["verdict"]], v["measured"]) for v in judged]
    if rows:
        yield from table(("claim", "stands in", "verdict", "measured"), rows)
    reasons = dict.fromkeys(v["measured"] for v in verdicts if v["verdict"] == UNKNOWN)
    for reason in reasons:
        claims = [v["claim"] for v in verdicts if v["verdict"] == UNKNOWN and v["measured"] == reason]
        yield ""
        yield f"Not measurable here: {reason}."
        yield ""
        yield from (f"* {claim}" for claim in claims)


def _parts(document: dict[str, Any]) -> Iterator[str]:
    yield "### How the parts went"
    yield ""
    rows = [
        (
            part["title"],
            part["state"] + (f": {part['why']}" if part["why"] else ""),
            units.duration(part["seconds"]) if part["seconds"] else units.MISSING,
            units.duration(part["limit_seconds"]) if part["limit_seconds"] else units.MISSING,
            _left_out(part["found"]),
        )
        for part in document["parts"].values()
    ]
    yield from table(("part", "ended", "took", "limit", "left out for lack of time"), rows)


def _left_out(found: dict[str, Any]) -> str:
    """What, the first of it by name."""
    lists = [each for name, each in found.items() if name.endswith("left_out") and isinstance(each, list)]
    names = [name for each in lists for name in each]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return "; ".join(names[:_NAMED]) + more if names else "nothing"


def _section(name: str, found: dict[str, Any], document: dict[str, Any]) -> list[str]:
    """A part whose findings cannot be shown is told so, and the others are shown."""
    try:
        return list(SECTIONS[name](found, document))
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        return [f"What was found cannot be shown ({type(error).__name__}: {error}); it is in `results.json`."]
