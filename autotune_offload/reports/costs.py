"""Picture: what each way adds to a backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autotune_offload import units
from autotune_offload.reports.alternatives import Alternative
from autotune_offload.reports.drawing import SECONDS_LABEL, Spec, frame, log_ticks, scale

# -- the alternatives -----------------------------------------------------------------------------

_WHO = {"chosen": "one", "other paths of ours": "three", "DeepSpeed's own": "two"}
_SHAPES = {"measured": "circle", "predicted": "diamond"}
_ROW = 44


def costs(
    rows: Sequence[Alternative],
    *,
    own_seconds: float | None,
    noise: float,
    width: int,
    colours: Mapping[str, str],
) -> Spec:
    """What each way adds to a backward pass, predicted and measured, and the band that is DeepSpeed's own noise."""
    points = [point for row in rows for point in _cost_points(row)]
    order = [_label(row) for row in rows]
    y = {"field": "label", "type": "nominal", "sort": order, "axis": None, "scale": {"paddingInner": 0}}
    x = {
        "field": "seconds",
        "type": "quantitative",
        "scale": {"type": "log", "nice": True},
        "axis": {
            "labelExpr": SECONDS_LABEL,
            "title": "time added to a backward pass (logarithmic)",
            "values": log_ticks([point["seconds"] for point in points]),
            "labelOverlap": True,
            "labelSeparation": 6,
        },
    }
    who: Spec = scale("who", list(_WHO), [colours[role] for role in _WHO.values()])
    who["legend"] = {"title": None, "columns": max(width // 150, 1)}
    shape = {**scale("what", list(_SHAPES), list(_SHAPES.values())), "legend": None}
    layers: list[Spec] = [
        *_own_band(own_seconds, noise, x, colours),
        {
            "data": {"values": [{"label": label, "row": label} for label in order]},
            "mark": {
                "type": "text",
                "align": "left",
                "baseline": "bottom",
                "dy": -7,
                "dx": 2,
                "aria": False,
                "color": colours["ink"],
                "fontSize": 12,
            },
            "encoding": {"y": y, "x": {"value": 0}, "text": {"field": "row"}},
        },
        {
            "mark": {"type": "rule", "strokeWidth": 3, "opacity": 0.6, "yOffset": 6, "aria": False},
            "encoding": {"y": y, "x": {**x, "field": "low"}, "x2": {"field": "high"}, "color": who},
        },
        *(_cost_marks(y, x, who, shape, what) for what in _SHAPES),
    ]
    return {"data": {"values": points}, "layer": layers, **frame(width, {"step": _ROW}, colours)}


def _cost_marks(y: Spec, x: Spec, who: Spec, shape: Spec, what: str) -> Spec:
    return {
        "transform": [{"filter": {"field": "what", "equal": what}}],
        "mark": {
            "type": "point",
            "filled": what == "measured",
            "size": 90,
            "opacity": 1,
            "yOffset": 6,
            "strokeWidth": 2,
        },
        "encoding": {"y": y, "x": x, "color": who, "shape": shape, "description": {"field": "words"}},
    }


def _label(row: Alternative) -> str:
    if row.stock:
        return row.group + (" (installed)" if row.installed else "")
    return f"{row.name} ({row.detail})" if row.detail else row.name


def _cost_points(row: Alternative) -> list[Spec]:
    who = "chosen" if row.chosen else "DeepSpeed's own" if row.stock else "other paths of ours"
    times = {"measured": row.measured_seconds, "predicted": row.predicted_seconds}
    half = (row.spread or 0.0) / 2
    return [
        {
            "label": _label(row),
            "who": who,
            "what": what,
            "seconds": seconds,
            "low": seconds * max(1 - half, 0.1) if what == "measured" else seconds,
            "high": seconds * (1 + half) if what == "measured" else seconds,
            "words": f"{_label(row)}, {who}: {what} {units.duration(seconds)}"
            + (f", spread {units.percent(row.spread)} in {row.samples} trials" if what == "measured" else ""),
        }
        for what, seconds in times.items()
        if seconds
    ]


def _own_band(own_seconds: float | None, noise: float, x: Spec, colours: Mapping[str, str]) -> list[Spec]:
    if not own_seconds:
        return []
    words = f"DeepSpeed's own time {units.duration(own_seconds)}, give or take the noise of {units.percent(noise)}"
    data = {
        "values": [
            {
                "low": own_seconds / (1 + noise),
                "high": own_seconds * (1 + noise),
                "seconds": own_seconds,
                "words": words,
            }
        ]
    }
    return [
        {
            "data": data,
            "mark": {"type": "rect", "color": colours["two"], "opacity": 0.18, "aria": False},
            "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}},
        },
        {
            "data": data,
            "mark": {"type": "rule", "color": colours["two"], "strokeDash": [4, 3]},
            "encoding": {"x": x, "description": {"field": "words"}},
        },
    ]
