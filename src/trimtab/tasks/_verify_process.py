"""A pool of verification workers: started when needed, killed at the time limit, never left behind."""

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
MAX_WORKERS = 8

# The child gets this process's own search path, so that it finds the same packages however this process found them.
_BOOTSTRAP = "import sys; sys.path[:] = sys.argv[1:]; from trimtab.tasks._verify_worker import main; main()"


def pool_size() -> int:
    """How many workers may run at once: the cores this process may use, at most MAX_WORKERS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_WORKERS)


class WorkerDied(Exception):
    """The worker ended, or passed the time limit and was killed.

    Attributes:
        timed_out: Whether the limit was the cause.
    """

    def __init__(self, timed_out: bool) -> None:
        super().__init__("time limit" if timed_out else "ended")
        self.timed_out = timed_out


class VerifyProcess:
    """One worker process with its pipes. Not thread-safe by itself: the pool lends it to one caller at a time."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, *(entry or os.getcwd() for entry in sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        _running.add(self)
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
        _running.discard(self)
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()


class WorkerPool:
    """Up to `size` workers, each started when a caller finds none idle. Safe to use from any thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._idle: list[VerifyProcess] = []
        self._busy = 0
        self._changed = threading.Condition()
        self._closed = False

    def borrow(self) -> VerifyProcess | None:
        """An idle worker that is alive; None when the caller may start one. Waits while all are busy."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._busy < self.size)
            if self._closed:
                raise RuntimeError("the answer verification has been shut down: the program is ending")
            self._busy += 1
            # The one used last: with a single caller it is always the same, which knows the golds already.
            return self._idle.pop() if self._idle else None

    def give_back(self, worker: VerifyProcess | None) -> None:
        """End a loan; None when the worker has died."""
        with self._changed:
            self._busy -= 1
            if worker is not None:
                self._idle.append(worker)
            self._changed.notify()

    def close(self) -> None:
        """Lend nothing any more: callers that wait or come later get RuntimeError."""
        # Without the lock: at exit a daemon thread may hold it for ever.
        self._closed = True


_pool = WorkerPool(pool_size())
# Every process that runs, lent or idle, so that none can be left behind.
_running: set[VerifyProcess] = set()
_inherited: list[VerifyProcess] = []


def judge(gold: str, prediction: str, time_limit: float) -> bool | None:
    """Compare two answers in a worker.

    Args:
        gold: The gold answer, as `canonical_latex` writes it.
        prediction: The extracted answer, likewise.
        time_limit: Seconds from the moment a running worker gets the request.

    Returns:
        The verdict; None when the gold cannot be parsed (or not within the limit); False when the prediction cannot
        be, or when it costs the worker its life.
    """
    request = {"gold": gold, "prediction": prediction, "limit": time_limit}
    pool = _pool
    worker = pool.borrow()
    try:
        for last_try in (False, True):
            if worker is None or not worker.alive():
                worker = _replace(worker)
            gold_parsed: bool | None = None
            try:
                deadline = time.monotonic() + time_limit
                worker.send(request)
                gold_parsed = worker.receive(deadline)["gold"]
                equal = bool(worker.receive(deadline)["equal"])
                return equal if gold_parsed else None
            except WorkerDied as death:
                worker.kill()
                if gold_parsed is None and not death.timed_out and not last_try:
                    continue  # It had been killed from outside while idle: this answer is not to blame.
                return False if gold_parsed else None
    except BaseException:
        # An interrupt leaves a reply unread, which the next answer would take for its own.
        if worker is not None:
            worker.kill()
        raise
    finally:
        pool.give_back(worker if worker is not None and worker.alive() else None)
    raise AssertionError("unreachable")


def _replace(dead: VerifyProcess | None) -> VerifyProcess:
    if dead is not None:
        dead.kill()
    return VerifyProcess()


def shutdown() -> None:
    """Kill all workers; the next verification starts new ones."""
    for worker in list(_running):
        worker.kill()


def _exit() -> None:
    _pool.close()  # Else a thread that still waits for a verdict would start another worker.
    shutdown()


def _forget_after_fork() -> None:
    # The workers belong to the parent: a forked child must neither share their pipes nor inherit a lock that is held.
    global _pool
    null = os.open(os.devnull, os.O_RDWR)
    for worker in _running:
        _inherited.append(worker)  # Kept from the garbage collector, which would wait for another process's child.
        for stream in (worker.process.stdin, worker.process.stdout):
            if stream is not None and not stream.closed:
                os.dup2(null, stream.fileno())  # Else the worker would outlive its parent as long as this child runs.
    os.close(null)
    _running.clear()
    _pool = WorkerPool(_pool.size)


atexit.register(_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
