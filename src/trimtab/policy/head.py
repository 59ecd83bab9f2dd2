"""The language-model head fused with log-softmax, gather and entropy, a chunk of tokens at a time.

Only the real completion tokens come here, so neither padding nor prompt is ever multiplied with the vocabulary, and no
(tokens, vocabulary) tensor larger than a chunk exists: the backward pass computes the logits of each chunk again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Logits that exist at once: 16 MiB of float32 stays in a CPU's cache, 512 MiB keeps a GPU busy."""

LARGE_VOCABULARY = 1 << 16
"""Above this a CPU gets four times as many: with fewer than 64 rows a matrix product waits for the head's weights."""


def chunk_rows(vocabulary: int, device: torch.device) -> int:
    """How many tokens' logits are computed at a time."""
    elements = CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cuda"])
    if device.type == "cpu" and vocabulary > LARGE_VOCABULARY:
        elements *= 4
    return max(1, elements // vocabulary)


def widen(values: Tensor) -> Tensor:
    """Half precision as float32; float32 and float64 stay as they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _logits(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, scale: float) -> Tensor:
    """Widened logits of a chunk, already divided by the temperature (scale = 1 / temperature)."""
    logits_CV = widen(torch.nn.functional.linear(hidden_CH, weight_VH, bias_V))
    return logits_CV if scale == 1.0 else logits_CV.mul_(scale)


def entropy(logp_V: Tensor, p_V: Tensor | None = None) -> Tensor:
    """Entropy in nats, shape (...), of distributions given by their log-probabilities, which must be finite.

    `p_V`: the probabilities, where the caller has them already.
    """
    with torch.autocast(logp_V.device.type, enabled=False):  # it would take the product in half precision
        return -torch.linalg.vecdot(logp_V.exp() if p_V is None else p_V, logp_V)


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        token_ids_M: Tensor,
        temperature: float,
        entropy_temperature: float | None,
    ) -> tuple[Tensor, Tensor]:
        size = chunk_rows(weight_VH.shape[0], weight_VH.device)
        logps, entropies = [], []
        for hidden_CH, ids_C in zip(hidden_MH.split(size), token_ids_M.split(size), strict=True):
            logits_CV = _logits(hidden_CH, weight_VH, bias_V, 1.0 / temperature)
            logp_CV = torch.log_softmax(logits_CV, dim=1)
            logps.append(logp_CV.gather(1, ids_C[:, None])[:, 0])
            if entropy_temperature is None:
                entropies.append(torch.zeros_like(logps[-1]))
                continue
            if entropy_temperature != temperature:
                logp_CV = torch.log_softmax(logits_CV.mul_(temperature / entropy_temperature), dim=1)
            entropies.append(entropy(logp_CV))
        ctx.save_for_backward(hidden_MH, weight_VH, bias_V, token_ids_M)
        ctx.temperatures = (temperature, entropy_temperature)
        return torch.cat(logps), torch.cat(entropies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logps_M: Tensor, grad_entropies_M: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MH, weight_VH, bias_V, token_ids_M = ctx.saved_tensors
        temperature, entropy_temperature = ctx.temperatures
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        with_entropy = entropy_temperature is not None and bool(grad_entropies_M.any())
        size = chunk_rows(weight_VH.shape[0], weight_VH.device)
        grad_hidden_MH = torch.empty_like(hidden_MH) if needs_hidden else None
        wide = torch.promote_types(weight_VH.dtype, torch.float32)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=wide) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=wide) if needs_bias else None
        for start in range(0, hidden_MH.shape[0], size):
            part = slice(start, start + size)
            hidden_CH = hidden_MH[part]
            logits_CV = _logits(hidden_CH, weight_VH, bias_V, 1.0 / temperature)
            grad_C1 = grad_logps_M[part, None]
            entropy_grad_CV = None
            if with_entropy:
                scale = temperature / entropy_temperature
                logp_CV = torch.log_softmax(logits_CV * scale, dim=1)
                p_CV = logp_CV.exp()
                entropy_C1 = entropy(logp_CV, p_CV)[:, None]
                # dH/dz = -p (log p + H)
                entropy_grad_CV = logp_CV.add_(entropy_C1).mul_(p_CV).mul_(grad_entropies_M[part, None] * -scale)
            # d log p_y / dz = [y] - p
            grad_CV = torch.softmax(logits_CV, dim=1).mul_(-grad_C1)
            grad_CV.scatter_add_(1, token_ids_M[part, None], grad_C1)
            if entropy_grad_CV is not None:
                grad_CV += entropy_grad_CV
            if temperature != 1.0:
                grad_CV /= temperature
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(dim=0)
            grad_CV = grad_CV.to(weight_VH.dtype)
            if grad_hidden_MH is not None:
                grad_hidden_MH[part] = grad_CV @ weight_VH
            if grad_weight_VH is not None:
                if grad_weight_VH.dtype == weight_VH.dtype:
                    grad_weight_VH.addmm_(grad_CV.t(), hidden_CH)
                else:
                    grad_weight_VH += grad_CV.t() @ hidden_CH
        cast = None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype)
        bias = None if grad_bias_V is None or bias_V is None else grad_bias_V.to(bias_V.dtype)
        return grad_hidden_MH, cast, bias, None, None, None


def token_logps(
    hidden_MH: Tensor,
    head: torch.nn.Linear,
    token_ids_M: Tensor,
    *,
    temperature: float = 1.0,
    entropy_temperature: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token and entropy of its distribution, from the hidden state that predicts it.

    Args:
        hidden_MH: last hidden states, after the final norm.
        head: the model's output projection, (vocabulary, hidden).
        token_ids_M: the tokens to be scored.
        temperature: logits are divided by it before the softmax of the log-probabilities.
        entropy_temperature: the same for the entropy; None leaves the entropies at 0.

    Returns:
        (logps_M, entropies_M), nats, float32 (float64 where the head is), both differentiable in `hidden_MH` and the
        head's parameters.
    """
    weight, bias = head.weight, head.bias
    device = hidden_MH.device.type
    # Outside autocast everything keeps the weight's own dtype; inside, the matrix products run in autocast's.
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    with torch.autocast(device, enabled=False):
        return _FusedHead.apply(  # type: ignore[no-any-return]
            hidden_MH.to(dtype),
            weight.to(dtype),
            None if bias is None else bias.to(dtype),
            token_ids_M,
            temperature,
            entropy_temperature,
        )
