"""Picture: who works when in one backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autotune_offload import units
from autotune_offload.reports.drawing import SECONDS_LABEL, Spec, frame, scale
from autotune_offload.reports.timeline import Timeline

# -- where the time goes --------------------------------------------------------------------------

_LANES = ("device", "link", "host", "training waits")
_STAGES = ("one", "four", "three", "five", "six")
_WAITS = "training waits"


def stages(named: Mapping[str, Timeline], *, width: int, colours: Mapping[str, str]) -> Spec:
    """One row a lane under each path's name, on one axis of time."""
    bars = [bar for name, each in named.items() for lane in _LANES for bar in _bars(name, lane, each)]
    order = list(dict.fromkeys(bar["row"] for bar in bars))
    y: Spec = {"field": "row", "type": "nominal", "sort": order, "axis": None}
    x: Spec = {"field": "start", "type": "quantitative", "title": "time since the gradient is there"}
    x["axis"] = {"labelExpr": SECONDS_LABEL, "tickCount": 4, "labelOverlap": True}
    what = list(dict.fromkeys(bar["what"] for bar in bars))
    work = [each for each in what if each != _WAITS]
    roles = {each: _STAGES[index % len(_STAGES)] for index, each in enumerate(work)} | {_WAITS: "two"}
    colour = scale("what", what, [colours[roles[each]] for each in what])
    label: Spec = {"type": "text", "align": "left", "baseline": "bottom", "dy": -1, "dx": 2, "fontSize": 12}
    layers: list[Spec] = [
        {
            "mark": {"type": "bar", "height": 14, "yOffset": 8, "stroke": colours["paper"], "strokeWidth": 1},
            "encoding": {
                "y": y,
                "x": x,
                "x2": {"field": "end"},
                "color": {**colour, "legend": {"title": None, "columns": max(width // 300, 1)}},
                "description": {"field": "words"},
            },
        },
        {
            "data": {"values": [{"row": row} for row in order]},
            "mark": {**label, "aria": False, "color": colours["ink"]},
            "encoding": {"y": y, "x": {"value": 0}, "text": {"field": "row"}},
        },
    ]
    return {"data": {"values": bars}, "layer": layers, **frame(width, {"step": 40}, colours)}


def _bars(name: str, lane: str, each: Timeline) -> Iterator[Spec]:
    row = f"{name}: {lane}"
    for stage in each.stages:
        if stage.lane == lane:
            yield {
                "row": row,
                "what": _WAITS if lane == _WAITS else stage.what,
                "start": stage.start_seconds,
                "end": stage.end_seconds,
                "words": f"{row}: {stage.what}, {units.duration(stage.seconds)} "
                f"from {units.duration(stage.start_seconds)} on",
            }
