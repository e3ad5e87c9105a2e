"""Charts that need no library: current results as bars, and a trace as its lanes. Used by `draw.py`."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from benchmarks.tables import COMPARED, Latest, ratio, said

WIDTH, MARGIN, LINE, BAR = 1000, 16, 16, 14
WORDS = 400
"""Pixels of the column of words."""

STYLE = """text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.t { font-weight: 600; font-size: 15px; } .s { fill: #57606a; } .s, .b { font-size: 12px; }
.d { fill: #afb8c1; } .o { fill: #0550ae; } .w { fill: #e8a33d; } .l { stroke: #d0d7de; } .b { fill: #1f2328; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .s { fill: #9da7b3; } .b { fill: #e6edf3; } .d { fill: #57606a; } .o { fill: #79c0ff; }
  .w { fill: #9e6a03; } .l { stroke: #30363d; }
}"""


def picture(parts: list[str], height: float, label: str) -> str:
    """An SVG of these parts."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(label)}">'
    )
    return "\n".join([head, f"<style>\n{STYLE}\n</style>", *parts, "</svg>"]) + "\n"


def results(latest: Latest) -> str:
    """DeepSpeed's own time as a full bar, and ours as its share of that, row by row of README's first table."""
    parts, y = [_text("t", MARGIN, 26, "Time, as a share of DeepSpeed's own code")], 44.0
    parts.append(_text("s", WORDS, 26, "grey: DeepSpeed's own code; blue: with autotune-offload"))
    for row in COMPARED:
        stock, ours, told = (
            latest.number(row.benchmark, row.what, of) for of in ("DeepSpeed", "ours", "ratio")
        )
        times = ratio(stock, ours, told)
        if stock is None or ours is None or times is None:
            raise ValueError(f"{row.what} was not recorded on both sides")
        room = WIDTH - WORDS - MARGIN - 110
        words = row.words.replace("`", "")
        parts.append(_text("n", MARGIN, y + 20, words))
        for kind, share, shift, number in (("d", 1.0, 0, stock), ("o", 1 / times, BAR + 2, ours)):
            width, top = room * share, y + 4 + shift
            parts.append(
                f'<rect class="{kind}" x="{WORDS}" y="{top:.0f}" width="{width:.1f}" height="{BAR}"/>'
            )
            parts.append(_text("s", WORDS + width + 6, top + 11, f"{said(number)}{_times(kind, times)}"))
        y += 2 * BAR + 14
    runs = {run.machine: run for run in (latest.run(row.benchmark, row.what) for row in COMPARED)}
    y += 8
    for run in runs.values():
        parts.append(
            _text("s", MARGIN, y + 10, f"{run.machine}; DeepSpeed {run.versions.deepspeed}; {run.date}")
        )
        y += LINE + 4
    return picture(parts, y + 4, "What autotune-offload takes beside DeepSpeed's own code")


def _times(kind: str, times: float) -> str:
    return f", {times:.{0 if times >= 10 else 2}f}x" if kind == "o" else ""


def lanes(trace: dict[str, Any], ways: int) -> str:
    """The first ways of a trace as `--trace` writes it, on one axis, a row for each lane."""
    events = trace["traceEvents"]
    shown = list(dict.fromkeys(event["pid"] for event in events))[:ways]
    spans = [event for event in events if event["ph"] == "X" and event["pid"] in shown]
    end = max(span["ts"] + span["dur"] for span in spans)
    scale = (WIDTH - 130 - 2 * MARGIN) / end
    parts: list[str] = []
    y = 8.0
    for process in shown:
        own = [event for event in events if event["pid"] == process]
        names = {e["tid"]: e["args"]["name"] for e in own if e["ph"] == "M" and e["name"] == "thread_name"}
        title = next(e["args"]["name"] for e in own if e["ph"] == "M" and e["name"] == "process_name")
        parts.append(_text("t", MARGIN, y + 18, title))
        y += 28
        for lane, name in sorted(names.items()):
            parts.append(_text("s", MARGIN, y + 15, name))
            for span in own:
                if span["ph"] == "X" and span["tid"] == lane:
                    parts += _span(
                        span, "w" if name == "training waits" else "d" if name == "link" else "o", scale, y
                    )
            y += 26
        y += 10
    parts.append(f'<line class="l" x1="{130 + MARGIN}" x2="{WIDTH - MARGIN}" y1="{y:.0f}" y2="{y:.0f}"/>')
    parts += [
        _text(
            "s",
            130 + MARGIN + end * scale * part / 4 - (0 if part < 4 else 40),
            y + 16,
            f"{end * part / 4:.0f} us",
        )
        for part in range(5)
    ]
    return picture(parts, y + 28, "The stages of one gradient on several ways, by lane")


def _span(span: dict[str, Any], kind: str, scale: float, y: float) -> Iterator[str]:
    x, width = 130 + MARGIN + span["ts"] * scale, max(span["dur"] * scale, 1.0)
    yield f'<rect class="{kind}" x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="20" rx="2"/>'
    words = span["name"]
    if len(words) * 6.6 < width:
        yield _text("b", x + 4, y + 14, words)


def _text(kind: str, x: float, y: float, words: str) -> str:
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}">{escape(words)}</text>'
