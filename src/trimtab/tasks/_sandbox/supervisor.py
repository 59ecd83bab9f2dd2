"""The process that watches the code: it starts one confined process a test, and reports what it saw.

It reads one JSON request from standard input and writes one JSON list to standard output. It never learns the right
answers: those stay with the process that started it. Exit code `NO_ISOLATION`: the kernel does not allow the mode.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from typing import Any, NoReturn

from trimtab.tasks._sandbox.child import CONTROL, run_child
from trimtab.tasks._sandbox.isolation import NO_ISOLATION, die_with_parent, isolate

TAIL_BYTES = 4096
CONTROL_BYTES = 1 << 20
POLL_SECONDS = 0.05


def main() -> NoReturn:
    """Serve the request and end."""
    with open(0, "rb", closefd=False) as stream:
        request = json.load(stream)
    _volunteer_for_the_memory_killer()
    try:
        place = isolate(request["mode"], request["folder"], request["limits"])
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(NO_ISOLATION)
    if request["mode"] != "plain":
        # The next child is the first process of its namespace: with it, the kernel kills every other one in there.
        first = os.fork()
        if first:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
        die_with_parent()
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        report = _run_all(request, place)
    finally:
        _kill_everything()
    with open(1, "w", encoding="utf-8", closefd=False) as stream:
        json.dump(report, stream)
    os._exit(0)


def _run_all(request: dict[str, Any], place: dict[str, Any]) -> list[dict[str, Any]]:
    deadline = time.monotonic() + request["limits"]["seconds"]
    report: list[dict[str, Any]] = []
    for test in request["tests"]:
        if time.monotonic() >= deadline:
            report.append({"ended": "not run: time limit", "values": [], "stdout": "", "stderr": ""})
        else:
            report.append(_run_one(request, test, place, deadline))
            _empty((place["root"] or "") + place["work"])
    return report


def _empty(folder: str) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            import shutil  # Rarely needed, and slow to import.

            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)


def _run_one(request: dict[str, Any], test: dict[str, Any], place: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Run one test; "ended" is empty when it went through to its end."""
    secret = os.urandom(16).hex()
    (out, out_end), (err, err_end), (control, control_end) = os.pipe(), os.pipe(), os.pipe()
    entry = _input_file(test.get("input"))
    ends = (entry, out_end, err_end, control_end)
    child = os.fork()
    if child == 0:
        # Lifted first, so that no descriptor is overwritten before it is in its place.
        for target, descriptor in enumerate([os.dup(_lift(end)) for end in ends]):
            os.dup2(descriptor, target, inheritable=False)
        os.closerange(CONTROL + 1, os.sysconf("SC_OPEN_MAX"))
        run_child(request, test, place, secret)
    for descriptor in ends:
        os.close(descriptor)
    seen = {out: bytearray(), err: bytearray(), control: bytearray()}
    bounds = {out: request["limits"]["output_bytes"], err: request["limits"]["output_bytes"], control: CONTROL_BYTES}
    try:
        ended = _watch(child, seen, bounds, control, deadline, request["limits"]["memory_bytes"])
    finally:
        _kill_everything()
        for descriptor in seen:
            os.close(descriptor)
    values, failure = _read_control(bytes(seen[control]), secret)
    if not ended and test["kind"] != "io":
        ended = "ended before the test did" if failure is None else failure
    stdout = seen[out] if test["kind"] == "io" else seen[out][-TAIL_BYTES:]
    return {"ended": ended, "values": values, "stdout": _text(stdout), "stderr": _text(seen[err][-TAIL_BYTES:])}


def _watch(
    child: int, seen: dict[int, bytearray], bounds: dict[int, int], control: int, deadline: float, memory_bytes: int
) -> str:
    """Read what the child says until it has ended, said its last word, or passed a limit; how it ended, if badly."""
    open_ends = set(seen)
    status: int | None = None
    next_poll = time.monotonic() + POLL_SECONDS
    while True:
        if status is None:
            process, raw = os.waitpid(child, os.WNOHANG)
            status = raw if process else None
        wait = min(POLL_SECONDS if open_ends else 0.002, deadline - time.monotonic()) if status is None else 0.0
        ready = select.select(open_ends, [], [], max(0.0, wait))[0]
        for descriptor in ready:
            chunk = os.read(descriptor, 1 << 16)
            seen[descriptor] += chunk
            if not chunk:
                open_ends.discard(descriptor)
            if len(seen[descriptor]) > bounds[descriptor]:
                return "output limit"
        if seen[control].endswith(b"\n") and seen[control][:-1].rpartition(b"\n")[2].startswith(b'["end"'):
            return ""
        if status is not None and not ready:  # Ended, and what it left in the pipes is read.
            return _describe(os.waitstatus_to_exitcode(status))
        now = time.monotonic()
        if now >= deadline:
            return "time limit"
        if now >= next_poll:
            if sum(_descendants().values()) > memory_bytes:
                return "memory limit"
            # On a machine with many processes a look costs more.
            next_poll = now + max(POLL_SECONDS, 10 * (time.monotonic() - now))


def _describe(code: int) -> str:
    if code == -signal.SIGXCPU:
        return "time limit"
    return "" if code == 0 else f"exit code {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"


def _read_control(raw: bytes, secret: str) -> tuple[list[list[Any]], str | None]:
    """The values [comparison's number, text] and the last word: what failed, or None when it never came."""
    values: list[list[Any]] = []
    for line in raw.splitlines():
        try:
            message = json.loads(line)
            if message[0] == "end":
                return values, str(message[2]) if message[1] == secret else None
            values.append([int(message[1]), str(message[2])])
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            return values, None  # The code wrote into the pipe.
    return values, None


def _kill_everything() -> None:
    """Kill and reap all descendants, however far they have gone."""
    while True:
        try:
            if os.getpid() == 1:
                os.kill(-1, signal.SIGKILL)
            else:
                for process in _descendants():
                    os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _descendants() -> dict[int, int]:
    """Process ids, as the visible /proc numbers them, and resident bytes of all processes below this one."""
    parents: dict[int, tuple[int, int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        parents[int(name)] = int(fields[1]), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    # Not os.getpid(): inside a PID namespace this process has another number in the machine's /proc.
    found = {int(os.readlink("/proc/self"))}
    below: dict[int, int] = {}
    while fresh := {process for process, (parent, _) in parents.items() if parent in found} - found:
        found |= fresh
        below |= {process: parents[process][1] for process in fresh}
    return below


def _volunteer_for_the_memory_killer() -> None:
    """Where the machine's memory ends first, the kernel shall take the code before the training run."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")
    except OSError:
        pass


def _input_file(text: str | None) -> int:
    if text is None:
        return os.open(os.devnull, os.O_RDONLY)
    descriptor = os.memfd_create("stdin")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(text.encode("utf-8", "surrogatepass"))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _lift(descriptor: int) -> int:
    while descriptor <= CONTROL:
        descriptor = os.dup(descriptor)
    return descriptor


def _text(raw: bytes | bytearray) -> str:
    return raw.decode("utf-8", "replace")
