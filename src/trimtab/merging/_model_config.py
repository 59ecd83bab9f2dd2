"""The configuration of a merged model."""

from __future__ import annotations

import json
from typing import Any

import torch

from trimtab.merging._tensor_plan import TensorPlan
from trimtab.merging.config import MergeConfig
from trimtab.merging.models import OpenModel, text_section
from trimtab.merging.tokenizers import Vocabulary


def merged_config(
    config: MergeConfig,
    donor: OpenModel,
    tensors: list[TensorPlan],
    vocabulary: Vocabulary | None,
    untied: bool,
) -> dict[str, Any]:
    """The donor's config.json with what the merge changes: dtype, head, layers, vocabulary.

    Args:
        config: the merge file.
        donor: the model whose configuration is taken over.
        tensors: of the output.
        vocabulary: the united one, or None.
        untied: whether the output has a head of its own.
    """
    result: dict[str, Any] = json.loads(json.dumps(donor.config))
    result.pop("_name_or_path", None)
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.bytes
    if sizes:
        dtype = str(max(sizes, key=lambda one: sizes[one])).removeprefix("torch.")
        inner = result.get("text_config")
        for section in (result, *([inner] if isinstance(inner, dict) else [])):
            for key in ("dtype", "torch_dtype"):
                if key in section:
                    section[key] = dtype
        # Readers older than transformers 5 know the second name alone.
        result["dtype"] = result["torch_dtype"] = dtype
    tied = text_section(result, "tie_word_embeddings")
    if untied != (tied.get("tie_word_embeddings") is False) and (untied or donor.head is not None):
        tied["tie_word_embeddings"] = not untied
    if any(tensor.in_vocabulary for tensor in tensors):
        assert vocabulary is not None
        text_section(result, "vocab_size")["vocab_size"] = vocabulary.size
    elif donor.embedding is not None and "vocab_size" in text_section(result, "vocab_size"):
        rows = [tensor.shape[0] for tensor in tensors if tensor.name == donor.embedding]
        text_section(result, "vocab_size")["vocab_size"] = rows[0] if rows else donor.shape(donor.embedding)[0]
    if config.slices[0].sources[0].layers is not None:
        _set_layers(result, config)
    return result


def _set_layers(result: dict[str, Any], config: MergeConfig) -> None:
    """The number of layers, and lists in the configuration that have an entry for each."""
    chosen = [number for one in config.slices for number in range(*(one.sources[0].layers or (0, 0)))]
    for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        section = text_section(result, key)
        if key not in section:
            continue
        before = section[key]
        section[key] = len(chosen)
        for other, value in section.items():
            if "layer" in other and isinstance(value, list) and len(value) == before:
                section[other] = [value[number] for number in chosen]
