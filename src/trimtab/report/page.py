"""A report page: one static HTML file that opens from disk, without a server or a network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import InputError
from trimtab.files import replace_file
from trimtab.report.charts import (
    DARK_PALETTE,
    PALETTE,
    chart_libraries,
    dashes_of,
    json_in_html,
    page_chart,
)

if TYPE_CHECKING:
    import altair

# What starts like a number is set as one: 12, -0.3, 1,024, 49.2 %, 0.53 ± 0.02, [0.49, 0.57], 3 min 2 s, 812 MB.
_NUMBER = re.compile(r"[\[(<>≤≥~±+\-−]?\s*\.?\d")
_NO_NUMBER = frozenset({"", "-", "–", "—", "n/a", "nan", "inf"})
EMPTY = "–"
"""What stands in a table where there is no number."""


@dataclass(frozen=True)
class Cell:
    """A cell with more to it than its text: a small second line, bold type."""

    text: str
    note: str = ""
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of text under column names; columns of numbers are set flush right, except the first.

    Attributes:
        columns: names.
        rows: a cell for each column.
        caption: under the table.
        published_caption: more of it, about rows of the class published.
        row_classes: for each row "" or names that the page's style knows: published, first.
        plain: no column is set as numbers.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    caption: str = ""
    published_caption: str = ""
    row_classes: Sequence[str] = ()
    plain: bool = False

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows, start=1):
            if len(row) != len(self.columns):
                raise ValueError(f"table row {number} has {len(row)} cells for {len(self.columns)} columns.")


@dataclass(frozen=True)
class LegendEntry:
    """A line's name; `place` is its number, from which colour and dashes follow."""

    label: str
    place: int
    note: str = ""

    @property
    def series(self) -> int:
        """Number of its colour, from 1."""
        return self.place % len(PALETTE) + 1

    @property
    def dashes(self) -> str:
        """As SVG writes them."""
        return " ".join(map(str, dashes_of(self.place)))


@dataclass(frozen=True)
class Section:
    """A heading, then in this order: paragraphs, legend, table, charts, HTML. All but the last is plain text.

    `html` is inserted as it is, so whoever makes it escapes what comes from a run. `kind` is a class of the page's
    style: published. A `folded` section shows its heading alone until it is opened.
    """

    heading: str
    paragraphs: Sequence[str] = ()
    table: Table | None = None
    charts: Sequence[altair.TopLevelMixin] = ()
    legend: Sequence[LegendEntry] = ()
    html: str = ""
    kind: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Tab:
    """Sections that are seen together."""

    name: str
    sections: Sequence[Section]


def write_page(path: str | Path, *, title: str, intro: str, tabs: Sequence[Tab]) -> None:
    """Write one self-contained HTML page at ``path``, creating its folder.

    A page that was there stays whole until the new one replaces it in one step. All text is escaped. The page loads
    nothing; with charts it holds the chart libraries inline (about 0.9 MB). A single tab is a page without tabs.

    Raises InputError if the file cannot be written.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path}: this is a folder; name the report's file, for example {path / 'report.html'}.")
    html = _render(title, intro, tabs)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, html.encode("utf-8", "replace"))
    except OSError as error:
        raise InputError(
            f"{path}: the report cannot be written there ({error.strerror}); name a file in a folder you can write to."
        ) from error


def render_template(name: str, **values: Any) -> str:
    """One of the templates beside this file, filled in; text is escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("trimtab", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name).render(**values)


def asset(name: str) -> str:
    """A style sheet or script beside this file, to be set into the page as it is."""
    from markupsafe import Markup

    return Markup((resources.files("trimtab.report") / name).read_text(encoding="utf-8"))


def _render(title: str, intro: str, tabs: Sequence[Tab]) -> str:
    from markupsafe import Markup

    sections = [section for tab in tabs for section in tab.sections]
    drawn = any(section.charts or 'class="plot' in section.html for section in sections)
    return render_template(
        "page.html.j2",
        title=title,
        intro=intro,
        css=asset("page.css"),
        palette=PALETTE,
        dark_palette=DARK_PALETTE,
        libraries=Markup(chart_libraries()) if drawn else "",
        script=asset("page.js") if drawn or len(tabs) > 1 else "",
        tabs=[
            {
                "name": tab.name,
                "id": _identifier(tab.name),
                "sections": [_prepared(section) for section in tab.sections],
            }
            for tab in tabs
        ],
    )


def _prepared(section: Section) -> dict[str, Any]:
    """A section as the template takes it."""
    from markupsafe import Markup

    figures = []
    for chart in section.charts:
        own = page_chart(chart)
        figures.append({"title": own.title, "unit": own.unit, "spec": Markup(json_in_html(own.specification))})
    return {
        "heading": section.heading,
        "paragraphs": section.paragraphs,
        "legend": section.legend,
        "table": section.table and _prepared_table(section.table),
        "figures": figures,
        "html": Markup(section.html),
        "kind": section.kind,
        "folded": section.folded,
    }


def _prepared_table(table: Table) -> dict[str, Any]:
    rows = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in table.rows]
    return {
        "caption": table.caption,
        "published_caption": table.published_caption,
        "columns": table.columns,
        "rows": rows,
        "row_classes": table.row_classes or [""] * len(rows),
        "numbers": [not table.plain and _holds_numbers(rows, place) for place in range(len(table.columns))],
    }


def _holds_numbers(rows: Sequence[Sequence[Cell]], place: int) -> bool:
    """Whether each of a column's cells is a number or marks a missing one; never so of the first column."""
    return place > 0 and all(_is_number(row[place].text.strip()) for row in rows)


def _is_number(cell: str) -> bool:
    return cell.lower() in _NO_NUMBER or _NUMBER.match(cell) is not None


def _identifier(name: str) -> str:
    return re.sub(r"\W+", "-", name.lower()).strip("-")
