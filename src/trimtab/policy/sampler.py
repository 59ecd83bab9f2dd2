"""Sampling from the policy in this process: prompts prefilled once a group, finished rows leave the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from trimtab.policy.cache import cache_argument, decoding_cache
from trimtab.policy.head import entropy
from trimtab.policy.rollouts import Rollouts, pad_left
from trimtab.policy.scorer import unwrap
from trimtab.seeds import row_uniforms

LEAVE = 0.125
"""Rows leave the batch when this share of it has finished: moving the cache costs about one decoding step."""

DRAW_ELEMENTS = 1 << 21
"""Probabilities that a CPU works on at once: larger temporaries go back to the system, page by page, at every step."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample.

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_p: smallest set of tokens that holds this probability; 1 is off.
        top_k: this many likeliest tokens; 0 is off.
        max_tokens: longest completion, the end token included.
        min_tokens: end tokens are forbidden before this many.
        entropy_temperature: temperature of the recorded entropies; None is that of sampling.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    min_tokens: int = 0
    entropy_temperature: float | None = None


class LocalSampler:
    """Samples from a transformers model with a cache that is written in place."""

    def __init__(self, model: nn.Module, *, end_ids: Sequence[int], pad_id: int) -> None:
        causal = unwrap(model)
        self.model = model
        self.causal: Any = causal
        self.cache_argument = cache_argument(causal.forward)
        self.end_ids = torch.tensor(sorted(set(end_ids)), dtype=torch.long)
        self.pad_id = pad_id

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        params: SamplingParams,
        seed: int,
        *,
        first_row: int = 0,
        on_step: Callable[[int, int], None] | None = None,
    ) -> Rollouts:
        """n completions of each prompt, rows of one prompt next to each other.

        Args:
            prompts: token ids, at least one each.
            n: completions a prompt.
            params: how to sample.
            seed: row i's draws depend on the seed and on `first_row` + i alone, not on its neighbours.
            first_row: where this call's rows stand in a larger batch (of another process, say).
            on_step: called with (tokens generated so far by the longest row, rows still running).

        Returns:
            Rollouts on the model's device, with log-probabilities and entropies of the whole distribution (before
            top-p, top-k and the ban on end tokens), as the scorer would give them.
        """
        training = self.model.training
        self.model.eval()
        try:
            return self._sample(prompts, n, params, seed, first_row, on_step)
        finally:
            self.model.train(training)

    def _sample(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        params: SamplingParams,
        seed: int,
        first_row: int,
        on_step: Callable[[int, int], None] | None,
    ) -> Rollouts:
        device = next(self.model.parameters()).device
        end_ids = self.end_ids.to(device)
        prompt_ids_PL, prompt_mask_PL = (t.to(device) for t in pad_left(prompts, self.pad_id))
        group_ids_N = torch.arange(len(prompts), device=device).repeat_interleave(n)
        rows, limit = group_ids_N.numel(), params.max_tokens
        uniforms_NT = torch.from_numpy(row_uniforms(seed, range(first_row, first_row + rows), limit)).to(device)

        shape = (rows, limit)
        ids_NT = torch.full(shape, self.pad_id, dtype=torch.long, device=device)
        mask_NT = torch.zeros(shape, dtype=torch.bool, device=device)
        logps_NT = torch.zeros(shape, dtype=torch.float32, device=device)
        entropies_NT = torch.zeros_like(logps_NT)
        truncated_N = torch.ones(rows, dtype=torch.bool, device=device)

        padded = not bool(prompt_mask_PL.all())
        position_PL = (prompt_mask_PL.cumsum(dim=1) - 1).clamp(min=0)
        cache: Any = decoding_cache(self.causal.config)
        logits_PV = self._forward(prompt_ids_PL, prompt_mask_PL.long() if padded else None, position_PL, cache)
        logits_NV = logits_PV.index_select(0, group_ids_N)
        cache.reorder_cache(group_ids_N)
        # A purely recurrent model has folded the prompt into its state and takes no mask over the past.
        padded = padded and any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)
        width = prompt_ids_PL.shape[1]
        attention_NS = torch.ones((rows, width + limit), dtype=torch.long, device=device)
        attention_NS[:, :width] = prompt_mask_PL.long().index_select(0, group_ids_N)
        position_N = position_PL[:, -1].index_select(0, group_ids_N)

        running_N = torch.arange(rows, device=device)
        alive_N = torch.ones(rows, dtype=torch.bool, device=device)
        for step in range(limit):
            token_N, logp_N, entropy_N = draw(logits_NV, uniforms_NT[running_N, step], params, end_ids, step)
            # Finished rows are overwritten, not left out: picking by a mask would make the host wait for the device,
            # and this loop waits once a step, for `left`.
            ids_NT[running_N, step] = token_N.where(alive_N, self.pad_id)
            logps_NT[running_N, step] = logp_N.where(alive_N, 0.0)
            entropies_NT[running_N, step] = entropy_N.where(alive_N, 0.0)
            mask_NT[running_N, step] = alive_N
            alive_N = alive_N & ~torch.isin(token_N, end_ids)
            truncated_N[running_N] = alive_N
            left = int(alive_N.sum())
            if on_step:
                on_step(step + 1, left)
            if left == 0 or step + 1 == limit:
                break
            if alive_N.numel() - left >= max(1, LEAVE * alive_N.numel()):
                keep = alive_N.nonzero()[:, 0]
                cache.reorder_cache(keep)
                running_N, token_N, position_N = running_N[keep], token_N[keep], position_N[keep]
                attention_NS = attention_NS[keep]
                alive_N = alive_N[keep]
            position_N = position_N + 1
            attention = attention_NS[:, : width + step + 1] if padded else None
            logits_NV = self._forward(token_N[:, None], attention, position_N[:, None], cache)

        longest = step + 1
        return Rollouts(
            prompt_ids_PL=prompt_ids_PL,
            prompt_mask_PL=prompt_mask_PL,
            completion_ids_NT=ids_NT[:, :longest],
            mask_NT=mask_NT[:, :longest],
            group_ids_N=group_ids_N,
            truncated_N=truncated_N,
            old_logps_NT=logps_NT[:, :longest],
            entropies_NT=entropies_NT[:, :longest],
        )

    def _forward(self, ids_NT: Tensor, attention: Tensor | None, position_NT: Tensor, cache: Any) -> Tensor:
        """Logits that follow the last column, (N, V), float32."""
        logits: Tensor = self.causal(
            input_ids=ids_NT,
            attention_mask=attention,
            position_ids=position_NT,
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_argument: cache},
        ).logits
        return logits[:, -1].float()


def draw(
    logits_NV: Tensor, uniforms_N: Tensor, params: SamplingParams, end_ids: Tensor, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One token a row by inverting the cumulative distribution at that row's uniform number.

    Returns:
        (token_N, logp_N, entropy_N): the log-probability and the entropy are those of the whole distribution, before
        top-k, top-p and the ban on end tokens.
    """
    rows = max(1, DRAW_ELEMENTS // logits_NV.shape[1]) if logits_NV.device.type == "cpu" else logits_NV.shape[0]
    chunks = zip(logits_NV.split(rows), uniforms_N.split(rows), strict=True)
    parts = [_draw_chunk(logits_CV, uniforms_C, params, end_ids, step) for logits_CV, uniforms_C in chunks]
    token_N, logp_N, entropy_N = (torch.cat(part) for part in zip(*parts, strict=True))
    return token_N, logp_N, entropy_N


def _draw_chunk(
    logits_NV: Tensor, uniforms_N: Tensor, params: SamplingParams, end_ids: Tensor, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    temperature = params.temperature or 1.0
    logp_NV = torch.log_softmax(logits_NV if temperature == 1.0 else logits_NV / temperature, dim=1)
    p_NV = logp_NV.exp()
    if params.entropy_temperature is None or params.entropy_temperature == temperature:
        entropy_N = entropy(logp_NV, p_NV)
    else:
        entropy_N = entropy(torch.log_softmax(logits_NV / params.entropy_temperature, dim=1))
    if step < params.min_tokens:
        logits_NV = logits_NV.index_fill(1, end_ids, float("-inf"))
        p_NV = torch.softmax(logits_NV / temperature, dim=1)
    if params.temperature == 0:
        token_N = logits_NV.argmax(dim=1)
    else:
        cdf_NV = truncate(p_NV, top_p=params.top_p, top_k=params.top_k).cumsum(dim=1)
        target_N1 = uniforms_N[:, None] * cdf_NV[:, -1:]
        token_N = torch.searchsorted(cdf_NV, target_N1, right=True)[:, 0].clamp(max=p_NV.shape[1] - 1)
    return token_N, logp_NV.gather(1, token_N[:, None])[:, 0], entropy_N


def truncate(p_NV: Tensor, *, top_p: float, top_k: int) -> Tensor:
    """Probabilities with everything outside the top k and the nucleus of mass `top_p` set to 0, not renormalised.

    Nucleus sampling is arXiv 1904.09751, section 3.1: the smallest set of likeliest tokens whose mass reaches top_p.
    """
    vocabulary = p_NV.shape[1]
    if 0 < top_k < vocabulary:
        values, places = p_NV.topk(top_k, dim=1)
        p_NV = torch.zeros_like(p_NV).scatter_(1, places, values)
    if top_p < 1.0:
        values, places = p_NV.sort(dim=1, descending=True)
        before = values.cumsum(dim=1) - values
        total = values.sum(dim=1, keepdim=True)
        p_NV = torch.zeros_like(p_NV).scatter_(1, places, values * (before < top_p * total))
    return p_NV
