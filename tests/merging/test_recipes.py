"""Named merges, run from the command line on tiny models."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from merge_models import adapter, folded, grow_vocabulary, variant, weights

from trimtab.errors import InputError
from trimtab.merging.recipes import recipe_config

Command = Callable[..., Any]


def test_rombodawgs_recipe_adds_half_of_the_lora_where_signs_agree_and_the_larger_change_elsewhere(
    tiny_model: Path, tmp_path: Path, command: Command
) -> None:
    instruct = variant(tiny_model, tmp_path / "instruct", 1)
    lora = adapter(tiny_model, tmp_path / "lora")
    outcome = command(
        *("merge", "--recipe", "rombodawg", "--base", tiny_model, "--instruct", instruct, "--lora", lora),
        *("-o", tmp_path / "out", "--quiet"),
    )
    assert outcome.code == 0, outcome.err
    base, own, both, merged = weights(tiny_model), weights(instruct), folded(instruct, lora), weights(tmp_path / "out")
    assert set(merged) == set(base)
    for name, tensor in merged.items():
        first, second = own[name] - base[name], both[name] - base[name]
        larger = torch.where(first.abs() > second.abs(), first, second)
        expected = torch.where(first * second > 0, (first + second) / 2, larger)
        torch.testing.assert_close(tensor, base[name] + expected, rtol=1e-5, atol=1e-6)
    written = yaml.safe_load((tmp_path / "out.yaml").read_text())
    assert written["merge_method"] == "ties"
    again = command("merge", tmp_path / "out.yaml", "-o", tmp_path / "again", "--quiet")
    assert again.code == 0, again.err
    assert all(torch.equal(tensor, merged[name]) for name, tensor in weights(tmp_path / "again").items())


def test_rombodawgs_recipe_takes_the_instruct_models_tokenizer(
    tiny_model: Path, tmp_path: Path, command: Command
) -> None:
    instruct = variant(tiny_model, tmp_path / "instruct", 1)
    grow_vocabulary(instruct, ["<|im_start|>", "<|im_end|>"], 261)
    (instruct / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    lora = adapter(tiny_model, tmp_path / "lora")
    outcome = command(
        *("merge", "--recipe", "rombodawg", "--base", tiny_model, "--instruct", instruct, "--lora", lora),
        *("-o", tmp_path / "out", "--quiet"),
    )
    assert outcome.code == 0, outcome.err
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 261
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages[0]['content'] }}"
    merged = weights(tmp_path / "out")["model.embed_tokens.weight"]
    assert torch.equal(merged[259:], weights(instruct)["model.embed_tokens.weight"][259:])


def test_runs_are_averaged_from_their_newest_checkpoints(tiny_model: Path, tmp_path: Path, command: Command) -> None:
    for number in (1, 2, 3):
        checkpoints = tmp_path / f"run{number}" / "checkpoints"
        checkpoints.mkdir(parents=True)
        for step in (9, 10):
            folder = variant(tiny_model, checkpoints / f"step_{step}", seed=10 * number + step)
            (folder / "trainer_state.json").write_text("{}")
    runs = [argument for number in (1, 2, 3) for argument in ("--model", tmp_path / f"run{number}")]
    outcome = command("merge", "--recipe", "average", "--base", tiny_model, *runs, "-o", tmp_path / "out", "--quiet")
    assert outcome.code == 0, outcome.err
    base, merged = weights(tiny_model), weights(tmp_path / "out")
    name = "model.layers.1.mlp.up_proj.weight"
    changes = torch.stack(
        [weights(tmp_path / f"run{n}" / "checkpoints" / "step_10")[name] - base[name] for n in (1, 2, 3)]
    )
    agree = changes.sign() == changes.sum(dim=0).sign()
    mean = (changes * agree).sum(dim=0) / agree.sum(dim=0)
    torch.testing.assert_close(merged[name], base[name] + mean, rtol=1e-5, atol=1e-6)


def test_a_dry_run_prints_the_recipe_and_the_plan_and_writes_nothing(
    tiny_model: Path, tmp_path: Path, command: Command
) -> None:
    other = variant(tiny_model, tmp_path / "other", 1)
    outcome = command(
        *("merge", "--recipe", "average", "--base", tiny_model, "--model", other, "--dry-run"),
        *("-o", tmp_path / "out"),
    )
    assert outcome.code == 0, outcome.err
    for word in ("merge_method: ties", "memory", "time ", "20 tensors", "density    [1.0]"):
        assert word in outcome.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]


@pytest.mark.parametrize(
    ("name", "given", "sentence"),
    [
        ("rombodog", {}, "did you mean 'rombodawg'"),
        ("rombodawg", {"base": "a"}, "needs --instruct and --lora"),
        ("average", {"base": "a"}, "needs --model"),
        ("average", {"base": "a", "models": ["b"], "lora": "c"}, "takes no --lora"),
    ],
)
def test_a_recipe_that_lacks_a_model_says_which(name: str, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        recipe_config(name, **given)


def test_the_command_wants_a_merge_file_or_a_recipe(tmp_path: Path, command: Command) -> None:
    assert "either a merge file or --recipe" in command("merge").err
    (tmp_path / "merge.yaml").write_text("{}")
    assert "--lora is of --recipe" in command("merge", tmp_path / "merge.yaml", "--lora", "x").err
    assert command("merge", tmp_path / "merge.yaml").code == 2


def test_what_was_merged_and_what_came_out_are_evaluated_in_one_command(
    tiny_model: Path, tmp_path: Path, command: Command
) -> None:
    other = variant(tiny_model, tmp_path / "other", 1)
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1 + 2 =", "answer": "3"}\n{"prompt": "2 + 2 =", "answer": "4"}\n')
    evaluation = tmp_path / "evaluation.yaml"
    evaluation.write_text(
        yaml.safe_dump(
            {
                "data": [{"source": str(data), "label": "sums"}],
                "samples": 2,
                "k": [1],
                "majority_k": [1],
                "sampling": {"max_completion_tokens": 4},
            }
        )
    )
    outcome = command(
        *("merge", "--recipe", "average", "--base", tiny_model, "--model", other, "--evaluate", evaluation),
        *("-o", tmp_path / "out", "--quiet"),
    )
    assert outcome.code == 0, outcome.err
    results = (tmp_path / "out-evaluation" / "results.json").read_text()
    assert all(json.dumps(label) in results for label in (str(tiny_model), str(other), "merged"))


def test_a_bad_evaluation_is_refused_before_the_merge(tiny_model: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "evaluation.yaml").write_text("samples: 2\n")
    outcome = command(
        *("merge", "--recipe", "average", "--base", tiny_model, "--model", tiny_model, "-o", tmp_path / "out"),
        *("--evaluate", tmp_path / "evaluation.yaml"),
    )
    assert outcome.code == 2 and "data is missing" in outcome.err
    assert not (tmp_path / "out").exists()
