import importlib.util
import json
import re
import stat
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

import trimtab
from trimtab.tasks.arithmetic import make_rows

FOLDER = Path(trimtab.__file__).parent / "data" / "arithmetic-varied"
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "build_warm_start.py"
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
needs_the_script = pytest.mark.skipif(not SCRIPT.exists(), reason="the build script is not part of this distribution")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    specification = importlib.util.spec_from_file_location("build_warm_start", SCRIPT)
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_folder_is_complete_small_and_readable_by_everyone() -> None:
    names = {path.name for path in FOLDER.iterdir()}
    assert names == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (FOLDER / "model.safetensors").stat().st_size <= 4_000_000
    assert all(path.stat().st_mode & stat.S_IROTH for path in FOLDER.iterdir())


def test_the_model_loads_offline_and_agrees_with_its_tokenizer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert 600_000 < model.num_parameters() < 1_000_000
    assert model.dtype == torch.float32
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(model.config, name) == getattr(tokenizer, name) == getattr(model.generation_config, name)
    assert model.config.vocab_size == len(tokenizer)


def test_the_vocabulary_has_512_entries_and_three_different_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == 512
    assert sorted(tokenizer.get_vocab().values()) == list(range(512))
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3
    assert tokenizer.chat_template is None


@pytest.mark.parametrize("mode", ["terse", "varied"])
@pytest.mark.parametrize("operations", [(1, 3), (4, 6)])
def test_every_row_survives_the_round_trip_exactly_and_no_token_is_added(
    tokenizer: PreTrainedTokenizerFast, mode: str, operations: tuple[int, int]
) -> None:
    special = set(tokenizer.all_special_ids)
    for row in make_rows(500, seed=21, mode=mode, operations=operations, max_operand=500, max_result=9999):
        for text in (row["prompt"], row["completion"]):
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.decode(token_ids) == text
            assert not special & set(token_ids)


def test_any_text_survives_the_round_trip(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in ("  two  spaces ", "a , b .c", "naïve 京都 🙂\t\r\n", "don't 12,345.67", ""):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_prompt_and_completion_meet_at_a_token_boundary(tokenizer: PreTrainedTokenizerFast) -> None:
    for row in make_rows(200, seed=22):
        apart = tokenizer.encode(row["prompt"], add_special_tokens=False) + tokenizer.encode(
            row["completion"], add_special_tokens=False
        )
        assert tokenizer.encode(row["prompt"] + row["completion"], add_special_tokens=False) == apart


def test_no_token_holds_more_than_one_digit_or_a_digit_and_something_else(tokenizer: PreTrainedTokenizerFast) -> None:
    holding_digits = [text for text in tokenizer.get_vocab() if re.search(r"\d", text)]
    assert sorted(holding_digits) == list("0123456789")


def test_tags_are_several_tokens_and_brackets_stand_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    assert all(len(tokenizer.encode(tag, add_special_tokens=False)) >= 3 for tag in TAGS)
    with_brackets = set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
    assert {text for text in with_brackets if re.search(r"[<>/]", text)} == {"<", ">", "/"}


def test_rows_are_short_under_the_shipped_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = make_rows(1000, seed=23)
    completion_lengths = [len(tokenizer.encode(row["completion"], add_special_tokens=False)) + 1 for row in rows]
    assert 30 <= sum(completion_lengths) / len(rows) <= 50
    assert max(len(tokenizer.encode(row["prompt"])) for row in rows) <= 60


@needs_the_script
def test_the_warm_start_solves_about_half_of_the_test_problems_in_the_right_form(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, script: ModuleType
) -> None:
    measured = script.measure(model, tokenizer, problems=128, samples=1, seed=24)
    assert 0.38 < measured["accuracy"] < 0.64
    assert measured["format"] > 0.9
    assert 0.3 < measured["entropy"] < 0.8
    assert 30 < measured["length"] < 55


@needs_the_script
def test_the_script_builds_the_shipped_tokenizer_from_the_task_as_it_is_now(
    tokenizer: PreTrainedTokenizerFast, script: ModuleType
) -> None:
    built = script.build_tokenizer(seed=0)
    assert json.loads(built.backend_tokenizer.to_str()) == json.loads(tokenizer.backend_tokenizer.to_str())


@needs_the_script
def test_the_training_loss_counts_the_completion_and_eos_and_nothing_of_the_prompt_or_padding(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, script: ModuleType
) -> None:
    rows = make_rows(3, seed=25)
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            prompt = tokenizer.encode(row["prompt"])
            target = [*tokenizer.encode(row["completion"], add_special_tokens=False), tokenizer.eos_token_id]
            logps_TV = model(torch.tensor([prompt + target])).logits[0].log_softmax(-1)
            for place, token in enumerate(target, start=len(prompt)):
                total -= logps_TV[place - 1, token].item()
                count += 1
        loss = script.sft_loss(model, tokenizer, rows)
    assert loss.item() == pytest.approx(total / count, rel=1e-4)


@needs_the_script
def test_two_trainings_of_one_seed_give_the_same_weights(
    script: ModuleType, tokenizer: PreTrainedTokenizerFast
) -> None:
    def weights_after_two_steps(seed: int) -> torch.Tensor:
        model = script.build_model(tokenizer, seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            script.sft_loss(model, tokenizer, make_rows(4, seed=step)).backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert torch.equal(weights_after_two_steps(1), weights_after_two_steps(1))
    assert not torch.equal(weights_after_two_steps(1), weights_after_two_steps(2))


def test_a_call_of_the_tokenizer_puts_exactly_one_bos_in_front(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("Tom has 3 apples.").input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
