"""Files that are whole or absent, and JSON lines that survive a torn end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trimtab.errors import InputError


def sync(path: Path) -> None:
    """Force a file's or a folder's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Write a whole file or leave the old one.

    Raises:
        OSError: the file cannot be written; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        sync(temporary)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def held_alone(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to a folder; it is free again when this one ends, however it ends.

    Raises:
        InputError: another process holds it, or it cannot be written.
    """
    try:
        import fcntl
    except ImportError:  # Not a POSIX system.
        yield
        return
    try:
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror}); name another folder") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{folder}: another process writes to it; wait for it, or name another folder") from None
        except OSError:  # A file system without locks.
            pass
        yield


def append_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Add JSON lines to a file in one write."""
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    # Half of a surrogate pair, which a server may send, is no UTF-8.
    with path.open("ab") as file:
        file.write(text.encode("utf-8", "replace"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file that may not be there yet or still be written: a last line without its end is left out.

    Raises:
        ValueError: a whole line is no JSON object; the message has its number.
    """
    lines: list[dict[str, Any]] = []
    if not path.exists():
        return lines
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.endswith(b"\n"):
                break
            try:
                line = json.loads(raw)
            except ValueError as error:
                raise ValueError(f"line {number} is not valid JSON ({error})") from None
            if not isinstance(line, dict):
                raise ValueError(f"line {number} is not a JSON object")
            lines.append(line)
    return lines
