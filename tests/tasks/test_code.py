import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from trimtab.errors import InputError
from trimtab.tasks._code_tests import AssertTest, ProgramTest, parse_tests
from trimtab.tasks._sandbox import launch
from trimtab.tasks._sandbox.values import encode
from trimtab.tasks.code import (
    CodeResult,
    Limits,
    code_reward,
    extract_code,
    isolation_mode,
    partial_code_reward,
    run_tests,
)
from trimtab.tasks.rewards import load_rewards, needed_columns, score_completions

ADD = "def add(a, b):\n    return a + b\n"
HALF = "def add(a, b):\n    return a + b if a > 0 else 7\n"
ADD_TESTS = ["assert add(1, 2) == 3", "assert add(-1, 2) == 1"]
PATIENCE = 20


@pytest.fixture(params=["strictest", "plain"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The mode that the test's code runs in: the one a user gets here, and the one without namespaces."""
    found = isolation_mode()
    if request.param == "strictest":
        return found
    if found == "plain":
        pytest.skip("the strictest mode is the plain one here")
    if reason := _why_not_plain():
        pytest.skip(f"the plain mode does not work here: {reason}")
    monkeypatch.setattr(launch, "_mode", "plain")
    return "plain"


_plain: list[str] = []


def _why_not_plain() -> str:
    if not _plain:
        _plain.append(launch.try_mode("plain"))
    return _plain[0].splitlines()[0] if _plain[0] else ""


def needs_another_user(mode: str) -> None:
    if mode == "plain" and os.geteuid() != 0:
        pytest.skip("without namespaces and without root, code has the rights of the user who runs it")


def needs_namespaces(mode: str) -> None:
    if mode == "plain":
        pytest.skip("the plain mode has no namespaces")


def program(source: str, **limits: Any) -> CodeResult:
    """Run a program whose output is looked at in `stdout_tail`."""
    return run_tests(
        textwrap.dedent(source), [{"input": "", "output": "never this"}], limits=Limits(**{"seconds": 5.0} | limits)
    )


def named_processes(name: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "comm").read_text().strip() == name:
                    found.append(int(entry.name))
    return found


def wait_for(condition: Any) -> bool:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


# What counts as code.


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a\n```python\nx = 1\n```\nb", "x = 1\n"),
        ("```python\nx = 1\n```\n```py\nx = 2\n```\n", "x = 2\n"),
        ("```python\nx = 1\n```\n```\nx = 2\n```", "x = 1\n"),
        ("```Python title='a'\nx = 1\n```", "x = 1\n"),
        ("~~~python3\nx = '```'\n~~~", "x = '```'\n"),
        ("````python\n```\nx\n```\n````", "```\nx\n```\n"),
        ("1. so:\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y\n"),
        ("```python\nx = 1\n```\n```python\nx = 2", "x = 1\n"),
        ("```markdown\n```python\nx = 1\n```\n```", None),
        ("```bash\nls\n```", None),
        ("```python\nx = 1", None),
        ("x = 1", None),
        ("", None),
    ],
)
def test_the_last_closed_block_marked_python_is_the_code(text: str, code: str | None) -> None:
    assert extract_code(text) == code


def test_the_whole_text_is_the_code_only_on_request_and_only_without_a_block() -> None:
    assert extract_code("x = 1", whole_text=True) == "x = 1"
    assert extract_code("a\n```python\nx = 1\n```", whole_text=True) == "x = 1\n"


# The forms of tests.


def test_asserts_a_program_and_pairs_are_read_also_as_json() -> None:
    pair = ProgramTest("1\n", "2\n")
    assert parse_tests({"inputs": ["1\n"], "outputs": ["2\n"]}) == [pair]
    assert parse_tests('{"inputs": ["1\\n"], "outputs": ["2\\n"]}') == [pair]
    assert parse_tests([{"input": "1\n", "output": "2\n"}]) == [pair]
    assert parse_tests([{"input": ["1", "2"], "output": 3}]) == [ProgramTest("1\n2", "3")]
    assert len(parse_tests('["assert f(1) == 2", "assert f(2)"]')) == 2
    assert len(parse_tests("[f(x) for x in ()]\nassert f(1) == 2\nassert f(2)")) == 1


def test_literals_leave_the_test_and_what_must_be_reached_is_known() -> None:
    source = """
    def check(candidate):
        assert candidate(1) == [1, -2.5], "first"
        assert {"a": (1,)} == candidate(2)
        for x in range(3):
            assert candidate(x) == set([x]) or x
            assert candidate(x) == frozenset([7])
        try:
            assert candidate(3) == 5
        except AssertionError:
            pass
        assert candidate(4) > 3
    """
    (test,) = parse_tests(textwrap.dedent(source), "f")
    assert isinstance(test, AssertTest)
    assert test.expected == tuple(map(encode, ([1, -2.5], {"a": (1,)}, {7})))
    assert test.required == {0, 1}
    for gone in ("-2.5", "'a'", "7"):
        assert gone not in test.source
    for kept in ("== 5", "> 3", "set([x]) or x", "check(f)"):
        assert kept in test.source


@pytest.mark.parametrize(
    "tests",
    [
        None,
        [],
        "",
        "  ",
        "assert f(1) ==",
        ["assert ("],
        [3],
        {"inputs": ["1"]},
        {"inputs": ["1"], "outputs": []},
        "{}",
    ],
)
def test_tests_that_cannot_be_used_are_refused_in_one_sentence(tests: Any) -> None:
    with pytest.raises(InputError, match=r"^[^\n]*\.$"):
        parse_tests(tests)


def test_calls_of_a_function_in_pairs_are_refused_and_named() -> None:
    with pytest.raises(InputError, match="fn_name"):
        parse_tests({"fn_name": "f", "inputs": [[1]], "outputs": [[2]]})


class _Texts(list):  # type: ignore[type-arg]
    def __eq__(self, other: object) -> bool:
        return True


NUMBERS = [0, 1, True, 1.0, -1, 0.5, float("inf"), 2**70, 2.0**70, 1j, 1 + 0j]
TEXTS = ["", "1", "a,b", b"1", None, ...]
CONTAINERS = [
    *([], [1], (), (1,), [[1], "x"], ["1,n1"], ["1", 1]),
    *({1, 2}, frozenset({1, 2}), {1: 2}, {1.0: 2}, {1: [2]}, {"a": 1, "b": 2}, {"b": 2, "a": 1}),
]
PLAIN = [*NUMBERS, *TEXTS, *CONTAINERS]


def test_two_plain_values_have_the_same_text_exactly_when_python_calls_them_equal() -> None:
    for one in PLAIN:
        for other in PLAIN:
            assert (encode(one) == encode(other)) == (one == other), (one, other)
    assert encode(_Texts([1])) == encode([1]) != encode(_Texts([2]))


@pytest.mark.parametrize("value", [float("nan"), object(), [object()], {1: range(3)}])
def test_what_is_not_plain_has_no_text(value: object) -> None:
    with pytest.raises(TypeError):
        encode(value)


# Verdicts.


def test_each_test_counts_and_the_first_failure_is_told(mode: str) -> None:
    assert run_tests(ADD, ADD_TESTS) == CodeResult(2, 2, "", "", "", (True, True))
    half = run_tests(HALF, ADD_TESTS)
    assert (half.passed, half.total, half.verdicts) == (1, 2, (True, False))
    assert half.reason == "test 2 of 2: wrong value"
    broken = run_tests("def add(a, b):\n    print('hm')\n    return a + c\n", ADD_TESTS)
    assert (broken.passed, broken.stdout_tail) == (0, "hm\n")
    assert broken.reason == "test 1 of 2: NameError: name 'c' is not defined"
    assert "return a + c" in broken.stderr_tail or "in add" in broken.stderr_tail
    assert run_tests("def add(:", ADD_TESTS).reason.startswith("test 1 of 2: SyntaxError")


def test_a_program_with_check_and_entry_point() -> None:
    tests = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert abs(candidate(0.1, 0.2) - 0.3) < 1e-9\n"
    assert run_tests(ADD, tests, entry_point="add").passed == 1
    assert run_tests(HALF.replace("> 0", "> 0.5"), tests, entry_point="add").reason.startswith(
        "test 1 of 1: AssertionError"
    )
    assert run_tests("def plus(a, b): return a + b", tests, entry_point="add").passed == 0


def test_setup_runs_before_the_code() -> None:
    assert (
        run_tests(
            "def f(x: List[int]): return math.floor(x[0])",
            ["assert f([1.5]) == 1"],
            setup="from typing import *\nimport math",
        ).passed
        == 1
    )


def test_output_is_compared_without_white_space_at_the_ends() -> None:
    tests = {"inputs": ["3\n", "4\n"], "outputs": ["6\n\n", "8"]}
    code = "if __name__ == '__main__':\n    print(int(input()) * 2, '')\n"
    assert run_tests(code, tests).verdicts == (True, True)
    assert run_tests(code.replace("* 2", "+ 3"), tests).reason == "test 2 of 2: wrong output"
    threaded = "import threading\ndef main(): print(int(input()) * 2)\nthreading.Thread(target=main).start()"
    assert run_tests(threaded, tests).passed == 2
    assert run_tests(code + "\nraise SystemExit(3)", tests).reason == "test 1 of 2: exit code 3"
    assert run_tests(code + "\nraise SystemExit", tests).passed == 2


def test_a_large_input_is_read_whole() -> None:
    text = "\n".join(map(str, range(100_000)))
    code = "import sys\nprint(sum(map(int, sys.stdin)))"
    assert run_tests(code, [{"input": text, "output": "4999950000"}]).passed == 1


def test_a_set_is_always_in_the_same_order() -> None:
    code = "print(list({str(i) for i in range(50)}))"
    assert program(code).stdout_tail == program(code).stdout_tail != ""


def test_a_test_starts_afresh(mode: str) -> None:
    code = """
    import os
    calls = []
    def f():
        calls.append(1)
        os.makedirs("folder/inner")
        os.symlink("/", "link")
        open("mark", "w").write("x")
        return len(calls), sorted(os.listdir("."))
    """
    result = run_tests(textwrap.dedent(code), ["assert f() == (1, ['folder', 'link', 'mark'])"] * 2)
    assert (result.passed, result.stderr_tail) == (2, "")


# The reward functions.


def block(code: str) -> str:
    return f"Here:\n```python\n{code}```\n"


def test_the_reward_is_all_or_nothing_or_the_share_and_none_without_tests(caplog: pytest.LogCaptureFixture) -> None:
    completions = [block(ADD), block(HALF), ADD, block(ADD), [{"role": "assistant", "content": block(ADD)}], block("")]
    tests = [ADD_TESTS, ADD_TESTS, ADD_TESTS, [], ADD_TESTS, None]
    assert code_reward(completions=completions, tests=tests) == [1.0, 0.0, 0.0, None, 1.0, None]
    assert partial_code_reward(completions=completions, tests=tests) == [1.0, 0.5, 0.0, None, 1.0, None]
    assert sum("usable tests" in message for message in caplog.messages) <= 1


def test_a_configuration_names_the_reward_and_the_row_brings_entry_point_and_setup() -> None:
    parts = load_rewards([{"function": "trimtab.tasks.code:code_reward"}])
    assert needed_columns(parts) == ["tests"]
    columns = {
        "tests": ["def check(f):\n    assert f(2, 2) == 2.0"],
        "entry_point": ["root"],
        "setup": [["import math", "x = 1"]],
    }
    code = block("def root(a, b):\n    return math.sqrt(a * b)\n")
    assert score_completions(parts, ["?"], [code], [[1]], columns).total == [1.0]


# Attempts to cheat: none may pass.

CHEATS = {
    "leaves": "import sys\nsys.exit(0)",
    "leaves at once": "import os\nos._exit(0)",
    "leaves when called": "import os\ndef add(a, b): os._exit(0)",
    "prints a success": 'print(\'OK\')\nprint(\'["end", "", ""]\')\ndef add(a, b): return 0',
    "writes into every descriptor": """
        import os
        for fd in range(3, 64):
            for line in (b'["value", 0, "n3"]\\n["end", "", ""]\\n', b'["end", null, ""]\\n', b'[]\\n'):
                try: os.write(fd, line)
                except OSError: pass
        os._exit(0)
    """,
    "equals everything": """
        class Equal(int):
            def __eq__(self, other): return True
            def __int__(self): return 3
            def __add__(self, other): return 3
            def __format__(self, spec): return '3'
            __hash__ = int.__hash__
        def add(a, b): return Equal(7)
    """,
    "is no plain value": "class Equal:\n  def __eq__(self, other): return True\ndef add(a, b): return Equal()",
    "lies about its class": """
        class Equal:
            __class__ = property(lambda self: int)
            def __eq__(self, other): return True
        def add(a, b): return Equal()
    """,
    "replaces the built-ins": """
        import builtins
        class Never(BaseException): pass
        builtins.AssertionError = Never
        builtins.exec = builtins.compile = lambda *_, **__: None
        def add(a, b): return 0
    """,
    "replaces the runner's functions": """
        import json, os, sys
        json.dumps = lambda *_: '["value", 0, "n3"]'
        for module in list(sys.modules.values()):
            for name in ("encode", "send", "run_child", "_sender"):
                if hasattr(module, name): setattr(module, name, lambda *_: "n3")
        def add(a, b): return 0
    """,
    "replaces the comparison": "def add(a, b):\n  globals()['__equal__'] = print\n  return 0",
    "traces": "import sys\nsys.settrace(lambda *_: None)\nsys.setprofile(lambda *_: None)\ndef add(a, b): return 0",
    "finds the secret and says the last word": """
        import json, os, sys
        def add(a, b):
            frame = sys._getframe()
            while frame is not None:
                if 'secret' in frame.f_locals:
                    os.write(3, (json.dumps(["end", frame.f_locals['secret'], ""]) + chr(10)).encode())
                frame = frame.f_back
            os._exit(0)
    """,
    "guesses": """
        import json, os
        def add(a, b):
            for guess in range(9): os.write(3, (json.dumps(["value", 0, f"n{guess:x}"]) + chr(10)).encode())
            return 3
    """,
    "kills its watcher": """
        import os, signal
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP, signal.SIGHUP):
            try: os.kill(os.getppid() or 1, number)
            except OSError: pass
        def add(a, b): return 0
    """,
}


@pytest.mark.parametrize("name", list(CHEATS))
def test_no_cheat_passes_a_comparison_with_a_literal(name: str) -> None:
    assert run_tests(textwrap.dedent(CHEATS[name]), ADD_TESTS[:1], limits=Limits(seconds=3)).passed == 0


@pytest.mark.parametrize("name", ["leaves", "leaves at once", "leaves when called", "prints a success",
                                  "writes into every descriptor", "replaces the built-ins"])  # fmt: skip
def test_no_cheap_cheat_passes_an_assert_that_runs_beside_the_code(name: str) -> None:
    code = textwrap.dedent(CHEATS[name])
    assert run_tests(code, ["assert abs(add(1, 2) - 3) < 1", "assert not add(1, -1) != 0 and add(1, 2)"]).passed == 0


def test_the_right_answer_is_nowhere_in_the_process_that_runs_the_code(mode: str) -> None:
    code = """
    import gc, sys
    mark = "".join(["need", "le"])
    def search(thing, depth=0):
        if isinstance(thing, str):
            return [thing] if mark in thing and 6 < len(thing) < 20 else []
        if depth > 3: return []
        inside = thing.items() if isinstance(thing, dict) else thing if isinstance(thing, (list, tuple, set)) else ()
        return [hit for entry in list(inside) for hit in search(entry, depth + 1)]
    def answer():
        frame, hits = sys._getframe(), []
        while frame:
            hits += search(dict(frame.f_locals)) + search(frame.f_code.co_consts)
            frame = frame.f_back
        return (hits + search([o for o in gc.get_objects() if isinstance(o, (dict, list, tuple))]) + ["none"])[0]
    """
    result = run_tests(textwrap.dedent(code), ["assert answer() == 'needle-7361'", "assert answer() == 'none'"])
    assert result.verdicts == (False, True)


# Attempts to break out or to harm the machine.


def test_an_endless_loop_ends_at_the_time_limit(mode: str) -> None:
    result = run_tests("while True: pass", ADD_TESTS, limits=Limits(seconds=0.5))
    assert (result.passed, result.reason) == (0, "test 1 of 2: time limit")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_is_cut(stream: str, mode: str) -> None:
    result = program(f"import sys\nwhile True: sys.{stream}.write('x' * 1000)")
    assert result.reason == "test 1 of 1: output limit"
    assert len(result.stdout_tail) + len(result.stderr_tail) <= 4000


def test_a_huge_allocation_fails(mode: str) -> None:
    assert "MemoryError" in program("x = bytearray(1 << 40)").stderr_tail
    assert "MemoryError" in program("x = [b'x' * (1 << 20) for _ in range(400)]", memory_bytes=256 << 20).stderr_tail


def test_the_memory_of_many_processes_is_added_up(mode: str) -> None:
    code = """
    import os, time
    for _ in range(5):
        if os.fork() == 0:
            x = b"x" * (60 << 20)
            time.sleep(3)
            os._exit(0)
    time.sleep(3)
    """
    assert program(code, memory_bytes=200 << 20).reason == "test 1 of 1: memory limit"


def test_many_children_end_at_the_limit(mode: str) -> None:
    code = """
    import os, time
    count = 0
    for _ in range(300):
        try:
            if os.fork() == 0:
                time.sleep(3)
                os._exit(0)
        except OSError:
            break
        count += 1
    print(count)
    """
    count = int(program(code, processes=12).stdout_tail)
    # Where the user is the tests' own, processes of the user that end meanwhile make room for more.
    assert 1 <= count <= (11 if mode != "plain" or os.geteuid() == 0 else 200)


def test_threads_count_as_processes() -> None:
    code = """
    import threading, time
    count = 0
    for _ in range(100):
        try: threading.Thread(target=time.sleep, args=(3,), daemon=True).start()
        except RuntimeError: break
        count += 1
    print(count)
    """
    if isolation_mode() == "plain" and os.geteuid() != 0:
        pytest.skip("the limit counts from what the user has already")
    assert 1 <= int(program(code, processes=8).stdout_tail) <= 7


LINGERS = """
import ctypes, os, time
ready, done = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        ctypes.CDLL(None).prctl(15, b"NAME", 0, 0, 0)
        os.write(done, b"x")
        time.sleep(60)
    os._exit(0)
os.read(ready, 1)
print("it lives")
time.sleep(SECONDS)
"""


@pytest.mark.parametrize("seconds", [0.3, 60])
def test_a_child_that_left_group_and_session_dies_with_the_test(seconds: float, mode: str) -> None:
    name = f"tt-{os.getpid() % 100000}-{int(seconds)}"
    code = LINGERS.replace("NAME", name).replace("SECONDS", str(seconds))
    results: list[CodeResult] = []
    thread = threading.Thread(target=lambda: results.append(program(code, seconds=1.5)))
    thread.start()
    assert wait_for(lambda: named_processes(name))
    thread.join()
    assert results[0].stdout_tail == "it lives\n" or seconds > 1
    assert named_processes(name) == []


def test_nothing_survives_when_the_run_itself_is_killed() -> None:
    name = f"tt-{os.getpid() % 100000}-k"
    code = LINGERS.replace("NAME", name).replace("SECONDS", "60")
    script = (
        f"from trimtab.tasks.code import *; run_tests({code!r}, [{{'input': '', 'output': ''}}], limits=Limits(60))"
    )
    with tempfile.TemporaryDirectory() as folder:  # The working folder stays behind, since nobody is left to remove it.
        os.chmod(folder, 0o711)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": folder}
        run = subprocess.Popen([sys.executable, "-c", script], env=environment)
        try:
            assert wait_for(lambda: named_processes(name))
        finally:
            run.send_signal(signal.SIGKILL)
            run.wait()
    if isolation_mode() == "plain":
        for process in named_processes(name):
            os.kill(process, signal.SIGKILL)
        pytest.skip("without namespaces a process that left its group survives its supervisor's death")
    assert wait_for(lambda: not named_processes(name))


def test_files_of_others_are_neither_deleted_nor_read(mode: str, tmp_path: Path) -> None:
    needs_another_user(mode)
    canary = tmp_path / "canary"
    canary.mkdir()
    (canary / "file").write_text("precious")
    (canary / "file").chmod(0o600)
    result = program(
        f"""
        import os, shutil
        shutil.rmtree({str(tmp_path)!r}, ignore_errors=True)
        for name in ("", "/file"):
            try: os.chmod({str(canary)!r} + name, 0o777)
            except OSError as error: print(type(error).__name__)
        try: print(open({str(canary / "file")!r}).read())
        except OSError as error: print(type(error).__name__)
        """
    )
    assert (canary / "file").read_text() == "precious"
    assert "precious" not in result.stdout_tail
    assert result.stdout_tail.count("Error") == 3


def test_with_namespaces_even_files_that_all_may_write_are_out_of_reach(mode: str) -> None:
    needs_namespaces(mode)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        file = Path(folder) / "file"
        file.write_text("precious")
        file.chmod(0o666)
        program(
            f"import shutil, os\nshutil.rmtree({folder!r}, ignore_errors=True)\nopen({str(file)!r}, 'w').write('x')"
        )
        assert file.read_text() == "precious"


def test_the_standard_library_cannot_be_written(mode: str) -> None:
    needs_another_user(mode)
    code = (
        "import os\ntry:\n  open(os.path.dirname(os.__file__) + '/trimtab_canary.py', 'w')\nexcept OSError: print('no')"
    )
    try:
        assert program(code).stdout_tail == "no\n"
    finally:
        Path(os.__file__).with_name("trimtab_canary.py").unlink(missing_ok=True)


def test_the_environment_is_empty_and_the_parents_cannot_be_read(mode: str) -> None:
    code = f"""
    import glob, os
    print("own", dict(os.environ))
    for path in ["/proc/{os.getpid()}/environ", f"/proc/{{os.getppid()}}/environ", *glob.glob("/proc/[0-9]*/environ")]:
        try: print(open(path).read()[:200])
        except OSError: pass
    """
    seen = program(code).stdout_tail
    assert "own {}" in seen
    needs_another_user(mode)
    assert not [name for name in os.environ if f"{name}=" in seen and not name.startswith(("PYTHON", "LD_LIBRARY"))]


def test_the_network_is_out_of_reach(mode: str) -> None:
    needs_namespaces(mode)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind("\0trimtab-test-code")
        local.listen()
        result = program(
            f"""
            import socket
            local = "\\0trimtab-test-code"
            for family, address in ((socket.AF_INET, {server.getsockname()!r}), (socket.AF_UNIX, local)):
                with socket.socket(family) as client:
                    client.settimeout(2)
                    try: client.connect(address); print("reached")
                    except OSError: print("no")
            """
        )
    assert result.stdout_tail == "no\nno\n"


def test_no_rights_can_be_won_back(mode: str) -> None:
    needs_another_user(mode)
    result = program(
        """
        import ctypes, os
        libc = ctypes.CDLL(None)
        print(libc.setuid(0), libc.setgroups(0, None), libc.chroot(b"."), libc.ptrace(16, os.getppid() or 1, 0, 0))
        print(libc.unshare(0x10000000), libc.mount(b"x", b".", b"tmpfs", 0, None))
        """
    )
    refused = result.stdout_tail.split()
    assert len(refused) == 6
    # Without a root of its own the process may make a user namespace, in which it may mount.
    assert set(refused[: 6 if mode != "plain" else 4]) == {"-1"}


def test_files_are_limited_in_size_and_with_namespaces_in_all(mode: str) -> None:
    result = program(
        """
        import errno, os
        try: open("a", "wb").write(b"x" * (3 << 20))
        except OSError as error: print(errno.errorcode[error.errno])
        os.truncate("a", 0)
        try:
            for number in range(8): open(f"b{number}", "wb").write(b"x" * (1 << 20))
        except OSError as error: print(errno.errorcode[error.errno])
        """,
        file_bytes=2 << 20,
        disk_bytes=4 << 20,
    )
    assert result.stdout_tail == ("EFBIG\n" if mode == "plain" else "EFBIG\nENOSPC\n")


def test_the_working_folder_is_fresh_and_removed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os\nprint(os.listdir('.'))\nos.makedirs('a/b')\nopen('a/b/c', 'w').write('x')\nos.chmod('a', 0)"
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o711)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        assert program(code).stdout_tail == "[]\n"
        assert os.listdir(folder) == []


def test_there_is_nothing_to_read_on_standard_input_of_an_assert_test() -> None:
    assert "EOFError" in run_tests("input()", ADD_TESTS).reason


# How the machine's limits are told.


def test_a_machine_without_namespaces_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launch, "_mode", None)
    monkeypatch.setattr(launch, "try_mode", lambda mode: "" if mode == "plain" else "EPERM")
    assert [isolation_mode(), isolation_mode()] == ["plain", "plain"]
    assert len(caplog.messages) == 1
    assert "network" in caplog.messages[0]


def test_a_machine_that_cannot_run_code_as_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_mode", None)
    monkeypatch.setattr(launch, "try_mode", lambda mode: "EPERM")
    with pytest.raises(InputError, match="EPERM"):
        code_reward(completions=[block(ADD)], tests=[ADD_TESTS])


def test_a_limit_that_is_not_positive_is_refused() -> None:
    with pytest.raises(InputError, match="seconds is 0"):
        Limits(seconds=0)
