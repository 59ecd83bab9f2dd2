"""What runs in the confined process: the code, then one test. Nothing here is out of the code's reach."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from trimtab.tasks._sandbox.isolation import confine
from trimtab.tasks._sandbox.values import encode

CONTROL = 3
"""The descriptor of the pipe to the supervisor."""


def run_child(request: dict[str, Any], test: dict[str, Any], place: dict[str, Any], secret: str) -> NoReturn:
    """Confine this process, run the code and the test, and end. Descriptors 0 to 3 must be in place already."""
    status = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        confine(place, request["limits"])
        os.environ.clear()
        sys.argv = ["solution.py"]
        status = _run_program(request) if test["kind"] == "io" else _run_asserts(request, test["source"], secret)
    except BaseException:
        sys.__excepthook__(*sys.exc_info())
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def _run_program(request: dict[str, Any]) -> int:
    """Run the code as a program would run; the exit status."""
    try:
        _load(request, "__main__")
    except SystemExit as leaving:
        if leaving.code is not None and not isinstance(leaving.code, int):
            sys.stderr.write(f"{leaving.code}\n")
        return int(leaving.code) if isinstance(leaving.code, int) else int(leaving.code is not None)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    return 0


def _run_asserts(request: dict[str, Any], source: str, secret: str) -> int:
    # Bound here, so that code which replaces a module's function does not change what this one does.
    send, encoded, execute = _sender(), encode, exec
    failure = ""
    try:
        names = _load(request, "solution")
        names["__equal__"] = lambda number, value: send(["value", number, encoded(value)])
        execute(compile(source, "<test>", "exec"), names)
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"[:500]
        sys.__excepthook__(*sys.exc_info())
    sys.stdout.flush()
    send(["end", secret, failure])
    return 0


def _load(request: dict[str, Any], name: str) -> dict[str, Any]:
    """Run setup and code as a module of that name; its namespace."""
    module = type(sys)(name)
    sys.modules[name] = module
    for part in ("setup", "code"):
        exec(compile(request[part], f"<{part}>", "exec"), module.__dict__)
    return module.__dict__


def _sender() -> Callable[[list[Any]], None]:
    write, dumps = os.write, json.dumps

    def send(message: list[Any]) -> None:
        left = dumps(message).encode() + b"\n"
        while left:
            left = left[write(CONTROL, left) :]

    return send
