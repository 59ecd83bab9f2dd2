"""The parent's handle on the verification worker: started lazily, killed at the time limit, never left behind."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from typing import Any

START_LIMIT_SECONDS = 120.0

# The child gets this process's own search path, so that it finds the same packages however this process found them.
_BOOTSTRAP = "import sys; sys.path[:] = sys.argv[1:]; from trimtab.tasks._verify_worker import main; main()"


class WorkerDied(Exception):
    """The worker ended, or passed the time limit and was killed.

    Attributes:
        timed_out: Whether the limit was the cause.
    """

    def __init__(self, timed_out: bool) -> None:
        super().__init__("time limit" if timed_out else "ended")
        self.timed_out = timed_out


class VerifyProcess:
    """One worker process with its pipes. Not thread-safe by itself: `judge` holds the lock."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, *(entry or os.getcwd() for entry in sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        # A reader thread, because a pipe cannot be waited for with a limit on every platform.
        threading.Thread(target=self._read, name="trimtab-verify-reader", daemon=True).start()
        try:
            reply = self.receive(time.monotonic() + START_LIMIT_SECONDS)
        except WorkerDied as error:
            self.kill()
            raise RuntimeError(f"the answer verification process did not start ({error})") from None
        except BaseException:
            self.kill()
            raise
        if "error" in reply:
            self.kill()
            raise RuntimeError(f"the answer verification process cannot start: {reply['error']}")

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(OSError, ValueError), self.process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

    def send(self, request: dict[str, Any]) -> None:
        """Write one request. Raises WorkerDied when the process has gone."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except OSError:
            raise WorkerDied(timed_out=False) from None

    def receive(self, deadline: float) -> dict[str, Any]:
        """Read one reply before `deadline` (`time.monotonic()` seconds). Raises WorkerDied."""
        try:
            line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise WorkerDied(timed_out=True) from None
        if line is None or not line.endswith("\n"):
            raise WorkerDied(timed_out=False)
        reply: dict[str, Any] = json.loads(line)
        return reply

    def kill(self) -> None:
        """End the process at once and reap it."""
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()


_lock = threading.Lock()
_worker: VerifyProcess | None = None
_inherited: list[VerifyProcess] = []


def judge(gold: str, prediction: str, time_limit: float) -> bool | None:
    """Compare two answers in the worker.

    Args:
        gold: The gold answer, as text.
        prediction: The extracted answer, as text.
        time_limit: Seconds from the moment a running worker gets the request.

    Returns:
        The verdict; None when the gold cannot be parsed (or not within the limit); False when the prediction cannot
        be, or when it costs the worker its life.
    """
    global _worker
    request = {"gold": gold, "prediction": prediction, "limit": time_limit}
    with _lock:
        for last_try in (False, True):
            if _worker is None or not _worker.alive():
                stop_locked()
                _worker = VerifyProcess()
            gold_parsed: bool | None = None
            try:
                deadline = time.monotonic() + time_limit
                _worker.send(request)
                gold_parsed = _worker.receive(deadline)["gold"]
                equal = bool(_worker.receive(deadline)["equal"])
                return equal if gold_parsed else None
            except WorkerDied as death:
                stop_locked()
                if gold_parsed is None and not death.timed_out and not last_try:
                    continue  # It had been killed from outside while idle: this answer is not to blame.
                return False if gold_parsed else None
            except BaseException:
                # An interrupt here leaves a reply unread, which the next answer would take for its own.
                stop_locked()
                raise
    raise AssertionError("unreachable")


def stop_locked() -> None:
    """Kill the worker; the caller holds the lock."""
    global _worker
    worker, _worker = _worker, None
    if worker is not None:
        worker.kill()


def shutdown() -> None:
    """Kill the worker if there is one; the next verification starts another. Runs at exit."""
    # Without the lock: at exit a daemon thread may hold it for ever.
    stop_locked()


def _forget_after_fork() -> None:
    # The worker belongs to the parent: a forked child must neither share its pipe nor inherit a lock that is held.
    global _lock, _worker
    if _worker is not None:
        _inherited.append(_worker)  # Kept from the garbage collector, which would wait for another process's child.
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (_worker.process.stdin, _worker.process.stdout):
            if stream is not None:
                os.dup2(null, stream.fileno())  # Else the worker would outlive its parent as long as this child runs.
        os.close(null)
    _lock = threading.Lock()
    _worker = None


atexit.register(shutdown)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
