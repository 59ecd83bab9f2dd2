import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from trimtab.errors import InputError
from trimtab.tasks import _verify_process
from trimtab.tasks._plain_number import numbers_equal, plain_number
from trimtab.tasks.verify import extract_answer, verify

ENDLESS = "7^{7^{7^{7}}}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"<answer>3</answer> or \boxed{4}, the final answer is 5, 6", "3"),
        ("<answer>3</answer> wait <answer> 4\n</answer> and <answer>5", "4"),
        ("put it in <answer> tags: <answer>4</answer>", "4"),
        (r"<answer>\boxed{12}</answer>", "12"),
        ("<answer></answer> 5", ""),
        (r"\boxed{12}, wait: \boxed{15}", "15"),
        (r"\boxed{12} and \fbox{\frac{1}{2}} end 7", r"\frac{1}{2}"),
        (r"\boxed{\{4, 9\}}", r"\{4, 9\}"),
        (r"\boxed {\text{a } b}", r"\text{a } b"),
        (r"\boxed{12}, so \boxed{15", None),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed{}", ""),
        ("The final answer is 3. The FINAL answer is: $4.5$. I hope so, 7", "$4.5$"),
        ("the final answer is\n42\nDone 7", "42"),
        ("the final answer is", None),
        ("first 3, then -4.", "-4"),
        ("costs $1,250.", "$1,250"),
        ("leaves 48 pens, in all.", "48"),
        ("10-3", "3"),
        ("x = -3", "-3"),
        ("it is 3/8 of it", "3/8"),
        (r"it is $-\frac{3}{8}$", r"-\frac{3}{8}"),
        ("a share of 12.5%", "12.5%"),
        ("about 3e-7 metres", "3e-7"),
        ("none", None),
        ("", None),
    ],
)
def test_the_extraction_order_is_block_then_box_then_phrase_then_number(text: str, expected: str | None) -> None:
    assert extract_answer(text) == expected


@pytest.mark.parametrize(
    ("gold", "prediction", "expected"),
    [
        (360, r"so \boxed{360}. Check: \boxed{360}", True),
        (15, r"\boxed{12}, wait: \boxed{15}", True),
        ("3/8", r"\boxed{\frac{3}{8}}", True),
        (12500, "12,500", True),
        (18, "-18", False),
        ("-18", "18", False),
        (-18, "−18", True),
        (1250, "costs $1,250.", True),
        (48, "leaves 48 pens, in all.", True),
        (48, "<answer>48 pens</answer>", True),
        (5, "<answer>3 or 5</answer>", False),
        ("3e-7", "4e-7", False),
        (3e-7, "0.0000003", True),
        (r"3 \cdot 10^{-7}", "4e-7", False),
        (r"3 \cdot 10^{-7}", "0.0000003", True),
        ("35%", "0.35", True),
        ("35%", "7/20", True),
        ("35%", "3.5", False),
        (r"35\%", "35", True),
        ("sqrt(13)", "3.605551275463989", True),
        ("sqrt(13)", "3.6", False),
        ("1/3", "0.333333", True),
        ("1/3", "0.3333", False),
        ("#### 1,234", "the total is 1234", True),
        (r"Thus \boxed{7}.", "7", True),
        ("x^2+1", r"\boxed{1+x\cdot x}", True),
        ("(2,5)", "25", False),
        ("15\\mbox{ cm}^2", "15", True),
        ("Monday", r"\boxed{\text{monday}}", True),
        ("evil", "live", False),
        (4.0, 4, True),
        (5, "", False),
        ("x", "", False),
        (5, None, False),
        (12, r"\boxed{12", False),
    ],
)
def test_a_prediction_is_judged_against_the_gold(gold: Any, prediction: Any, expected: bool) -> None:
    assert verify(gold=gold, prediction=prediction) is expected


@pytest.mark.parametrize("gold", [None, "", "  ", "???", r"\frac{", "1/0", float("nan"), float("inf"), True])
def test_a_gold_that_cannot_be_parsed_gives_none(gold: Any) -> None:
    assert verify(gold=gold, prediction="1") is None
    assert verify(gold=gold, prediction="") is None


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_limit_that_is_not_positive_is_refused(limit: float) -> None:
    with pytest.raises(InputError, match="time_limit"):
        verify(gold=1, prediction=1, time_limit=limit)


@pytest.mark.parametrize("text", ["x", "", "1/0", "1 2", "2,5", "--3", "12,34", "1e9999", "9" * 500, ".", "٣", "3/8/9"])
def test_what_is_not_a_plain_number_is_left_to_the_worker(text: str) -> None:
    assert plain_number(text) is None


integers = st.integers(-1100, 1100)
written = st.one_of(
    integers.map(str),
    integers.map("{:,}".format),
    integers.map("${}.".format),
    integers.map("{}%".format),
    st.tuples(integers, st.integers(1, 12)).map("{0[0]}/{0[1]}".format),
    st.tuples(integers, st.integers(1, 12)).map(r"\frac{{{0[0]}}}{{{0[1]}}}".format),
    st.tuples(integers, st.integers(1, 12)).map(lambda pair: str(round(pair[0] / pair[1], 7))),
    st.tuples(integers, st.integers(-9, 9)).map("{0[0]}e{0[1]}".format),
)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@example("1/3", "0.333333")
@example("1/3", "0.33333")
@example("100%", "1")
@example("1000000.5", "1000000.6")
@example("3e-7", "4e-7")
@example("0.0000003", "0.0000004")
@given(written, written)
def test_the_fast_path_agrees_with_the_worker(gold: str, prediction: str) -> None:
    left, right = plain_number(gold), plain_number(prediction)
    assert left is not None
    assert right is not None
    # That 35 equals 35% is a rule of ours for golds to "what percentage", not algebra.
    assume(left.whole is None or left.whole != right.whole or left.value == right.value)
    assert numbers_equal(left, right) is _verify_process.judge(gold, prediction, 20.0)
    assert _verify_process.judge(gold, gold, 20.0) is True


def worker_pid() -> int:
    assert verify(gold="x", prediction="x") is True
    assert _verify_process._worker is not None
    return _verify_process._worker.process.pid


def gone(pid: int) -> bool:
    """Whether the process has ended within half a minute (a zombie has ended)."""
    for _ in range(300):
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


@pytest.mark.parametrize(
    ("bootstrap", "expected"),
    [('print(\'{"error": "no module"}\')', "cannot start: no module"), ("raise SystemExit", "did not start")],
)
def test_a_worker_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch, bootstrap: str, expected: str) -> None:
    _verify_process.shutdown()
    with monkeypatch.context() as patch:
        patch.setattr(_verify_process, "_BOOTSTRAP", bootstrap)
        with pytest.raises(RuntimeError, match=expected):
            verify(gold="x", prediction="x")
    assert verify(gold="x", prediction="x") is True


def test_a_runaway_answer_is_false_without_asking_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(_verify_process, "judge", lambda gold, prediction, limit: asked.append(prediction) or False)
    assert verify(gold="x", prediction=r"\boxed{" + "x+" * 5000 + "x}") is False
    assert asked == [""]


def test_an_interrupt_while_waiting_leaves_no_reply_for_the_next_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    worker_pid()

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_verify_process.VerifyProcess, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            verify(gold="x", prediction="x")
    assert verify(gold="x", prediction="y") is False


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
    "assert verify(gold='x', prediction='x')\n"
    "print(_verify_process._worker.process.pid, flush=True)\n"
)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc to see whether a process has ended")
@pytest.mark.parametrize(
    "ending",
    [
        "",
        "os._exit(0)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        f"threading.Timer(0.5, os._exit, [0]).start(); verify(gold={ENDLESS!r}, prediction='1', time_limit=1.0)",
    ],
)
def test_no_worker_is_left_behind_however_the_parent_ends(ending: str) -> None:
    finished = run_python(START + ending)
    assert finished.stdout, finished.stderr
    assert gone(int(finished.stdout))


def test_importing_the_tasks_and_the_worker_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'datasets', 'pandas', 'scipy', 'numpy', 'pyarrow'}"
    tasks = "import trimtab.tasks.prompts, trimtab.tasks.rewards, trimtab.tasks.rows, trimtab.tasks.verify\n"
    worker = "import trimtab.tasks._verify_worker, math_verify\n"
    for modules, forbidden in ((tasks, f"{heavy} | {{'math_verify', 'sympy'}}"), (worker, heavy)):
        finished = run_python(f"{modules}import sys; print(sorted(set(sys.modules) & ({forbidden})))")
        assert finished.stdout.strip() == "[]", finished.stderr


@pytest.mark.parametrize("sum_", ["15+2-3", "(15+2)-3", "7*2", "7 x 2", r"7\times 2", r"7 \cdot 2", "10 + 4", "20−6"])
def test_a_sum_that_is_not_worked_out_is_no_answer_to_a_number(sum_: str) -> None:
    assert verify(gold="14", prediction=f"<answer>{sum_}</answer>") is False
    assert verify(gold="14", prediction=f"<answer>{sum_} = 14</answer>") is True


@pytest.mark.parametrize(
    ("gold", "prediction"),
    [("-14", "-14"), ("0.003", r"3 \times 10^{-3}"), ("3000", "3*10^3"), ("1e-05", "1e-5"), ("3/8", r"\frac{3}{8}")],
)
def test_signs_exponents_and_scientific_notation_are_not_sums(gold: str, prediction: str) -> None:
    assert verify(gold=gold, prediction=rf"\boxed{{{prediction}}}") is True
