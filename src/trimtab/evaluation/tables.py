"""Scores laid out as the GTPO paper's Table 1: rows are model x training set x method, columns data set x metric@k.

`TableData` has no format; table_formats.py and the report give it one.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from trimtab.errors import InputError, did_you_mean
from trimtab.evaluation.scores import HERE, SHARES, Score

METRICS = {
    "pass": "pass",
    "first": "first",
    "maj": "maj",
    "maj_first": "maj first",
    "mean": "accuracy",
    "format": "format",
    "truncated": "truncated",
    "entropy": "entropy (nats)",
    "tokens": "tokens",
}
"""What a column of each metric is called; one with k reads "pass@8"."""

MISSING = "–"
BEST_FIRST = frozenset({"pass", "first", "maj", "maj_first", "mean", "format"})
"""Metrics of which the highest value is the best; the others have no best."""

_PAPER_DATA = ("AIME 2024", "AIME 2025", "AMC 2023")
_BASELINES = ("sft", "grpo")


@dataclass(frozen=True)
class Cell:
    """One place of a table.

    Attributes:
        text: a value or a label; `MISSING` where there is none.
        interval: "[47.0, 59.5]"; "n/a" where a value measured here has none; else "".
        reference: letter of a footnote, or "".
    """

    text: str
    interval: str = ""
    reference: str = ""

    def __str__(self) -> str:
        reference = f"[{self.reference}]" if self.reference else ""
        return " ".join(part for part in (self.text, self.interval, reference) if part)


@dataclass(frozen=True)
class TableData:
    """A table without a format.

    Attributes:
        columns: heading of each column ("pass@8").
        groups: what stands over it, the data set; "" over the columns that name the row, which come first.
        rows: a cell for each column.
        marks: (row, column) of the best values.
        caption: of the table.
        notes: footnotes, each after its letter in brackets, then what else a reader must know.
        breaks: rows at which a new model or training set begins, the first row apart.
    """

    columns: tuple[str, ...]
    groups: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    marks: frozenset[tuple[int, int]]
    caption: str
    notes: tuple[str, ...] = ()
    breaks: frozenset[int] = frozenset()

    @property
    def labels(self) -> int:
        """How many columns name the row."""
        return self.groups.count("")

    @property
    def headings(self) -> tuple[str, ...]:
        """Each column's heading after its group's, for a format with a single line of headings."""
        return tuple(f"{group} {column}".strip() for group, column in zip(self.groups, self.columns, strict=True))


@dataclass(frozen=True)
class _Row:
    model: str
    training: str
    method: str
    source: str


_Place = tuple[str, str, int | None]
_Grid = dict[_Row, dict[_Place, Score]]


def table_data(
    scores: Sequence[Score], metrics: Sequence[str] = ("pass", "maj"), *, caption: str = "", digits: int = 1
) -> TableData:
    """Lay scores out.

    Columns: the paper's data sets first, others as they come; within one the metrics as asked for, k ascending.
    Rows: models and training sets as they come, but first the untrained model; methods as they come, but first SFT and
    GRPO; below a row the same one from other sources.
    Marks: the best value of a column among the rows of one source, model and training set, to which the untrained model
    counts too. Values that read alike are equal. Where nothing is compared nothing is marked.

    Args:
        scores: of any models, data sets and k; those of other metrics are left out.
        metrics: keys of `METRICS`.
        caption: of the table; by default it names the metrics.
        digits: decimals of shares, which are shown in percent, and of tokens; the entropy has two more.

    Raises:
        InputError: an unknown metric, no score of these metrics, or two values for one place.
    """
    for metric in metrics:
        if metric not in METRICS:
            raise InputError(f"metric: there is no {metric!r}{did_you_mean(metric, METRICS)}")
    grid = _grid(scores, metrics)
    places = _places(grid, metrics)
    named, footnotes = _label_cells(grid)
    best = list(_best(grid, places, digits))
    rows = tuple((*named[row], *(_cell(grid[row].get(place), digits) for place in places)) for row in grid)
    label_columns = ("model", "training", "method", *(["source"] if _several_sources(grid) else []), "seeds")
    names = dict.fromkeys(METRICS[metric] + ("" if k is None else "@k") for _, metric, k in places)
    title = f"{_listed(list(names))} by data set"
    return TableData(
        columns=(*label_columns, *(_column(metric, k) for _, metric, k in places)),
        groups=(*("" for _ in label_columns), *(data for data, _, _ in places)),
        rows=rows,
        marks=frozenset((row, len(label_columns) + place) for row, place in best),
        caption=caption or title + ("; shares in percent" if any(metric in SHARES for _, metric, _ in places) else ""),
        notes=(
            *(f"[{letter}] {text}" for text, letter in footnotes.items()),
            *_remarks(grid),
            *(
                ["bold: best of a model and training set, the untrained model included, within one source"]
                if best
                else []
            ),
        ),
        breaks=_breaks(list(grid)),
    )


def _grid(scores: Sequence[Score], metrics: Sequence[str]) -> _Grid:
    """The scores by row and place, rows in their order."""
    grid: _Grid = {}
    for score in scores:
        if score.metric not in metrics:
            continue
        row = _Row(score.model, score.training, score.method, score.source)
        place = (score.data, score.metric, score.k)
        if place in grid.setdefault(row, {}):
            name = " ".join(part for part in (score.model, score.training, score.method) if part)
            raise InputError(
                f"{name} has two values of {_column(score.metric, score.k)} on {score.data}; leave one out, or give "
                "one a method name of its own"
            )
        grid[row][place] = score
    if not grid:
        there = ", ".join(dict.fromkeys(score.metric for score in scores)) or "none at all"
        raise InputError(f"metric: there are no scores of {', '.join(metrics)} (there are: {there})")
    models, trainings, methods, sources = (
        _ranks(getattr(row, name) for row in grid) for name in ("model", "training", "method", "source")
    )

    def order(row: _Row) -> tuple[int, ...]:
        method = _plain(row.method)
        baseline = next((n for n, name in enumerate(_BASELINES) if method.startswith(name)), len(_BASELINES))
        return (
            models[_plain(row.model)],
            trainings[_plain(row.training)] if row.training else -1,
            baseline if row.method else -1,
            methods[method],
            sources[_plain(row.source)],
        )

    return {row: grid[row] for row in sorted(grid, key=order)}


def _plain(name: str) -> str:
    """A name by which "Qwen 2.5 3B" and "Qwen2.5-3B" are the same."""
    return "".join(character for character in name.casefold() if character.isalnum())


def _ranks(names: Iterable[str]) -> dict[str, int]:
    """The place of each name in the order in which they come."""
    return {name: rank for rank, name in enumerate(dict.fromkeys(map(_plain, names)))}


def _places(grid: _Grid, metrics: Sequence[str]) -> list[_Place]:
    found = dict.fromkeys(place for row in grid.values() for place in row)
    data = list(dict.fromkeys((*_PAPER_DATA, *(title for title, _, _ in found))))
    return sorted(found, key=lambda place: (data.index(place[0]), metrics.index(place[1]), place[2] or 0))


def _column(metric: str, k: int | None) -> str:
    return METRICS[metric] if k is None else f"{METRICS[metric]}@{k}"


def _several_sources(grid: _Grid) -> bool:
    return len({row.source for row in grid}) > 1


def _label_cells(grid: _Grid) -> tuple[dict[_Row, tuple[Cell, ...]], dict[str, str]]:
    """The cells that name each row, and the footnotes they refer to: text to letter."""
    footnotes: dict[str, str] = {}

    def letter(text: str) -> str:
        if text and text not in footnotes:
            times, place = divmod(len(footnotes), len(string.ascii_lowercase))
            footnotes[text] = string.ascii_lowercase[place] * (times + 1)
        return footnotes.get(text, "")

    cells: dict[_Row, tuple[Cell, ...]] = {}
    for row, scores in grid.items():
        note = "; ".join(dict.fromkeys(score.note for score in scores.values() if score.note))
        seeds = sorted({score.seeds for score in scores.values()})
        method = Cell(row.method or MISSING, reference=letter(note))
        cells[row] = (
            Cell(row.model or MISSING),
            Cell(row.training or MISSING),
            method,
            *([_source_cell(row.source, letter)] if _several_sources(grid) else []),
            Cell(f"{seeds[0]}–{seeds[-1]}" if len(seeds) > 1 else str(seeds[0])),
        )
    return cells, footnotes


def _source_cell(source: str, letter: Callable[[str], str]) -> Cell:
    if source.startswith("arXiv"):
        return Cell("paper", reference=letter(source))
    return Cell(source or MISSING)


def _cell(score: Score | None, digits: int) -> Cell:
    if score is None:
        return Cell(MISSING)
    if score.low is None or score.high is None:
        return Cell(_number(score, score.value, digits), "n/a" if score.source == HERE else "")
    low, high = (_number(score, limit, digits) for limit in (score.low, score.high))
    return Cell(_number(score, score.value, digits), f"[{low}, {high}]")


def _number(score: Score, value: float, digits: int) -> str:
    if score.metric in SHARES:
        return f"{100 * value:.{digits}f}"
    return f"{value:.{digits + 2 if score.metric == 'entropy' else digits}f}"


def _best(grid: _Grid, places: Sequence[_Place], digits: int) -> Iterator[tuple[int, int]]:
    """(row, place) of the best values."""
    rows = list(grid)
    for number, row in enumerate(rows):
        rivals = [
            other
            for other in rows
            if (other.source, _plain(other.model)) == (row.source, _plain(row.model))
            and (not row.training or _plain(other.training) in ("", _plain(row.training)))
        ]
        for column, place in enumerate(places):
            values = [grid[rival][place] for rival in rivals if place in grid[rival]]
            if place[1] not in BEST_FIRST or place not in grid[row] or len(values) < 2:
                continue
            best = max(values, key=lambda score: score.value)
            own = grid[row][place]
            if _number(own, own.value, digits) == _number(best, best.value, digits):
                yield number, column


def _breaks(rows: Sequence[_Row]) -> frozenset[int]:
    groups = [(_plain(row.model), _plain(row.training)) for row in rows]
    return frozenset(number for number in range(1, len(rows)) if groups[number] != groups[number - 1])


def _remarks(grid: _Grid) -> Iterator[str]:
    if not _several_sources(grid) and (source := next(iter(grid)).source) not in ("", HERE):
        yield f"source: {source}"
    scores = [score for row in grid.values() for score in row.values()]
    for rows, several in (("one seed", False), ("several seeds", True)):
        found = [score for score in scores if score.low is not None and (score.seeds > 1) == several]
        if found:
            yield f"[low, high], {rows}: " + "; ".join(dict.fromkeys(score.interval or "interval" for score in found))
    if any(score.low is None and score.source == HERE for score in scores):
        yield "n/a: no interval; one seed has none over seeds, nor have seeds of equal value"


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
