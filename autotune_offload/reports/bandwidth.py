"""Picture: the measured bandwidth curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autotune_offload import units
from autotune_offload.records import Kind, Profile, Transfer
from autotune_offload.reports.drawing import Spec, frame, log_ticks, scale

KIND_WORDS: dict[Kind, str] = {"d2h": "device to host", "h2d": "host to device", "h2h": "host to host"}

_SIZE_LABEL = (
    "datum.value >= 1073741824 ? datum.value / 1073741824 + ' GiB' : "
    "datum.value >= 1048576 ? datum.value / 1048576 + ' MiB' : datum.value / 1024 + ' KiB'"
)

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
    y["axis"] = {"labelExpr": "format(datum.value, '~r')", "values": log_ticks(rates)}
    colour = scale("series", shown, [colours[_SERIES[name][0]] for name in shown])
    shape = scale("series", shown, [_SERIES[name][1] for name in shown])
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
                "strokeDash": scale("series", shown, [_SERIES[name][2] for name in shown]),
            },
        },
        {
            "mark": {"type": "point", "filled": True, "size": 55, "opacity": 1},
            "encoding": {"x": x, "y": y, "color": colour, "shape": shape, "description": {"field": "words"}},
        },
        *_ceiling_layers(ceiling, y, colours),
    ]
    return {"data": {"values": points}, "layer": layers, **frame(width, 250, colours)}


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
