"""Tiny models to merge: variants of one model, and adapters for it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def variant(
    model: Path,
    folder: Path,
    seed: int = 0,
    *,
    scale: float = 0.02,
    dtype: torch.dtype | None = None,
    config: dict[str, Any] | None = None,
    change: Callable[[dict[str, Tensor]], None] | None = None,
) -> Path:
    """A copy of a model with noise on every weight; `change` edits the tensors, `config` the configuration."""
    generator = torch.Generator().manual_seed(seed)
    shutil.copytree(model, folder)
    tensors = {
        name: tensor + scale * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(model / "model.safetensors").items()
    }
    if dtype is not None:
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        config = {"dtype": str(dtype).removeprefix("torch."), **(config or {})}
    if change is not None:
        change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", config or {})
    return folder


def edit_json(path: Path, changes: dict[str, Any]) -> None:
    """Set keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a model's folder."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def grow_vocabulary(model: Path, tokens: list[str], height: int) -> None:
    """Add tokens to a model's tokenizer and rows to its embedding, `height` in all."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(tokens, special_tokens=True)
    tokenizer.save_pretrained(model)
    tensors = load_file(model / "model.safetensors")
    old = tensors["model.embed_tokens.weight"]
    generator = torch.Generator().manual_seed(len(tokens))
    rows = torch.randn(height - len(old), old.shape[1], generator=generator)
    tensors["model.embed_tokens.weight"] = torch.cat([old, rows.to(old.dtype)])
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    edit_json(model / "config.json", {"vocab_size": height})


def adapter(model: Path, folder: Path, seed: int = 0, **options: Any) -> Path:
    """A LoRA for a model, its factors random, as peft saves it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"], **options}
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(**settings))
    for name, parameter in policy.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.normal_(0, 0.1)
    policy.save_pretrained(folder)
    return folder


def folded(model: Path, lora: Path) -> dict[str, Tensor]:
    """The weights of a model with an adapter folded in by peft."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(lora))
    state: dict[str, Tensor] = policy.merge_and_unload().state_dict()
    return state
