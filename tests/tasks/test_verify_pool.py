"""The pool of verification workers: nothing is mixed up, nothing is left behind, a dead worker costs one answer."""

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from trimtab.tasks import _verify_process
from trimtab.tasks.verify import verify, verify_all

ENDLESS = "7^{7^{7^{7}}}"


def worker_pid() -> int:
    assert verify(gold="2x", prediction="x+x") is True
    return _verify_process._pool._idle[-1].process.pid


def gone(pid: int, tries: int = 300) -> bool:
    """Whether the process has ended within `tries` tenths of a second (a zombie has ended)."""
    for _ in range(tries):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


def test_an_endless_expression_is_false_within_the_limit_and_the_next_answer_is_judged() -> None:
    pid = worker_pid()
    assert verify(gold=ENDLESS, prediction="1", time_limit=0.5) is False
    assert gone(pid)
    assert verify(gold="x+1", prediction="1+x") is True
    assert worker_pid() != pid


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="the worker is killed by a POSIX signal here")
def test_a_worker_that_was_killed_from_outside_costs_no_answer() -> None:
    os.kill(worker_pid(), signal.SIGKILL)
    assert verify(gold="x+1", prediction="1+x") is True


def test_answers_from_many_threads_are_not_mixed_up() -> None:
    results: dict[int, list[bool | None]] = {}

    def judge(number: int) -> None:
        results[number] = [verify(gold=f"x+{number}", prediction=f"{value}+x") for value in range(4)]

    threads = [threading.Thread(target=judge, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [value == number for value in range(4)] for number in range(4)}


def test_as_many_workers_run_as_callers_ask_at_once_but_never_more_than_the_pool_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_verify_process, "_pool", _verify_process.WorkerPool(2))
    _verify_process.shutdown()
    ready = threading.Barrier(4)
    seen: list[int] = []

    def judge(number: int) -> None:
        ready.wait()
        for value in range(30):
            verify(gold=f"{number}x", prediction=f"{value}x + x")
            seen.append(len(_verify_process._running))

    threads = [threading.Thread(target=judge, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(seen) == 2
    assert len(_verify_process._pool._idle) == 2
    _verify_process.shutdown()
    assert not _verify_process._running


def test_a_batch_is_judged_in_order_and_an_endless_answer_in_it_costs_only_itself() -> None:
    golds: list[Any] = ["2x", "2x", 5, "???", "2x", "sqrt(2)", "2x"]
    predictions = ["x+x", "3x", "5", "5", ENDLESS, "1.41421356", r"\boxed{x \cdot 2}"]
    expected = [True, False, True, None, False, True, True]
    assert verify_all(golds=golds, predictions=predictions, time_limit=2.0) == expected
    assert verify_all(golds=[], predictions=[]) == []


def test_a_batch_asks_the_same_question_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def judge(gold: str, prediction: str, limit: float) -> bool:
        asked.append((gold, prediction))
        return True

    monkeypatch.setattr(_verify_process, "judge", judge)
    assert verify_all(golds=["2x"] * 9, predictions=["x+x"] * 8 + ["2x"]) == [True] * 9
    assert sorted(asked) == [("2x", "2x"), ("2x", "x+x")]


def test_a_batch_needs_one_prediction_for_each_gold() -> None:
    with pytest.raises(ValueError, match="shorter"):
        verify_all(golds=[1, 2], predictions=["1"])


def test_an_interrupted_batch_begins_nothing_new_and_the_next_answer_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    def interrupt(gold: str, prediction: str, limit: float) -> Any:
        begun.append(prediction)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_verify_process, "judge", interrupt)
        with pytest.raises(KeyboardInterrupt):
            verify_all(golds=["2x"] * 500, predictions=[f"{number}x" for number in range(500)])
    assert len(begun) < 500
    assert verify(gold="2x", prediction="x+x") is True


def test_a_closed_pool_starts_no_worker() -> None:
    pool = _verify_process.WorkerPool(1)
    pool.borrow()
    refused: list[str] = []

    def wait() -> None:
        try:
            pool.borrow()
        except RuntimeError as error:
            refused.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    pool.close()
    pool.give_back(None)
    waiting.join(timeout=30)
    assert "ending" in refused[0]


@pytest.mark.parametrize(
    ("bootstrap", "expected"),
    [('print(\'{"error": "no module"}\')', "cannot start: no module"), ("raise SystemExit", "did not start")],
)
def test_a_worker_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch, bootstrap: str, expected: str) -> None:
    _verify_process.shutdown()
    with monkeypatch.context() as patch:
        patch.setattr(_verify_process, "_BOOTSTRAP", bootstrap)
        with pytest.raises(RuntimeError, match=expected):
            verify(gold="2x", prediction="x+x")
    assert verify(gold="2x", prediction="x+x") is True


def test_an_interrupt_while_waiting_leaves_no_reply_for_the_next_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    worker_pid()

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_verify_process.VerifyProcess, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            verify(gold="2x", prediction="x+x")
    assert verify(gold="2x", prediction="3x") is False


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_a_worker_of_its_own() -> None:
    pid = worker_pid()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if worker_pid() not in (0, pid) else 2
        finally:
            _verify_process.shutdown()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert worker_pid() == pid


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=120,
    )


START = (
    "import os, signal, threading\n"
    "from trimtab.tasks import _verify_process\n"
    "from trimtab.tasks.verify import verify\n"
    "assert verify(gold='2x', prediction='x+x')\n"
    "print(_verify_process._pool._idle[-1].process.pid, flush=True)\n"
)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc to see whether a process has ended")
@pytest.mark.parametrize(
    "ending",
    [
        "",
        "os._exit(0)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        f"threading.Timer(0.5, os._exit, [0]).start(); verify(gold={ENDLESS!r}, prediction='1', time_limit=1.0)",
        f"threading.Thread(target=verify, daemon=True, kwargs=dict(gold={ENDLESS!r}, prediction='1')).start()",
    ],
)
def test_no_worker_is_left_behind_however_the_parent_ends(ending: str) -> None:
    finished = run_python(START + ending)
    assert finished.stdout, finished.stderr
    assert gone(int(finished.stdout))


@pytest.mark.skipif(not hasattr(os, "fork") or not os.path.isdir("/proc/self"), reason="needs fork and /proc")
def test_a_forked_child_that_lives_on_does_not_keep_its_parents_worker_alive() -> None:
    fork = "child = os.fork()\nif child == 0:\n    os.close(1); os.close(2); signal.pause()\nprint(child, flush=True)\n"
    finished = run_python(f"{START}{fork}os._exit(0)")
    assert finished.stdout, finished.stderr
    worker, child = map(int, finished.stdout.split())
    try:
        assert gone(worker)
        assert not gone(child, tries=1)
    finally:
        os.kill(child, signal.SIGKILL)


def test_importing_the_tasks_and_the_worker_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'datasets', 'pandas', 'scipy', 'numpy', 'pyarrow'}"
    tasks = "import trimtab.tasks.prompts, trimtab.tasks.rewards, trimtab.tasks.rows, trimtab.tasks.verify\n"
    worker = "import trimtab.tasks._verify_worker, math_verify\n"
    for modules, forbidden in ((tasks, f"{heavy} | {{'math_verify', 'sympy'}}"), (worker, heavy)):
        finished = run_python(f"{modules}import sys; print(sorted(set(sys.modules) & ({forbidden})))")
        assert finished.stdout.strip() == "[]", finished.stderr
