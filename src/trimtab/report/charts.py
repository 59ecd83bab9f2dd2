"""Curves and bars for the report and the README, drawn with Vega-Lite and readable without a network."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from trimtab.errors import InputError

if TYPE_CHECKING:
    import altair

Series = tuple[str, int, Sequence[float], Sequence[float | None]]
"""One run's curve: label, seed, x values, y values (None or NaN where nothing was measured)."""

# Okabe and Ito's colours, which stay apart under the common kinds of colour blindness; their yellow and sky blue are
# darkened for lines on white. The second row is the same hues for lines on a dark ground.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#AA4499", "#B8860B", "#3A3A3A", "#4FA3D1", "#8C564B")
DARK_PALETTE = ("#56B4E9", "#FF8C42", "#2FC798", "#E08BCB", "#E0B436", "#D5DAE0", "#9AD4F5", "#CFA08F")
DASHES = ([1, 0], [6, 3], [2, 2])
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
BAR_COLOURS = {"focus": "var(--accent)", "other": "var(--bar)", "published": "var(--bar-published)"}
LEGEND_WIDTH = 380  # pixels, what a chart in a two-column page leaves to its plot
INK, MUTED, GRID = "#1f2933", "#52606d", "#e4e7eb"


@dataclass(frozen=True)
class Mark:
    """Something that happened to a run at some x: a vertical line in the colour of its label."""

    label: str
    x: float
    text: str


def curve_chart(
    series: Iterable[Series],
    *,
    title: str,
    x_title: str,
    y_title: str,
    domain: tuple[float, float] | None = None,
    marks: Sequence[Mark] = (),
    labels: Sequence[str] = (),
    legend: bool = True,
) -> altair.LayerChart:
    """One chart with a line per label: the mean over its seeds, inside a band from the lowest to the highest seed.

    Args:
        series: ``(label, seed, xs, ys)`` of each run. At each x the mean and the band are taken over the seeds that
            have a finite y there; a label with one seed has a line without a band.
        title: of the chart.
        x_title: of the x axis.
        y_title: the unit of y, under the title.
        domain: fixes the y axis, in the units of y; values outside are drawn at its edge.
        marks: vertical lines.
        labels: all labels of the page in their order, so that a label has one colour in all charts; default: those of
            the series, in the order of their first appearance.
        legend: whether the chart names its colours itself.

    Raises:
        ValueError: there is no series, xs and ys differ in length, or one label holds the same seed twice.
    """
    import altair as alt

    series = list(series)
    if not series:
        raise ValueError(f"chart {title!r} has no curve to draw.")
    points = _points_over_seeds(series)
    # From the series, not the points: a run that never logged this metric must not shift the colours of the others.
    labels = list(dict.fromkeys((*labels, *(label for label, *_ in series))))
    data = alt.Data(values=points)
    shown = alt.Undefined if legend else None
    colour = alt.Color("label:N", title=None, sort=labels, scale=alt.Scale(domain=labels), legend=shown)
    # Past the palette's end colours repeat, and the dashes tell the lines apart.
    dashes = [dashes_of(place) for place in range(len(labels))]
    dash_scale = alt.Scale(domain=labels, range=dashes)
    dash = alt.StrokeDash("label:N", title=None, sort=labels, scale=dash_scale, legend=shown)
    x = alt.X("x:Q", title=x_title, scale=alt.Scale(zero=False, nice=False))
    y_scale = alt.Scale(zero=False) if domain is None else alt.Scale(domain=list(domain), clamp=True)
    y_mean = alt.Y("mean:Q", title=None, scale=y_scale)
    tooltip = [
        alt.Tooltip("label:N", title="run"),
        alt.Tooltip("x:Q", title=x_title),
        alt.Tooltip("mean:Q", title=y_title, format=".4~g"),
        alt.Tooltip("low:Q", title="lowest seed", format=".4~g"),
        alt.Tooltip("high:Q", title="highest seed", format=".4~g"),
        alt.Tooltip("seeds:Q", title="seeds"),
    ]
    pointed = alt.selection_point(on="pointerover", clear="pointerout", fields=["x", "label"], empty=False)
    # A dot shows under the pointer, and where it is its line's only point, since such a line cannot be seen.
    visible = alt.when(pointed).then(alt.value(1)).when("datum.lone").then(alt.value(1)).otherwise(alt.value(0))

    base = alt.Chart(data)
    band = base.mark_area(opacity=0.16).encode(x=x, y=alt.Y("low:Q", title=None), y2="high:Q", color=colour)
    line = base.mark_line(strokeWidth=2, strokeJoin="round").encode(x=x, y=y_mean, color=colour, strokeDash=dash)
    # The clear rim widens what the pointer can hit. The selection's own nearest-point search would show the label as
    # undefined, an error of the chart library.
    dots = (
        base.mark_point(filled=True, size=55, stroke="transparent", strokeWidth=12)
        .encode(x=x, y=y_mean, color=colour, tooltip=tooltip, opacity=visible)
        .add_params(pointed)
    )
    layers: list[Any] = [band, line, dots]
    if marks:
        marked = alt.Chart(alt.Data(values=[{"label": mark.label, "x": mark.x, "text": mark.text} for mark in marks]))
        tip = [alt.Tooltip("label:N", title="run"), alt.Tooltip("text:N", title="finding")]
        layers.append(marked.mark_rule(strokeWidth=1.5, strokeDash=[3, 3]).encode(x=x, color=colour, tooltip=tip))
        for place, label in enumerate(label for label in labels if any(mark.label == label for mark in marks)):
            # One flag below the other, since methods tend to break at the same step.
            flag = marked.transform_filter(alt.datum.label == label)
            flag = flag.mark_point(filled=True, shape="triangle-down", size=80, opacity=1)
            layers.append(flag.encode(x=x, y=alt.value(4 + 10 * place), color=colour, tooltip=tip))
    return (
        alt.layer(*layers)
        .properties(title=alt.TitleParams(title, subtitle=y_title), width=640, height=240, background="white")
        .configure(**style(INK, MUTED, GRID, PALETTE, _legend_columns(labels)))
    )


def bar_chart(*, compared: bool) -> altair.TopLevelMixin:
    """A chart without data, for a page that fills in rows of label, value, low, high, end, text and kind.

    Bars with intervals, or, `compared`, points with intervals around a line at 0. `end` is where the text stands,
    `kind` one of focus, other and published.
    """
    import altair as alt

    y = alt.Y("label:N", title=None, sort=None)
    x = alt.X("value:Q", title=None, scale=alt.Scale(zero=True))
    tooltip = [alt.Tooltip("label:N", title="method"), alt.Tooltip("text:N", title="value")]
    base = alt.Chart(alt.NamedData("rows")).encode(y=y, tooltip=tooltip)
    colours = alt.Scale(domain=list(BAR_COLOURS), range=list(BAR_COLOURS.values()))
    kind = alt.Color("kind:N", scale=colours, legend=None)
    shape = base.mark_point(filled=True, size=80, opacity=1) if compared else base.mark_bar(height=14)
    interval = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=1.5)
    text = base.mark_text(align="left", baseline="middle", dx=10, fontSize=12)
    end = alt.X("end:Q")
    layers = [shape.encode(x=x, color=kind), interval.encode(x="low:Q", x2="high:Q"), text.encode(x=end, text="text:N")]
    if compared:
        zero = alt.Chart(alt.Data(values=[{"zero": 0}])).mark_rule(strokeDash=[3, 3]).encode(x="zero:Q")
        layers.insert(0, zero)
    # The text of the longest bar stands beyond the axis.
    return alt.layer(*layers).properties(padding={"left": 0, "top": 5, "right": 44, "bottom": 5})


def dashes_of(place: int) -> list[int]:
    """The dash pattern of the line with this number."""
    return DASHES[place // len(PALETTE) % len(DASHES)]


def style(ink: str, muted: str, grid: str, palette: Sequence[str], legend_columns: int = 1) -> dict[str, Any]:
    """How charts look, as Vega-Lite's ``config``; colours are anything that SVG takes."""
    return {
        "font": FONT,
        "range": {"category": list(palette)},
        "view": {"stroke": None},
        "title": {
            "anchor": "start",
            "color": ink,
            "fontSize": 15,
            "fontWeight": 600,
            "offset": 12,
            "subtitleColor": muted,
            "subtitleFontSize": 12,
        },
        "axis": {
            "labelColor": muted,
            "titleColor": muted,
            "titleFontWeight": 500,
            "titleFontSize": 12,
            "labelFontSize": 11,
            "titlePadding": 8,
            "labelFlush": False,
            "labelPadding": 6,
            "gridColor": grid,
            "domainColor": grid,
            "tickColor": grid,
        },
        "axisX": {"grid": False, "domainColor": muted, "tickColor": muted, "tickCount": 6},
        "axisY": {"domain": False, "ticks": False, "tickCount": 5, "minExtent": 34},
        "rule": {"color": ink},
        "text": {"color": ink},
        "legend": {
            "orient": "bottom",
            "labelColor": ink,
            "labelFontSize": 12,
            "symbolType": "stroke",
            "symbolSize": 200,
            "symbolStrokeWidth": 3,
            "symbolOpacity": 1,
            "columns": legend_columns,
            "labelLimit": LEGEND_WIDTH - 40,
        },
    }


PAGE_STYLE = style(
    "var(--ink)", "var(--muted)", "var(--line)", [f"var(--series-{i})" for i in range(1, len(PALETTE) + 1)]
)
"""In a page the colours are its variables, so that charts follow light, dark and print without being drawn again."""


@cache
def chart_libraries() -> str:
    """The script element with the chart libraries (about 0.9 MB), for a page's head; nothing is loaded by it."""
    import vl_convert

    return f"<script>{_script_safe(vl_convert.javascript_bundle('window.vegaEmbed = vegaEmbed;'))}</script>"


@dataclass(frozen=True)
class PageChart:
    """A chart as a page draws it: as wide as its container, in the page's colours, its title told by the page."""

    title: str
    unit: str
    specification: dict[str, Any]


def page_chart(chart: altair.TopLevelMixin) -> PageChart:
    """Make a chart ready for a page."""
    # The library checks what it is given when a chart is put together; to check the whole again takes a while.
    spec = chart.to_dict(validate=False)
    title = spec.get("title") or {}
    # The address of the schema is of no use offline.
    for key in ("$schema", "title", "config", "background"):
        spec.pop(key, None)
    if isinstance(spec.get("height"), int):
        spec["height"] = 190
    fitted = {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
    specification = {**spec, **fitted, "background": "transparent", "config": PAGE_STYLE}
    return PageChart(title.get("text", ""), title.get("subtitle", ""), specification)


def json_in_html(value: Any) -> str:
    """JSON for the inside of a script element.

    Inside JSON "<" occurs in strings alone, where the escape means the same and no HTML parser sees a tag.
    """
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def chart_grid(
    rows: Sequence[Sequence[altair.LayerChart]], *, width: int = 340, height: int = 190
) -> altair.TopLevelMixin:
    """Charts in rows, as one picture for `save_chart`; each plot has this many pixels."""
    import altair as alt

    sized = [[chart.properties(width=width, height=height) for chart in row] for row in rows]
    config = sized[0][0].config
    for chart in (chart for row in sized for chart in row):
        # A part of a grid may have no style of its own.
        chart.config = chart.background = alt.Undefined
    grid: altair.TopLevelMixin = alt.vconcat(*(alt.hconcat(*row) for row in sized), config=config, background="white")
    return grid


def save_chart(chart: altair.TopLevelMixin, path: str | Path) -> None:
    """Write a chart as a picture, without a browser or a network: ``.svg``, or ``.png`` at double resolution.

    Raises InputError if the file name ends in anything else.
    """
    import vl_convert

    path = Path(path)
    if path.suffix not in (".svg", ".png"):
        raise InputError(f"{path}: a chart is saved as .svg or .png; give the file name one of these endings.")
    spec = chart.to_dict()
    if path.suffix == ".svg":
        path.write_text(vl_convert.vegalite_to_svg(spec), encoding="utf-8")
    else:
        path.write_bytes(vl_convert.vegalite_to_png(spec, scale=2))


def _points_over_seeds(series: Iterable[Series]) -> list[dict[str, Any]]:
    """Per label and x: mean, lowest and highest y over the seeds with a finite y, and their number; sorted by x.

    ``lone`` marks a label's only point.
    """
    values: dict[str, dict[float, list[float]]] = {}
    seen: set[tuple[str, int]] = set()
    for label, seed, xs, ys in series:
        if len(xs) != len(ys):
            raise ValueError(f"curve {label!r}, seed {seed}: {len(xs)} x values but {len(ys)} y values.")
        if (label, seed) in seen:
            raise ValueError(f"curve {label!r} has seed {seed} twice.")
        seen.add((label, seed))
        at_x = values.setdefault(label, defaultdict(list))
        for x, y in zip(xs, ys, strict=True):
            if y is not None and math.isfinite(y):
                at_x[float(x)].append(float(y))
    return [
        {
            "label": label,
            "x": x,
            "mean": _short(fmean(ys)),
            "low": _short(min(ys)),
            "high": _short(max(ys)),
            "seeds": len(ys),
            "lone": len(at_x) == 1,
        }
        for label, at_x in values.items()
        for x, ys in sorted(at_x.items())
    ]


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _legend_columns(labels: Sequence[str]) -> int:
    """How many legend entries fit beside each other: a symbol with its margins, and about 6.5 pixels a character."""
    widest = 40 + 6.5 * max((len(label) for label in labels), default=0)
    return max(1, int(LEGEND_WIDTH // widest))


def _script_safe(code: str) -> str:
    """The same JavaScript, unable to end the script element around it.

    Only the end tag is rewritten: a bare ``</`` also occurs in regular expressions, where a backslash would break it.
    """
    return re.sub("</(?=script)", r"<\\/", code, flags=re.IGNORECASE)
