"""Whole merges of tiny models against those of mergekit 0.1.5: equal to 1e-6, tensor by tensor."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from merge_models import adapter, grow_vocabulary, variant, weights

from trimtab.merging import merge

pytest.importorskip("mergekit.merge", reason="the comparison needs mergekit: pip install 'trimtab[oracle]'")

BASE, CHAT, CODE, GROWN, LORA = "BASE", "CHAT", "CODE", "GROWN", "LORA"
TIES = {
    "merge_method": "ties",
    "base_model": BASE,
    "models": [
        {"model": BASE},
        {"model": CHAT, "parameters": {"weight": [0.1, 0.5, 1], "density": 0.5}},
        {"model": CODE, "parameters": {"weight": 1.0, "density": [1, 0.3]}},
    ],
    "parameters": {"normalize": True, "int8_mask": True, "lambda": 0.9},
}
GROWING = {
    "merge_method": "task_arithmetic",
    "base_model": BASE,
    "models": [
        {"model": CHAT, "parameters": {"weight": 0.5}},
        {"model": GROWN, "parameters": {"weight": 0.7}},
    ],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "ties with gradients": TIES,
    "linear": {
        "merge_method": "linear",
        "models": [
            {"model": CHAT, "parameters": {"weight": 0.3}},
            {"model": CODE, "parameters": {"weight": [{"filter": "mlp", "value": 2.0}, {"value": 1.0}]}},
        ],
    },
    "slerp over slices with filters": {
        "merge_method": "slerp",
        "base_model": BASE,
        "slices": [{"sources": [{"model": model, "layer_range": [0, 2]} for model in (BASE, CHAT)]}],
        "parameters": {
            "t": [
                {"filter": "self_attn", "value": [0, 0.5, 0.3]},
                {"filter": "mlp", "value": [1, 0.5]},
                {"value": 0.5},
            ]
        },
    },
    "a stack with a scale": {
        "merge_method": "passthrough",
        "slices": [
            {"sources": [{"model": CHAT, "layer_range": [0, 2]}]},
            {
                "sources": [
                    {
                        "model": CODE,
                        "layer_range": [1, 2],
                        "parameters": {"scale": [{"filter": "o_proj", "value": 0.0}, {"value": 1.0}]},
                    }
                ]
            },
        ],
    },
    "task arithmetic with a LoRA": {
        "merge_method": "task_arithmetic",
        "base_model": BASE,
        "models": [
            {"model": f"{BASE}+{LORA}", "parameters": {"weight": 0.5}},
            {"model": CODE, "parameters": {"weight": 0.7}},
        ],
        "parameters": {"lambda": 0.8},
    },
    "model stock": {"merge_method": "model_stock", "base_model": BASE, "models": [{"model": CHAT}, {"model": CODE}]},
    "a united vocabulary": {**GROWING, "tokenizer_source": "union"},
    "the base's vocabulary": {**GROWING, "tokenizer_source": "base"},
    "a model's vocabulary": {**GROWING, "tokenizer_source": GROWN},
    "a united vocabulary without a base": {
        "merge_method": "linear",
        "models": [{"model": model, "parameters": {"weight": 0.5}} for model in (CHAT, GROWN)],
        "tokenizer_source": "union",
    },
}


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders by the words that stand for them."""
    folder = tmp_path_factory.mktemp("models")
    grown = variant(tiny_model, folder / "grown", 3)
    grow_vocabulary(grown, ["<|im_start|>", "<|im_end|>"], 264)
    found = {
        BASE: tiny_model,
        CHAT: variant(tiny_model, folder / "first", 1),
        CODE: variant(tiny_model, folder / "second", 2),
        GROWN: grown,
        LORA: adapter(tiny_model, folder / "lora"),
    }
    return {word: str(path) for word, path in found.items()}


def filled(config: dict[str, Any], models: dict[str, str]) -> dict[str, Any]:
    text = yaml.safe_dump({**config, "dtype": "float32"})
    for word, path in models.items():
        text = text.replace(word, path)
    values: dict[str, Any] = yaml.safe_load(text)
    return values


def assert_equal(ours: Path, theirs: Path) -> None:
    first, second = weights(ours), weights(theirs)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_merge_equals_that_of_mergekits_python_api(name: str, models: dict[str, str], tmp_path: Path) -> None:
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    config = filled(CONFIGS[name], models)
    options = MergeOptions(quiet=True, lora_merge_cache=str(tmp_path / "cache"))
    run_merge(MergeConfiguration.model_validate(config), str(tmp_path / "theirs"), options)
    assert_equal(merge(config, tmp_path / "ours"), tmp_path / "theirs")


def test_a_merge_equals_that_of_mergekits_command_line(models: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "merge.yaml"
    path.write_text(yaml.safe_dump(filled(TIES, models)))
    script = Path(sys.executable).with_name("mergekit-yaml")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [script, path, tmp_path / "theirs", "--quiet"], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert_equal(merge(path, tmp_path / "ours"), tmp_path / "theirs")
