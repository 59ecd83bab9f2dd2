"""The text of each token of a completion, for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """One text a token; together they are the decoded completion, special tokens included.

    Byte-level vocabularies split a character over several tokens: the last of them carries the character, the ones
    before it are empty. A byte that belongs to no character is the replacement character.
    """
    texts: list[str] = []
    # Tokens are decoded behind the ones before them, since many tokenizers drop the space at the beginning of a text.
    context_start = open_start = 0
    for end in range(1, len(token_ids) + 1):
        known = _decode(tokenizer, token_ids[context_start:open_start])
        text = _decode(tokenizer, token_ids[context_start:end])[len(known) :]
        if text.endswith(REPLACEMENT) and end < len(token_ids):
            continue
        for _ in range(open_start, end - 1):
            broken = text.startswith(REPLACEMENT)
            texts.append(text[:1] if broken else "")
            text = text[1:] if broken else text
        texts.append(text)
        context_start, open_start = open_start, end
    return texts


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
