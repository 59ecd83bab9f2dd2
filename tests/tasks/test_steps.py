"""Steps of completions: cutting, the token that ends each, scorers by name, and scorers that fail."""

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trimtab.errors import InputError
from trimtab.objectives import process_weights
from trimtab.policy.loading import load_tokenizer
from trimtab.policy.token_texts import token_texts
from trimtab.tasks.arithmetic import make_rows
from trimtab.tasks.rewards import completion_text
from trimtab.tasks.step_model import TokenClassificationScorer
from trimtab.tasks.steps import (
    Step,
    StepScorer,
    arithmetic_steps,
    equation_steps,
    load_step_scorer,
    score_steps,
    split_steps,
    step_columns,
    step_tensors,
    token_ends,
)

NAN = math.nan


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(str(tiny_model))


def encode(tokenizer: Any, text: str) -> list[int]:
    return [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]


# --- cutting ---


def test_steps_are_the_pieces_between_delimiters_and_blank_pieces_are_none() -> None:
    text = "one\n\n\n\n  \n\ntwo\nlines\n\n"
    steps = split_steps(text)
    assert steps == [Step("one", 0, 3), Step("two\nlines", 11, 20)]
    assert all(text[step.start : step.end] == step.text for step in steps)
    assert split_steps("no delimiter") == [Step("no delimiter", 0, 12)]
    assert split_steps(" \n") == split_steps("") == []
    assert [step.text for step in split_steps("a ; b;c", " ; ")] == ["a", "b;c"]
    with pytest.raises(InputError, match="the step delimiter is empty"):
        split_steps("a", "")


def test_each_equation_of_the_reasoning_is_a_step_and_holds_or_not() -> None:
    text = "<reasoning>start 4, 4+3=7 ; 7x2=15=30-15</reasoning><answer>1+1=2</answer>"
    steps = equation_steps(text)
    assert [step.text for step in steps] == ["<reasoning>start 4, 4+3=7", " ; 7x2=15"]
    assert all(text[step.start : step.end] == step.text for step in steps)
    assert arithmetic_steps([text], [[step.text for step in steps]]) == [[1.0, 0.0]]
    # In a run each link is an equation, and shares a number with the one before.
    run = "15+2=17+12=28"
    assert [step.end for step in equation_steps(run)] == [7, 13]
    assert arithmetic_steps([run], [["", ""]]) == [[1.0, 0.0]]


# --- the token that ends a step ---


def test_a_step_ends_at_the_last_token_of_its_last_character(tokenizer: Any) -> None:
    text = "h€\n\n😀 x"
    ids = encode(tokenizer, text)
    # One token a byte: h, three of €, two line feeds, four of 😀, a space, x and the end of sequence.
    assert token_ends(tokenizer, ids, text, [step.end for step in split_steps(text)]) == [3, 11]
    assert token_ends(tokenizer, ids, text, range(1, 7 + 1)) == [0, 3, 4, 5, 9, 10, 11]
    assert token_ends(tokenizer, ids, text, []) == []


def test_special_tokens_are_in_the_ids_and_not_in_the_text(tokenizer: Any) -> None:
    text = "ab\n\nc"
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    a, b, feed, _, c = tokenizer(text, add_special_tokens=False).input_ids
    ids = [bos, a, eos, b, bos, feed, feed, eos, c, eos]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert token_ends(tokenizer, ids, text, [2, 5]) == [3, 8]


def test_a_token_of_several_characters_ends_every_step_inside_it() -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"▁so": 0, "▁done.": 1, "<eos>": 2, "<unk>": 3}, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    words = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    # A special token in front: this decoder drops the space of the first word, but only where the special is left out.
    text = words.decode([2, 0, 1, 2], skip_special_tokens=True)
    assert text == "so done."
    assert token_ends(words, [2, 0, 1, 2], text, [1, 2, 3, 7, 8]) == [1, 1, 2, 2, 2]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 258), min_size=1, max_size=40))
@example([159, 97, 127])  # bytes that are no character, next to each other
def test_any_ids_agree_with_the_texts_of_their_tokens(tokenizer: Any, ids: list[int]) -> None:
    text = tokenizer.decode(ids, skip_special_tokens=True)
    found = token_ends(tokenizer, ids, text, range(1, len(text) + 1))
    assert found == sorted(found)
    for end, position in enumerate(found, start=1):
        before, through = (
            tokenizer.decode(ids[:count], skip_special_tokens=True) for count in (position, position + 1)
        )
        assert through.startswith(text[:end]) and not before.startswith(text[:end])
    texts = token_texts(tokenizer, ids)
    if not any(i in tokenizer.all_special_ids for i in ids) and "\ufffd" not in text:
        assert found == [position for position, piece in enumerate(texts) for _ in piece]


def test_a_text_of_other_ids_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="do not decode to its text up to character 3"):
        token_ends(tokenizer, encode(tokenizer, "abd"), "abc", [1, 3])
    with pytest.raises(ValueError, match="up to character 1"):
        token_ends(tokenizer, [], "a", [1])


# --- the built-in task ---


@pytest.mark.parametrize("mode", ["terse", "varied"])
def test_every_equation_of_the_tasks_own_solutions_is_right_and_a_spoilt_one_wrong(mode: str) -> None:
    rows = make_rows(60, seed=1, mode=mode)
    builtin = load_tokenizer("builtin:arithmetic-varied")
    right = [row["completion"] for row in rows]
    wrong = [text.replace("=" + row["answer"], "=987", 1) for text, row in zip(right, rows, strict=True)]
    for texts, judged in ((right, True), (wrong, False)):
        ids = [encode(builtin, text) for text in texts]
        table = score_steps(
            load_step_scorer("arithmetic"),
            [row["prompt"] for row in rows],
            texts,
            ids,
            {"answer": [row["answer"] for row in rows]},
            tokenizer=builtin,
        )
        assert not any(table.failed) and table.messages == []
        assert all((set(rewards) == {1.0}) == judged for rewards in table.rewards)
        for row, row_ids, text, ends in zip(rows, ids, texts, table.ends, strict=True):
            assert len(ends) == row["operations"]
            for end, step in zip(ends, equation_steps(text), strict=True):
                # Exactly the tokens through the equation's result, whether or not the tokenizer cuts there.
                assert builtin.decode(row_ids[: end + 1], skip_special_tokens=True).startswith(text[: step.end])
                assert not builtin.decode(row_ids[:end], skip_special_tokens=True).startswith(text[: step.end])


def test_scored_steps_become_weights_that_blame_the_tokens_up_to_the_wrong_equation(tokenizer: Any) -> None:
    texts = ["1+1=2;2+2=5", "1+1=2;2+2=4"]
    ids = [encode(tokenizer, text) for text in texts]
    table = score_steps(load_step_scorer("arithmetic"), ["p", "p"], texts, ids, {}, tokenizer=tokenizer)
    ends_NS, rewards_NS = step_tensors(table)
    assert ends_NS.tolist() == [[4, 10], [4, 10]] and rewards_NS.tolist() == [[1, 0], [1, 1]]
    ids_NT = torch.tensor(ids)
    weights = process_weights(
        ids_NT,
        torch.ones_like(ids_NT),
        torch.tensor([0.0, 1.0]),
        torch.zeros(2, dtype=torch.long),
        step_ends_NS=ends_NS,
        step_rewards_NS=rewards_NS,
        outcome="none",
        form="min",
        normalise="none",
    ).weights_NT
    # mean 3/4
    assert weights[0].tolist() == [-0.75] * 11 + [0] and weights[1].tolist() == [0.25] * 11 + [0]


# --- scorers, good and bad ---


def scorer(function: Any) -> StepScorer:
    return StepScorer("mine", function, split_steps)


def score(tokenizer: Any, function: Any, texts: list[str], **columns: list[Any]) -> Any:
    ids = [encode(tokenizer, text) for text in texts]
    return score_steps(scorer(function), ["p"] * len(texts), texts, ids, columns, tokenizer=tokenizer)


TEXTS = ["a\n\nb", "c", "", "d\n\ne\n\nf"]


def same(left: list[list[float]], right: list[list[float]]) -> bool:
    return [len(row) for row in left] == [len(row) for row in right] and all(
        np.array_equal(a, b, equal_nan=True) for a, b in zip(left, right, strict=True)
    )


def test_a_scorer_gets_texts_steps_and_columns_and_none_is_no_reward(tokenizer: Any) -> None:
    seen: dict[str, Any] = {}

    def judge(**arguments: Any) -> list[list[float | None]]:
        seen.update(arguments)
        return [[None, torch.tensor(0.5)], [np.float32(1.0)], [], (1, 2, True)]  # type: ignore[list-item]

    table = score(tokenizer, judge, TEXTS, answer=[1, 2, 3, 4], steps=["a column that clashes"] * 4)
    assert seen == {
        "prompts": ["p"] * 4,
        "completions": TEXTS,
        "steps": [["a", "b"], ["c"], [], ["d", "e", "f"]],
        "answer": [1, 2, 3, 4],
    }
    assert same(table.rewards, [[NAN, 0.5], [1.0], [], [1.0, 2.0, 1.0]])
    assert table.ends == [[0, 3], [0], [], [0, 3, 6]]
    assert table.failed == [False] * 4 and table.messages == []
    ends_NS, rewards_NS = step_tensors(table)
    assert ends_NS.tolist() == [[0, 3, -1], [0, -1, -1], [-1, -1, -1], [0, 3, 6]]
    assert rewards_NS.isfinite().tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]]


def test_a_wrong_number_of_values_and_values_that_are_no_numbers_cost_their_rows(tokenizer: Any) -> None:
    table = score(tokenizer, lambda **_: [[1.0], ["good"], [], [1.0, NAN, 1.0]], TEXTS)
    assert table.failed == [True, True, False, True]
    assert same(table.rewards, [[NAN, NAN], [NAN], [], [NAN] * 3])
    assert table.messages == [
        "mine: returned 1 values for 2 steps",
        "mine: returned str, which is not a number",
        "mine: returned nan, which is not a finite number",
    ]


def test_a_scorer_that_raises_costs_only_the_rows_it_raises_for(tokenizer: Any) -> None:
    def judge(steps: list[list[str]], **_: Any) -> list[list[float | None]]:
        if any("e" in row for row in steps):
            raise LookupError("no e, please")
        return [[1.0] * len(row) for row in steps]

    table = score(tokenizer, judge, TEXTS)
    assert table.failed == [False, False, False, True]
    assert same(table.rewards, [[1, 1], [1], [], [NAN] * 3])
    assert table.messages == ["mine: LookupError: no e, please"]
    assert score(tokenizer, judge, ["e", "a", "e"]).messages == ["mine: LookupError: no e, please"]


@pytest.mark.parametrize("result", [None, 3, "abcd", [[1.0, 1.0]], {0: [1.0]}, [1.0, 1.0, 1.0, 1.0]])
def test_a_scorer_that_returns_nonsense_loses_every_row_that_it_leaves_unjudged(tokenizer: Any, result: Any) -> None:
    table = score(tokenizer, lambda **_: result, TEXTS)
    # A list of one row is right for the first row alone, when it is asked again for each.
    assert table.failed == [result != [[1.0, 1.0]], True, True, True]
    assert table.messages


def test_an_interrupt_passes_through_a_scorer(tokenizer: Any) -> None:
    def judge(**_: Any) -> list[list[float | None]]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(tokenizer, judge, TEXTS)


def test_columns_of_another_length_are_refused_and_named(tokenizer: Any) -> None:
    with pytest.raises(InputError, match="there are 4 completions, but 'answer' has 1 values"):
        score(tokenizer, arithmetic_steps, TEXTS, answer=[1])
    with pytest.raises(InputError, match="there are 1 completions, but 'completion_ids' has 2 values"):
        score_steps(scorer(arithmetic_steps), ["p"], ["a"], [[1], [2]], {}, tokenizer=tokenizer)


def test_scorers_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("my_steps")
    module.judge = lambda prompts, steps, difficulty, hint=None, **_: steps  # type: ignore[attr-defined]
    module.mine = StepScorer("mine", completion_text, equation_steps)  # type: ignore[attr-defined,arg-type]
    monkeypatch.setitem(sys.modules, "my_steps", module)
    found = load_step_scorer("my_steps:judge", delimiter=";")
    assert found.name == "my_steps:judge" and found.function is module.judge  # type: ignore[attr-defined]
    assert [step.text for step in found.split("a;b")] == ["a", "b"]
    assert step_columns(found) == ["difficulty"]
    assert load_step_scorer("my_steps:mine") is module.mine  # type: ignore[attr-defined]
    assert step_columns(load_step_scorer("arithmetic")) == []
    with pytest.raises(InputError, match=r"my_steps has no function 'juge'; did you mean 'judge'\?"):
        load_step_scorer("my_steps:juge")
    with pytest.raises(InputError, match=r"importing no_such_steps failed \(ModuleNotFoundError"):
        load_step_scorer("no_such_steps:judge")
    with pytest.raises(InputError, match="there is no step scorer 'arithmetik': give 'arithmetic', module:function"):
        load_step_scorer("arithmetik")
    with pytest.raises(InputError, match="the step delimiter is empty"):
        load_step_scorer("my_steps:judge", delimiter="")


# --- a token-classification model ---


@pytest.fixture(scope="module")
def step_model(tiny_model: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForTokenClassification

    torch.manual_seed(1)
    config = LlamaConfig.from_pretrained(tiny_model, num_labels=2, tie_word_embeddings=False)
    folder = tmp_path_factory.mktemp("models") / "steps"
    LlamaForTokenClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


PROMPTS = ["1 + 1 =", [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], "x", "a longer prompt"]
STEPS = [["one", "two €"], ["c"], [], ["d", "e", "f"]]


def test_a_step_is_worth_the_positive_labels_probability_at_the_separator_behind_it(step_model: Path) -> None:
    from transformers import AutoModelForTokenClassification

    judge = TokenClassificationScorer(str(step_model), separator="\n\n")
    found = judge(prompts=PROMPTS, steps=STEPS, answer=["a column it does not read"] * 4)
    model = AutoModelForTokenClassification.from_pretrained(step_model).eval()
    encoding = judge.tokenizer
    for prompt, steps, values in zip(["1 + 1 =", "s\n\nq", "x", "a longer prompt"], STEPS, found, strict=True):
        assert len(values) == len(steps)
        for count, value in enumerate(values, start=1):
            # A causal model: what follows a step's separator does not change its score.
            ids = (
                encoding(prompt).input_ids
                + encoding("".join(step + "\n\n" for step in steps[:count]), add_special_tokens=False).input_ids
            )
            assert ids.count(encoding.bos_token_id) == 1
            with torch.no_grad():
                last = model(torch.tensor([ids])).logits[0, -1].softmax(dim=-1)[1]
            assert value == pytest.approx(float(last), abs=1e-5)
    assert len({value for row in found for value in row}) == 6


@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
def test_batches_and_their_order_change_no_score(step_model: Path, tmp_path: Path, kind: str) -> None:
    folder = step_model
    if kind == "bidirectional":
        from transformers import BertConfig, BertForTokenClassification

        folder = tmp_path
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
        BertForTokenClassification(BertConfig(vocab_size=259, **sizes)).save_pretrained(folder)
        load_tokenizer(str(step_model)).save_pretrained(folder)
    together = TokenClassificationScorer(str(folder))(PROMPTS, STEPS)
    alone = TokenClassificationScorer(str(folder), batch_tokens=1)(PROMPTS, STEPS)
    assert [pytest.approx(row, abs=1e-6) for row in alone] == together


def test_the_label_called_positive_counts_whatever_its_number(step_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(
        step_model, id2label={0: "Positive", 1: "Negative"}, label2id={"Positive": 0, "Negative": 1}
    )
    model.save_pretrained(tmp_path)
    load_tokenizer(str(step_model)).save_pretrained(tmp_path)
    first = TokenClassificationScorer(str(tmp_path))(PROMPTS, STEPS)
    second = TokenClassificationScorer(str(step_model))(PROMPTS, STEPS)
    assert [[1 - v for v in row if v is not None] for row in first] == [pytest.approx(row, abs=1e-6) for row in second]


def test_a_folder_is_a_step_scorer_and_a_row_that_is_too_long_for_it_is_lost(step_model: Path, tokenizer: Any) -> None:
    found = load_step_scorer(str(step_model))
    assert step_columns(found) == []
    texts = ["a\n\nb", "c" * 200]
    ids = [encode(tokenizer, text) for text in texts]
    table = score_steps(found, ["p", "p"], texts, ids, {"answer": [1, 2]}, tokenizer=tokenizer)
    assert table.failed == [False, True]
    assert all(0 < value < 1 for value in table.rewards[0])
    assert table.messages == [
        f"{step_model}: ValueError: prompt and steps have 203 tokens, more than the step scorer's 96 positions"
    ]


def test_a_model_without_the_right_head_is_refused(tiny_model: Path, step_model: Path, tmp_path: Path) -> None:
    # The language model has no classification head; one of random numbers would score anything.
    with pytest.raises(InputError, match=r"lacks weights \(score\.bias, score\.weight\)"):
        TokenClassificationScorer(str(tiny_model))
    with pytest.raises(InputError, match="is no token-classification model"):
        TokenClassificationScorer(str(tmp_path))
    with pytest.raises(InputError, match="no token for the separator ''"):
        TokenClassificationScorer(str(step_model), separator="")
    from transformers import LlamaConfig, LlamaForTokenClassification

    LlamaForTokenClassification(LlamaConfig.from_pretrained(step_model, num_labels=1)).save_pretrained(tmp_path)
    load_tokenizer(str(step_model)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="has one label"):
        TokenClassificationScorer(str(tmp_path))
