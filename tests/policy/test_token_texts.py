from pathlib import Path

import pytest

from trimtab.policy.loading import load_tokenizer
from trimtab.policy.token_texts import token_texts


def test_texts_of_tokens_add_up_to_the_completion_with_its_special_tokens(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    ids = [*tokenizer(" h€llo 😀\n", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    texts = token_texts(tokenizer, ids)
    assert "".join(texts) == " h€llo 😀\n</s>"
    # Of the bytes of a character the last one shows it.
    assert texts[:6] == [" ", "h", "", "", "€", "l"]
    assert texts[-6:] == ["", "", "", "😀", "\n", "</s>"]


@pytest.mark.parametrize("text", ["€", "a€", "ü"])
def test_half_a_character_is_shown_as_a_broken_one_and_its_neighbours_stay_whole(text: str, tiny_model: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    broken = tokenizer(text, add_special_tokens=False).input_ids[:-1]
    after = tokenizer("xy", add_special_tokens=False).input_ids
    assert "".join(token_texts(tokenizer, broken)) == text[:-1] + "\ufffd"
    texts = token_texts(tokenizer, broken + after)
    assert texts[-2:] == ["x", "y"]
    assert "".join(texts) == text[:-1] + "\ufffdxy"


def test_a_space_at_the_beginning_of_a_token_stays_where_the_tokenizer_drops_it_at_the_beginning_of_a_text() -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"▁two": 0, "▁words": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    assert token_texts(PreTrainedTokenizerFast(tokenizer_object=backend), [0, 1, 0]) == ["two", " words", " two"]


def test_no_tokens_have_no_texts(tiny_model: Path) -> None:
    assert token_texts(load_tokenizer(str(tiny_model)), []) == []
