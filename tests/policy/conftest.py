"""Tiny random models of many architectures, and rollouts that are awkward in every way a real batch can be."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trimtab.policy.rollouts import Rollouts, pad_left, pad_right

VOCABULARY = 64
LAYOUT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    # Far above the usual 0.02, so that the distributions are far from uniform and a wrong mask shows.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def _config(architecture: str, changes: dict[str, Any]) -> Any:
    import transformers as hf

    layout = LAYOUT | changes
    match architecture:
        case "llama":
            return hf.LlamaConfig(**layout)
        case "qwen2":
            return hf.Qwen2Config(**({"tie_word_embeddings": True} | layout))
        case "gpt2":
            quiet = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
            sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": VOCABULARY}
            ids = {"initializer_range": 0.3, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
            return hf.GPT2Config(**(sizes | ids | quiet | changes))
        case "mistral":
            return hf.MistralConfig(**({"sliding_window": 4} | layout))
        case "gemma2":
            # Its tied, scaled embeddings repeat one token for ever unless they are small.
            small = {"initializer_range": 0.1, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
            return hf.Gemma2Config(**(LAYOUT | small | changes))
        case "phi":
            return hf.PhiConfig(**layout)
        case "granite":
            return hf.GraniteConfig(**({"logits_scaling": 3.0, "embedding_multiplier": 2.0} | layout))
        case "mixtral":
            return hf.MixtralConfig(**({"num_local_experts": 4, "num_experts_per_tok": 2} | layout))
        case "mamba":
            return hf.MambaConfig(**(LAYOUT | {"state_size": 4, "initializer_range": 0.15} | changes))
        case "lfm2":
            kinds: dict[str, Any] = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
            return hf.Lfm2Config(**(kinds | layout))
    raise ValueError(architecture)


def _tiny(architecture: str, **changes: Any) -> Any:
    """A causal language model with random weights and biases, in float32, in training mode."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_config(architecture, changes))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
    return model.train()


@pytest.fixture
def tiny() -> Callable[..., Any]:
    """Builds a model: `tiny("llama", num_hidden_layers=1)`."""
    return _tiny


@pytest.fixture
def awkward() -> Rollouts:
    """Prompts of 5, 2 and 7 tokens; unequal, interleaved groups; completions of 1 to 6 tokens."""
    generator = torch.Generator().manual_seed(1)

    def ids(length: int) -> list[int]:
        return torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()

    prompt_ids_PL, prompt_mask_PL = pad_left([ids(5), ids(2), ids(7)], 0)
    completion_ids_NT, mask_NT = pad_right([ids(n) for n in (6, 1, 4, 3, 1, 5)], 0)
    return Rollouts(
        prompt_ids_PL=prompt_ids_PL,
        prompt_mask_PL=prompt_mask_PL,
        completion_ids_NT=completion_ids_NT,
        mask_NT=mask_NT,
        group_ids_N=torch.tensor([0, 2, 1, 0, 0, 2]),
        truncated_N=torch.tensor([True, False, False, True, False, False]),
    )
