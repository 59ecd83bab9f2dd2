"""Arms: runs that differ by nothing but the seed, under one name that says what sets them apart from the others."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trimtab.report.runs import Run

# They change where a run writes, how often it is looked at, or how fast it goes, never what it learns.
IRRELEVANT = frozenset({"seed", "output", "log", "checkpoint", "training.threads", "training.micro_batch_tokens"})
LONGEST = 28
"""Characters of a setting in a name; where names become equal for it, the folders tell the runs apart."""
# Their values speak for themselves; other settings are named by the last part of their key.
UNNAMED = frozenset({"model.name", "data.source"})


@dataclass(frozen=True)
class Arm:
    """Runs that differ by their seed alone; `label` is unlike every other arm's."""

    label: str
    runs: tuple[Run, ...]


def arms_of(runs: Sequence[Run], labels: Mapping[str, str] | None = None) -> list[Arm]:
    """Group runs into arms, in the order of their first run.

    Args:
        runs: any.
        labels: folder name -> label, for a caller who knows better; runs of one label are one arm.

    Returns:
        Arms named by method and by the settings in which they differ. A run without a configuration is an arm of its
        own, and so is each of several runs with the same configuration and the same seed.
    """
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        own = labels.get(run.name) if labels else None
        groups[own or _identity(run)].append(run)
    groups = {key: members for whole, group in groups.items() for key, members in _apart(whole, group).items()}
    if labels:
        return [Arm(labels.get(group[0].name, group[0].name), tuple(group)) for group in groups.values()]
    settings = [_flat(group[0].config) for group in groups.values()]
    keys = sorted({key for one in settings for key in one})
    differing = [key for key in keys if len({json.dumps(one.get(key)) for one in settings if one}) > 1]
    arms = [Arm(_label(group[0], differing), tuple(group)) for group in groups.values()]
    counts = Counter(arm.label for arm in arms)
    return [arm if counts[arm.label] == 1 else replace(arm, label=f"{arm.label} ({arm.runs[0].name})") for arm in arms]


def method_title(config: Mapping[str, Any]) -> str:
    """A method as people write it."""
    from trimtab.objectives import METHODS

    method = config.get("method") or {}
    name = str(method.get("name", "") if isinstance(method, Mapping) else method)
    known = METHODS.get(name)
    return known.title if known and known.title else name.rsplit(":", 1)[-1].upper()


def _apart(whole: str, group: list[Run]) -> dict[str, list[Run]]:
    """The group itself, or its runs one by one when a seed occurs twice: those are no repetitions to average over."""
    if len({run.seed for run in group}) == len(group):
        return {whole: group}
    return {f"{whole} {run.folder}": [run] for run in group}


def _identity(run: Run) -> str:
    return json.dumps(_flat(run.config), sort_keys=True) if run.config else str(run.folder)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys, without those that decide nothing."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if dotted in IRRELEVANT or key == "evaluation":
            continue
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{dotted}.")
        else:
            flat[dotted] = value
    return flat


def _label(run: Run, differing: Sequence[str]) -> str:
    if not run.config:
        return run.name
    flat = _flat(run.config)
    parts = [method_title(run.config)]
    for key in differing:
        if key == "method.name" or flat.get(key) is None:
            continue
        text = _text(flat[key])
        if key in UNNAMED:
            text = text.rstrip("/").rsplit("/", 1)[-1]
        text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
        name = "" if key in UNNAMED else key.rsplit(".", 1)[-1].replace("_", " ")
        parts.append(f"{name} {text}".strip())
    return ", ".join(parts)


def _text(value: Any) -> str:
    """0.001 and 5e-5, not 5e-05."""
    if not isinstance(value, float) or not value or abs(value) >= 1e-3:
        return f"{value:g}" if isinstance(value, float) else str(value)
    digits, exponent = f"{value:.5e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"
