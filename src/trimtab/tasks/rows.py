"""Load the rows of a task: JSONL, JSON, Parquet, or a data set that the `datasets` library knows by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.errors import InputError, did_you_mean

FILE_TYPES = (".jsonl", ".json", ".parquet")

NumberedRow = tuple[int | None, dict[str, Any]]
"""A row with its line number, which only JSONL has."""


def load_rows(
    source: str,
    *,
    split: str = "train",
    columns: Mapping[str, str] | None = None,
    required: Sequence[str] = ("prompt",),
    limit: int | None = None,
) -> list[dict[str, Any]]:
    """Load rows as dictionaries from column name to value.

    Args:
        source: A local .jsonl, .json or .parquet file, or the name of a data set (or a local folder) for
            `datasets.load_dataset`; "name:configuration" chooses one of several configurations, as in
            "openai/gsm8k:main".
        split: The split of a named data set. A file has no splits: it is read whole.
        columns: Renames columns: trimtab's name to the source's name, as in ``{"prompt": "question"}``. Other columns
            stay.
        required: Column names, after renaming, that every row must have with a value that is not null.
        limit: Read only the first `limit` rows.

    Returns:
        The rows in the order of the source; never empty.

    Raises:
        InputError: The source is missing, empty or malformed, or a column is missing; names file, line and column.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}: it must be at least 1, or left out to read every row of {source}.")
    path = Path(source).expanduser()
    if path.suffix.lower() in FILE_TYPES:
        if not path.is_file():
            raise InputError(f"{source}: there is no such file.")
        numbered = _read_file(path, limit)
    elif path.is_file():
        raise InputError(f"{source}: this type of file is not supported; use one of {', '.join(FILE_TYPES)}.")
    elif source.startswith(("/", "./", "../", "~")) and not path.is_dir():
        raise InputError(f"{source}: there is no such file or folder.")
    else:
        numbered = [(None, row) for row in _load_named(source, split, limit)]
    if not numbered:
        raise InputError(f"{source} has no rows.")
    return _rename(source, numbered, dict(columns or {}), required)


def _read_file(path: Path, limit: int | None) -> list[NumberedRow]:
    try:
        if path.suffix.lower() == ".parquet":
            return [(None, row) for row in _read_parquet(path, limit)]
        if path.suffix.lower() == ".json" and _is_json_array(path):
            return [(None, row) for row in _read_json_array(path)[:limit]]
        rows: list[NumberedRow] = []
        for numbered in _read_json_lines(path):
            rows.append(numbered)
            if len(rows) == limit:
                break
        return rows
    except OSError as error:
        raise InputError(f"{path}: the file cannot be read ({error.strerror or error}).") from error


def _read_json_lines(path: Path) -> Iterator[NumberedRow]:
    # Binary iteration ends lines at \n only; text mode would be right too, but str.splitlines would cut at U+2028.
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if not raw.strip():
                continue
            row = _parse_json(raw, f"{path}, line {number}")
            if not isinstance(row, dict):
                raise InputError(f"{path}, line {number}: a row must be a JSON object, but this line is {_kind(row)}.")
            yield number, row


def _parse_json(raw: bytes, where: str) -> Any:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: invalid UTF-8 at byte {error.start + 1}; save the file as UTF-8.") from error
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():
            # A lone surrogate escape passes the JSON parser and would stop the tokenizer hours later.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not valid JSON ({error.msg} at column {error.colno}).") from error
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: a \\ud... escape is half of a surrogate pair, which is no character.") from error
    except (RecursionError, ValueError) as error:
        raise InputError(f"{where}: not usable JSON ({error}).") from error
    return value


def _is_json_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _read_json_array(path: Path) -> list[dict[str, Any]]:
    rows = _parse_json(path.read_bytes().removeprefix(b"\xef\xbb\xbf"), str(path))
    for index, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise InputError(f"{path}, row {index}: a row must be a JSON object, but this one is {_kind(row)}.")
    return list(rows)


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _read_parquet(path: Path, limit: int | None) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
        return list(table.slice(0, limit).to_pylist())
    except (pyarrow.ArrowException, ValueError) as error:
        raise InputError(f"{path}: not a readable Parquet file ({_first_line(error)}).") from error


def _load_named(source: str, split: str, limit: int | None) -> list[dict[str, Any]]:
    import datasets

    name, _, configuration = source.partition(":")
    try:
        loaded = datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:  # The library raises a dozen kinds: offline, unknown name, configuration or split.
        raise InputError(
            f"the data set {source!r} (split {split!r}) cannot be loaded "
            f"({type(error).__name__}: {_first_line(error)}); "
            "without network access a local JSONL or Parquet file with the same columns is enough."
        ) from error
    count = len(loaded) if limit is None else min(limit, len(loaded))
    return [dict(loaded[index]) for index in range(count)]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0].strip().rstrip(".")


def _rename(
    source: str, numbered: list[NumberedRow], columns: dict[str, str], required: Sequence[str]
) -> list[dict[str, Any]]:
    present = list(dict.fromkeys(name for _, row in numbered for name in row))
    needed = {columns.get(name, name): name for name in required}
    for original in dict.fromkeys([*columns.values(), *needed]):
        if original not in present:
            raise InputError(f"{source}: {_missing(original, present)}")
    renamed_away = set(columns.values())
    rows = []
    for index, (line, row) in enumerate(numbered, start=1):
        where = f"{source}, row {index}" if line is None else f"{source}, line {line}"
        for original in dict.fromkeys([*columns.values(), *needed]):
            if original not in row:
                raise InputError(f"{where}: {_missing(original, list(row))}")
            if original in needed and row[original] is None:
                raise InputError(f"{where}: the column {original!r} is null; give it a value or remove the row.")
        kept = {name: value for name, value in row.items() if name not in renamed_away}
        rows.append({**kept, **{name: row[original] for name, original in columns.items()}})
    return rows


def _missing(column: str, present: Iterable[str]) -> str:
    names = list(present)
    there = ", ".join(repr(name) for name in names) or "none"
    return f"the column {column!r} is missing (columns there are: {there}){did_you_mean(column, names)}"
