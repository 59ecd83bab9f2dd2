"""A report page: one static HTML file that opens from disk, without a server or a network."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.errors import InputError
from trimtab.report.charts import chart_html_fragments

if TYPE_CHECKING:
    import altair

# What starts like a number is set as one: 12, -0.3, 1,024, 49.2 %, 0.53 ± 0.02, [0.49, 0.57], 3 min 2 s, 812 MB.
_NUMBER = re.compile(r"[\[(<>≤≥~±+\-−]?\s*\.?\d")
_NO_NUMBER = frozenset({"", "-", "–", "—", "n/a", "nan", "inf"})


@dataclass(frozen=True)
class Table:
    """Rows of text under column names; columns of numbers are set flush right, except the first."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows, start=1):
            if len(row) != len(self.columns):
                raise ValueError(f"table row {number} has {len(row)} cells for {len(self.columns)} columns.")


@dataclass(frozen=True)
class Section:
    """A heading, then in this order: paragraphs, a table, charts. All text is plain text, never HTML."""

    heading: str
    paragraphs: Sequence[str] = ()
    table: Table | None = None
    charts: Sequence[altair.TopLevelMixin] = ()


def write_page(path: str | Path, *, title: str, intro: str, sections: Sequence[Section]) -> None:
    """Write one self-contained HTML page at ``path``, creating its folder.

    A page that was there stays whole until the new one replaces it in one step. All text is escaped. The page loads
    nothing; with charts it holds the chart libraries inline (about 0.9 MB).

    Raises InputError if the file cannot be written.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path}: this is a folder; name the report's file, for example {path / 'report.html'}.")
    html = _render(title, intro, sections)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(html, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(
            f"{path}: the report cannot be written there ({error.strerror}); name a file in a folder you can write to."
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def _render(title: str, intro: str, sections: Sequence[Section]) -> str:
    import jinja2
    from markupsafe import Markup

    head, bodies = chart_html_fragments([chart for section in sections for chart in section.charts])
    remaining = iter(bodies)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("trimtab", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        title=title,
        intro=intro,
        head=Markup(head),
        sections=[
            {
                "heading": section.heading,
                "paragraphs": section.paragraphs,
                "table": section.table,
                "number_columns": _number_columns(section.table),
                "charts": [Markup(next(remaining)) for _ in section.charts],
            }
            for section in sections
        ],
    )


def _number_columns(table: Table | None) -> list[bool]:
    """Which columns hold numbers: never the first, others when each of its cells is a number or marks a missing one."""
    if table is None:
        return []
    return [
        index > 0 and all(_is_number(row[index].strip()) for row in table.rows) for index in range(len(table.columns))
    ]


def _is_number(cell: str) -> bool:
    return cell.lower() in _NO_NUMBER or _NUMBER.match(cell) is not None
