"""Curves for the report and the README, drawn with Vega-Lite and readable without a network."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from trimtab.errors import InputError

if TYPE_CHECKING:
    import altair

Series = tuple[str, int, Sequence[float], Sequence[float | None]]
"""One run's curve: label, seed, x values, y values (None or NaN where nothing was measured)."""

# Okabe and Ito's colours, which stay apart under the common kinds of colour blindness; their yellow and sky blue are
# darkened for lines on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#AA4499", "#B8860B", "#3A3A3A", "#4FA3D1", "#8C564B")
DASHES = ([1, 0], [6, 3], [2, 2])
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
LEGEND_WIDTH = 380  # pixels, what a chart in a two-column page leaves to its plot
INK, MUTED, GRID = "#1f2933", "#52606d", "#e4e7eb"


def curve_chart(
    series: Iterable[Series], *, title: str, x_title: str, y_title: str, domain: tuple[float, float] | None = None
) -> altair.LayerChart:
    """One chart with a line per label: the mean over its seeds, inside a band from the lowest to the highest seed.

    ``series`` holds ``(label, seed, xs, ys)`` per run. At each x the mean and the band are taken over the seeds that
    have a finite y there; a label with one seed has a line without a band. ``domain`` fixes the y axis, in the units of
    y; values outside are drawn at its edge. Labels keep the order and colour of their first appearance.

    Raises ValueError if there is no series, if xs and ys differ in length, or if one label holds the same seed twice.
    """
    import altair as alt

    series = list(series)
    if not series:
        raise ValueError(f"chart {title!r} has no curve to draw.")
    points = _points_over_seeds(series)
    # From the series, not the points: a run that never logged this metric must not shift the colours of the others.
    labels = list(dict.fromkeys(label for label, *_ in series))
    data = alt.Data(values=points)
    colour = alt.Color(
        "label:N",
        title=None,
        sort=labels,
        scale=alt.Scale(domain=labels, range=[PALETTE[i % len(PALETTE)] for i in range(len(labels))]),
    )
    # Past the palette's end colours repeat, and the dashes tell the lines apart.
    dashes = [DASHES[i // len(PALETTE) % len(DASHES)] for i in range(len(labels))]
    dash = alt.StrokeDash("label:N", title=None, sort=labels, scale=alt.Scale(domain=labels, range=dashes))
    x = alt.X("x:Q", title=x_title, scale=alt.Scale(zero=False, nice=False))
    y_scale = alt.Scale(zero=False) if domain is None else alt.Scale(domain=list(domain), clamp=True)
    y_mean = alt.Y("mean:Q", title=y_title, scale=y_scale)
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
    band = base.mark_area(opacity=0.16).encode(x=x, y=alt.Y("low:Q", title=y_title), y2="high:Q", color=colour)
    line = base.mark_line(strokeWidth=2, strokeJoin="round").encode(x=x, y=y_mean, color=colour, strokeDash=dash)
    # The clear rim widens what the pointer can hit. The selection's own nearest-point search would show the label as
    # undefined, an error of the chart library.
    dots = (
        base.mark_point(filled=True, size=55, stroke="transparent", strokeWidth=12)
        .encode(x=x, y=y_mean, color=colour, tooltip=tooltip, opacity=visible)
        .add_params(pointed)
    )
    return (
        alt.layer(band, line, dots)
        .properties(title=title, width=640, height=240, background="white")
        .configure(font=FONT)
        .configure_view(stroke=None)
        .configure_title(anchor="start", color=INK, fontSize=15, fontWeight=600, offset=12)
        .configure_axis(
            labelColor=MUTED,
            titleColor=MUTED,
            titleFontWeight=500,
            titleFontSize=12,
            labelFontSize=11,
            titlePadding=8,
            labelFlush=False,
            labelPadding=6,
            gridColor=GRID,
            domainColor=GRID,
            tickColor=GRID,
        )
        .configure_axisX(grid=False, domainColor=MUTED, tickColor=MUTED, tickCount=8)
        .configure_axisY(domain=False, ticks=False, tickCount=5)
        .configure_legend(
            orient="bottom",
            labelColor=INK,
            labelFontSize=12,
            symbolType="stroke",
            symbolSize=200,
            symbolStrokeWidth=3,
            symbolOpacity=1,
            columns=_legend_columns(labels),
            labelLimit=LEGEND_WIDTH - 40,
        )
    )


def chart_html_fragments(charts: Sequence[altair.TopLevelMixin]) -> tuple[str, list[str]]:
    """HTML for charts in one page: a fragment for the page's head and one body fragment per chart, in order.

    The head holds the chart libraries inline, once for all charts, so the page needs no network; without charts it is
    empty. Single and layered charts fill the width of their container.
    """
    if not charts:
        return "", []
    import vl_convert

    head = f"<script>{_script_safe(vl_convert.javascript_bundle('window.vegaEmbed = vegaEmbed;'))}</script>"
    return head, [_chart_body(chart, f"chart-{number}") for number, chart in enumerate(charts, start=1)]


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
            "mean": fmean(ys),
            "low": min(ys),
            "high": max(ys),
            "seeds": len(ys),
            "lone": len(at_x) == 1,
        }
        for label, at_x in values.items()
        for x, ys in sorted(at_x.items())
    ]


def _legend_columns(labels: Sequence[str]) -> int:
    """How many legend entries fit beside each other: a symbol with its margins, and about 6.5 pixels a character."""
    widest = 40 + 6.5 * max((len(label) for label in labels), default=0)
    return max(1, int(LEGEND_WIDTH // widest))


def _chart_body(chart: altair.TopLevelMixin, element_id: str) -> str:
    """One chart's element and the script that draws into it."""
    import altair as alt

    spec = chart.to_dict()
    # The address of the schema is of no use offline: the mode below says what the specification is.
    spec.pop("$schema", None)
    if isinstance(chart, alt.Chart | alt.LayerChart):
        spec |= {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
    # The other entries of the menu would send the chart to an editor on the network.
    actions = {"export": True, "source": False, "compiled": False, "editor": False}
    options = {"mode": "vega-lite", "renderer": "svg", "actions": actions}
    # Inside JSON "<" occurs in strings alone, where the escape means the same and no HTML parser sees a tag.
    specification = json.dumps(spec).replace("<", "\\u003c")
    call = f"vegaEmbed('#{element_id}', {specification}, {json.dumps(options)})"
    return f'<div class="chart" id="{element_id}"></div>\n<script>{call}.catch(console.error);</script>'


def _script_safe(code: str) -> str:
    """The same JavaScript, unable to end the script element around it.

    Only the end tag is rewritten: a bare ``</`` also occurs in regular expressions, where a backslash would break it.
    """
    return re.sub("</(?=script)", r"<\\/", code, flags=re.IGNORECASE)
