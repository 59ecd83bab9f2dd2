"""What a merge refuses, and that nothing is left behind when it does."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from merge_models import adapter, edit_json, grow_vocabulary, variant, weights
from safetensors.torch import save_file
from torch import Tensor

import trimtab.merging.engine
from trimtab.errors import InputError
from trimtab.merging import merge

MLP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A model to spoil."""
    return variant(tiny_model, tmp_path / "model", 1)


@pytest.fixture
def refused(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Runs a merge, sees it refused with nothing left behind, returns the sentence."""

    def run(config: dict[str, Any], output: Path | None = None) -> str:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(InputError) as error:
            merge(config, output or tmp_path / "out")
        assert sorted(tmp_path.rglob("*")) == before
        sentence = str(error.value)
        assert "\n" not in sentence and sentence.endswith((".", "?"))
        return sentence

    yield run


def linear(*models: Path | str, **more: Any) -> dict[str, Any]:
    return {"merge_method": "linear", "models": [str(model) for model in models], **more}


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    """A change that removes a tensor."""

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


def sharded(model: Path) -> list[Path]:
    """Split a model's weights over two files."""
    tensors = weights(model)
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    files = [model / f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    halves = [names[::2], names[1::2]]
    for file, half in zip(files, halves, strict=True):
        save_file({name: tensors[name] for name in half}, file, {"format": "pt"})
    places = {name: file.name for file, half in zip(files, halves, strict=True) for name in half}
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return files


def test_a_missing_shard_is_named(model: Path, tiny_model: Path, refused: Callable[..., str]) -> None:
    sharded(model)[1].unlink()
    sentence = refused(linear(model, tiny_model))
    assert "the shard model-00002-of-00002.safetensors is missing" in sentence and str(model) in sentence


def test_a_shard_that_ends_early_is_named(model: Path, tiny_model: Path, refused: Callable[..., str]) -> None:
    shard = sharded(model)[0]
    shard.write_bytes(shard.read_bytes()[:-10])
    assert f"{shard} ends before its tensor" in refused(linear(model, tiny_model))
    shard.write_bytes(b"\x00" * 4)
    assert f"{shard} is not a whole safetensors file" in refused(linear(model, tiny_model))


def test_a_tensor_that_the_index_places_in_a_shard_must_be_there(model: Path, refused: Callable[..., str]) -> None:
    sharded(model)
    index = model / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**places, "model.more": "model-00001-of-00002.safetensors"}}))
    assert "lacks the tensor model.more" in refused(linear(model))


@pytest.mark.parametrize("place", [0, 1])
def test_a_missing_tensor_is_named_with_the_model_that_lacks_it(
    place: int, tiny_model: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    short = variant(tiny_model, tmp_path / "short", change=without(MLP))
    models = [tiny_model, short] if place else [short, tiny_model]
    assert f"{short} has no tensor {MLP}, which {tiny_model} has." in refused(linear(*models))


def test_models_of_different_depth_are_told_of_slices(
    model: Path, tiny_model: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    slices = [{"sources": [{"model": str(model), "layer_range": [0, 1]}]}]
    short = merge({"merge_method": "passthrough", "slices": slices}, tmp_path / "short")
    assert "it has 1 layers, give layer ranges under slices" in refused(linear(model, short))
    slices[0]["sources"][0]["layer_range"] = [1, 3]
    sentence = refused({"merge_method": "passthrough", "slices": slices})
    assert "has 2 layers; layer_range (1, 3)" in sentence.replace("[", "(").replace("]", ")")


def test_a_shape_mismatch_names_both_shapes(tiny_model: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    def widen(tensors: dict[str, Tensor]) -> None:
        tensors[MLP] = torch.zeros(65, 32)

    wide = variant(tiny_model, tmp_path / "wide", change=widen)
    sentence = refused(linear(tiny_model, wide))
    assert f"{MLP}: {tiny_model} has shape [64, 32], {wide} has [65, 32]" in sentence


def test_a_vocabulary_mismatch_names_both_shapes_and_the_option(
    model: Path, tiny_model: Path, refused: Callable[..., str]
) -> None:
    grow_vocabulary(model, ["<|im_start|>"], 262)
    sentence = refused(linear(tiny_model, model))
    assert "[259, 32]" in sentence and "[262, 32]" in sentence and "tokenizer_source: union" in sentence


def test_different_architectures_and_quantised_models_are_refused(
    model: Path, tiny_model: Path, refused: Callable[..., str]
) -> None:
    edit_json(model / "config.json", {"model_type": "mistral"})
    assert "one architecture" in refused(linear(tiny_model, model))
    edit_json(model / "config.json", {"model_type": "llama", "quantization_config": {"bits": 4}})
    assert f"{model} is quantised" in refused(linear(tiny_model, model))


def test_a_folder_without_safetensors_is_told_how_to_get_them(model: Path, refused: Callable[..., str]) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "holds no model.safetensors" in (sentence := refused(linear(model))) and "save_pretrained" in sentence


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_found_in_the_model_and_tensor_that_hold_it(
    value: float, tiny_model: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[MLP][3, 4] = value

    spoilt = variant(tiny_model, tmp_path / "spoilt", change=spoil)
    assert refused(linear(tiny_model, spoilt)).startswith(f"{spoilt} of '{MLP}' holds NaN or infinity")


def test_the_output_cannot_be_an_input_or_lie_in_one_or_be_there_already(
    model: Path, tiny_model: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    lora = adapter(tiny_model, tmp_path / "lora")
    assert f"lies in the model {model}" in refused(linear(model), model)
    assert f"lies in the model {model}" in refused(linear(model), tmp_path / "other" / ".." / "model")
    assert f"lies in the model {model}" in refused(linear(model), model / "merged")
    assert f"lies in the model {lora}" in refused(linear(f"{model}+{lora}"), lora)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").touch()
    assert f"{taken} is there already" in refused(linear(model), taken)
    (taken / "file").unlink()
    assert merge(linear(model), taken) == taken and (taken / "config.json").is_file()


def test_too_little_space_is_seen_before_anything_is_written(
    model: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr(trimtab.merging.engine.shutil, "disk_usage", lambda _: usage)
    assert "takes 107.5 kB, but" in (sentence := refused(linear(model))) and "1.0 kB left" in sentence


def test_a_disk_that_fills_up_while_merging_leaves_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trimtab.merging.engine.ShardWriter, "write", full)
    assert "no space is left on the disk" in refused(linear(model))


def test_a_killed_merge_leaves_no_model_and_the_next_one_clears_up(model: Path, tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "import trimtab.merging.engine as engine\n"
        "real = engine.merge_one\n"
        "def slow(*arguments):\n"
        "    print('merging', flush=True)\n"
        "    time.sleep(0.2)\n"
        "    return real(*arguments)\n"
        "engine.merge_one = slow\n"
        "engine.merge({'merge_method': 'linear', 'models': [sys.argv[1]]}, sys.argv[2], workers=1)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(model), str(tmp_path / "out")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline() == "merging\n"
    with pytest.raises(InputError, match="another process writes to it"):
        merge(linear(model), tmp_path / "out")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    partial = tmp_path / ".out.partial"
    assert not (tmp_path / "out").exists() and partial.is_dir() and not (partial / "config.json").exists()
    (partial / "model-00009-of-00009.safetensors").touch()
    output = merge(linear(model), tmp_path / "out")
    assert not partial.exists() and not list(output.glob("model-*"))
    for name, tensor in weights(model).items():
        assert torch.equal(weights(output)[name], tensor)


def test_an_interrupted_merge_leaves_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        time.sleep(0.01)
        raise SystemExit(130)

    monkeypatch.setattr(trimtab.merging.engine, "merge_one", stop)
    with pytest.raises(SystemExit):
        merge(linear(model), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_adapter_for_another_model_or_of_another_kind_is_refused(
    model: Path, tiny_model: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    lora = adapter(tiny_model, tmp_path / "lora")

    def narrow(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(16, 32)

    other = variant(tiny_model, tmp_path / "other", change=narrow)
    assert "belongs to another model" in refused(linear(f"{other}+{lora}"))
    down = "model.layers.1.mlp.down_proj.weight"
    fewer = variant(tiny_model, tmp_path / "fewer", change=without(down))
    assert f"changes {down}, which" in refused(linear(f"{fewer}+{lora}"))
    edit_json(lora / "adapter_config.json", {"use_dora": True})
    assert "use_dora" in refused(linear(f"{model}+{lora}"))
    edit_json(lora / "adapter_config.json", {"use_dora": False, "peft_type": "LOHA"})
    assert "of type LOHA" in refused(linear(f"{model}+{lora}"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"merge_method": "ties"}, "needs the base model"),
        ({"merge_method": "slerp"}, "slerp merges 2 tensors"),
        ({"merge_method": "linear", "parameters": {"weight": 0}}, "sum to 0"),
        ({"merge_method": "linear", "parameters": {"weight": "much"}}, "weights is 'much'; it must be a number"),
        ({"merge_method": "ties", "base_model": "BASE", "parameters": {"density": 1.5}}, "from 0 to 1"),
        ({"merge_method": "model_stock", "base_model": "BASE"}, "merges at least 2 tensors besides the base"),
        ({"models": ["./nowhere"]}, "There is no model folder ./nowhere"),
        ({"models": ["BASE+./nowhere"]}, "There is no model folder ./nowhere"),
    ],
)
def test_settings_that_the_method_refuses_are_refused_before_anything_is_written(
    change: dict[str, Any], sentence: str, model: Path, tiny_model: Path, refused: Callable[..., str]
) -> None:
    text = json.dumps({**linear(model), **change}).replace("BASE", str(tiny_model))
    assert sentence in refused(json.loads(text))


def test_slerp_needs_the_base_to_be_one_of_its_two_models(
    model: Path, tiny_model: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    other = variant(tiny_model, tmp_path / "other", 5)
    config = linear(model, other, base_model=str(tiny_model), parameters={"t": 0.5}, merge_method="slerp")
    assert "is none of the two models" in refused(config)
    config["models"] = [str(model), str(other), str(tiny_model)]
    assert "slerp merges 2 tensors" in refused(config)
