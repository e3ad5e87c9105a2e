"""The pictures of a profile as Vega-Lite specifications, drawn to SVG or PNG by vl-convert.

Drawn when the page is made, so that the page needs no chart library, no network and no scripting to show
them. Every mark carries its values as words, which screen readers read and a pointer shows. Colours are
CSS variables in a page, which follow its light or dark scheme, and fixed in a PNG.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from autotune_offload import units
from autotune_offload.alternatives import Alternative
from autotune_offload.errors import ConfigError
from autotune_offload.records import Kind, Profile, Transfer
from autotune_offload.timeline import Timeline

Spec = dict[str, Any]

LIGHT = {
    "ink": "#1f2328",
    "muted": "#57606a",
    "grid": "#d8dee4",
    "paper": "#ffffff",
    "one": "#0550ae",
    "two": "#a04100",
    "three": "#6e5494",
    "four": "#116329",
    "five": "#a40e26",
    "six": "#4d5560",
}
DARK = {
    "ink": "#e6edf3",
    "muted": "#9da7b3",
    "grid": "#30363d",
    "paper": "#0d1117",
    "one": "#79c0ff",
    "two": "#f0a35e",
    "three": "#d2b3ff",
    "four": "#7ee787",
    "five": "#ff9492",
    "six": "#a9b4c0",
}
"""The two schemes, by role; a test holds their contrast against the paper (WCAG 2.2, 1.4.3 and 1.4.11)."""

IN_PAGE = {role: f"var(--{role})" for role in LIGHT}
"""What a chart in a page is painted with."""

KIND_WORDS: dict[Kind, str] = {"d2h": "device to host", "h2d": "host to device", "h2h": "host to host"}

_SIZE_LABEL = (
    "datum.value >= 1073741824 ? datum.value / 1073741824 + ' GiB' : "
    "datum.value >= 1048576 ? datum.value / 1048576 + ' MiB' : datum.value / 1024 + ' KiB'"
)
_SECONDS_LABEL = (
    "datum.value == 0 ? '0' : datum.value >= 1 ? format(datum.value, '~r') + ' s' : "
    "datum.value >= 1e-3 ? format(datum.value * 1e3, '~r') + ' ms' : format(datum.value * 1e6, '~r') + ' us'"
)


def svg(spec: Spec) -> str:
    """`spec` drawn as SVG text.

    Raises:
        ConfigError: vl-convert is not installed.
    """
    return cast("str", _converter().vegalite_to_svg(spec))


def png(spec: Spec) -> bytes:
    """`spec` drawn as a PNG of twice its size.

    Raises:
        ConfigError: vl-convert is not installed.
    """
    return cast("bytes", _converter().vegalite_to_png(spec, scale=2))


def _converter() -> Any:
    try:
        import vl_convert
    except ImportError as error:
        raise ConfigError(
            "charts are drawn by vl-convert, which is not installed; "
            "run `pip install 'autotune-offload[report]'`"
        ) from error
    return vl_convert


# -- bandwidth against size -----------------------------------------------------------------------

_SERIES = {
    "pinned": ("one", "circle", [1, 0]),
    "pageable, warm": ("two", "square", [6, 3]),
    "pageable, cold": ("three", "triangle-up", [2, 3]),
    "both directions busy": ("four", "diamond", [8, 2, 2, 2]),
}
"""Name of a curve: its role of colour, the shape of its points, its dashes. Never told by colour alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """What the link can carry in one direction at most, and who says so."""

    gbps: float
    name: str


def series_of(each: Transfer) -> str | None:
    """The curve that a point belongs to; None for what is not drawn, such as copies by one thread."""
    if each.threads:
        return None
    if each.duplex:
        return "both directions busy"
    return "pinned" if each.memory == "pinned" else f"pageable, {each.state}"


def bandwidth(
    profile: Profile, kind: Kind, *, ceiling: Ceiling | None, width: int, colours: Mapping[str, str]
) -> Spec | None:
    """GB/s against the bytes of one copy, both axes logarithmic; None where nothing of this kind was timed."""
    points = [_point(each) for each in profile.transfers if each.kind == kind and series_of(each)]
    if not points:
        return None
    shown = [name for name in _SERIES if any(point["series"] == name for point in points)]
    x = {
        "field": "bytes",
        "type": "quantitative",
        "scale": {"type": "log", "base": 2, "nice": False},
        "axis": {"values": _size_ticks(points), "labelExpr": _SIZE_LABEL, "title": "bytes of one copy"},
    }
    y = {"field": "gbps", "type": "quantitative", "scale": {"type": "log"}, "title": "GB/s"}
    rates = [point["gbps"] for point in points] + ([ceiling.gbps] if ceiling else [])
    y["axis"] = {"labelExpr": "format(datum.value, '~r')", "values": _log_ticks(rates)}
    colour = _scale("series", shown, [colours[_SERIES[name][0]] for name in shown])
    shape = _scale("series", shown, [_SERIES[name][1] for name in shown])
    layers: list[Spec] = [
        {
            "mark": {"type": "area", "opacity": 0.18, "aria": False},
            "encoding": {
                "x": x,
                "y": {**y, "field": "low"},
                "y2": {"field": "high"},
                "color": colour,
            },
        },
        {
            "mark": {"type": "line", "strokeWidth": 2, "aria": False},
            "encoding": {
                "x": x,
                "y": y,
                "color": colour,
                "strokeDash": _scale("series", shown, [_SERIES[name][2] for name in shown]),
            },
        },
        {
            "mark": {"type": "point", "filled": True, "size": 55, "opacity": 1},
            "encoding": {"x": x, "y": y, "color": colour, "shape": shape, "description": {"field": "words"}},
        },
        *_ceiling_layers(ceiling, y, colours),
    ]
    return {"data": {"values": points}, "layer": layers, **_frame(width, 250, colours)}


def _point(each: Transfer) -> Spec:
    half = each.iqr_seconds / 2
    name = str(series_of(each))
    spread = each.iqr_seconds / each.median_seconds if each.median_seconds else None
    return {
        "series": name,
        "bytes": each.bytes,
        "gbps": each.gbps,
        "low": each.bytes / (each.median_seconds + half) / 1e9,
        "high": each.bytes / max(each.median_seconds - half, each.median_seconds / 10) / 1e9,
        "words": f"{name}, {units.size(each.bytes)}: {units.rate(each.gbps)}, "
        f"{units.duration(each.median_seconds)} a copy, spread {units.percent(spread)}, {each.samples} samples",
    }


def _size_ticks(points: Iterable[Spec]) -> list[int]:
    sizes = sorted({point["bytes"] for point in points})
    return sizes[:: max(1, -(-len(sizes) // 4))]


def _log_ticks(values: Iterable[float]) -> list[float]:
    """1, 2 and 5 of each decade where those are few, else 1 and 3, else powers of ten."""
    found = [value for value in values if value > 0]
    first, last = math.floor(math.log10(min(found))), math.ceil(math.log10(max(found)))
    steps = (1, 2, 5) if last - first <= 2 else (1, 3) if last - first == 3 else (1,)
    return [step * 10.0**power for power in range(first, last + 1) for step in steps]


def _ceiling_layers(ceiling: Ceiling | None, y: Spec, colours: Mapping[str, str]) -> list[Spec]:
    if ceiling is None:
        return []
    words = f"ceiling of {ceiling.name}: {units.rate(ceiling.gbps)}"
    data = {"data": {"values": [{"gbps": ceiling.gbps, "words": words}]}}
    at = {"y": {**y, "field": "gbps"}, "description": {"field": "words"}}
    return [
        {
            **data,
            "mark": {"type": "rule", "strokeDash": [1, 2], "strokeWidth": 2, "color": colours["ink"]},
            "encoding": at,
        },
        {
            **data,
            "mark": {
                "type": "text",
                "align": "left",
                "baseline": "bottom",
                "dx": 4,
                "dy": -3,
                "color": colours["ink"],
                "aria": False,
            },
            "encoding": {
                **at,
                "x": {"value": 0},
                "text": {"value": f"{ceiling.name} {units.rate(ceiling.gbps)}"},
            },
        },
    ]


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
            "labelExpr": _SECONDS_LABEL,
            "title": "time added to a backward pass (logarithmic)",
            "values": _log_ticks([point["seconds"] for point in points]),
            "labelOverlap": True,
            "labelSeparation": 6,
        },
    }
    who: Spec = _scale("who", list(_WHO), [colours[role] for role in _WHO.values()])
    who["legend"] = {"title": None, "columns": max(width // 150, 1)}
    shape = {**_scale("what", list(_SHAPES), list(_SHAPES.values())), "legend": None}
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
    return {"data": {"values": points}, "layer": layers, **_frame(width, {"step": _ROW}, colours)}


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
    x["axis"] = {"labelExpr": _SECONDS_LABEL, "tickCount": 4, "labelOverlap": True}
    what = list(dict.fromkeys(bar["what"] for bar in bars))
    work = [each for each in what if each != _WAITS]
    roles = {each: _STAGES[index % len(_STAGES)] for index, each in enumerate(work)} | {_WAITS: "two"}
    colour = _scale("what", what, [colours[roles[each]] for each in what])
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
    return {"data": {"values": bars}, "layer": layers, **_frame(width, {"step": 40}, colours)}


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


# -- one picture ----------------------------------------------------------------------------------


def picture(title: str, lines: Sequence[str], charts: Mapping[str, Spec]) -> Spec:
    """Several charts, each under its own title, below one headline: for a PNG."""
    inner = ("$schema", "config", "background", "autosize", "padding")
    parts = [
        {"title": {"text": name, "anchor": "start"}, **{k: v for k, v in chart.items() if k not in inner}}
        for name, chart in charts.items()
    ]
    return {
        "$schema": _SCHEMA,
        "title": {"text": title, "subtitle": list(lines), "anchor": "start", "fontSize": 16, "offset": 16},
        "vconcat": parts,
        "resolve": {"scale": {"color": "independent", "shape": "independent", "strokeDash": "independent"}},
        "background": LIGHT["paper"],
        "padding": 20,
        "config": _config(LIGHT),
    }


_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"


def _scale(field: str, domain: Sequence[str], values: Sequence[Any]) -> Spec:
    return {
        "field": field,
        "type": "nominal",
        "scale": {"domain": domain, "range": values},
        "legend": {"title": None},
    }


def _frame(width: int, height: object, colours: Mapping[str, str]) -> Spec:
    return {
        "$schema": _SCHEMA,
        "width": width,
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "background": None,
        "padding": 2,
        "config": _config(colours),
    }


def _config(colours: Mapping[str, str]) -> Spec:
    words = {
        "labelColor": colours["ink"],
        "titleColor": colours["ink"],
        "labelFontSize": 12,
        "titleFontSize": 12,
    }
    axis = {"gridColor": colours["grid"], "domainColor": colours["muted"], "tickColor": colours["muted"]}
    legend = {"orient": "top", "direction": "horizontal", "columns": 2, "columnPadding": 24}
    symbols = {"symbolSize": 90, "symbolOpacity": 1, "labelLimit": 0}
    return {
        "font": "system-ui, sans-serif",
        "axis": {**words, **axis, "titleFontWeight": "normal"},
        "legend": {**words, **legend, **symbols},
        "title": {"color": colours["ink"], "subtitleColor": colours["ink"]},
        "view": {"stroke": None},
    }
