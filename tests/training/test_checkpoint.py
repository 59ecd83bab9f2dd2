import json
import logging
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from run_folder import RunFolder, distance, load_weights

from trimtab.config_file import load_config
from trimtab.files import append_lines, replace_file
from trimtab.training.checkpoint import (
    checkpoints,
    cut_log,
    keep_lines,
    load_optimizer,
    newest_checkpoint,
    save_checkpoint,
)

Train = Callable[..., RunFolder]


def save(
    run: Path,
    step: int,
    *,
    keep: int = 2,
    optimizer: torch.optim.Optimizer | None = None,
    spare: Collection[Path] = (),
) -> Path:
    """A checkpoint of next to nothing."""
    weight = torch.nn.Parameter(torch.ones(2))
    return save_checkpoint(
        run,
        step,
        write_model=lambda folder: folder.joinpath("model.bin").write_bytes(b"12345678") and None,
        optimizer=optimizer or torch.optim.SGD([weight], lr=1.0),
        names=["weight"],
        state={"objective": {}},
        keep=keep,
        spare=spare,
    )


def steps(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in checkpoints(run)]


def test_checkpoints_are_found_by_number_and_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (2, 9, 10, 11):
        save(tmp_path, step, keep=3)
    (tmp_path / "checkpoints" / "step_x").mkdir()
    (tmp_path / "checkpoints" / ".step_12.1.tmp").mkdir()
    assert steps(tmp_path) == [9, 10, 11]
    found = newest_checkpoint(tmp_path)
    assert found is not None and found[0].name == "step_11" and found[1]["step"] == 11


def test_what_is_spared_stays_beside_the_newest(tmp_path: Path) -> None:
    first = save(tmp_path, 2, keep=1)
    for step in (4, 6):
        save(tmp_path, step, keep=1, spare=[first])
    assert steps(tmp_path) == [2, 6]
    save(tmp_path, 8, keep=1)
    assert steps(tmp_path) == [8]


def test_a_folder_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    "tear",
    [
        lambda path: (path / "model.bin").write_bytes(b"1234"),
        lambda path: (path / "model.bin").unlink(),
        lambda path: (path / "trainer_state.json").write_text('{"step": 4, "fi'),
        lambda path: (path / "trainer_state.json").write_text("[]"),
        lambda path: (path / "trainer_state.json").unlink(),
        lambda path: shutil.rmtree(path) or path.mkdir(),
    ],
)
def test_a_torn_checkpoint_is_skipped_with_a_warning(
    tear: Callable[[Path], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 2)
    tear(save(tmp_path, 4))
    with caplog.at_level(logging.WARNING, "trimtab"):
        found = newest_checkpoint(tmp_path)
    assert found is not None and found[0].name == "step_2"
    assert f"{tmp_path / 'checkpoints' / 'step_4'} is not whole and is skipped" in caplog.text


def test_a_torn_checkpoint_of_a_later_step_does_not_push_out_a_whole_one(tmp_path: Path) -> None:
    save(tmp_path, 2, keep=1)
    (save(tmp_path, 4, keep=2) / "model.bin").unlink()
    save(tmp_path, 3, keep=1)
    assert steps(tmp_path) == [3]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_optimizer_continues_as_if_it_had_not_been_stopped(name: str, tmp_path: Path) -> None:
    def build() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
        weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
        kind = torch.optim.AdamW([weight], lr=0.1, fused=True) if name == "adamw" else torch.optim.SGD([weight], lr=0.1)
        return weight, kind

    def step(weight: torch.nn.Parameter, optimizer: torch.optim.Optimizer, factor: float) -> None:
        optimizer.zero_grad()
        (weight**2 * factor).sum().backward()
        optimizer.step()

    weight, optimizer = build()
    step(weight, optimizer, 1.0)
    path = save(tmp_path, 1, optimizer=optimizer)
    resumed, other = build()
    resumed.data.copy_(weight.data)
    load_optimizer(path, other, ["weight"])
    step(weight, optimizer, 0.3)
    step(resumed, other, 0.3)
    assert torch.equal(weight, resumed)


def test_a_log_is_cut_after_the_last_step_and_torn_lines_go(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes('{"step": 1, "a": "\u2028"}\n{"step": 2}\n{"step": 3}\n{"ste'.encode())
    cut_log(log, 2)
    assert log.read_bytes() == '{"step": 1, "a": "\u2028"}\n{"step": 2}\n'.encode()
    cut_log(log, -1)
    assert log.read_bytes() == b""
    cut_log(tmp_path / "none.jsonl", 2)
    assert not (tmp_path / "none.jsonl").exists()


def test_lines_that_are_not_wanted_are_dropped_and_returned(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    append_lines(log, [{"step": 1}, {"step": 2}, {"step": 3}])
    append_lines(log, [{"step": 2, "text": "é"}])
    assert keep_lines(log, lambda line: line["step"] != 2) == [{"step": 2}, {"step": 2, "text": "é"}]
    assert log.read_text("utf-8") == '{"step": 1}\n{"step": 3}\n'
    assert keep_lines(tmp_path / "none.jsonl", lambda line: True) == []


def test_a_file_is_replaced_as_a_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_is_a_plain_hugging_face_folder(train: Train, tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = train({"training.steps": 3})
    assert steps(run.path) == [2, 3]
    model = AutoModelForCausalLM.from_pretrained(run.checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(run.checkpoint)
    assert {n: t.shape for n, t in run.weights.items()} == {n: t.shape for n, t in load_weights(tiny_model).items()}
    assert distance(load_weights(tiny_model), run.weights) > 1e-3
    prompt = tokenizer("1 + 2 =", return_tensors="pt")
    assert prompt.input_ids[0, 0] == tokenizer.bos_token_id
    answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert answer.shape[1] > prompt.input_ids.shape[1]


def test_a_checkpoint_of_adapters_loads_over_its_base_model(train: Train) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    run = train({"model.lora": {"rank": 2}, "training.steps": 1})
    assert not (run.checkpoint / "model.safetensors").exists()
    model = AutoPeftModelForCausalLM.from_pretrained(run.checkpoint)
    assert any("lora_A" in name for name, _ in model.named_parameters())
    assert AutoTokenizer.from_pretrained(run.checkpoint).eos_token_id == 1


def test_a_model_card_beside_the_weights_names_method_settings_and_results(train: Train) -> None:
    run = train({"training.steps": 1})
    card = (run.checkpoint / "README.md").read_text(encoding="utf-8")
    assert "after gtpo" in card
    assert "learning_rate: 0.01" in card
    assert "| grad_norm |" in card


def test_the_environment_and_the_resolved_configuration_are_complete(
    train: Train, configure: Callable[..., Path]
) -> None:
    run = train({"training.steps": 2, "seed": 3})
    environment = json.loads((run.path / "environment.json").read_text(encoding="utf-8"))
    for package in ("python", "trimtab", "torch", "transformers", "accelerate", "peft", "datasets", "numpy"):
        assert environment["versions"][package], package
    assert environment["seed"] == 3
    assert environment["machine"].keys() == {"system", "processor", "cores", "torch_threads", "gpus"}
    assert environment["machine"]["torch_threads"] == 1
    (start,) = environment["starts"]
    assert start.keys() == {"command", "resumed_at_step", "commit"}
    assert start["resumed_at_step"] is None
    assert load_config(run.path / "config.yaml") == load_config(configure({"training.steps": 2, "seed": 3}))

    train({"training.steps": 4, "seed": 3})
    environment = json.loads((run.path / "environment.json").read_text(encoding="utf-8"))
    assert [start["resumed_at_step"] for start in environment["starts"]] == [None, 2]
    assert load_config(run.path / "config.yaml").training.steps == 4
