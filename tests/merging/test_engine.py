"""Whole merges of tiny models: what is in the folder that comes out."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from merge_models import adapter, edit_json, folded, variant, weights
from safetensors.torch import load_file, save_file
from torch import Tensor

from trimtab.errors import InputError
from trimtab.merging import merge
from trimtab.merging.engine import as_config, describe, parse_size, plan_merge

MLP = "model.layers.1.mlp.up_proj.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two variants of the tiny model."""
    folder = tmp_path_factory.mktemp("pair")
    return variant(tiny_model, folder / "first", 1), variant(tiny_model, folder / "second", 2)


def linear(*models: Path | str, **more: Any) -> dict[str, Any]:
    return {"merge_method": "linear", "models": [str(model) for model in models], **more}


def ties(base: Path, *models: Path | str, **parameters: Any) -> dict[str, Any]:
    return {**linear(*models), "merge_method": "ties", "base_model": str(base), "parameters": parameters}


def config_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values


def load(folder: Path) -> Any:
    """The model as transformers reads it, with no weight missing or left over."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    return model


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_the_output_is_a_model_that_transformers_loads_with_its_tokenizer(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    output = merge(linear(*pair), tmp_path / "out")
    first, second = map(weights, pair)
    model = load(output)
    torch.testing.assert_close(model.state_dict()[MLP], (first[MLP] + second[MLP]) / 2)
    assert AutoTokenizer.from_pretrained(output)("a+b") == AutoTokenizer.from_pretrained(pair[0])("a+b")
    assert model.generation_config.eos_token_id == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not (output / ".lock").exists()
    assert "base_model" in (output / "README.md").read_text() and "linear" in (output / "merge.yaml").read_text()


def test_one_thread_or_four_and_one_shard_or_many_give_the_same_bits(
    tiny_model: Path, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    config = {**ties(tiny_model, *pair, density=0.4), "merge_method": "dare_ties"}
    one = merge(config, tmp_path / "one", workers=1, seed=3)
    four = merge(config, tmp_path / "four", workers=4, seed=3, shard_size="20KB")
    assert_same(weights(four), weights(one))
    assert not torch.equal(weights(merge(config, tmp_path / "other", seed=4))[MLP], weights(one)[MLP])
    torch_threads = torch.get_num_threads()
    assert torch_threads == 1


def test_shards_are_at_most_as_large_as_asked_and_the_index_is_full(pair: tuple[Path, Path], tmp_path: Path) -> None:
    output = merge(linear(*pair), tmp_path / "out", shard_size="20KB")
    index = json.loads((output / "model.safetensors.index.json").read_text())
    shards = sorted(output.glob("*.safetensors"))
    assert len(shards) > 3 and shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    assert index["weight_map"] == {name: path.name for path in shards for name in load_file(path)}
    assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in weights(output).values())
    largest = max(4 * tensor.numel() for tensor in weights(output).values())
    assert all(path.stat().st_size <= max(20_000, largest) + 4096 for path in shards)
    load(output)
    # And what was written in shards can be merged again.
    again = merge(linear(output), tmp_path / "again")
    assert_same(weights(again), weights(output))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_dtype_of_files_and_configuration_is_the_one_asked_for_and_is_rounded_to_once(
    dtype: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    wanted = getattr(torch, dtype)
    output = merge(linear(*pair, out_dtype=dtype), tmp_path / "out")
    assert {tensor.dtype for tensor in weights(output).values()} == {wanted}
    assert config_of(output)["dtype"] == config_of(output)["torch_dtype"] == dtype
    assert load(output).dtype == wanted
    full = weights(merge(linear(*pair), tmp_path / "full"))
    assert_same(weights(output), {name: tensor.to(wanted) for name, tensor in full.items()})


def test_half_precision_models_are_merged_in_float32(tiny_model: Path, tmp_path: Path) -> None:
    first = variant(tiny_model, tmp_path / "first", 1, dtype=torch.bfloat16)
    second = variant(tiny_model, tmp_path / "second", 2, dtype=torch.bfloat16)
    a, b = weights(first)[MLP].float(), weights(second)[MLP].float()
    wide = merge(linear(first, second, dtype="float32"), tmp_path / "wide")
    torch.testing.assert_close(weights(wide)[MLP], (a + b) / 2)
    narrow = merge(linear(first, second), tmp_path / "narrow")
    assert torch.equal(weights(narrow)[MLP], ((a + b) / 2).bfloat16())
    assert config_of(narrow)["dtype"] == "bfloat16"


def test_an_overflow_of_the_dtype_asked_for_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    def enlarge(tensors: dict[str, Tensor]) -> None:
        tensors[MLP] = torch.full_like(tensors[MLP], 1e5)

    large = variant(tiny_model, tmp_path / "large", change=enlarge)
    with pytest.raises(InputError, match=f"The merge of '{MLP}' overflows float16"):
        merge(linear(large, dtype="float16"), tmp_path / "out")


def test_a_gradient_follows_the_layers_and_a_filter_the_names(pair: tuple[Path, Path], tmp_path: Path) -> None:
    config = {
        **linear(*pair, base_model=str(pair[0])),
        "merge_method": "slerp",
        "parameters": {"t": [{"filter": "mlp", "value": [0, 1]}, {"value": 0}]},
    }
    found, first, second = (weights(path) for path in (merge(config, tmp_path / "out"), *pair))
    for name, tensor in found.items():
        source = second if "layers.1.mlp" in name else first
        torch.testing.assert_close(tensor, source[name], rtol=1e-6, atol=1e-7)


def test_layers_are_stacked_and_the_configuration_counts_them(pair: tuple[Path, Path], tmp_path: Path) -> None:
    slices = [
        {"sources": [{"model": str(pair[0]), "layer_range": [0, 2]}]},
        {"sources": [{"model": str(pair[1]), "layer_range": [0, 1]}]},
        {"sources": [{"model": str(pair[1]), "layer_range": [1, 2], "parameters": {"scale": 0.5}}]},
    ]
    output = merge({"merge_method": "passthrough", "slices": slices}, tmp_path / "out")
    found, first, second = (weights(path) for path in (output, *pair))
    assert config_of(output)["num_hidden_layers"] == 4 == load(output).config.num_hidden_layers
    up = "model.layers.{}.mlp.up_proj.weight"
    assert torch.equal(found[up.format(1)], first[up.format(1)])
    assert torch.equal(found[up.format(2)], second[up.format(0)])
    torch.testing.assert_close(found[up.format(3)], second[up.format(1)] / 2)
    assert torch.equal(found[EMBEDDING], first[EMBEDDING])
    assert torch.equal(found["model.norm.weight"], 0.5 * second["model.norm.weight"])


def test_a_list_with_an_entry_for_each_layer_is_stacked_too(tiny_model: Path, tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention"]
    model = variant(tiny_model, tmp_path / "model", config={"layer_types": kinds})
    slices = [{"sources": [{"model": str(model), "layer_range": place}]} for place in ([0, 2], [1, 2])]
    output = merge({"merge_method": "passthrough", "slices": slices}, tmp_path / "out")
    assert config_of(output)["layer_types"] == [*kinds, "sliding_attention"]


@pytest.mark.parametrize("density", [0, 1])
def test_density_0_leaves_the_base_and_density_1_with_one_model_the_model(
    density: float, tiny_model: Path, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    output = merge(ties(tiny_model, pair[0], density=density), tmp_path / "out")
    expected = weights(pair[0] if density else tiny_model)
    for name, tensor in weights(output).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-7)


def test_a_single_model_passes_through_bit_for_bit(pair: tuple[Path, Path], tmp_path: Path) -> None:
    output = merge({"merge_method": "passthrough", "models": [str(pair[0])]}, tmp_path / "out")
    assert_same(weights(output), weights(pair[0]))


def test_slerp_with_a_zero_tensor_is_linear(tiny_model: Path, pair: tuple[Path, Path], tmp_path: Path) -> None:
    def empty(tensors: dict[str, Tensor]) -> None:
        tensors[MLP].zero_()

    zero = variant(tiny_model, tmp_path / "zero", change=empty)
    config = {**linear(zero, pair[0]), "merge_method": "slerp", "parameters": {"t": 0.25}}
    output = merge(config, tmp_path / "out")
    torch.testing.assert_close(weights(output)[MLP], 0.25 * weights(pair[0])[MLP])


def test_tied_and_untied_heads_meet_in_a_head_of_its_own(
    tiny_model: Path, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    def untie(tensors: dict[str, Tensor]) -> None:
        tensors[HEAD] = tensors[EMBEDDING] + 1

    untied = variant(tiny_model, tmp_path / "untied", 3, change=untie, config={"tie_word_embeddings": False})
    output = merge(linear(pair[0], untied), tmp_path / "out")
    tied, own, found = (weights(path) for path in (pair[0], untied, output))
    assert config_of(output)["tie_word_embeddings"] is False
    torch.testing.assert_close(found[HEAD], (tied[EMBEDDING] + own[HEAD]) / 2)
    torch.testing.assert_close(found[EMBEDDING], (tied[EMBEDDING] + own[EMBEDDING]) / 2)
    model = load(output)
    assert torch.equal(model.lm_head.weight, found[HEAD])
    # The same as the base of a method.
    output = merge(ties(tiny_model, untied), tmp_path / "ties")
    torch.testing.assert_close(weights(output)[HEAD], own[HEAD])


def test_tied_heads_stay_tied_even_where_a_file_stores_the_copy(
    tiny_model: Path, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    def store(tensors: dict[str, Tensor]) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()

    stored = variant(tiny_model, tmp_path / "stored", 3, change=store)
    output = merge(linear(stored, pair[0]), tmp_path / "out")
    assert HEAD not in weights(output) and config_of(output)["tie_word_embeddings"] is True
    load(output)


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 3}, "rank_pattern": {"down_proj": 2}},
        {"target_modules": ["embed_tokens", "o_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    ],
    ids=["alpha over r", "rank-stabilised", "patterns", "embedding", "a module saved whole"],
)
def test_a_lora_is_merged_on_the_fly_as_peft_merges_it(
    options: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    lora = adapter(tiny_model, tmp_path / "lora", **options)
    output = merge(linear(f"{tiny_model}+{lora}"), tmp_path / "out")
    expected = folded(tiny_model, lora)
    changed = 0
    for name, tensor in weights(output).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
        changed += not torch.equal(tensor, weights(tiny_model)[name])
    assert changed


def test_an_adapters_folder_stands_for_the_model_that_it_names(tiny_model: Path, tmp_path: Path) -> None:
    lora = adapter(tiny_model, tmp_path / "lora")
    short = merge(linear(lora), tmp_path / "short")
    assert_same(weights(short), weights(merge(linear(f"{tiny_model}+{lora}"), tmp_path / "long")))


def test_an_adapter_of_half_precision_weights_is_rounded_once(tiny_model: Path, tmp_path: Path) -> None:
    half = variant(tiny_model, tmp_path / "half", dtype=torch.bfloat16)
    lora = adapter(tiny_model, tmp_path / "lora")
    name = "model.layers.0.self_attn.q_proj.weight"
    factors = load_file(lora / "adapter_model.safetensors")
    down, up = (factors[f"base_model.model.{name.replace('.weight', '')}.lora_{side}.weight"] for side in "AB")
    output = merge(linear(f"{half}+{lora}"), tmp_path / "out")
    assert torch.equal(weights(output)[name], torch.addmm(weights(half)[name].float(), up, down, alpha=4).bfloat16())


def test_tensors_that_are_no_floats_are_passed_on_when_equal_and_refused_when_not(
    tiny_model: Path, tmp_path: Path
) -> None:
    def count(number: int) -> Any:
        def change(tensors: dict[str, Tensor]) -> None:
            tensors["model.steps"] = torch.tensor([number])
            tensors["model.flag"] = torch.tensor(True)

        return change

    first, same = (variant(tiny_model, tmp_path / f"seven{n}", n, change=count(7)) for n in (1, 2))
    other = variant(tiny_model, tmp_path / "eight", 3, change=count(8))
    output = merge(linear(first, same, dtype="bfloat16"), tmp_path / "out")
    assert weights(output)["model.steps"].tolist() == [7] and weights(output)["model.flag"].item() is True
    with pytest.raises(InputError, match=r"eight of 'model.steps' \(int64\) differs"):
        merge(linear(first, other), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_what_stands_beside_the_weights_comes_along(tiny_model: Path, pair: tuple[Path, Path], tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    (base / "chat_template.jinja").write_text("base's")
    edit_json(base / "generation_config.json", {"temperature": 0.3})
    output = merge(ties(base, *pair), tmp_path / "out")
    assert (output / "chat_template.jinja").read_text() == "base's"
    assert json.loads((output / "generation_config.json").read_text())["temperature"] == 0.3
    assert config_of(output)["vocab_size"] == config_of(tiny_model)["vocab_size"]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("auto", "common"), ("{{ mine }}", "{{ mine }}"), ("chatml", "<|im_start|>")],
)
def test_a_chat_template_is_the_commonest_a_named_or_a_given_one(
    wanted: str, found: str, tiny_model: Path, tmp_path: Path
) -> None:
    models = [variant(tiny_model, tmp_path / str(number), number) for number in range(3)]
    for model, template in zip(models, ("rare", "common", "common"), strict=True):
        (model / "chat_template.jinja").write_text(template)
    output = merge(linear(*models, chat_template=wanted), tmp_path / "out")
    from transformers import AutoTokenizer

    assert found in AutoTokenizer.from_pretrained(output).chat_template


def test_an_unusable_chat_template_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="chat_template is 'alpaco'; it must be auto, chatml"):
        merge(linear(*pair, chat_template="alpaco"), tmp_path / "out")


def test_the_plan_says_what_it_takes_and_reads_no_tensor(
    tiny_model: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reads(*_: Any) -> None:
        raise AssertionError("a tensor is read")

    monkeypatch.setattr("trimtab.merging.models.read_tensor", reads)
    plan = plan_merge(as_config(ties(tiny_model, *pair, density=[0.2, 0.8])))
    text = describe(plan, workers=2, shard_size="1MB")
    assert "107.5 kB, shards of at most 1.0 MB" in text and "2 tensors at a time" in text
    assert "(base)" in text and "density    [0.2, 0.2], [0.8, 0.8]" in text
    embedding = next(one for one in plan.tensors if one.name == EMBEDDING)
    assert embedding.memory == 4 * embedding.bytes  # two models, the base and the result


def test_a_setting_without_effect_is_warned_of(
    tiny_model: Path, pair: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {**ties(tiny_model, *pair, density=0.5), "merge_method": "task_arithmetic"}
    with caplog.at_level(logging.WARNING):
        merge(config, tmp_path / "out")
    assert "parameters.density has no effect" in caplog.text


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), (7, 7), ("20K", 20_000)])
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert parse_size(text) == size


def test_progress_is_a_line_a_tensor_at_the_end(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    merge(linear(*pair), tmp_path / "out", quiet=False)
    assert "merge: tensor 20/20" in capsys.readouterr().err


def test_the_inputs_are_not_changed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    before = [path.read_bytes() for folder in pair for path in sorted(folder.iterdir()) if path.is_file()]
    merge(linear(*pair), tmp_path / "out")
    assert before == [path.read_bytes() for folder in pair for path in sorted(folder.iterdir()) if path.is_file()]


def test_an_empty_tensor_and_a_scalar_survive(tiny_model: Path, tmp_path: Path) -> None:
    model = variant(tiny_model, tmp_path / "model")
    odd = {"model.empty": torch.empty(0, 3), "model.scalar": torch.tensor(2.5)}
    save_file({**weights(model), **odd}, model / "model.safetensors", {"format": "pt"})
    found = weights(merge(linear(model, model), tmp_path / "out"))
    assert found["model.empty"].shape == (0, 3) and found["model.scalar"].item() == 2.5
