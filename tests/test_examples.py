import importlib.util
import runpy
import sys
from pathlib import Path

import pytest
import torch

from trimtab.config_file import load_config
from trimtab.objectives import METHODS

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "common")
CONFIGS = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))


def test_every_method_has_a_script_and_a_configuration() -> None:
    assert {*METHODS, "sft"} == set(SCRIPTS)
    assert {*METHODS, "sft"} <= set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_example_configuration_is_valid(name: str) -> None:
    load_config(EXAMPLES / f"{name}.yaml")


@pytest.mark.parametrize("name", ["paper-llama-3.1-8b", "paper-qwen-2.5-3b"])
def test_the_papers_settings_are_those_of_the_paper(name: str) -> None:
    config = load_config(EXAMPLES / f"{name}.yaml")
    optimizer = config.optimizer
    assert config.method == {"name": "gtpo", "gamma": 0.1, "entropy_filter": "auto"}
    assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.max_grad_norm) == (1e-6, 0.1, 0.1)
    assert (optimizer.schedule, optimizer.warmup_ratio, config.training.epochs, config.seed) == (
        "cosine",
        0.005,
        1,
        3407,
    )
    assert config.sampling.group_size == (8 if "llama" in name else 12)
    assert (config.sampling.temperature, config.sampling.max_completion_tokens) == (1.0, 1500)
    assert config.training.updates_per_rollout == 1
    assert config.model.lora is not None and (config.model.lora.rank, config.model.lora.alpha) == (128, 128.0)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_example_script_moves_the_policy(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("common", EXAMPLES / "common.py")
    assert spec is not None and spec.loader is not None
    common = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "common", common)
    spec.loader.exec_module(common)
    monkeypatch.setattr(common, "STEPS", 1)
    monkeypatch.setattr(common, "PROMPTS", 3)
    before = {k: v.clone() for k, v in common.setup(learning_rate=0.0).policy.model.state_dict().items()}
    world = runpy.run_path(str(EXAMPLES / f"{name}.py"))["world"]
    after = world.policy.model.state_dict()
    assert "step  1" in capsys.readouterr().out
    assert any(not torch.equal(before[key], after[key]) for key in before)
    assert all(value.isfinite().all() for value in after.values())
