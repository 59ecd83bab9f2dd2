"""A table as Markdown, CSV, LaTeX or HTML."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from trimtab.errors import InputError, did_you_mean
from trimtab.evaluation.scores import Score, scores_csv
from trimtab.evaluation.tables import Cell, TableData, table_data
from trimtab.files import replace_file

# A bracket alone is text; one that a link could begin after is not.
_MARKDOWN_SPECIALS = re.compile(r"([\\|*_`<]|\](?=[(\[:]))")
_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    # At the start of a line of a table a bracket or a star would be read as an argument of the line before.
    "[": "{[}",
    "]": "{]}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "*": "{*}",
    '"': "''",
    "–": "--",
    "—": "---",
    "−": "$-$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "γ": r"$\gamma$",
    "δ": r"$\delta$",
    "ε": r"$\varepsilon$",
    "λ": r"$\lambda$",
    "τ": r"$\tau$",
} | {character: f"\\{character}" for character in "&%$#_"}
_STYLE = """\
:root { color-scheme: light dark; }
body { font-family: system-ui, sans-serif; margin: 1rem; }
div { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption, tfoot td { text-align: left; padding: .5rem 0; }
th, td { padding: .3rem .7rem; text-align: right; white-space: nowrap; }
th { font-weight: normal; }
.label, [scope=colgroup] { text-align: left; }
thead { vertical-align: bottom; }
thead, tbody { border-bottom: 1px solid; }
"""


def markdown(data: TableData) -> str:
    """GitHub's Markdown: best values bold, intervals beside the values."""
    rows = [
        [_markdown_cell(cell, (number, column) in data.marks) for column, cell in enumerate(row)]
        for number, row in enumerate(data.rows)
    ]
    rule = [":---" if column < data.labels else "---:" for column in range(len(data.columns))]
    lines = [_markdown_line(line) for line in ([_markdown_text(text) for text in data.headings], rule, *rows)]
    notes = [f"- {_markdown_text(note)}" for note in data.notes]
    return "\n".join([f"{_markdown_text(data.caption)}.", "", *lines, "", *notes]) + "\n"


def _markdown_cell(cell: Cell, best: bool) -> str:
    plain = replace(cell, text=_markdown_text(cell.text))
    return str(replace(plain, text=f"**{plain.text}**") if best else plain)


def _markdown_text(text: str) -> str:
    return _MARKDOWN_SPECIALS.sub(r"\\\1", " ".join(text.split()))


def _markdown_line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def wide_csv(data: TableData) -> str:
    """A line a row, as shown; a column's intervals, where it has any, in a column of their own after it."""
    with_interval = [any(row[column].interval for row in data.rows) for column in range(len(data.columns))]

    def spread(cells: Iterator[tuple[str, str]]) -> list[str]:
        pairs = zip(cells, with_interval, strict=True)
        return [text for (value, interval), wanted in pairs for text in ((value, interval) if wanted else (value,))]

    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(spread((heading, f"{heading} interval") for heading in data.headings))
    writer.writerows(spread((cell.text, cell.interval) for cell in row) for row in data.rows)
    return file.getvalue()


def latex(data: TableData) -> str:
    """A `table` float with the rules of booktabs; as wide as the line at most, by adjustbox."""
    spans = _spans(data)
    first = data.labels + 1
    over = [rf"\multicolumn{{{width}}}{{c}}{{{_latex_text(group)}}}" for group, width in spans]
    rules = []
    for _, width in spans:
        rules.append(rf"\cmidrule(lr){{{first}-{first + width - 1}}}")
        first += width
    lines = [
        r"% \usepackage{booktabs,adjustbox}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_latex_text(data.caption)}.}}",
        r"\begin{adjustbox}{max width=\linewidth}",
        rf"\begin{{tabular}}{{{'l' * data.labels}{'r' * (len(data.columns) - data.labels)}}}",
        r"\toprule",
        " & ".join([""] * data.labels + over).lstrip() + r" \\",
        " ".join(rules),
        " & ".join(map(_latex_text, data.columns)) + r" \\",
        r"\midrule",
    ]
    for number, row in enumerate(data.rows):
        if number in data.breaks:
            lines.append(r"\midrule")
        cells = [_latex_cell(cell, (number, column) in data.marks) for column, cell in enumerate(row)]
        lines.append(" & ".join(cells) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}", r"\end{adjustbox}"]
    if data.notes:
        lines += ["", r"\smallskip", r"{\footnotesize " + r"\par ".join(_latex_text(n) for n in data.notes) + r"\par}"]
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def _latex_cell(cell: Cell, best: bool) -> str:
    text = rf"\textbf{{{_latex_text(cell.text)}}}" if best else _latex_text(cell.text)
    if cell.reference:
        text += rf"\textsuperscript{{{cell.reference}}}"
    if cell.interval:
        return rf"\shortstack[r]{{{text} \\ \scriptsize {_latex_text(cell.interval)}}}"
    return text


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))


def page(data: TableData) -> str:
    """A small HTML page with the table: headings with their scope, best values strong, intervals below."""
    number_columns = len(data.columns) - data.labels
    spans = _spans(data)
    caption = html.escape(data.caption)
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        f'<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{caption}</title>',
        f"<style>\n{_STYLE}</style></head>",
        f'<body><div tabindex="0" role="region" aria-label="{caption}"><table>',
        f"<caption>{caption}.</caption>",
        f'<colgroup span="{data.labels}"></colgroup>',
        *(f'<colgroup span="{width}"></colgroup>' for _, width in spans),
        "<thead>",
        "<tr>",
        *(f'<th scope="col" rowspan="2" class="label">{html.escape(c)}</th>' for c in data.columns[: data.labels]),
        *(f'<th scope="colgroup" colspan="{width}">{html.escape(group)}</th>' for group, width in spans),
        "</tr>",
        "<tr>",
        *(f'<th scope="col">{html.escape(column)}</th>' for column in data.columns[data.labels :]),
        "</tr>",
        "</thead>",
        "<tbody>",
    ]
    for number, row in enumerate(data.rows):
        if number in data.breaks:
            lines += ["</tbody>", "<tbody>"]
        lines.append("<tr>")
        for column, cell in enumerate(row):
            content = _html_cell(cell, (number, column) in data.marks)
            label = column < data.labels
            lines.append(f'<th scope="row" class="label">{content}</th>' if label else f"<td>{content}</td>")
        lines.append("</tr>")
    notes = "<br>".join(map(html.escape, data.notes))
    foot = f'<tfoot><tr><td colspan="{data.labels + number_columns}">{notes}</td></tr></tfoot>' if notes else ""
    return "\n".join([*lines, "</tbody>", *([foot] if foot else []), "</table></div></body>", "</html>"]) + "\n"


def _html_cell(cell: Cell, best: bool) -> str:
    text = html.escape(cell.text)
    return (
        (f"<strong>{text}</strong>" if best else text)
        + (f"<sup>{html.escape(cell.reference)}</sup>" if cell.reference else "")
        + (f"<br><small>{html.escape(cell.interval)}</small>" if cell.interval else "")
    )


def _spans(data: TableData) -> list[tuple[str, int]]:
    """The headings over the value columns, with how many columns each covers."""
    return [(group, len(list(columns))) for group, columns in groupby(data.groups[data.labels :])]


_RENDER: dict[str, Callable[[TableData], str]] = {
    "markdown": markdown,
    "csv-wide": wide_csv,
    "latex": latex,
    "html": page,
}
FORMATS = ("markdown", "csv", "csv-wide", "latex", "html")
"""csv has a line a number, as `read_scores_csv` takes it; csv-wide has the table's lines."""

_FORMAT_OF_SUFFIX = {".md": "markdown", ".csv": "csv", ".tex": "latex", ".html": "html", ".htm": "html"}


def write_table(
    scores: Sequence[Score], metrics: Sequence[str], form: str | None = None, path: Path | None = None
) -> None:
    """Write a table of scores to a file, or to the standard output.

    Args:
        scores: of any metrics.
        metrics: which of them; see `table_data`.
        form: one of `FORMATS`; None: as the file's ending says, else Markdown.
        path: None: the standard output.

    Raises:
        InputError: see `table_data`; or the format is unknown, or the file cannot be written.
    """
    form = form or (_FORMAT_OF_SUFFIX.get(path.suffix.lower(), "markdown") if path else "markdown")
    if form not in FORMATS:
        raise InputError(f"format: there is no {form!r}{did_you_mean(form, FORMATS)}")
    # Laid out for the long form too, so that what is wrong with the scores is said in every format.
    data = table_data(scores, metrics)
    text = scores_csv(s for s in scores if s.metric in metrics) if form == "csv" else _RENDER[form](data)
    if path is None:
        print(text, end="")
        return
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); name a file in an existing folder") from error
