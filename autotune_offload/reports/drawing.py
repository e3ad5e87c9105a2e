"""The pictures of a profile as Vega-Lite specifications, drawn to SVG or PNG by vl-convert.

Drawn when the page is made, so that the page needs no chart library, no network and no scripting to show
them. Every mark carries its values as words, which screen readers read and a pointer shows. Colours are
CSS variables in a page, which follow its light or dark scheme, and fixed in a PNG.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from autotune_offload.errors import ConfigError

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

SECONDS_LABEL = (
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


def log_ticks(values: Iterable[float]) -> list[float]:
    """1, 2 and 5 of each decade where those are few, else 1 and 3, else powers of ten."""
    found = [value for value in values if value > 0]
    first, last = math.floor(math.log10(min(found))), math.ceil(math.log10(max(found)))
    steps = (1, 2, 5) if last - first <= 2 else (1, 3) if last - first == 3 else (1,)
    return [step * 10.0**power for power in range(first, last + 1) for step in steps]


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


def scale(field: str, domain: Sequence[str], values: Sequence[Any]) -> Spec:
    """One channel's values, in this order."""
    return {
        "field": field,
        "type": "nominal",
        "scale": {"domain": domain, "range": values},
        "legend": {"title": None},
    }


def frame(width: int, height: object, colours: Mapping[str, str]) -> Spec:
    """What every picture shares."""
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
