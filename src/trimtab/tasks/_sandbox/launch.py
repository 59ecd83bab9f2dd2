"""Start the sandbox's supervisor, in the strictest mode that this machine allows."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.errors import InputError
from trimtab.tasks._sandbox.isolation import NO_ISOLATION

logger = logging.getLogger("trimtab")

_BOOTSTRAP = (
    "import sys; sys.path.insert(0, sys.argv[1]); from trimtab.tasks._sandbox.supervisor import main; "
    "del sys.path[0]; main()"
)
_PACKAGES = str(Path(__file__).parents[3])
_GRACE_SECONDS = 10.0
_PROBE_SECONDS = 30.0


@dataclass(frozen=True)
class Limits:
    """What the tests of one completion may use.

    Attributes:
        seconds: Wall-clock time of all tests together, and CPU time of one process (a second more).
        memory_bytes: Address space of one process, and resident memory of all together (looked at 20 times a second).
        processes: Processes and threads at one time.
        file_bytes: Size of one file.
        disk_bytes: All files in the working folder; it binds with namespaces only.
        open_files: Open files of one process.
        output_bytes: Standard output and standard error, each, of one test.
    """

    seconds: float = 6.0
    memory_bytes: int = 1 << 30
    processes: int = 16
    file_bytes: int = 16 << 20
    disk_bytes: int = 64 << 20
    open_files: int = 64
    output_bytes: int = 256 << 10

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise InputError(f"Limits: {name} is {value!r}, but it must be more than 0.")


@dataclass(frozen=True)
class Observation:
    """What was seen of one test.

    Attributes:
        ended: How the test ended when it did not go through to its end; else empty.
        values: Of each comparison, in order: its number and the value as text (`values.encode`).
        stdout: Standard output; of a test with asserts the end of it.
        stderr: The end of standard error.
    """

    ended: str
    values: Sequence[tuple[int, str]] = ()
    stdout: str = ""
    stderr: str = ""


class NotAllowed(Exception):
    """The machine does not allow this mode; the message says why."""


def observe(
    code: str, tests: Sequence[Mapping[str, str]], *, setup: str, limits: Limits, mode: str | None = None
) -> list[Observation]:
    """Run tests against code.

    Args:
        code: A module's or a program's source.
        tests: ``{"kind": "assert", "source": ...}`` runs after the code in the same process, in which
            ``__equal__(number, value)`` reports a value; ``{"kind": "io", "input": ...}`` runs the code as a program.
        setup: Source that runs before the code.
        limits: For all tests together.
        mode: As `isolation.isolate` has it; by default the one that `isolation_mode` found.

    Returns:
        One observation a test. A supervisor that dies costs all tests.

    Raises:
        InputError: This is not Linux, or root cannot run code as another user here.
        NotAllowed: The mode was named and is not allowed.
    """
    mode = isolation_mode() if mode is None else mode
    folder = tempfile.mkdtemp(prefix="trimtab-code-")
    try:
        request = {"mode": mode, "folder": folder, "setup": setup, "code": code, "tests": list(tests)}
        return _supervise(request | {"limits": asdict(limits)}, limits)
    finally:
        _remove(folder)


def _supervise(request: dict[str, Any], limits: Limits) -> list[Observation]:
    # A constant hash seed, since the order of a set must not change a reward.
    environment = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
    if "LD_LIBRARY_PATH" in os.environ:  # The interpreter itself may need it.
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    process = subprocess.Popen(
        [sys.executable, "-s", "-S", "-P", "-B", "-c", _BOOTSTRAP, _PACKAGES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        env=environment,
        start_new_session=True,
    )
    try:
        # ASCII, so that a lone surrogate in a completion stays what it is.
        output, errors = process.communicate(
            json.dumps(request).encode("ascii"), timeout=limits.seconds + _GRACE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return [Observation("the sandbox did not answer")] * len(request["tests"])
    finally:
        _end(process)
    if process.returncode == NO_ISOLATION:
        raise NotAllowed(errors.decode("utf-8", "replace").strip())
    try:
        return [
            Observation(
                seen["ended"], [(number, text) for number, text in seen["values"]], seen["stdout"], seen["stderr"]
            )
            for seen in json.loads(output)
        ]
    except ValueError:
        ended = f"the sandbox ended with exit code {process.returncode}"
        return [Observation(ended, stderr=errors[-4096:].decode("utf-8", "replace"))] * len(request["tests"])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a supervisor that still runs: it takes its descendants along when it is asked, or else the kernel does."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _remove(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.isdir(folder):  # The code took its own rights to a folder away.
        os.chmod(folder, 0o700)
        for path, names, _ in os.walk(folder):
            for inner in (os.path.join(path, name) for name in names):
                if not os.path.islink(inner):
                    os.chmod(inner, 0o700)
        shutil.rmtree(folder, ignore_errors=True)


_lock = threading.Lock()
_mode: str | None = None

_PLAIN_AS_ROOT = (
    "the kernel allows no namespaces here, so the code of completions runs as another user and under limits, but it "
    "can use the network and read what every user may read."
)
_PLAIN_AS_USER = (
    "the kernel allows no namespaces here, so the code of completions runs under limits but with your own rights: it "
    "can use the network, and read, delete or signal whatever you can. Better run this in a container."
)


def isolation_mode() -> str:
    """The strictest mode that works here, found by running a test in each once a process: "root", "user" or "plain".

    A mode without namespaces is said once, as a warning.

    Raises:
        InputError: This is not Linux, or root cannot run code as another user here.
    """
    global _mode
    with _lock:
        if _mode is None:
            _mode = _find_mode()
        return _mode


def _find_mode() -> str:
    if not sys.platform.startswith("linux"):
        raise InputError("the code of completions can be run on Linux only; run it there, or in a container.")
    reason = ""
    for mode in ("root", "user", "plain"):
        if mode == "root" and os.geteuid() != 0:
            continue
        reason = try_mode(mode)
        if not reason:
            if mode == "plain":
                logger.warning(_PLAIN_AS_ROOT if os.geteuid() == 0 else _PLAIN_AS_USER)
            return mode
    raise InputError(
        f"the code of completions cannot be run as another user: {reason}. Use a Python that every user may read "
        f"(this one is {sys.base_prefix}), or allow namespaces."
    )


def try_mode(mode: str) -> str:
    """Why a mode does not work here; empty when it does."""
    # A module that nothing has loaded yet: the files of the standard library must be readable.
    test = {"kind": "assert", "source": "import colorsys"}
    try:
        seen = observe("", [test], setup="", limits=replace(Limits(), seconds=_PROBE_SECONDS), mode=mode)[0]
    except NotAllowed as error:
        return str(error)
    return " ".join(seen.ended.split())
