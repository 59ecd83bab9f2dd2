"""One table: a method's name, its two functions and its defaults.

    weights = method.weights(token_ids_NT, mask_NT, rewards_N, group_ids_N, entropies_NT, ...)   # whole groups, no grad
    loss, sums = method.loss(logps_NT, old_logps_NT, weights.weights_NT, weights.mask_NT, denominator=..., ...)

A method of one's own is registered with `register_method` or named as `module:attribute` in the config.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trimtab.objectives.distill import distill_surrogate, distill_weights
from trimtab.objectives.entropy import gtpo_weights
from trimtab.objectives.groups import TokenWeights, outcome_weights
from trimtab.objectives.gvpo import gvpo_surrogate, gvpo_weights
from trimtab.objectives.process import process_weights
from trimtab.objectives.surrogate import surrogate_loss

# The trainer supplies these itself; everything else that the two functions take by keyword is a setting.
SUPPLIED = {
    "truncated_N",
    "initial_entropy",
    "denominator",
    "logps_NT",
    "reference_logps_NT",
    "teacher_logps_NT",
    "entropies_NT",
    "entropy_weights_NT",
    "step_ends_NS",
    "step_rewards_NS",
}


@dataclass(frozen=True)
class Method:
    """A group-relative method: two pure functions and what they are called with.

    Attributes:
        name: as in the config.
        source: arXiv id.
        summary: one line; what it changes against GRPO.
        weights: the function of whole groups, without gradient.
        loss: the differentiable function of micro-batches.
        defaults: settings that differ from the functions' own defaults.
        title: as people write the name, in tables; empty: the name.
    """

    name: str
    source: str
    summary: str
    weights: Callable[..., TokenWeights] = outcome_weights
    loss: Callable[..., tuple[Tensor, dict[str, Tensor]]] = surrogate_loss
    defaults: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""

    @property
    def at_every_update(self) -> bool:
        """Whether the weights follow the policy as it moves: they are computed before every update, from `logps_NT`."""
        return self.takes("logps_NT")

    def takes(self, name: str) -> bool:
        """Whether the weights function has this parameter."""
        return name in inspect.signature(self.weights).parameters

    def accepted(self, supplied: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the supplied values that the weights function has a parameter for."""
        return {name: value for name, value in supplied.items() if self.takes(name)}

    def settings(self) -> dict[str, inspect.Parameter]:
        """The method's settings: keyword-only parameters of both functions, with this method's defaults filled in."""
        found: dict[str, inspect.Parameter] = {}
        for function in (self.weights, self.loss):
            for name, parameter in inspect.signature(function).parameters.items():
                if parameter.kind is parameter.KEYWORD_ONLY and name not in SUPPLIED:
                    found[name] = parameter.replace(default=self.defaults.get(name, parameter.default))
        return found

    def split(self, settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Settings (over the defaults) as keyword arguments of the weights function and of the loss function.

        Raises:
            ValueError: a key that neither function takes.
        """
        known = self.settings()
        for key in settings:
            if key not in known:
                raise ValueError(f"{self.name} has no setting {key!r}{nearest(key, known)}")
        values = {name: settings.get(name, parameter.default) for name, parameter in known.items()}
        return tuple(  # type: ignore[return-value]
            {name: values[name] for name in inspect.signature(function).parameters if name in values}
            for function in (self.weights, self.loss)
        )


def nearest(word: str, choices: Mapping[str, Any] | list[str]) -> str:
    """A hint for an unknown name: the closest known one, or the list of all."""
    names = sorted(choices)
    close = difflib.get_close_matches(word, names)
    # Letters in the wrong order are the commonest slip: gpto is gtpo, not gvpo.
    letters: Counter[str] = Counter(word)
    close.sort(key=lambda name: (Counter[str](name) - letters).total())
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(names)}"


_CLIPPED = {"clip_low": 0.2, "clip_high": 0.2}

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "gtpo",
            "2508.03772",
            "conflict masks, entropy filter and penalty; no std, clip, KL or reference model",
            weights=gtpo_weights,
            title="GTPO",
        ),
        Method(
            "grpo",
            "2402.03300",
            "advantages over the group's std, clipped ratio, optional KL to a frozen reference",
            defaults={"normalise": "std", **_CLIPPED},
            title="GRPO",
        ),
        Method(
            "grpo_process",
            "2402.03300",
            "a reward for every step: a token answers for the steps ahead of it, the outcome being the last one",
            weights=process_weights,
            defaults=_CLIPPED,
            title="GRPO + process rewards",
        ),
        Method(
            "dr_grpo",
            "2503.20783",
            "no division by std, constant denominator: no bias by length or difficulty",
            defaults={"normaliser": "constant", **_CLIPPED},
            title="Dr. GRPO",
        ),
        Method(
            "dapo",
            "2503.14476",
            "asymmetric clip, mean over all tokens; drop_uniform_groups and mask_truncated as options",
            defaults={"normalise": "std", "normaliser": "tokens", "clip_low": 0.2, "clip_high": 0.28},
            title="DAPO",
        ),
        Method(
            "gspo",
            "2507.18071",
            "one length-normalised ratio a sequence, with a narrow clip",
            defaults={"normalise": "std", "level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
            title="GSPO",
        ),
        Method(
            "rloo",
            "2402.14740",
            "leave-one-out baseline, no clip",
            defaults={"baseline": "leave_one_out", "normaliser": "tokens"},
            title="RLOO",
        ),
        Method(
            "reinforce", "Williams 1992", "mean baseline, no clip", defaults={"normaliser": "tokens"}, title="REINFORCE"
        ),
        Method(
            "gvpo",
            "2504.19599",
            "regresses log-ratios to the reference on rewards; one optimum for any sampling, no ratio, no clip",
            weights=gvpo_weights,
            loss=gvpo_surrogate,
            title="GVPO",
        ),
        Method(
            "distill",
            "2609.21432",
            "GVPO towards one or more teachers, with or without a reward; sequence or token form",
            weights=distill_weights,
            loss=distill_surrogate,
            title="Distillation",
        ),
    )
}


def register_method(method: Method) -> Method:
    """Add a method to the table under its name.

    Raises:
        ValueError: the name is taken.
    """
    if method.name in METHODS:
        raise ValueError(f"a method named {method.name!r} is registered already")
    METHODS[method.name] = method
    return method


def find_method(name: str) -> Method:
    """A registered method, or the one that `module:attribute` names.

    Raises:
        ValueError: there is no such method.
    """
    if name in METHODS:
        return METHODS[name]
    if ":" in name:
        module_name, _, attribute = name.partition(":")
        try:
            method = getattr(importlib.import_module(module_name), attribute)
        except Exception as error:  # importing a user's module may fail in any way
            raise ValueError(f"method {name!r} cannot be loaded ({type(error).__name__}: {error})") from error
        if not isinstance(method, Method):
            raise ValueError(f"method {name!r} is not a trimtab.objectives.Method but of type {type(method).__name__}")
        return method
    raise ValueError(unknown_method(name, METHODS))


def unknown_method(name: str, choices: Mapping[str, Any] | list[str]) -> str:
    """What to say of a method that is not there, and which of the methods called GTPO is."""
    which = "gtpo is Group-relative Trajectory-based Policy Optimization, arXiv 2508.03772"
    return f"there is no method {name!r}{nearest(name, choices)} ({which})"
