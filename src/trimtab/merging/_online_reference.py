"""What the online merging optimizer merges with: weights by parameter name, checked before anything is trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from trimtab.errors import InputError, did_you_mean

Weights = Mapping[str, Tensor] | str | Path


def load_weights(name: str | Path) -> dict[str, Tensor]:
    """A model's weights by parameter name, tied ones under each of their names, float32, on the CPU.

    Args:
        name: a folder, a Hugging Face id, or `builtin:NAME`.

    Raises:
        InputError: the model cannot be loaded.
    """
    from trimtab.policy.loading import load_policy

    model = load_policy(str(name)).model
    return {key: weight.detach() for key, weight in model.named_parameters(remove_duplicate=False)}


def names_of(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]] | None
) -> dict[nn.Parameter, str]:
    """The optimizer's parameters in its order, each with its name."""
    if named is None:
        if not all("param_names" in group for group in optimizer.param_groups):
            raise InputError(
                "Online merging needs the parameters' names; pass model.named_parameters() as its second argument."
            )
        pairs = [
            (name, parameter)
            for group in optimizer.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
        ]
    else:
        pairs = list(named)
    names: dict[nn.Parameter, str] = {}
    for name, parameter in pairs:
        names.setdefault(parameter, name)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    unknown = sum(parameter not in names for parameter in parameters)
    if unknown:
        raise InputError(
            f"Online merging has no name for {unknown} of the optimizer's {len(parameters)} parameters; pass the "
            "named_parameters() of the model that the optimizer was made for."
        )
    return {parameter: names[parameter] for parameter in parameters}


def check_weights(names: dict[nn.Parameter, str], weights: dict[str, Mapping[str, Tensor]]) -> None:
    """Refuse adapters, shards, and weights that are missing or of another shape."""
    adapters = [name for name in names.values() if "lora_" in name]
    if adapters:
        raise InputError(
            f"Online merging cannot train adapters ({some(adapters)}): the reference has no weights of theirs; train "
            "the full model, or merge afterwards."
        )
    sharded = [name for parameter, name in names.items() if hasattr(parameter, "placements")]
    if sharded:
        raise InputError(
            f"Online merging needs whole parameters, but {some(sharded)} is sharded; use data parallelism."
        )
    missing, unlike = [], []
    for parameter, name in names.items():
        for title, mapping in weights.items():
            if name not in mapping:
                missing.append(f"{name} ({title})")
            elif mapping[name].shape != parameter.shape:
                unlike.append(f"{name} ({list(parameter.shape)}, {title} {list(mapping[name].shape)})")
    if missing or unlike:
        parts = [f"absent: {some(missing)}"] if missing else []
        parts += [f"of another shape: {some(unlike)}"] if unlike else []
        raise InputError(
            f"The weights to merge with do not fit the trained parameters ({'; '.join(parts)}); give the model that "
            "this one was tuned from, or leave those parameters out of training."
        )


def check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(
            f"Online merging has no {key} {value!r}, only {', '.join(choices)}{did_you_mean(value, choices)}"
        )


def as_mapping(weights: Weights | None) -> Mapping[str, Tensor] | None:
    return load_weights(weights) if isinstance(weights, str | Path) else weights


def some(names: list[str]) -> str:
    """All of a few names, or the first and how many more."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
