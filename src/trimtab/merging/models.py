"""A model on disk as a merge sees it: named tensors, a configuration, maybe a LoRA that is added as they are read."""

from __future__ import annotations

import json
import logging
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import InputError
from trimtab.merging.config import ModelName
from trimtab.merging.lora import Adapter
from trimtab.merging.shards import INDEX, Stored, find_tensors, read_tensor

logger = logging.getLogger("trimtab")

FETCHED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
HEADS = ("lm_head.weight", "embed_out.weight")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight")
# Of rotary embeddings: calculated when a model is made, and not of the weights' dtype.
_NOT_MERGED = ("inv_freq",)
_LAYER = re.compile(r"^((?:.*\.)?(?:layers|h|blocks|block|layer))\.(\d+)\.(.+)$")


def split_layer(name: str) -> tuple[str, int, str] | None:
    """(what is before, the layer's number, what is after) of a tensor's name; None outside of layers."""
    match = _LAYER.match(name)
    return (match[1], int(match[2]), match[3]) if match else None


def fetch(path: str, revision: str | None = None) -> Path:
    """The folder of a model: itself, a training run's newest checkpoint, or the hub's files in the local cache.

    Raises:
        InputError: there is no such folder and none on the hub.
    """
    if path.startswith("builtin:"):
        from trimtab.policy.loading import resolve_model

        return Path(resolve_model(path))
    folder = Path(path).expanduser()
    if folder.is_dir():
        steps = [
            (int(step.name.removeprefix("step_")), step)
            for step in (folder / "checkpoints").glob("step_*")
            if step.name.removeprefix("step_").isdigit() and (step / "trainer_state.json").is_file()
        ]
        return max(steps)[1] if steps and not (folder / "config.json").is_file() else folder
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise InputError(f"There is no model folder {path}; give a local folder or a Hugging Face id (owner/name).")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=FETCHED))
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path} is no local folder and cannot be fetched from the hub ({reason}).") from error


class OpenModel:
    """The tensors of one model, with its adapter in them.

    Attributes:
        name: as the merge file has it.
        folder: of the model.
        config: its config.json.
        embedding: name of the matrix with a row for each token, None where there is not exactly one.
        head: name of the output matrix, stored or tied.
        tied: whether the head is the embedding.
    """

    def __init__(self, name: ModelName) -> None:
        """Find everything, read no tensor (but the head of a model that says it is tied and stores one).

        Raises:
            InputError: files missing or not whole, a quantised model, an adapter that does not fit.
        """
        self.name = name
        self.folder = fetch(name.path, name.revision)
        adapter = fetch(name.adapter, name.adapter_revision) if name.adapter else None
        plain = any((self.folder / file).is_file() for file in ("model.safetensors", INDEX))
        if adapter is None and not plain and (self.folder / "adapter_config.json").is_file():
            adapter = self.folder
            self.folder = fetch(_base_of(adapter))
        try:
            self.config: dict[str, Any] = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{self.folder} holds no readable config.json; it is no model's folder.") from error
        if self.config.get("quantization_config"):
            raise InputError(f"{name} is quantised; merge the weights it was made from.")
        self._stored = find_tensors(self.folder)
        self.adapter = Adapter(adapter, self._stored) if adapter else None
        embeddings = [key for key in self._stored if key.endswith(EMBEDDINGS)]
        self.embedding = embeddings[0] if len(embeddings) == 1 else None
        changed = self.adapter.names() if self.adapter else set()
        heads = [key for key in sorted({*self._stored, *changed}) if key.endswith(HEADS)]
        self.head = heads[0] if len(heads) == 1 else None
        if adapter and self.head is None and self.embedding in changed:
            # peft leaves the head as it was while it trains, and changes both when it merges.
            logger.warning("%s changes the embedding, which is the head as well; both are changed", adapter)
        self.tied = self.head is None or (self.head not in changed and self._is_copy_of_embedding(self.head))

    def _is_copy_of_embedding(self, head: str) -> bool:
        """Whether a stored head is the embedding again. Where they differ, transformers does not tie them."""
        if not text_section(self.config, "tie_word_embeddings").get("tie_word_embeddings") or self.embedding is None:
            return False
        first, second = self._stored[head], self._stored[self.embedding]
        return first.shape == second.shape and torch.equal(read_tensor(first), read_tensor(second))

    @cached_property
    def names(self) -> list[str]:
        """All tensors to merge, a tied head not among them, layers in their order."""
        names = {*self._stored, *(self.adapter.names() if self.adapter else ())}
        if self.tied and self.head is not None:
            names.discard(self.head)

        def order(name: str) -> tuple[Any, ...]:
            layer = split_layer(name)
            return (0 if is_before_layers(name) else 2, name, 0, "") if layer is None else (1, *layer)

        return sorted((name for name in names if not name.endswith(_NOT_MERGED)), key=order)

    @cached_property
    def layers(self) -> dict[str, int]:
        """Number of layers under each prefix of names."""
        counts: dict[str, int] = {}
        for prefix, number, _ in filter(None, map(split_layer, self.names)):
            counts[prefix] = max(counts.get(prefix, 0), number + 1)
        return counts

    def has(self, name: str) -> bool:
        """Whether there is such a tensor; a tied head counts, where its model does not say that it is not tied."""
        if name in self._stored or (self.adapter is not None and name in self.adapter.replaced):
            return True
        untied = text_section(self.config, "tie_word_embeddings").get("tie_word_embeddings") is False
        return name.endswith(HEADS) and self.embedding is not None and (not untied or name == self.head)

    def stored(self, name: str) -> Stored:
        """Where a tensor lies before the adapter changes it."""
        if name in self._stored and not (self.tied and name == self.head):
            return self._stored[name]
        if self.adapter is not None and name in self.adapter.replaced:
            return self.adapter.replaced[name]
        assert self.embedding is not None
        return self._stored[self.embedding]

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape, the adapter's changes included."""
        shape = self.stored(name).shape
        return self.adapter.shape(self._changed_as(name), shape) if self.adapter else shape

    def is_changed(self, name: str) -> bool:
        """Whether the adapter changes it."""
        return self.adapter is not None and self._changed_as(name) in self.adapter.names()

    def read(self, name: str) -> Tensor:
        """The tensor, in memory of its own; float32 where an adapter adds to it."""
        tensor = read_tensor(self.stored(name))
        return self.adapter.apply(self._changed_as(name), tensor) if self.adapter else tensor

    def _changed_as(self, name: str) -> str:
        tied_head = self.tied and name.endswith(HEADS) and self.embedding is not None
        return str(self.embedding) if tied_head else name


def is_before_layers(name: str) -> bool:
    """Whether a tensor outside of the layers belongs to the input side."""
    return not name.endswith(HEADS) and any(part in name for part in ("embed", "wte", "wpe"))


def text_section(config: dict[str, Any], key: str) -> dict[str, Any]:
    """The part of a configuration that holds a key of the language model: of several modalities text has its own."""
    inner = config.get("text_config")
    return inner if key not in config and isinstance(inner, dict) else config


def _base_of(adapter: Path) -> str:
    try:
        base = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError):
        base = None
    if not base:
        raise InputError(f"{adapter} is an adapter that names no base model; write MODEL+{adapter}.")
    return str(base)
