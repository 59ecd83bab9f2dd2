"""The model in this process as a `SearchPolicy`: every prompt and trajectory runs once, prefixes are cut from it."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import InputError
from trimtab.pivotal.memo import digest
from trimtab.pivotal.policy import Continuation, Request
from trimtab.policy.cache import PreallocatedLayer, cache_argument, decoding_cache
from trimtab.policy.head import widen
from trimtab.policy.loading import Policy
from trimtab.policy.rollouts import pad_left
from trimtab.policy.sampler import LEAVE, truncate
from trimtab.policy.scorer import unwrap
from trimtab.seeds import row_uniforms

Ids = tuple[int, ...]


class LocalSearchPolicy:
    """Samples and scores with a transformers model.

    The keys and values of the last `kept_tokens` tokens of prompts and trajectories are kept. A prefix of one of them
    costs no forward pass but that of its last token. A model with any state besides keys and values runs every prefix
    anew.

    Attributes:
        identity, prefilled_tokens: see `SearchPolicy`.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_completion_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        kept_tokens: int = 1 << 16,
    ) -> None:
        """Settings as in `SamplingParams`; `max_completion_tokens` bounds prefix and continuation together.

        Raises:
            InputError: temperature 0, under which no token can be pivotal.
        """
        if temperature <= 0:
            raise InputError(f"temperature is {temperature}: a search needs sampling, so it must be above 0")
        self.policy, self.causal = policy, unwrap(policy.model)
        self.cache_argument = cache_argument(self.causal.forward)
        self.temperature, self.top_p, self.top_k = temperature, top_p, top_k
        self.max_tokens, self.kept_tokens = max_completion_tokens, kept_tokens
        self.device = next(policy.model.parameters()).device
        self.end_ids = torch.tensor(sorted(set(policy.end_ids)), dtype=torch.long, device=self.device)
        self.prefilled_tokens = 0
        self.identity: dict[str, Any] = {
            "model": fingerprint(policy.model),
            "tokenizer": digest(policy.tokenizer.get_vocab()),
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "max_completion_tokens": max_completion_tokens,
        }
        self._kept: OrderedDict[Ids, Any] = OrderedDict()
        self._keeps = all(type(layer) is PreallocatedLayer for layer in self._new_cache().layers)

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `SearchPolicy`."""
        return str(self.policy.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    @torch.no_grad()
    def score(self, rows: Sequence[tuple[Ids, Ids]]) -> list[list[float]]:
        """See `SearchPolicy`; what ran stays for the prefixes."""
        self.policy.model.eval()
        result = []
        for prompt_ids, token_ids in rows:
            ids = prompt_ids + token_ids
            # The token before the completion predicts its first one, so it runs again where it has run before.
            logits_TV = self._extend(ids, at_most=len(prompt_ids) - 1, keep=len(token_ids) + 1)[:-1]
            p_TV = self._distribution(logits_TV)
            p_T = p_TV.gather(1, torch.tensor(token_ids, device=self.device)[:, None])[:, 0]
            result.append(p_T.clamp(min=torch.finfo(p_T.dtype).tiny).log().tolist())
        return result

    @torch.no_grad()
    def sample(self, requests: Sequence[Request]) -> list[list[Continuation]]:
        """See `SearchPolicy`."""
        self.policy.model.eval()
        prefixes = [request.prompt_ids + request.prefix_ids for request in requests]
        cache, logits_RV, attention_RS = self._start(prefixes)
        counts_R = torch.tensor([request.count for request in requests], device=self.device)
        request_N = torch.arange(len(requests), device=self.device).repeat_interleave(counts_R)
        cache.reorder_cache(request_N)
        logits_NV = logits_RV.index_select(0, request_N)

        rooms = [self.max_tokens - len(request.prefix_ids) for request in requests]
        limit, rows = max(rooms), int(request_N.numel())
        uniforms_NT = torch.zeros((rows, limit))
        place = 0
        for request, room in zip(requests, rooms, strict=True):
            numbers = range(request.first, request.first + request.count)
            uniforms_NT[place : place + request.count, :room] = torch.from_numpy(
                row_uniforms(request.seed, numbers, room)
            )
            place += request.count
        uniforms_NT = uniforms_NT.to(self.device)
        room_N = torch.tensor(rooms, device=self.device).index_select(0, request_N)
        banned_R = torch.tensor([-1 if r.banned is None else r.banned for r in requests], device=self.device)
        banned_N = banned_R.index_select(0, request_N)

        ids_NT = torch.zeros((rows, limit), dtype=torch.long, device=self.device)
        length_N = torch.zeros(rows, dtype=torch.long, device=self.device)
        ended_N = torch.zeros(rows, dtype=torch.bool, device=self.device)
        width = attention_RS.shape[1]
        attention_NS = torch.ones((rows, width + limit), dtype=torch.long, device=self.device)
        attention_NS[:, :width] = attention_RS.index_select(0, request_N)
        position_N = attention_RS.sum(dim=1).index_select(0, request_N) - 1
        running_N = torch.arange(rows, device=self.device)
        alive_N = torch.ones(rows, dtype=torch.bool, device=self.device)
        for step in range(limit):
            p_NV = self._distribution(logits_NV)
            if step == 0:
                p_NV[torch.arange(rows, device=self.device), banned_N.clamp(min=0)] *= (banned_N < 0).to(p_NV.dtype)
            token_N = invert(p_NV, uniforms_NT[running_N, step])
            ids_NT[running_N, step] = token_N.where(alive_N, ids_NT[running_N, step])
            length_N[running_N] += alive_N.long()
            ends_N = torch.isin(token_N, self.end_ids) & alive_N
            ended_N[running_N] |= ends_N
            alive_N = alive_N & ~ends_N & (step + 1 < room_N[running_N])
            left = int(alive_N.sum())
            if left == 0:
                break
            if alive_N.numel() - left >= max(1, LEAVE * alive_N.numel()):
                keep = alive_N.nonzero()[:, 0]
                cache.reorder_cache(keep)
                running_N, token_N, position_N = running_N[keep], token_N[keep], position_N[keep]
                attention_NS, alive_N = attention_NS[keep], alive_N[keep]
            position_N = position_N + 1
            logits_NV = self._forward(
                token_N[:, None], attention_NS[:, : width + step + 1], position_N[:, None], cache, 1
            )[:, -1]
        rows_out = [
            Continuation(tuple(ids[:length]), not ended)
            for ids, length, ended in zip(ids_NT.tolist(), length_N.tolist(), ended_N.tolist(), strict=True)
        ]
        result, place = [], 0
        for request in requests:
            result.append(rows_out[place : place + request.count])
            place += request.count
        return result

    def _distribution(self, logits_NV: Tensor) -> Tensor:
        """What is drawn from: after temperature, top-k and top-p."""
        p_NV = truncate(torch.softmax(logits_NV / self.temperature, dim=1), top_p=self.top_p, top_k=self.top_k)
        return p_NV / p_NV.sum(dim=1, keepdim=True)

    def _start(self, prefixes: Sequence[Ids]) -> tuple[Any, Tensor, Tensor]:
        """A cache of all prefixes, padded on the left, the logits behind them (R, V), and the mask (R, S)."""
        ids_RS, mask_RS = (tensor.to(self.device) for tensor in pad_left(prefixes, 0))
        attention_RS, cache = mask_RS.long(), self._new_cache()
        width = ids_RS.shape[1] - 1
        position_RS = (attention_RS.cumsum(dim=1) - 1).clamp(min=0)
        if not self._keeps or width == 0:
            self.prefilled_tokens += int(attention_RS.sum())
            return cache, self._forward(ids_RS, attention_RS, position_RS, cache, 1)[:, -1], attention_RS
        sources = [self._cache_of(prefix[:-1]) if len(prefix) > 1 else None for prefix in prefixes]
        for number, layer in enumerate(cache.layers):
            some = next(source for source in sources if source is not None).layers[number]
            for name in ("keys", "values"):
                buffer = getattr(some, name)
                filled = buffer.new_zeros(len(prefixes), buffer.shape[1], width, buffer.shape[3])
                for row, (prefix, source) in enumerate(zip(prefixes, sources, strict=True)):
                    if source is not None:
                        length = len(prefix) - 1
                        filled[row, :, width - length :] = getattr(source.layers[number], name)[0, :, :length]
                setattr(layer, name, filled)
            layer.length, layer.is_initialized = width, True
        self.prefilled_tokens += len(prefixes)
        logits_RV = self._forward(ids_RS[:, -1:], attention_RS, position_RS[:, -1:], cache, 1)[:, -1]
        return cache, logits_RV, attention_RS

    def _cache_of(self, ids: Ids) -> Any:
        """A cache that begins with these tokens, grown from the longest start of them that is kept."""
        for kept, cache in self._kept.items():
            if kept[: len(ids)] == ids:
                self._kept.move_to_end(kept)
                return cache
        self._extend(ids, at_most=len(ids) - 1, keep=1)
        return self._kept[ids]

    def _extend(self, ids: Ids, *, at_most: int, keep: int) -> Tensor:
        """Run tokens behind the longest kept start of them (of `at_most` tokens): logits of the last `keep`, (T, V)."""
        best, source = 0, None
        for kept, cache in self._kept.items():
            same = next(
                (i for i, (a, b) in enumerate(zip(kept, ids, strict=False)) if a != b), min(len(kept), len(ids))
            )
            if min(same, at_most) > best:
                best, source = min(same, at_most), cache
        cache = self._new_cache()
        if source is not None:
            for layer, old in zip(cache.layers, source.layers, strict=True):
                layer.keys, layer.values = old.keys[:, :, :best], old.values[:, :, :best]
                layer.length, layer.is_initialized = best, True
        new = torch.tensor([ids[best:]], device=self.device)
        positions = torch.arange(best, len(ids), device=self.device)[None]
        logits_TV = self._forward(new, None, positions, cache, keep)[0]
        self.prefilled_tokens += len(ids) - best
        if self._keeps:
            self._kept[ids] = cache
            while len(self._kept) > 1 and sum(map(len, self._kept)) > self.kept_tokens:
                self._kept.popitem(last=False)
        return logits_TV

    def _new_cache(self) -> Any:
        return decoding_cache(self.causal.config)

    def _forward(self, ids_NT: Tensor, attention: Tensor | None, position_NT: Tensor, cache: Any, keep: int) -> Tensor:
        """Logits of the last `keep` columns, (N, keep, V), at least float32."""
        logits: Tensor = self.causal(
            input_ids=ids_NT,
            attention_mask=attention,
            position_ids=position_NT,
            use_cache=True,
            logits_to_keep=keep,
            **{self.cache_argument: cache},
        ).logits
        return widen(logits[:, -keep:])


def invert(p_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """One token a row, where the running sum of its probabilities passes the row's uniform number."""
    cdf_NV = p_NV.cumsum(dim=1)
    target_N1 = uniforms_N[:, None].to(cdf_NV.dtype) * cdf_NV[:, -1:]
    token_N = torch.searchsorted(cdf_NV, target_N1, right=True)[:, 0]
    # Rounding may pass the end; the last token of any probability is meant then.
    last_N = p_NV.shape[1] - 1 - (p_NV.flip(1) > 0).long().argmax(dim=1)
    return torch.minimum(token_N, last_N)


def fingerprint(model: torch.nn.Module) -> str:
    """A hash of all weights, by name."""
    hashed = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(model.state_dict().items()):
        hashed.update(name.encode())
        hashed.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()
