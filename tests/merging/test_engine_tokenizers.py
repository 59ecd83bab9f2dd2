"""Models with different vocabularies."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from merge_models import edit_json, grow_vocabulary, variant, weights
from torch import Tensor

from trimtab.errors import InputError
from trimtab.merging import merge
from trimtab.merging.tokenizers import select_rows

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def three(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The tiny model (259 tokens), one with a chat's two tokens, one with another two and two rows of padding."""
    folder = tmp_path_factory.mktemp("three")
    chat, tools = variant(tiny_model, folder / "chat", 1), variant(tiny_model, folder / "tools", 2)
    grow_vocabulary(chat, ["<|im_start|>", "<|im_end|>"], 261)
    grow_vocabulary(tools, ["<tool>", "<|im_end|>"], 263)
    return tiny_model, chat, tools


def summed(three: tuple[Path, Path, Path], **more: Any) -> dict[str, Any]:
    base, *models = map(str, three)
    return {
        "merge_method": "task_arithmetic",
        "base_model": base,
        "models": [{"model": model, "parameters": {"weight": 0.5}} for model in models],
        **more,
    }


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_a_union_keeps_the_bases_ids_and_appends_the_others_tokens(
    three: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    output = merge(summed(three, tokenizer_source="union"), tmp_path / "out")
    base, chat, tools, found = (weights(path)[EMBEDDING] for path in (*three, output))
    vocabulary = tokenizer_of(output).get_vocab()
    assert {token: vocabulary[token] for token in ("<s>", "<|im_start|>", "<|im_end|>", "<tool>")} == {
        "<s>": 0,
        "<|im_start|>": 259,
        "<|im_end|>": 260,
        "<tool>": 261,
    }
    assert tokenizer_of(output)("<|im_end|>", add_special_tokens=False)["input_ids"] == [260]
    assert found.shape == (262, 32) and json.loads((output / "config.json").read_text())["vocab_size"] == 262
    torch.testing.assert_close(found[:259], 0.5 * chat[:259] + 0.5 * tools[:259])
    # A token of one model has its row in all; one that two models have starts from their mean in the base.
    torch.testing.assert_close(found[259], chat[259])
    torch.testing.assert_close(found[260], (chat[260] + tools[260]) / 2)
    torch.testing.assert_close(found[261], tools[259])
    assert base.shape == (259, 32)
    assert AutoModelForCausalLM.from_pretrained(output).get_input_embeddings().weight.shape == (262, 32)


def test_base_keeps_the_bases_vocabulary(three: tuple[Path, Path, Path], tmp_path: Path) -> None:
    output = merge(summed(three, tokenizer_source="base"), tmp_path / "out")
    assert weights(output)[EMBEDDING].shape == (259, 32)
    assert (output / "tokenizer.json").read_bytes() == (three[0] / "tokenizer.json").read_bytes()


def test_a_models_own_tokenizer_comes_with_its_special_ids(three: tuple[Path, Path, Path], tmp_path: Path) -> None:
    tools = variant(three[2], tmp_path / "tools", scale=0)
    edit_json(tools / "config.json", {"eos_token_id": 260})
    edit_json(tools / "generation_config.json", {"eos_token_id": 260})
    models = (three[0], three[1], tools)
    output = merge(summed(models, tokenizer_source=str(tools)), tmp_path / "out")
    assert tokenizer_of(output).get_vocab()["<tool>"] == 259
    for file in ("config.json", "generation_config.json"):
        assert json.loads((output / file).read_text())["eos_token_id"] == 260
    torch.testing.assert_close(weights(output)[EMBEDDING][259], weights(tools)[EMBEDDING][259])


def test_padding_rows_are_the_mean_and_a_multiple_of_what_was_asked(
    three: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    output = merge(summed(three, tokenizer={"source": "union", "pad_to_multiple_of": 64}), tmp_path / "out")
    found = weights(output)[EMBEDDING]
    assert found.shape == (320, 32)
    torch.testing.assert_close(found[300], found[:262].mean(dim=0))


def test_one_vocabulary_moves_nothing_and_keeps_padding_rows(three: tuple[Path, Path, Path], tmp_path: Path) -> None:
    other = variant(three[2], tmp_path / "other", 5)
    config = {"merge_method": "linear", "models": [str(three[2]), str(other)]}
    plain = merge(config, tmp_path / "plain")
    united = merge({**config, "tokenizer_source": "union"}, tmp_path / "united")
    assert weights(united)[EMBEDDING].shape == (263, 32)
    assert all(torch.equal(tensor, weights(plain)[name]) for name, tensor in weights(united).items())


def test_a_head_of_its_own_moves_with_the_embedding(three: tuple[Path, Path, Path], tmp_path: Path) -> None:
    def untie(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors[EMBEDDING] + 1

    models = [
        variant(three[2], tmp_path / str(n), n, change=untie, config={"tie_word_embeddings": False}) for n in (1, 2)
    ]
    config = {"merge_method": "linear", "models": list(map(str, models)), "tokenizer_source": str(three[1])}
    found = weights(merge(config, tmp_path / "out"))
    assert found["lm_head.weight"].shape == found[EMBEDDING].shape == (261, 32)
    # Row 260 is <|im_end|> in both.
    first, second = (weights(model)["lm_head.weight"] for model in models)
    torch.testing.assert_close(found["lm_head.weight"][260], (first[260] + second[260]) / 2)


def test_a_model_without_a_tokenizer_is_taken_to_have_the_bases(
    three: tuple[Path, Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bare = variant(three[0], tmp_path / "bare", 1)
    for file in bare.glob("tokenizer*"):
        file.unlink()
    output = merge(summed((three[0], bare, three[1]), tokenizer_source="union"), tmp_path / "out")
    assert "holds no tokenizer; its tokens are taken to be those of" in caplog.text
    expected = 0.5 * weights(bare)[EMBEDDING] + 0.5 * weights(three[1])[EMBEDDING][:259]
    torch.testing.assert_close(weights(output)[EMBEDDING][:259], expected)
    with pytest.raises(InputError, match="holds no tokenizer"):
        merge(summed(three, tokenizer_source=str(bare)), tmp_path / "none")


def test_rows_that_a_model_lacks_are_the_bases_else_the_mean_else_zero() -> None:
    base, first, second = torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0], [20.0]]), torch.tensor([[40.0]])
    rows = [torch.tensor([0, 1, -1, -1]), torch.tensor([0, -1, 1, -1]), torch.tensor([-1, -1, 0, -1])]
    selected = select_rows([first, second, base], [rows[1], rows[2], rows[0]], 2, 4)
    assert [matrix[:, 0].tolist() for matrix in selected] == [[10, 2, 20, 0], [1, 2, 40, 0], [1, 2, 30, 0]]
    selected = select_rows([first, second], rows[1:], None, 4)
    assert [matrix[:, 0].tolist() for matrix in selected] == [[10, 0, 20, 0], [10, 0, 40, 0]]


def test_different_tokens_in_the_same_rows_are_warned_of(
    three: tuple[Path, Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = variant(three[2], tmp_path / "other", 5)
    text = (other / "tokenizer.json").read_text()
    config = {"merge_method": "linear", "models": [str(three[2]), str(other)]}
    (other / "tokenizer.json").write_text(text + "\n")
    merge(config, tmp_path / "same")
    assert "different tokens" not in caplog.text
    (other / "tokenizer.json").write_text(text.replace("<tool>", "<fool>"))
    merge(config, tmp_path / "different")
    assert f"{three[2]} and {other} have different tokens in the same rows; set tokenizer_source" in caplog.text
