from pathlib import Path
from typing import Any

import pytest
import yaml

from trimtab.config import RunConfig
from trimtab.config_file import apply_override, describe_keys, describe_methods, load_config, parse_config
from trimtab.errors import InputError
from trimtab.objectives import METHODS

VALID: dict[str, Any] = {
    "method": "gtpo",
    "model": {"name": "m"},
    "data": {"source": "rows.jsonl"},
    "output": "runs/x",
}


def refusal(text: str, tmp_path: Path, *overrides: str) -> str:
    """The one sentence with which a configuration is refused, without the file's name."""
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_config(path, list(overrides))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith((str(path), *overrides))
    return message.removeprefix(str(path))


def complaint(**sections: Any) -> str:
    """What is said of a valid configuration with these sections changed."""
    with pytest.raises(InputError) as caught:
        parse_config({**VALID, **sections}, where="c")
    return str(caught.value).removeprefix("c: ")


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"sede": 1}, "sede is not a key; did you mean 'seed'?"),
        ({"model": {"name": "m", "dtpye": "float32"}}, "model.dtpye is not a key; did you mean 'dtype'?"),
        ({"model": {"name": "m", "lora": {"rnak": 4}}}, "model.lora.rnak is not a key; did you mean 'rank'?"),
        ({"data": {"source": "x", "splt": "a"}}, "data.splt is not a key; did you mean 'split'?"),
        (
            {"data": {"source": "x", "arithmetic": {"row": 4}}},
            "data.arithmetic.row is not a key; did you mean 'rows'?",
        ),
        ({"prompt": {"templat": "x"}}, "prompt.templat is not a key; did you mean 'template'?"),
        ({"sampling": {"temprature": 1.0}}, "sampling.temprature is not a key; did you mean 'temperature'?"),
        ({"optimizer": {"lerning_rate": 1.0}}, "optimizer.lerning_rate is not a key; did you mean 'learning_rate'?"),
        ({"training": {"step": 1}}, "training.step is not a key; did you mean 'steps'?"),
        ({"evaluation": {"evry": 1}}, "evaluation.evry is not a key; did you mean 'every'?"),
        (
            {"evaluation": {"data": {"source": "x", "limt": 1}}},
            "evaluation.data.limt is not a key; did you mean 'limit'?",
        ),
        ({"checkpoint": {"kep": 1}}, "checkpoint.kep is not a key; did you mean 'keep'?"),
        ({"log": {"trackrs": []}}, "log.trackrs is not a key; did you mean 'trackers'?"),
        (
            {"rewards": [{"function": "a:b", "wieght": 2.0}]},
            "rewards.0.wieght is not a key; did you mean 'weight'?",
        ),
        ({"method": {"name": "gtpo", "gama": 0.1}}, "gtpo has no setting 'gama'; did you mean 'gamma'?"),
        ({"method": {"name": "sft", "gamma": 0.1}}, "method sft has no setting 'gamma'"),
    ],
)
def test_a_misspelt_key_is_refused_at_every_level_and_the_nearest_is_suggested(
    sections: dict[str, Any], expected: str
) -> None:
    assert complaint(**sections) == expected


def test_an_unknown_key_near_to_nothing_lists_the_keys_there_are() -> None:
    said = complaint(checkpoint={"zzzzzz": 1})
    assert said == "checkpoint.zzzzzz is not a key; there are every, keep"


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"training": {"steps": "ten"}}, "training.steps: input should be a valid integer, not 'ten'"),
        ({"training": {"steps": True}}, "training.steps: input should be a valid integer, not True"),
        ({"training": {"steps": 1.5}}, "training.steps: input should be a valid integer, not 1.5"),
        (
            {"optimizer": {"learning_rate": "fast"}},
            "optimizer.learning_rate: input should be a valid number, not 'fast'",
        ),
        ({"optimizer": {"learning_rate": True}}, "optimizer.learning_rate: input should be a valid number, not True"),
        ({"model": {"name": 7}}, "model.name: input should be a valid string, not 7"),
        ({"rewards": [{"function": 3}]}, "rewards.0.function: input should be a valid string, not 3"),
        ({"rewards": 3}, "rewards: give the name of a preset or a list of functions, not 3"),
        ({"method": {"name": "gtpo", "gamma": "high"}}, "method.gamma: input should be a valid number, not 'high'"),
        ({"method": {"name": "gtpo", "gamma": float("nan")}}, "method.gamma: input should be a finite number, not nan"),
        ({"method": 3}, "method: input should be a valid dictionary, not 3"),
    ],
)
def test_a_wrong_type_is_refused_with_key_and_value(sections: dict[str, Any], expected: str) -> None:
    assert complaint(**sections) == expected


@pytest.mark.parametrize(
    ("sections", "key", "value"),
    [
        ({"training": {"steps": 0}}, "training.steps", "0"),
        ({"sampling": {"temperature": 0.0}}, "sampling.temperature", "0.0"),
        ({"sampling": {"top_p": 1.5}}, "sampling.top_p", "1.5"),
        ({"optimizer": {"learning_rate": -1e-6}}, "optimizer.learning_rate", "-1e-06"),
        ({"optimizer": {"learning_rate": float("inf")}}, "optimizer.learning_rate", "inf"),
        ({"optimizer": {"learning_rate": float("nan")}}, "optimizer.learning_rate", "nan"),
        ({"training": {"max_excluded_rows": 1.1}}, "training.max_excluded_rows", "1.1"),
        ({"evaluation": {"k": [0]}}, "evaluation.k.0", "0"),
        ({"model": {"name": "m", "dtype": "int8"}}, "model.dtype", "'int8'"),
        ({"log": {"trackers": ["paper"]}}, "log.trackers.0", "'paper'"),
        ({"seed": -1}, "seed", "-1"),
    ],
)
def test_a_value_out_of_range_is_refused_with_key_and_value(sections: dict[str, Any], key: str, value: str) -> None:
    said = complaint(**sections)
    assert said.startswith(f"{key}: input should be ")
    assert said.endswith(f", not {value}")


def test_a_group_of_one_is_refused_because_it_has_nothing_to_be_compared_with() -> None:
    said = complaint(sampling={"group_size": 1})
    assert said == "sampling: group_size must be at least 2, not 1: a group is compared with itself"


@pytest.mark.parametrize(("batch", "choice"), [(12, "8 or 16"), (3, "8")])
def test_a_batch_that_the_group_size_does_not_divide_is_refused_and_the_nearest_sizes_are_named(
    batch: int, choice: str
) -> None:
    said = complaint(training={"batch_size": batch})
    assert said == f"training.batch_size: {batch} completions do not divide into groups of 8; use {choice}"


def test_supervised_fine_tuning_takes_any_batch_size() -> None:
    assert parse_config({**VALID, "method": "sft", "training": {"batch_size": 3}}).training.batch_size == 3


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("grop", "there is no method 'grop'; did you mean 'grpo'?"),
        ({"gamma": 0.1}, "method needs a name, e.g. method: gtpo"),
        ({"name": "grpo", "gamma": 0.1}, "grpo has no setting 'gamma'"),
        (
            {"name": "gtpo", "entropy_filter": "onn"},
            "method.entropy_filter: input should be 'auto', 'on' or 'off'",
        ),
        ({"name": "gtpo", "gamma": -1.0}, "method: gamma must be at least 0, not -1.0"),
        ({"name": "grpo", "beta": -0.1}, "method: beta must be at least 0, not -0.1"),
        ({"name": "dapo", "normaliser": "row"}, "method.normaliser: input should be 'rows', 'tokens' or 'constant'"),
        ("no_such_module:method", "method 'no_such_module:method' cannot be loaded"),
        ("math:pi", "method 'math:pi' is not a trimtab.objectives.Method but of type float"),
    ],
)
def test_an_unknown_method_setting_or_value_of_a_setting_is_refused(method: Any, expected: str) -> None:
    assert complaint(method=method).startswith(expected)


def test_missing_keys_are_named_together_in_one_sentence() -> None:
    with pytest.raises(InputError, match=r"^c: model is missing; data\.source is missing; output is missing$"):
        parse_config({"method": "gtpo", "data": {}}, where="c")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nseed: 2\n", ", line 2: not valid YAML: the key 'seed' stands twice"),
        ("model:\n  name: a\n  name: b\n", ", line 3: not valid YAML: the key 'name' stands twice"),
        ("training:\n  steps: 3\n batch: 4\n", ", line 3: not valid YAML: "),
        ("training: [1, 2\n", ", line 2: not valid YAML: "),
        ("training: {steps: 1\nseed: 2\n", ", line 2: not valid YAML: "),
        ("seed: \x01\n", ": not valid YAML: unacceptable character #x0001: special characters are not allowed"),
        ("[a, b]: 1\n", ", line 1: not valid YAML: a key must be a word"),
        ("- gtpo\n", ": a configuration is a mapping of keys to values"),
        ("", ": a configuration is a mapping of keys to values"),
        ("1: 2\n", ": "),
    ],
)
def test_malformed_yaml_is_refused_with_file_and_line(text: str, expected: str, tmp_path: Path) -> None:
    assert refusal(text, tmp_path).startswith(expected)


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes("output: café\n".encode("latin-1"))
    with pytest.raises(InputError, match="invalid UTF-8 at byte 12; save the file as UTF-8"):
        load_config(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.yaml: there is no such configuration file"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("written", "value"),
    [("5e-6", 5e-6), ("1E-3", 1e-3), ("1.5e-4", 1.5e-4), ("2e+0", 2.0), ("0.01", 0.01), ("1", 1.0)],
)
def test_a_learning_rate_in_any_usual_notation_is_a_number(written: str, value: float, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(VALID) + f"optimizer: {{learning_rate: {written}}}\n", encoding="utf-8")
    assert load_config(path).optimizer.learning_rate == value
    assert load_config(path, [f"optimizer.learning_rate={written}"]).optimizer.learning_rate == value


def test_off_and_on_are_words_while_true_and_false_are_truth_values(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    extra = "method: {name: gtpo, entropy_filter: off, keep_uniform_groups: true}\nprompt: {chat_template: off}\n"
    rest = {key: value for key, value in VALID.items() if key != "method"}
    path.write_text(yaml.safe_dump(rest) + extra, encoding="utf-8")
    config = load_config(path)
    assert config.method == {"name": "gtpo", "entropy_filter": "off", "keep_uniform_groups": True}
    assert config.prompt.chat_template == "off"


def test_anchors_and_merge_keys_work_and_a_merged_key_may_be_set_again(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    text = "data: &rows {source: a.jsonl, limit: 4}\nevaluation:\n  data:\n    <<: *rows\n    limit: 2\n"
    rest = {key: value for key, value in VALID.items() if key != "data"}
    path.write_text(yaml.safe_dump(rest) + text, encoding="utf-8")
    config = load_config(path)
    assert config.evaluation.data is not None
    assert (config.evaluation.data.source, config.evaluation.data.limit) == ("a.jsonl", 2)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(VALID, sort_keys=False), encoding="utf-8-sig")
    assert load_config(path).method == {"name": "gtpo"}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.steps", "'training.steps': an override has the form key=value, e.g. optimizer.learning_rate=1e-6"),
        ("=5", "'=5': an override has the form key=value, e.g. optimizer.learning_rate=1e-6"),
        ("output.x=5", "output.x: output is not a mapping, so nothing below it can be set"),
        ("training.steps=[1", "training.steps=[1, line 1: not valid YAML: "),
        ("training.stesp=5", "training.stesp is not a key; did you mean 'steps'?"),
        ("training.steps=ten", "training.steps: input should be a valid integer, not 'ten'"),
    ],
)
def test_a_malformed_override_is_refused(override: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(VALID), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_config(path, [override])
    assert str(caught.value).removeprefix(f"{path}: ").startswith(expected)


def test_overrides_reach_every_level_and_leave_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({**VALID, "training": {"steps": 3, "batch_size": 16}}), encoding="utf-8")
    config = load_config(path, ["training.steps=9", "method.gamma=0.2", "model.lora.rank=4", "seed=7"])
    assert (config.training.steps, config.training.batch_size, config.seed) == (9, 16, 7)
    assert config.method == {"name": "gtpo", "gamma": 0.2}
    assert config.model.lora is not None and config.model.lora.rank == 4


def test_an_override_changes_a_copy() -> None:
    values = {"training": {"steps": 3}}
    assert apply_override(values, "training.steps=9") == {"training": {"steps": 9}}
    assert values == {"training": {"steps": 3}}


def test_what_is_written_down_is_read_back_as_the_same_configuration(tmp_path: Path) -> None:
    config = parse_config(
        {
            **VALID,
            "method": {"name": "gtpo", "entropy_filter": "off", "gamma": 1e-7},
            "model": {"name": "m", "lora": {"rank": 2}},
            "rewards": [{"function": "a:b", "weight": 0.5}],
            "evaluation": {"data": {"source": "builtin:arithmetic"}},
            "prompt": {"template": "a\n{question}\u2028: #"},
        }
    )
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(), allow_unicode=True), encoding="utf-8")
    assert load_config(path) == config


def test_every_key_is_described_for_the_help() -> None:
    rows = describe_keys()
    keys = [key for key, _, _ in rows]
    assert len(keys) == len(set(keys))
    assert all(description for _, _, description in rows)
    assert {key.split(".")[0].removesuffix("[]") for key in keys} == set(RunConfig.model_fields)
    assert ("model.name", "required") in [(key, default) for key, default, _ in rows]
    assert ("optimizer.learning_rate", "1e-06") in [(key, default) for key, default, _ in rows]


def test_every_method_is_described_for_the_help() -> None:
    described = {name: text for name, _, text in describe_methods()}
    assert list(described) == [*METHODS] and "gvpo" in described
    assert "gamma=0.1" in described["gtpo"]
    assert "beta=0.0" in described["grpo"]
