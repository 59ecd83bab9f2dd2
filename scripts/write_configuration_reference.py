"""Write the generated tables of the documentation: every key of the configuration, every method's settings.

    python scripts/write_configuration_reference.py            # rewrite what is out of date
    python scripts/write_configuration_reference.py --check    # write nothing; exit 1 when a page is out of date

A table stands between `<!-- generated: NAME -->` and `<!-- end of generated -->`; the rest of a page is left alone.
"""

from __future__ import annotations

import argparse
import inspect
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trimtab.config import RunConfig
from trimtab.config_file import describe_keys, describe_methods, section_below
from trimtab.evaluation.config import EvaluateConfig
from trimtab.objectives import METHODS, Method

DOCS = Path(__file__).resolve().parent.parent / "docs"
BLOCK = re.compile(r"(<!-- generated: ([\w.-]+) -->\n).*?(<!-- end of generated -->)", re.DOTALL)
CONFIGURATIONS: dict[str, type[BaseModel]] = {"keys": RunConfig, "keys-of-evaluate": EvaluateConfig}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}

MEANINGS = {
    "baseline": "what is subtracted from a reward: the group's mean, the mean of the other rows, or nothing",
    "normalise": "`std` divides the advantages by the group's sample standard deviation",
    "mask_truncated": "take completions that hit the length limit out of numerator and denominator",
    "drop_uniform_groups": "take groups of equal rewards out of the denominator too; nothing is sampled again",
    "normaliser": "what the sum over tokens is divided by; see the formula",
    "level": "ratio of each token, or one length-normalised ratio a sequence",
    "clip_low": "the ratio is clipped below at 1 − clip_low; none: no lower clip",
    "clip_high": "the ratio is clipped above at 1 + clip_high; none: no upper clip",
    "beta": "weight of the k3 KL to the frozen starting policy, per nat; above 0 a reference is scored too",
    "gamma": "weight of a completion's mean token entropy, in reward units per nat; not scale-free",
    "entropy_penalty": "subtract a constant from the advantage, or add a differentiable term to the loss",
    "entropy_filter": "`auto`: on when the untouched policy's mean token entropy is below the threshold",
    "entropy_threshold": "nats a token, above 0",
    "entropy_filter_rows": "which rows the filter may drop: all, or those of negative advantage",
    "conflict_sides": "which conflict runs count",
    "conflict_negative": "λ of a conflict token in a row of negative advantage, a factor",
    "conflict_positive": "λ of a conflict token in a row of positive advantage, a factor",
    "filtered_rows_define_conflicts": "whether rows that the filter drops still take part in finding conflicts",
    "keep_uniform_groups": "keep groups of equal rewards, which then receive the entropy penalty alone",
    "compat": "`authors`: the traits of the authors' code; see the table of differences",
    "gvpo.beta": "weight of the KL to the reference, reward units per nat, above 0",
    "distill.beta": "weight of the log-probabilities against the reward, reward units per nat, above 0",
    "reference": "the policy that sampled, the one training began with, or a moving average of the weights",
    "ema_decay": "what the moving average keeps each step; 0 is the policy that samples, towards 1 it stands still",
    "scale_by_beta": "divide the loss by beta, so that the first update after a rollout does not depend on it",
    "lambdas": "exponent of each teacher in the target; the reference has 1 minus their sum",
    "eta": "weight of the reward; 0: distillation alone",
    "length_power": "factor length^−length_power on the residual; only with one teacher, lambda 1 and eta 0",
    "form": "compare whole completions within their group, or weigh every token by its own log-ratio",
    "grpo_process.form": "a token answers for the sum of the steps ahead of it, or for the row's worst step alone",
    "outcome": "`last_step`: the outcome reward joins the pool, as a step that ends at the last token",
    "grpo_process.normalise": "`std` divides the step rewards by the sample standard deviation of the group's pool",
    "grpo_process.drop_uniform_groups": "take groups whose steps are all worth the same out of the denominator too",
}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; bars inside cells are escaped."""
    lines: list[Sequence[str]] = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def default_text(value: Any) -> str:
    """A default as it would be written in YAML; empty for "not set"."""
    if value is None or value is inspect.Parameter.empty:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value == math.log(2.0):
        return f"ln 2 = {value:.4f}"
    return f"`{value}`"


def type_text(annotation: Any) -> str:
    """Which values an annotation allows, in words."""
    if annotation is Any or annotation is inspect.Parameter.empty:
        return "any"
    if get_origin(annotation) is Annotated:
        inner, *extras = get_args(annotation)
        limits = [limit for extra in extras for limit in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
        return f"{type_text(inner)} {bounds_text(limits)}".strip()
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_origin(annotation) is list:
        return f"list of {type_text(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return "mapping"
    parts = [part for part in get_args(annotation) if part is not NoneType]
    if parts:
        return " or ".join(type_text(part) for part in parts)
    if annotation is str:
        return "text"
    if annotation is bool:
        return "`true`, `false`"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    return {int: "whole number", float: "number"}.get(annotation, str(annotation))


def find_field(section: type[BaseModel], key: str) -> FieldInfo:
    """The field of a dotted key; `[]` behind a part stands for a list's entries."""
    first, _, rest = key.partition(".")
    info = section.model_fields[first.removesuffix("[]")]
    below, _ = section_below(info.annotation)
    return find_field(below, rest) if rest and below is not None else info


def bounds_text(limits: Sequence[Any]) -> str:
    """Bounds as pydantic keeps them, like "≥ 0, < 1"."""
    return ", ".join(
        f"{sign} {getattr(limit, name):g}" for limit in limits for name, sign in BOUNDS.items() if hasattr(limit, name)
    )


def values_text(info: FieldInfo) -> str:
    """Type and bounds of a field."""
    return f"{type_text(info.annotation)} {bounds_text(info.metadata)}".strip()


def keys_table(section: type[BaseModel]) -> str:
    """Every key of a configuration, from `describe_keys`."""
    rows = []
    for key, default, meaning in describe_keys(section):
        info = find_field(section, key)
        plain = default.lower() if default in ("True", "False") else default
        shown = plain if plain in ("", "required") else f"`{plain}`"
        rows.append((f"`{key}`", values_text(info), shown, meaning))
    return table(("key", "values", "default", "meaning"), rows)


def methods_table() -> str:
    """Every method, from `describe_methods`."""
    rows = []
    for name, source, text in describe_methods():
        summary, _, settings = text.rpartition(". ")
        shown = ", ".join(f"`{setting}`" for setting in settings.split(", "))
        rows.append((f"[`{name}`](methods/{name}.md)", source, summary, shown))
    return table(("method", "source (arXiv)", "in one line", "settings and defaults"), rows)


def meaning(method: Method, setting: str) -> str:
    """What a setting means, in this method where it has a meaning of its own there."""
    own = f"{method.name}.{setting}"
    return MEANINGS[own if own in MEANINGS else setting]


def settings_table(method: Method) -> str:
    """A method's settings with types, defaults and meanings.

    Raises:
        KeyError: a setting has no meaning in `MEANINGS` yet.
    """
    hints: dict[str, Any] = {}
    for function in (method.weights, method.loss):
        hints |= inspect.get_annotations(function, eval_str=True)
    rows = [
        (f"`{name}`", type_text(hints.get(name, Any)), default_text(parameter.default) or "none", meaning(method, name))
        for name, parameter in method.settings().items()
    ]
    return table(("setting", "values", "default", "meaning, unit"), rows)


def generated(name: str) -> str:
    """The content of a block by its name.

    Raises:
        ValueError: no such block.
    """
    if name in CONFIGURATIONS:
        return keys_table(CONFIGURATIONS[name])
    if name == "methods":
        return methods_table()
    kind, _, method = name.partition(".")
    if kind == "settings" and method in METHODS:
        return settings_table(METHODS[method])
    raise ValueError(f"no generated block is called {name!r}")


def renew(text: str) -> str:
    """A page with all its generated blocks up to date."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{generated(block[2])}\n{block[3]}", text)


def main() -> int:
    """Rewrite the pages, or with --check only tell which are out of date."""
    parser = argparse.ArgumentParser(description="Write the generated tables of the documentation.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is out of date")
    check = parser.parse_args().check
    pages = [DOCS / "configuration.md", DOCS / "evaluation.md", *(DOCS / "methods" / f"{name}.md" for name in METHODS)]
    stale = []
    for page in pages:
        text = page.read_text(encoding="utf-8") if page.is_file() else ""
        if not BLOCK.search(text):
            print(f"{page}: missing, or without a generated block", file=sys.stderr)
            return 1
        renewed = renew(text)
        if renewed != text:
            stale.append(page)
            if not check:
                page.write_text(renewed, encoding="utf-8")
    for page in stale:
        print(f"{page}: {'out of date; run scripts/write_configuration_reference.py' if check else 'rewritten'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
