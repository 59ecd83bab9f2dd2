"""Checking a method's settings before anything loads: by the signatures of its functions, then by calling them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, ValidationError, create_model

if TYPE_CHECKING:
    from trimtab.objectives import Method

SFT = "sft"


def settings_of(method: Mapping[str, Any]) -> dict[str, Any]:
    """A method section's settings, without the name."""
    return {key: value for key, value in method.items() if key != "name"}


def check_method(method: Mapping[str, Any], *, max_length: int) -> None:
    """Check a method's settings: names and types by its functions' signatures, values by calling them on a tiny batch.

    Raises:
        ValueError: in one sentence.
    """
    from trimtab.objectives import METHODS, find_method
    from trimtab.objectives.registry import unknown_method

    name = method["name"]
    if name not in METHODS and ":" not in name:
        raise ValueError(unknown_method(name, [*METHODS, SFT]))
    found = find_method(name)
    settings = settings_of(method)
    found.split(settings)
    hints: dict[str, Any] = {}
    for function in (found.weights, found.loss):
        hints |= inspect.get_annotations(function, eval_str=True)
    fields: dict[str, Any] = {key: (hints.get(key, Any), ...) for key in settings}
    checker = create_model("Settings", __config__=ConfigDict(strict=True, allow_inf_nan=False), **fields)
    try:
        checker(**settings)
    except ValidationError as error:
        wrong = (wrong_value(".".join(map(str, ("method", *e["loc"]))), e) for e in error.errors())
        raise ValueError("; ".join(wrong)) from None
    try:
        _try_out(found, settings, max_length)
    except ValueError as error:
        raise ValueError(f"method: {error}") from None
    except Exception as error:  # a method of the user's own may fail in any way
        raise ValueError(f"method: {name} fails on a batch of two tokens ({type(error).__name__}: {error})") from error


def wrong_value(key: str, error: Any) -> str:
    """A pydantic error about a value of the wrong kind, as a person would say it."""
    message = error["msg"]
    return f"{key}: {message[0].lower()}{message[1:]}, not {error['input']!r}"


def _try_out(found: Method, settings: Mapping[str, Any], max_length: int) -> None:
    """Call both functions of a method on two completions of one token."""
    import torch

    from trimtab.objectives import loss_denominator

    weights_settings, loss_settings = found.split(settings)
    ids_NT, mask_NT = torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1, dtype=torch.bool)
    zeros_NT, group_ids_N = torch.zeros(2, 1), torch.zeros(2, dtype=torch.long)
    supplied = {
        "truncated_N": torch.zeros(2, dtype=torch.bool),
        "initial_entropy": 0.0,
        "logps_NT": zeros_NT,
        "reference_logps_NT": zeros_NT,
        "teacher_logps_NT": [zeros_NT for _ in weights_settings.get("lambdas", [])],
        "step_ends_NS": torch.zeros(2, 1, dtype=torch.long),
        "step_rewards_NS": torch.tensor([[0.0], [1.0]]),
    }
    weights = found.weights(
        ids_NT,
        mask_NT,
        torch.tensor([0.0, 1.0]),
        group_ids_N,
        zeros_NT,
        **found.accepted(supplied),
        **weights_settings,
    )
    normaliser = loss_settings.get("normaliser", "rows")
    loss_denominator(mask_NT, normaliser=normaliser, max_length=max_length, group_ids_N=group_ids_N)
    found.loss(
        zeros_NT,
        None,
        weights.weights_NT,
        weights.mask_NT,
        denominator=1.0,
        reference_logps_NT=zeros_NT,
        entropies_NT=zeros_NT,
        **loss_settings,
    )
