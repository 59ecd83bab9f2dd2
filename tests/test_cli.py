import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trimtab.training.run
from trimtab import __version__

Command = Callable[..., Any]
Configure = Callable[..., Path]
Refused = Callable[..., str]


@pytest.fixture
def refused(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Refused:
    """Runs `trimtab train`, sees it refused before a model loads, with nothing written; returns the sentence."""

    def model_loads(*_: Any, **__: Any) -> None:
        raise AssertionError("a model is being loaded")

    monkeypatch.setattr(trimtab.training.run, "load_configured", model_loads)

    def run(*arguments: str | Path) -> str:
        outcome = command("train", *arguments)
        assert outcome.code == 2, outcome
        assert outcome.out == ""
        assert outcome.err.startswith("trimtab: ")
        assert outcome.err.count("\n") == 1 and outcome.err.endswith("\n"), outcome.err
        assert not (tmp_path / "run").exists()
        return outcome.err.removeprefix("trimtab: ").removesuffix("\n")

    return run


def test_the_help_and_the_version_need_no_heavy_library() -> None:
    code = (
        "import sys, trimtab.cli\n"
        "for argument in ('--help', '--version'):\n"
        "    try:\n"
        "        trimtab.cli.app([argument])\n"
        "    except SystemExit as leaving:\n"
        "        assert not leaving.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pandas', 'scipy', 'math_verify', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout and f"trimtab {__version__}" in done.stdout


def test_the_help_of_train_ends_with_every_key_and_every_method(command: Command) -> None:
    outcome = command("train", "--help")
    assert outcome.code == 0
    for word in ("optimizer.learning_rate", "sampling.group_size", "gtpo", "dr_grpo", "reinforce"):
        assert word in outcome.out


def test_an_unknown_command_or_option_exits_with_2(command: Command) -> None:
    assert command("trian").code == 2
    assert command("train", "--stpes", "3").code == 2
    assert command("train").code == 2


def test_check_says_that_a_configuration_is_valid_and_writes_nothing(
    command: Command, configure: Configure, tmp_path: Path
) -> None:
    path = configure()
    outcome = command("train", path, "--check")
    assert (outcome.code, outcome.out) == (0, f"{path}: a valid configuration for gtpo\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"method": "grpo_process"}, "process: grpo_process needs a step scorer"),
        ({"method": "distill"}, "teachers: there are 0, but method.lambdas has 1 numbers"),
        ({"rewards": "none"}, "rewards: none, but gtpo learns from rewards"),
    ],
)
def test_check_finds_sections_that_do_not_go_with_the_method(
    changes: dict[str, Any], expected: str, command: Command, configure: Configure
) -> None:
    outcome = command("train", configure(changes), "--check")
    assert outcome.code == 2
    assert expected in outcome.err


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"training.stesp": 3}, "training.stesp is not a key; did you mean 'steps'?"),
        ({"training.steps": "ten"}, "training.steps: input should be a valid integer, not 'ten'"),
        ({"sampling.group_size": 1}, "sampling: group_size must be at least 2"),
        ({"training.batch_size": 6}, "training.batch_size: 6 completions do not divide into groups of 4; use 4 or 8"),
        ({"method": "gptoo"}, "there is no method 'gptoo'; did you mean 'gtpo'?"),
        ({"method": {"name": "gtpo", "gama": 1.0}}, "gtpo has no setting 'gama'; did you mean 'gamma'?"),
        (
            {"rewards": "papr"},
            "the reward preset 'papr' is unknown (there are 'paper', 'binary', 'none'); did you mean 'paper'?",
        ),
        (
            {"rewards": [{"function": "toy_rewards:low_byte"}]},
            "the module toy_rewards has no function 'low_byte'; did you mean 'low_bytes'?",
        ),
        ({"rewards": [{"function": "no_such:f"}]}, "the reward 'no_such:f': there is no module 'no_such'"),
        ({"data.columns": {"prompt": "question"}}, "the column 'question' is missing (columns there are: 'prompt', "),
        (
            {"prompt": {"template": "{qestion}"}},
            "the column 'qestion' is missing (columns there are: 'prompt', 'answer'",
        ),
        (
            {"prompt": {"template": "{prompt"}},
            "prompt.template: expected '}' before end of string; double a literal brace",
        ),
        ({"data.source": "nowhere.jsonl"}, "nowhere.jsonl: there is no such file."),
        ({"data.max_prompt_tokens": 1}, "0 of 5 rows left: every prompt is longer than 1 tokens (the longest has 10)"),
        ({"sampling.max_completion_tokens": 96}, "sampling.max_completion_tokens: 96 leaves no room for a prompt"),
        ({"sampling.max_completion_tokens": 90}, "0 of 5 rows left: every prompt is longer than 6 tokens"),
        (
            {"model.name": "./nowhere"},
            "model.name: there is no folder ./nowhere; give a local folder or a Hugging Face",
        ),
        (
            {"model.name": "builtin:nothing"},
            "model.name: there is no built-in model 'builtin:nothing'; there are arith",
        ),
        (
            {"method": "sft", "sampling.max_completion_tokens": 2},
            "row 1: the completion has 3 tokens with its end, more",
        ),
        ({"log.trackers": ["mlflow"]}, "log.trackers: mlflow is not installed; pip install mlflow, or leave it out"),
        ({"evaluation.data": {"source": "no.jsonl"}}, "no.jsonl: there is no such file."),
        ({"output": None}, "output is missing"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence_before_a_model_loads(
    changes: dict[str, Any], expected: str, refused: Refused, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = trimtab.training.run.importlib.util.find_spec
    monkeypatch.setattr(
        trimtab.training.run.importlib.util, "find_spec", lambda name: None if name == "mlflow" else find_spec(name)
    )
    assert expected in refused(configure(changes))


def test_malformed_yaml_a_double_key_and_a_missing_file_are_refused(refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    assert refused(path) == f"{path}: there is no such configuration file"
    path.write_text("seed: 1\nmodel: {name: a\n", encoding="utf-8")
    assert refused(path).startswith(f"{path}, line 3: not valid YAML: ")
    path.write_text("seed: 1\nseed: 2\n", encoding="utf-8")
    assert refused(path) == f"{path}, line 2: not valid YAML: the key 'seed' stands twice"


def test_a_malformed_override_is_refused(refused: Refused, configure: Configure) -> None:
    assert refused(configure(), "steps").startswith("'steps': an override has the form key=value")
    assert "training.steps: input should be a valid integer" in refused(configure(), "training.steps=ten")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "{path} has no rows."),
        ("\n\n", "{path} has no rows."),
        (
            '{"prompt": "a"}\n{"prompt": "b"\n',
            "{path}, line 2: not valid JSON (Expecting ',' delimiter at column ",
        ),
        ('{"prompt": "a"}\n["b"]\n', "{path}, line 2: a row must be a JSON object, but this line is an array."),
        (
            '{"question": "a", "prmpt": "b"}\n',
            "{path}: the column 'prompt' is missing (columns there are: 'question', 'prmpt'); did you mean 'prmpt'?",
        ),
        (
            '{"prompt": "a"}\n{"prompt": 3}\n',
            "{path}, row 2: the column 'prompt' must be a string or a list of at least one message.",
        ),
    ],
)
def test_rows_that_cannot_be_used_are_refused_with_file_and_place(
    content: str, expected: str, refused: Refused, configure: Configure, tmp_path: Path
) -> None:
    path = configure()
    (tmp_path / "rows.jsonl").write_text(content, encoding="utf-8")
    assert refused(path).startswith(expected.format(path=tmp_path / "rows.jsonl"))


def test_a_completion_that_is_no_text_is_refused(refused: Refused, configure: Configure, tmp_path: Path) -> None:
    path = configure({"method": "sft"})
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": 3}\n', encoding="utf-8")
    assert refused(path) == "row 1: the completion is a int; it must be text"
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8")
    assert "the column 'completion' is missing (columns there are: 'prompt')" in refused(path)


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        (("config.json", "tokenizer.json"), "holds no weights (no *.safetensors); save the model there"),
        (("config.json", "model.safetensors"), "holds no tokenizer (no tokenizer.json); save it there"),
        (("model.safetensors", "tokenizer.json"), "holds no config.json; save the model there with save_pretrained"),
        ((), "holds no weights"),
    ],
)
def test_an_incomplete_model_folder_is_refused(
    kept: tuple[str, ...], expected: str, refused: Refused, configure: Configure, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "part"
    folder.mkdir()
    for name in kept:
        (folder / name).write_bytes((tiny_model / name).read_bytes())
    said = refused(configure({"model.name": str(folder)}))
    assert said.startswith(f"model.name: {folder} {expected}")


@pytest.mark.parametrize(("name", "what"), [("model.safetensors", "model"), ("tokenizer.json", "tokenizer")])
def test_a_model_folder_that_cannot_be_read_is_refused_in_one_sentence(
    name: str, what: str, command: Command, configure: Configure, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "bogus"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / name).write_bytes(b"garbage")
    outcome = command("train", configure({"model.name": str(folder)}), "--quiet")
    assert outcome.code == 2
    assert outcome.err.startswith(f"trimtab: model.name: the {what} of {folder} cannot be loaded")
    assert outcome.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_an_output_that_is_a_file_is_refused(command: Command, configure: Configure, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine", encoding="utf-8")
    outcome = command("train", configure(), "--quiet")
    assert (outcome.code, outcome.err) == (2, f"trimtab: output: {tmp_path / 'run'} is a file; name a folder\n")
    assert (tmp_path / "run").read_text(encoding="utf-8") == "mine"


def test_a_line_separator_inside_a_string_and_a_byte_order_mark_are_fine_end_to_end(
    command: Command, configure: Configure, tmp_path: Path
) -> None:
    path = configure({"training.steps": 1, "training.batch_size": 4, "log": {"samples_every": 1}})
    rows = json.dumps({"prompt": "one\u2028two\u0085\u2029", "answer": "\u2028"}, ensure_ascii=False) + "\n"
    (tmp_path / "rows.jsonl").write_text(rows, encoding="utf-8-sig")
    path.write_text(path.read_text(encoding="utf-8"), encoding="utf-8-sig")
    outcome = command("train", path, "--quiet")
    assert (outcome.code, outcome.out, outcome.err) == (0, f"done: {tmp_path / 'run'}\n", "")
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_bytes().splitlines()]
    assert {sample["prompt"] for sample in samples} == {"one\u2028two\u0085\u2029"}


def test_what_nobody_foresaw_shows_its_traceback_and_exits_with_1(
    command: Command, configure: Configure, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def surprise(*_: Any, **__: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(trimtab.training.run, "load_configured", surprise)
    outcome = command("train", configure(), "--quiet")
    assert outcome.code == 1
    assert caplog.records[-1].exc_info is not None


def test_a_method_and_a_reward_in_the_current_folder_are_found(
    command: Command, configure: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "of_my_own.py").write_text(
        "from trimtab.objectives import Method\n"
        "METHOD = Method('mine', 'nowhere', 'REINFORCE under another name')\n"
        "def length(completion_ids, **columns):\n"
        "    return [len(ids) for ids in completion_ids]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "of_my_own", raising=False)
    config = configure(
        {"method": "of_my_own:METHOD", "rewards": [{"function": "of_my_own:length"}], "training.steps": 1}
    )
    outcome = command("train", config)
    assert outcome.code == 0, outcome


def test_a_column_that_a_reward_function_needs_is_missed_before_a_model_loads(
    refused: Refused, configure: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "needy.py").write_text("def reward(completions, difficulty, **columns):\n    return difficulty\n")
    monkeypatch.syspath_prepend(tmp_path)
    sentence = refused(configure({"rewards": [{"function": "needy:reward"}]}))
    assert "a reward function needs the column 'difficulty', which no row has (columns there are: 'prompt'" in sentence


def test_the_demo_starts_with_its_own_number_of_steps(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    import trimtab.demo

    asked: list[Any] = []
    monkeypatch.setattr(trimtab.demo, "run_demo", lambda output, **options: asked.append(options))
    assert command("demo").code == 0
    assert asked == [{"seeds": 3, "steps": None, "workers": 2}]


def test_a_demo_into_a_file_is_refused(command: Command, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    outcome = command("demo", "--output", tmp_path / "taken")
    assert outcome.code == 2 and "is a file; name a folder" in outcome.err


def test_a_run_that_failed_before_its_first_checkpoint_may_be_corrected_in_its_folder(
    command: Command, configure: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "failing.py").write_text("def reward(completions, **columns):\n    return [None] * len(completions)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert command("train", configure({"rewards": [{"function": "failing:reward"}], "training.steps": 1})).code == 1
    assert command("train", configure({"training.steps": 1})).code == 0
