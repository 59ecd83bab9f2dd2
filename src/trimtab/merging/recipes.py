"""Merges that have a name: the merge file that belongs to each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trimtab.errors import InputError, did_you_mean

RECIPES = {
    "rombodawg": "a LoRA trained on the base model, applied to the instruct model, and TIES over base, instruct, both",
    "average": "TIES over several runs that began at one model",
}


def recipe_config(
    name: str,
    *,
    base: str | None = None,
    instruct: str | None = None,
    lora: str | None = None,
    models: Sequence[str] = (),
    density: float = 1.0,
) -> dict[str, Any]:
    """What the merge file of a recipe holds.

    `rombodawg`: Rombodawg, Continuous fine-tuning without loss using LoRA and mergekit, 2024: weight 1, density 1,
    normalized. The tokenizer is the instruct model's, whose chat template people want.

    Args:
        name: of `RECIPES`.
        base: the model that training began at.
        instruct: the base's instruction-tuned sibling, for `rombodawg`.
        lora: the adapter, for `rombodawg`.
        models: models or run folders, for `average`.
        density: share of each task vector that TIES keeps.

    Raises:
        InputError: an unknown recipe, or one that lacks a model it needs.
    """
    if name not in RECIPES:
        raise InputError(f"There is no recipe {name!r}; there are {', '.join(RECIPES)}{did_you_mean(name, RECIPES)}")
    given = {"base": base, "instruct": instruct, "lora": lora, "model": list(models)}
    needed = ("base", "instruct", "lora") if name == "rombodawg" else ("base", "model")
    missing = [f"--{option}" for option in needed if not given[option]]
    surplus = [f"--{option}" for option, value in given.items() if value and option not in needed]
    if missing or surplus:
        verb = f"needs {' and '.join(missing)}" if missing else f"takes no {' and no '.join(surplus)}"
        raise InputError(f"The recipe {name} {verb}; it is {RECIPES[name]}.")
    merged = [instruct, f"{instruct}+{lora}"] if name == "rombodawg" else list(models)
    config: dict[str, Any] = {
        "merge_method": "ties",
        "base_model": base,
        "models": [{"model": model, "parameters": {"weight": 1.0, "density": density}} for model in merged],
        "parameters": {"normalize": True},
    }
    if name == "rombodawg":
        config["tokenizer_source"] = instruct
    return config
