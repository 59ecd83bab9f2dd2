"""Log-probabilities and entropies of given token ids under the policy, with gradient, at the least cost.

The shared path runs each prompt once, with gradient, and lets all its completions attend to the one set of keys and
values; the language-model head then sees real completion tokens only (head.py). The plain path is the whole model over
prompt + completion: the fallback for models that cannot be taken apart, and the reference that the shared path is
compared with before its first use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.policy.cache import cache_argument, shared_prompt_cache
from trimtab.policy.head import entropy, token_logps, widen
from trimtab.policy.rollouts import Rollouts, pad_left

logger = logging.getLogger("trimtab")

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
"""How far the two paths may differ at first, relative to 1 + |log-probability|; half precision gets 0.05.

Relative, because rounding grows with the logits: made-up tokens have log-probabilities around -20, where SmolLM2-135M
differs by 2e-4 in float32 (1e-5 on real text) and by 6e-7 in float64. Many models compute their norms in float32 even
when everything else is float64."""


def unwrap(model: nn.Module) -> nn.Module:
    """The transformers model inside a peft wrapper (whose LoRA layers live in the modules themselves)."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


class Scorer:
    """Scores rollouts under one model.

    Attributes:
        shared: whether the shared path is in use.
        reason: why not, or an empty string.
    """

    def __init__(self, model: nn.Module, *, shared: bool | None = None) -> None:
        """`shared` None decides by looking at the model and comparing both paths once; True or False insists."""
        self.model = model
        causal = unwrap(model)
        self.backbone: Any = causal.get_decoder()  # type: ignore[operator]
        self.head: Any = causal.get_output_embeddings()  # type: ignore[operator]
        self.cache_argument = cache_argument(self.backbone.forward)
        self.shared, self.reason = (True, "") if shared is None else (shared, "" if shared else "asked for")
        if shared is None:
            self.reason = self._obstacle()
            if not self.reason:
                self.reason = self._difference()
            self.shared = not self.reason
            if self.reason:
                logger.warning("scoring takes the plain path, slower but equal: %s", self.reason)

    def score(
        self,
        rollouts: Rollouts,
        *,
        temperature: float = 1.0,
        entropy_temperature: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the completion tokens; gradient flows unless the caller forbids it.

        Args:
            rollouts: on the model's device; every row has at least one completion token.
            temperature: that of sampling: logits are divided by it.
            entropy_temperature: the same for the entropies; None leaves them at 0, which is cheaper.

        Returns:
            (logps_NT, entropies_NT), nats, 0 outside the mask; float32 (float64 for a float64 model).
        """
        path = self._shared_path if self.shared else self._plain_path
        return path(rollouts, temperature, entropy_temperature)

    def _shared_path(
        self, rollouts: Rollouts, temperature: float, entropy_temperature: float | None
    ) -> tuple[Tensor, Tensor]:
        prompt_mask_PL, mask_NT = rollouts.prompt_mask_PL, rollouts.mask_NT
        padded = not bool(prompt_mask_PL.all())
        position_PL = (prompt_mask_PL.cumsum(dim=1) - 1).clamp(min=0)
        cache: Any = shared_prompt_cache()
        call: Callable[..., Any] = self.backbone
        prompt_PLH = call(
            input_ids=rollouts.prompt_ids_PL,
            attention_mask=prompt_mask_PL.long() if padded else None,
            position_ids=position_PL,
            use_cache=True,
            **{self.cache_argument: cache},
        ).last_hidden_state
        first_NH = prompt_PLH[:, -1].index_select(0, rollouts.group_ids_N)
        width = mask_NT.shape[1]
        if width > 1:
            for layer in cache.layers:
                layer.rows_N = rollouts.group_ids_N
            # The last token of each row predicts nothing, so it is never fed.
            fed_NT = rollouts.completion_ids_NT[:, :-1]
            start_N1 = position_PL[:, -1:].index_select(0, rollouts.group_ids_N) + 1
            attention = None
            if padded:
                # Padding behind a completion needs no mask: it lies in the future of every token that counts.
                ahead_NT = torch.ones_like(fed_NT, dtype=torch.long)
                attention = torch.cat([prompt_mask_PL.long().index_select(0, rollouts.group_ids_N), ahead_NT], dim=1)
            rest_NTH = call(
                input_ids=fed_NT,
                attention_mask=attention,
                position_ids=start_N1 + torch.arange(width - 1, device=mask_NT.device),
                use_cache=True,
                **{self.cache_argument: cache},
            ).last_hidden_state
            hidden_NTH = torch.cat([first_NH[:, None], rest_NTH], dim=1)
        else:
            hidden_NTH = first_NH[:, None]
        logps_M, entropies_M = token_logps(
            hidden_NTH[mask_NT],
            self.head,
            rollouts.completion_ids_NT[mask_NT],
            temperature=temperature,
            entropy_temperature=entropy_temperature,
        )
        empty_NT = logps_M.new_zeros(mask_NT.shape)
        return empty_NT.masked_scatter(mask_NT, logps_M), empty_NT.masked_scatter(mask_NT, entropies_M)

    def _plain_path(
        self, rollouts: Rollouts, temperature: float, entropy_temperature: float | None
    ) -> tuple[Tensor, Tensor]:
        mask_NT, width = rollouts.mask_NT, rollouts.mask_NT.shape[1]
        prompt_mask_NL = rollouts.prompt_mask_PL.index_select(0, rollouts.group_ids_N)
        prompt_ids_NL = rollouts.prompt_ids_PL.index_select(0, rollouts.group_ids_N)
        attention_NS = torch.cat([prompt_mask_NL, mask_NT], dim=1).long()
        logits_NTV = self.model(
            input_ids=torch.cat([prompt_ids_NL, rollouts.completion_ids_NT], dim=1),
            attention_mask=attention_NS,
            position_ids=(attention_NS.cumsum(dim=1) - 1).clamp(min=0),
            use_cache=False,
            logits_to_keep=width + 1,
        ).logits[:, :-1]
        logits_NTV = widen(logits_NTV)
        logps_NT = torch.log_softmax(logits_NTV / temperature, dim=2)
        logps_NT = logps_NT.gather(2, rollouts.completion_ids_NT[..., None])[..., 0]
        entropies_NT = torch.zeros_like(logps_NT)
        if entropy_temperature is not None:
            entropies_NT = entropy(torch.log_softmax(logits_NTV / entropy_temperature, dim=2))
        return logps_NT.where(mask_NT, 0.0), entropies_NT.where(mask_NT, 0.0)

    def _obstacle(self) -> str:
        """What, by its looks, keeps the model from the shared path; empty when nothing does."""
        config = unwrap(self.model).config
        if getattr(self.backbone, "gradient_checkpointing", False):
            return "gradient checkpointing recomputes layers and cannot keep a cache"
        if type(self.head) is not nn.Linear:
            return f"the output head is a {type(self.head).__name__}, not a plain linear layer"
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        if rope.get("rope_type", rope.get("type")) in ("dynamic", "longrope"):
            return "its rotary embedding depends on the length of the whole sequence"
        for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
            if getattr(config, name, None) not in (None, 1.0):
                return f"the model changes its logits after the head ({name})"
        return ""

    @torch.no_grad()
    def _difference(self) -> str:
        """Compare both paths on a few made-up tokens; empty when they agree."""
        device = self.head.weight.device
        vocabulary = self.head.weight.shape[0]
        step = max(1, vocabulary // 16)
        prompt_ids_PL, prompt_mask_PL = pad_left([[step, 2 * step, 3 * step], [4 * step]], 0)
        ids_NT = torch.arange(12).reshape(3, 4) * step % vocabulary
        mask_NT = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]).bool()
        probe = Rollouts(
            prompt_ids_PL, prompt_mask_PL, ids_NT, mask_NT, torch.tensor([0, 0, 1]), torch.zeros(3, dtype=torch.bool)
        ).to(device)
        training = self.model.training
        self.model.eval()
        try:
            plain = self._plain_path(probe, 1.0, 1.0)
            shared = self._shared_path(probe, 1.0, 1.0)
        except (TypeError, AttributeError, NotImplementedError, RuntimeError, IndexError, ValueError) as error:
            return f"the model does not take a shared prompt ({type(error).__name__}: {error})"
        finally:
            self.model.train(training)
        difference = max(float(((a - b) / (1 + a.abs())).abs().max()) for a, b in zip(plain, shared, strict=True))
        if not difference <= TOLERANCE.get(self.head.weight.dtype, 0.05):
            return f"sharing the prompt changes log-probabilities by {difference:.2g} (over 1 + their size)"
        return ""
