"""Merge files as people write them, and those that are refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from trimtab.errors import InputError
from trimtab.merging.config import ModelName, load_merge_config, parse_merge_config
from trimtab.merging.parameters import evaluate

SHAPES = {
    "two models averaged": """
models:
  - model: org/chat-7b
    parameters:
      weight: 1.0
  - model: org/code-7b
    parameters:
      weight: 0.3
merge_method: linear
dtype: float16
""",
    "slerp over slices with gradients and filters": """
slices:
  - sources:
      - model: org/chat-7b
        layer_range: [0, 32]
      - model: org/code-7b
        layer_range: [0, 32]
merge_method: slerp
base_model: org/chat-7b
parameters:
  t:
    - filter: self_attn
      value: [0, 0.5, 0.3, 0.7, 1]
    - filter: mlp
      value: [1, 0.5, 0.7, 0.3, 0]
    - value: 0.5 # everything else
dtype: bfloat16
""",
    "slerp over models": """
models:
  - model: org/chat-7b
  - model: org/code-7b
merge_method: slerp
base_model: org/chat-7b
parameters: {t: [0, 0.5, 1, 0.5, 0]}
""",
    "ties with the base among the models, gradients, int8_mask": """
models:
  - model: org/base-7b
    # no parameters necessary for base model
  - model: org/chat-7b
    parameters:
      density: [1, 0.7, 0.1] # density gradient
      weight: 1.0
  - model: org/math-7b
    parameters:
      density: 0.33
      weight:
        - filter: mlp
          value: 0.5
        - value: 0
merge_method: ties
base_model: org/base-7b
parameters:
  normalize: true
  int8_mask: true
dtype: float16
""",
    "dare_ties with a union tokenizer and a chat template": """
models:
  - model: org/base-7b
  - model: org/chat-7b
    parameters: {density: 0.53, weight: 0.4}
  - model: org/math-7b
    parameters: {density: 0.53, weight: 0.3}
merge_method: dare_ties
tokenizer_source: union
base_model: org/base-7b
chat_template: auto
parameters:
  int8_mask: true
dtype: bfloat16
out_dtype: float16
""",
    "a stack of one model's layers": """
slices:
- sources:
  - model: org/chat-7b
    layer_range: [0, 24]
- sources:
  - model: org/chat-7b
    layer_range: [8, 32]
merge_method: passthrough
dtype: float16
""",
    "a stack whose repeated layers are scaled to nothing": """
slices:
  - sources: [{model: org/chat-7b, layer_range: [0, 16]}]
  - sources:
    - model: org/chat-7b
      layer_range: [12, 32]
      parameters:
        scale:
          - filter: o_proj
            value: 0.0
          - filter: down_proj
            value: 0.0
          - value: 1.0
merge_method: passthrough
""",
    "task arithmetic with a negative weight and a LoRA": """
base_model: org/base-7b
models:
  - model: org/base-7b+user/lora-r16
    parameters:
      weight: 1e-1
  - model: org/toxic-7b
    parameters:
      weight: -0.5
merge_method: task_arithmetic
parameters:
  lambda: 0.8
""",
    "model stock, upper case and models by name alone": """
models: [org/a, org/b, org/c]
base_model: org/base-7b
merge_method: Model-Stock
parameters: {filter_wise: no_such}
dtype: bf16
""".replace("filter_wise: no_such", "filter_wise: false"),
    "della with its own epsilon and lambda": """
merge_method: della
base_model: org/base-7b
models:
  - {model: org/a, parameters: {weight: 0.5, density: 0.6, epsilon: 0.1}}
  - {model: org/b, parameters: {weight: 0.5, density: 0.6, epsilon: 0.1}}
parameters: {lambda: 1.1, normalize: false}
tokenizer:
  source: base
  pad_to_multiple_of: 64
""",
    "breadcrumbs with gamma": """
merge_method: breadcrumbs_ties
base_model: org/base-7b
models:
  - {model: org/a, parameters: {weight: 0.5, density: 0.9, gamma: 0.01}}
  - {model: org/b, parameters: {weight: 0.5}}
parameters: {density: 0.8}
""",
    "sce": """
merge_method: sce
base_model: org/base-7b
models:
  - model: org/a
  - model: org/b
parameters: {select_topk: 0.7}
tokenizer: {source: union}
""",
    "nuslerp without a base": """
merge_method: nuslerp
models:
  - {model: org/a, parameters: {weight: [0, 1]}}
  - {model: org/b, parameters: {weight: [1, 0]}}
parameters: {nuslerp_flatten: false}
""",
    "revisions and mappings": """
merge_method: linear
models:
  - model: {model: {path: org/a, revision: v2}, lora: {path: user/lora}}
    parameters: {weight: 1}
  - model: org/b@main+user/lora@v1
    parameters: {weight: 1}
tokenizer_source: org/b
""",
    "one model whose dtype changes": """
models:
  - model: org/a
merge_method: passthrough
out_dtype: bfloat16
""",
    "ties over slices with a base of its own": """
merge_method: ties
slices:
  - base_model: org/base-7b
    sources:
      - {model: org/base-7b, layer_range: [0, 4]}
      - {model: org/a, layer_range: [4, 8], parameters: {weight: 1, density: 0.5}}
    parameters: {lambda: 0.5}
  - sources:
      - {model: org/base-7b, layer_range: [4, 8]}
      - {model: org/a, layer_range: [4, 8], parameters: {weight: 1, density: 0.5}}
base_model: org/base-7b
""",
}


def parsed(text: str) -> Any:
    return parse_merge_config(yaml.safe_load(text))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_merge_file_as_people_write_it_is_read(shape: str, tmp_path: Path) -> None:
    path = tmp_path / "merge.yaml"
    path.write_text(SHAPES[shape])
    config = load_merge_config(path)
    assert config.method in yaml.safe_load(SHAPES[shape])["merge_method"].lower().replace("-", "_")
    assert config.text == SHAPES[shape]
    assert config.models() and config.slices[0].sources
    assert config.ignored == ()


def test_what_a_file_says_arrives() -> None:
    config = parsed(SHAPES["dare_ties with a union tokenizer and a chat template"])
    assert config.models() == [ModelName(f"org/{name}-7b") for name in ("base", "chat", "math")]
    assert config.slices[0].sources[2].parameters == {"density": 0.53, "weight": 0.3}
    assert (config.dtype, config.tokenizer_source, config.chat_template) == ("float16", "union", "auto")


def test_a_number_with_an_exponent_is_a_number(tmp_path: Path) -> None:
    path = tmp_path / "merge.yaml"
    path.write_text(SHAPES["task arithmetic with a negative weight and a LoRA"])
    first, second = load_merge_config(path).slices[0].sources
    assert first.parameters == {"weight": 0.1}
    assert first.model == ModelName("org/base-7b", adapter="user/lora-r16") and str(first.model).endswith("lora-r16")
    assert second.parameters == {"weight": -0.5}


def test_revisions_belong_to_the_model_or_the_adapter_they_stand_behind() -> None:
    first, second = (source.model for source in parsed(SHAPES["revisions and mappings"]).slices[0].sources)
    assert first == ModelName("org/a", "v2", "user/lora")
    assert second == ModelName("org/b", "main", "user/lora", "v1")


def test_a_folder_may_have_a_plus_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "a+b").mkdir()
    config = parse_merge_config({"merge_method": "passthrough", "models": [str(tmp_path / "a+b")]})
    assert config.models() == [ModelName(str(tmp_path / "a+b"))]


def test_a_parameter_of_another_method_is_named_as_without_effect() -> None:
    config = parse_merge_config(
        {"merge_method": "task_arithmetic", "base_model": "a", "models": ["b"], "parameters": {"density": 0.5}}
    )
    assert config.ignored == ("merge: parameters.density has no effect: task_arithmetic has no density",)


GOOD: dict[str, Any] = {"merge_method": "ties", "base_model": "org/a", "models": [{"model": "org/b"}]}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"merge_metod": "ties"}, "merge_metod is not a key; did you mean 'merge_method'?"),
        ({"merge_method": "tie"}, "did you mean 'ties'?"),
        ({"merge_method": None}, "There is no merging method"),
        ({"modules": {}}, "modules is not supported"),
        ({"models": None}, "give either models or slices"),
        ({"slices": [{"sources": []}]}, "give either models or slices"),
        ({"models": "org/b"}, r"models: expected a list"),
        ({"models": [{"modle": "org/b"}]}, r"models\[0\]: modle is not a key; did you mean 'model'"),
        ({"models": [{"model": "a+b+c"}]}, r"models\[0\].model: 'a\+b\+c' is not a model; write MODEL or MODEL\+LORA"),
        ({"models": [{"model": "b", "parameters": {"wieght": 1}}]}, "wieght is not a parameter of ties; did you mean"),
        ({"models": [{"model": "b", "parameters": {"lambda": 1}}]}, "lambda is of the merge as a whole"),
        ({"models": [{"model": "b", "layer_range": [0, 1]}]}, "layer_range is not a key"),
        ({"parameters": {"density": []}}, "parameters.density is"),
        ({"parameters": {"density": [0.5, {"value": 1}]}}, "a gradient over layers"),
        ({"parameters": {"density": {"fliter": "mlp", "value": 1}}}, "a filtered value is written"),
        ({"dtype": "int3"}, "dtype is 'int3'; it must be one of float64, float32"),
        ({"tokenizer_source": "union", "tokenizer": {}}, "tokenizer_source or tokenizer, not both"),
        ({"tokenizer": {"source": "union", "tokens": {}}}, "tokens is not supported"),
        ({"tokenizer": {"pad_to_multiple_of": 0}}, "pad_to_multiple_of is 0"),
        ({"models": None, "slices": [{"sources": [{"model": "b"}]}]}, "layer_range is None"),
        (
            {"models": None, "slices": [{"sources": [{"model": "b", "layer_range": [3, 3]}]}]},
            r"layer_range is \[3, 3\]",
        ),
        ({"models": None, "slices": [{"sources": [], "residual_weight": 1}]}, "residual_weight is not supported"),
    ],
)
def test_a_bad_merge_file_is_refused_with_the_key(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        parse_merge_config({**GOOD, **change})


def test_a_merge_file_without_a_method_lists_them() -> None:
    with pytest.raises(InputError, match="merge_method is missing; one of linear, slerp"):
        parse_merge_config({"models": ["a"]})


def test_a_file_that_is_not_there_or_no_yaml_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such merge file"):
        load_merge_config(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("models: [\n")
    with pytest.raises(InputError, match=r"bad.yaml, line 2: not valid YAML"):
        load_merge_config(tmp_path / "bad.yaml")


@pytest.mark.parametrize(
    ("setting", "depth", "value"),
    [
        (0.5, 0.3, 0.5),
        ([0, 1], 0.0, 0.0),
        ([0, 1], 0.25, 0.25),
        ([0, 1], 1.0, 1.0),
        ([0, 1, 0], 0.75, 0.5),
        ([3], 0.6, 3.0),
        ([True, False], 0.9, True),
        ([True, False], 1.0, False),
        ({"filter": "mlp", "value": [2, 4]}, 0.5, 3.0),
        ({"filter": "attn", "value": 1}, 0.5, None),
        ([{"filter": "attn", "value": 1}, {"filter": "*", "value": 7}], 0.5, 7),
        ([{"filter": "up_proj", "value": 1}, {"value": 7}], 0.5, 1),
    ],
)
def test_gradients_are_interpolated_and_the_first_filter_that_fits_counts(
    setting: Any, depth: float, value: Any
) -> None:
    assert evaluate(setting, "model.layers.3.mlp.up_proj.weight", depth) == value
