"""A LoRA adapter as peft saves it, added to a model's tensors while they are read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import InputError
from trimtab.merging.shards import Stored, read_header, read_tensor

_PREFIX = "base_model.model."
_PAIR = re.compile(r"^(.*)\.lora_(embedding_)?([AB])(?:\.(weight|bias))?$")
# Kinds of adapters whose change to a weight is not B A.
_OTHER = ("use_dora", "lora_bias")


class Adapter:
    """The changes that a LoRA makes to a model's tensors: W + scale · B A (arXiv 2106.09685, section 4.1).

    The scale is alpha / r, with rsLoRA alpha / sqrt(r) (arXiv 2312.03732). Tensors that were trained whole
    (`modules_to_save`, biases) replace the model's.
    """

    def __init__(self, folder: Path, model_tensors: Container[str]) -> None:
        """Read what there is, no tensor yet.

        Args:
            folder: with adapter_config.json and adapter_model.safetensors.
            model_tensors: names of the model's tensors.

        Raises:
            InputError: not a LoRA, one of a kind that cannot be folded in, or one for another model.
        """
        self.folder = folder
        try:
            self.config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{folder} holds no readable adapter_config.json; it is no LoRA adapter.") from error
        if self.config.get("peft_type", "LORA") != "LORA":
            raise InputError(f"{folder} is an adapter of type {self.config['peft_type']}; only LORA can be merged.")
        for option in _OTHER:
            if self.config.get(option):
                raise InputError(f"{folder} was trained with {option}, which cannot be merged; fold it in with peft.")
        if not (folder / "adapter_model.safetensors").is_file():
            raise InputError(f"{folder} holds no adapter_model.safetensors; save the adapter again as safetensors.")
        self.pairs: dict[str, dict[str, Stored]] = {}
        self.replaced: dict[str, Stored] = {}
        for key, stored in read_header(folder / "adapter_model.safetensors").items():
            name = key.removeprefix(_PREFIX)
            pair = _PAIR.match(name)
            if pair is None:
                self.replaced[name.replace(".base_layer.", ".")] = stored
            else:
                module, embedding, side, _ = pair.groups()
                self.pairs.setdefault(f"{module}.weight", {})[f"{embedding or ''}{side}"] = stored
        for name in self.names():
            # A tied head is a tensor that the model's files do not have.
            if name not in model_tensors and not name.endswith("lm_head.weight"):
                raise InputError(f"{folder}: the adapter changes {name}, which the model does not have.")

    def names(self) -> set[str]:
        """The tensors that change."""
        return set(self.pairs) | set(self.replaced)

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A tensor's shape after the change: a matrix that was trained whole may have rows for new tokens."""
        return self.replaced[name].shape if name in self.replaced else shape

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        """The changed tensor, float32 where something is added.

        Args:
            name: its name.
            tensor: the model's, any shape.

        Raises:
            InputError: the adapter's factors do not fit the tensor's shape.
        """
        if name in self.replaced:
            tensor = read_tensor(self.replaced[name])
        if name not in self.pairs:
            return tensor
        pair = self.pairs[name]
        transposed = "embedding_A" in pair
        first, second = (pair.get(f"embedding_{side}" if transposed else side) for side in "AB")
        if first is None or second is None:
            raise InputError(f"{self.folder}: of the two factors for {name} one is missing.")
        down, up = read_tensor(first).float(), read_tensor(second).float()
        if down.dim() != 2 or up.dim() != 2:
            raise InputError(f"{self.folder}: the factors for {name} are no matrices; fold this adapter in with peft.")
        if transposed or self.config.get("fan_in_fan_out"):
            down, up = up.T, down.T
        if (up.shape[0], down.shape[1]) != tuple(tensor.shape) or up.shape[1] != down.shape[0]:
            raise InputError(
                f"{self.folder}: the change to {name} has shape {[up.shape[0], down.shape[1]]}, the model's tensor "
                f"{list(tensor.shape)}; this adapter belongs to another model."
            )
        return torch.addmm(tensor.float(), up, down, alpha=self._scale(name.removesuffix(".weight"), up.shape[1]))

    def _scale(self, module: str, rank: int) -> float:
        patterns: dict[str, float] = self.config.get("alpha_pattern") or {}
        fitting = (alpha for key, alpha in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
        alpha = next(fitting, self.config["lora_alpha"])
        return float(alpha) / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
