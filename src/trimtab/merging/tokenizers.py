"""One vocabulary for models that have different ones: which row of each model's matrices stands for which token."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import InputError
from trimtab.merging.config import MergeConfig, ModelName
from trimtab.merging.models import OpenModel, fetch

logger = logging.getLogger("trimtab")


@dataclass(frozen=True)
class Vocabulary:
    """The output's vocabulary.

    Attributes:
        folder: whose tokenizer files the output gets.
        tokenizer: what replaces them when tokens were added, else None.
        rows: of each model, (V,) int64: the row of its matrices that holds token i, −1 where it has none. None: every
            model has the same rows already.
        size: V, padding included.
        real: tokens without padding.
    """

    folder: Path
    tokenizer: Any = None
    rows: Mapping[ModelName, Tensor] | None = None
    size: int = 0
    real: int = 0


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder, None where there is none.

    Raises:
        InputError: there is one that cannot be loaded.
    """
    if not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:
        raise InputError(f"{folder}: the tokenizer cannot be loaded ({' '.join(str(error).split())[:200]}).") from error


def unite_vocabularies(config: MergeConfig, models: Mapping[ModelName, OpenModel]) -> Vocabulary | None:
    """The vocabulary that `tokenizer_source` asks for; None when it asks for none.

    `union` keeps the ids of the base (or first) model and appends what the others have besides. A token whose id lies
    beyond a model's matrix is not in that model.

    Raises:
        InputError: a tokenizer that is needed is not there or cannot be loaded.
    """
    source = config.tokenizer_source
    if source is None:
        _warn_of_different_tokens(models)
        return None
    names = list(models)
    tokenizers = {name: load_tokenizer(_tokenizer_folder(model)) for name, model in models.items()}
    first = tokenizers[names[0]]
    folder = models[names[0]].folder
    if isinstance(source, ModelName):
        folder = fetch(source.path, source.revision)
        first = load_tokenizer(folder)
    if first is None:
        raise InputError(f"tokenizer_source: {folder} holds no tokenizer.")
    vocabularies: dict[ModelName, dict[str, int]] = {}
    for name, tokenizer in tokenizers.items():
        if tokenizer is None:
            logger.warning("%s holds no tokenizer; its tokens are taken to be those of %s", name, folder)
        model = models[name]
        rows = model.shape(model.embedding)[0] if model.embedding else None
        known = (first if tokenizer is None else tokenizer).get_vocab()
        vocabularies[name] = {token: row for token, row in known.items() if rows is None or row < rows}
    added = _add_missing(first, tokenizers, vocabularies) if source == "union" else False
    ids: dict[str, int] = first.get_vocab()
    if source == "base":
        ids = {token: row for token, row in ids.items() if token in vocabularies[names[0]]}
    real = max(ids.values()) + 1
    size = real + (-real % config.pad_to_multiple_of if config.pad_to_multiple_of else 0)
    rows_by_model = {name: _rows(ids, own, size) for name, own in vocabularies.items()}
    if config.pad_to_multiple_of is None and _are_alike(rows_by_model, ids, models):
        return Vocabulary(folder)
    return Vocabulary(folder, first if added else None, rows_by_model, size, real)


def select_rows(tensors: Sequence[Tensor], rows: Sequence[Tensor], base: int | None, real: int) -> list[Tensor]:
    """Matrices with the rows of the united vocabulary.

    A row that a model lacks is the base model's; where that has none either, the mean over the models that have it.
    Rows that no model has are zero, padding rows are the mean of the real ones.

    Args:
        tensors: of each model, (its rows, ...).
        rows: of each model, (V,), see `Vocabulary`.
        base: the base model's place among them, or None.
        real: tokens without padding.
    """
    present_NV = torch.stack(list(rows)) >= 0
    lacking = (~present_NV[:, :real].all(dim=0)).nonzero()[:, 0]
    filled = torch.zeros(len(lacking), *tensors[0].shape[1:])
    count = torch.zeros(len(lacking))
    for place, (tensor, own) in enumerate(zip(tensors, rows, strict=True)):
        here = present_NV[place, lacking]
        filled[here] += tensor[own[lacking[here]]].float()
        count += here
    filled /= count.clamp(min=1).view(-1, *[1] * (filled.dim() - 1))
    if base is not None:
        here = present_NV[base, lacking]
        filled[here] = tensors[base][rows[base][lacking[here]]].float()
    united = []
    for place, (tensor, own) in enumerate(zip(tensors, rows, strict=True)):
        result = tensor[own.clamp(min=0)]
        absent = ~present_NV[place, lacking]
        result[lacking[absent]] = filled[absent].to(result.dtype)
        if real < len(result):
            result[real:] = result[:real].float().mean(dim=0).to(result.dtype)
        united.append(result)
    return united


def _warn_of_different_tokens(models: Mapping[ModelName, OpenModel]) -> None:
    """Matrices of one height may still have different tokens in their rows, and their merge means nothing."""
    first: tuple[ModelName, bytes, dict[int, str]] | None = None
    for name, model in models.items():
        path = model.folder / "tokenizer.json"
        text = path.read_bytes() if path.is_file() else b""
        if not text or (first is not None and text == first[1]):
            continue
        tokens = _tokens(text)
        if first is None:
            first = (name, text, tokens)
        elif any(tokens.get(row, token) != token for row, token in first[2].items()):
            logger.warning("%s and %s have different tokens in the same rows; set tokenizer_source", first[0], name)


def _tokens(text: bytes) -> dict[int, str]:
    """Token by row, from the text of a tokenizer.json."""
    values = json.loads(text)
    vocabulary = values["model"].get("vocab") or {}
    if isinstance(vocabulary, dict):
        tokens = {row: token for token, row in vocabulary.items()}
    else:
        tokens = {row: token for row, (token, _) in enumerate(vocabulary)}
    return {**tokens, **{added["id"]: added["content"] for added in values.get("added_tokens", [])}}


def _tokenizer_folder(model: OpenModel) -> Path:
    """An adapter that replaced the embedding may have added tokens, and has them in a tokenizer of its own."""
    adapter = model.adapter
    if adapter is not None and model.embedding in adapter.replaced and (adapter.folder / "tokenizer.json").is_file():
        return adapter.folder
    return model.folder


def _add_missing(first: Any, tokenizers: Mapping[ModelName, Any], own: Mapping[ModelName, dict[str, int]]) -> bool:
    """Append to `first` what the other tokenizers have besides, in their order of ids; whether there was anything."""
    known = set(first.get_vocab())
    added = 0
    for name, tokenizer in tokenizers.items():
        if tokenizer is None or tokenizer is first:
            continue
        special = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
        missing = [token for token, _ in sorted(own[name].items(), key=lambda pair: pair[1]) if token not in known]
        added += first.add_tokens([special.get(token, token) for token in missing])
        known.update(missing)
    return added > 0


def _rows(ids: Mapping[str, int], own: Mapping[str, int], size: int) -> Tensor:
    rows = torch.full((size,), -1, dtype=torch.int64)
    shared = [(place, own[token]) for token, place in ids.items() if token in own]
    if shared:
        places, values = zip(*shared, strict=True)
        rows[torch.tensor(places)] = torch.tensor(values)
    return rows


def _are_alike(rows: Mapping[ModelName, Tensor], ids: Mapping[str, int], models: Mapping[ModelName, OpenModel]) -> bool:
    """Whether every model has every token in its row already and all matrices are of one height: nothing need move.

    Tokens beyond the matrices may be, as they are in the models.
    """
    heights = {model.shape(model.embedding)[0] for model in models.values() if model.embedding}
    places = torch.tensor([place for place in ids.values() if place < min(heights, default=0)])
    return len(heights) == 1 and all(bool((own[places] == places).all()) for own in rows.values())
