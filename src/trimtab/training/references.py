"""The policies that a run measures itself against: where it started, or a moving average of where it has been."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from trimtab.config import RunConfig
from trimtab.config_method import SFT
from trimtab.objectives import find_method, reference_share
from trimtab.policy.loading import Policy, load_configured
from trimtab.policy.rollouts import Rollouts
from trimtab.policy.scorer import Scorer
from trimtab.training.scoring import without_dropout

EMA_FILE = "trainer/reference.safetensors"


class Reference(Protocol):
    """Scores like a `Scorer`, and may move with the policy."""

    def score(self, rollouts: Rollouts, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """See `Scorer.score`."""

    def follow(self) -> None:
        """Called after every training step."""

    def save(self, folder: Path) -> None:
        """Write what a resumed run needs into a checkpoint."""

    def load(self, folder: Path) -> None:
        """The opposite."""


@dataclass(frozen=True)
class Frozen:
    """A model of its own that never moves; nothing of it is in a checkpoint."""

    scorer: Scorer

    def score(self, rollouts: Rollouts, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """See `Scorer.score`."""
        return self.scorer.score(rollouts, temperature=temperature)

    def follow(self) -> None:
        """It stays where it is."""

    def save(self, folder: Path) -> None:
        """It is loaded from where the run started."""

    def load(self, folder: Path) -> None:
        """It is loaded from where the run started."""


class AdapterOff(Frozen):
    """The start of a LoRA run: the same model with its adapters switched off, so no second copy is held."""

    def score(self, rollouts: Rollouts, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """See `Scorer.score`."""
        with without_dropout(self.scorer.model), self.scorer.model.disable_adapter():  # type: ignore[operator]
            return self.scorer.score(rollouts, temperature=temperature)


class MovingAverage:
    """decay x itself + (1 - decay) x the policy, after every step: a copy of the weights, put in place to score."""

    def __init__(self, policy: Policy, decay: float) -> None:
        self.scorer, self.decay = Scorer(policy.model), decay
        self.live = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
        # float32, since a step of (1 - decay) times an update vanishes in half precision
        self.average = {name: p.detach().float().clone() for name, p in self.live.items()}

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        kept = {name: p.data for name, p in self.live.items()}
        try:
            for name, parameter in self.live.items():
                parameter.data = self.average[name].to(parameter.dtype)
            yield
        finally:
            for name, parameter in self.live.items():
                parameter.data = kept[name]

    def score(self, rollouts: Rollouts, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """See `Scorer.score`."""
        with torch.no_grad(), without_dropout(self.scorer.model), self._in_place():
            return self.scorer.score(rollouts, temperature=temperature)

    @torch.no_grad()
    def follow(self) -> None:
        """Move towards the policy."""
        for name, parameter in self.live.items():
            self.average[name].lerp_(parameter.detach().float(), 1.0 - self.decay)

    def save(self, folder: Path) -> None:
        """The average is part of the run's state."""
        from safetensors.torch import save_file

        (folder / EMA_FILE).parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in self.average.items()}, folder / EMA_FILE)

    def load(self, folder: Path) -> None:
        """Take the average of a checkpoint."""
        from safetensors.torch import load_file

        for name, tensor in load_file(folder / EMA_FILE).items():
            self.average[name].copy_(tensor)


def reference_kind(config: RunConfig) -> str | None:
    """Which reference the method scores: `frozen`, `ema`, or None where it needs none or the policy itself serves."""
    if config.method["name"] == SFT:
        return None
    weights, loss = find_method(config.method["name"]).split(config.method_settings)
    if loss.get("beta"):
        return "frozen"
    if "lambdas" in weights and not reference_share(weights["lambdas"]):
        return None
    kind: Any = weights.get("reference")
    return kind if kind in ("frozen", "ema") else None


def make_reference(config: RunConfig, policy: Policy, *, resumed: bool) -> Reference | None:
    """The reference that a method asks for; None when it asks for none, and then no copy is made."""
    kind = reference_kind(config)
    if kind is None:
        return None
    if kind == "ema":
        return MovingAverage(policy, find_method(config.method["name"]).split(config.method_settings)[0]["ema_decay"])
    if config.model.lora is not None:
        return AdapterOff(Scorer(policy.model))
    model = policy.model
    if resumed:
        # The policy has moved since; the reference is where it started.
        model = load_configured(config.model, tokenizer=policy.tokenizer, device=policy.device).model
    else:
        model = copy.deepcopy(model)
    model.eval().requires_grad_(False)
    return Frozen(Scorer(model))
