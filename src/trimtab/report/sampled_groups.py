"""Sampled groups from a run's samples.jsonl, or from a file of rollouts that another trainer wrote."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.errors import InputError
from trimtab.objectives import Method, find_method

DEFAULT_METHOD = "gtpo"
MAX_ID = 2**31
BY_WORDS = (
    "The file holds no tokens, so the completions are cut at white space. "
    "Give --tokenizer to see the tokens of the model, on which conflicts are found."
)


@dataclass(frozen=True)
class Completion:
    """One completion of a group; every list has one entry a token.

    Attributes:
        tokens: texts.
        token_ids: ids; equal tokens have equal ids.
        reward: weighted total; None when there is none.
        rewards: each reward alone.
        entropy: mean over the tokens, nats; None when unknown.
        truncated: the length limit ended it.
        kept: whether any of its tokens is in the loss; None when unknown.
        weights: the method's signed weights; None when they are to be computed.
        entropies: nats; None when unknown.
    """

    tokens: list[str]
    token_ids: list[int]
    reward: float | None
    rewards: dict[str, float | None]
    entropy: float | None
    truncated: bool
    kept: bool | None
    weights: list[float] | None
    entropies: list[float] | None


@dataclass(frozen=True)
class SampledGroup:
    """The completions of one prompt, and the method that weighs them.

    Attributes:
        step: training step; None when the file names none.
        place: the group's place in the step, or its name in the file.
        prompt: text.
        completions: in the order of the file.
        method: the method of the weights.
        settings: its settings over the defaults.
        initial_entropy: of the untouched policy, nats; None when unknown.
        notes: what a reader of the page should know about the data.
        label: the run's name, where a page shows several.
    """

    step: int | None
    place: int | str
    prompt: str
    completions: list[Completion]
    method: Method
    settings: dict[str, Any]
    initial_entropy: float | None = None
    notes: tuple[str, ...] = ()
    label: str = ""


def read_groups(
    path: Path, *, method: str | None = None, tokenizer: str | None = None, label: str = ""
) -> list[SampledGroup]:
    """The groups of a run folder (its samples.jsonl) or of a JSONL file, in the order of the file.

    A line needs `reward`, `prompt` or `group`, and `completion`, `tokens` or `token_ids`; lines with equal `step` and
    `group` (else equal prompt) form a group. Weights in the file are used, unless `method` is another one than the
    run's own. A last line that is torn is left out.

    Args:
        path: a run folder or a file.
        method: default: the run's own, else gtpo.
        tokenizer: name or folder, for completions without token ids.
        label: see `SampledGroup`.

    Raises:
        InputError: there is nothing to read, a line cannot be used (with its number), or the method is unknown.
    """
    file, run = (path / "samples.jsonl", path) if path.is_dir() else (path, None)
    if not file.is_file():
        hint = "it is no run, or log.samples is 0" if run else "give a run folder or a JSONL file of rollouts"
        raise InputError(f"{path}: there is no {'samples.jsonl' if run else 'such file'} ({hint})")
    own = _own_method(path / "config.yaml") if run else {}
    name = method or own.get("name") or DEFAULT_METHOD
    if name == "sft" or (own.get("name") == "sft" and method is None):
        raise InputError(f"{path}: supervised fine-tuning weighs all tokens alike; there are no groups to inspect")
    again = bool(own) and name != own["name"]
    notes = [f"The run used {own['name']}; these are the weights that {name} would give."] if again else []
    try:
        found = find_method(name)
        weights_settings, loss_settings = found.split({} if again else {k: v for k, v in own.items() if k != "name"})
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    encoder = _load_tokenizer(tokenizer) if tokenizer else None
    words: dict[str, int] = {}
    groups: dict[tuple[Any, Any], tuple[str, list[Completion]]] = {}
    by_words = False
    for number, line in _lines(file):
        try:
            completion, prompt, key, cut = _completion(line, encoder, words)
        except ValueError as error:
            raise InputError(f"{file}, line {number}: {error}") from None
        by_words = by_words or cut
        groups.setdefault(key, (prompt, []))[1].append(completion)
    if not groups:
        raise InputError(f"{file}: there is no completion in it yet")
    if by_words:
        notes.append(BY_WORDS)
    places: dict[Any, int] = {}
    result = []
    for (step, group), (prompt, completions) in groups.items():
        places[step] = places.get(step, -1) + 1
        result.append(
            SampledGroup(
                step,
                # A prompt names a group, but not on a page.
                group[1] if group[0] == "group" else places[step],
                prompt,
                [replace(c, weights=None, kept=None) for c in completions] if again else completions,
                found,
                weights_settings | loss_settings,
                _initial_entropy(path / "metrics.jsonl") if run else None,
                tuple(notes),
                label,
            )
        )
    return result


def _lines(file: Path) -> list[tuple[int, dict[str, Any]]]:
    """Numbered JSON objects; a last line without its end that is no JSON was torn, and is left out."""
    parts = file.read_bytes().split(b"\n")
    lines = []
    for number, raw in enumerate(parts, 1):
        if not raw.strip():
            continue
        try:
            line = json.loads(raw)
        except ValueError:
            if number == len(parts):
                break
            raise InputError(f"{file}, line {number}: this is not JSON; mend or remove the line") from None
        if not isinstance(line, dict):
            raise InputError(f"{file}, line {number}: this is no JSON object with prompt, completion and reward")
        lines.append((number, line))
    return lines


def _completion(
    line: Mapping[str, Any], tokenizer: Any, words: dict[str, int]
) -> tuple[Completion, str, tuple[Any, Any], bool]:
    """(completion, prompt, key of its group, whether it was cut into words)."""
    if "reward" not in line or not (line["reward"] is None or isinstance(line["reward"], int | float)):
        raise ValueError("it needs a reward, a number or null")
    prompt, step, group, kept = _text(line.get("prompt")), line.get("step"), line.get("group"), line.get("kept")
    if group is None and prompt is None:
        raise ValueError("it needs a prompt or a group, to tell which completions belong together")
    if step is not None and not (_is_number(step) and step == int(step)):
        raise ValueError(f"step must be a whole number, not {step!r}")
    rewards = line.get("rewards") or {}
    if not isinstance(rewards, dict):
        raise ValueError("rewards must be an object with one number a name")
    tokens, ids, by_words = _tokens(line, tokenizer, words)
    entropies = _numbers(line, "entropies", len(tokens))
    completion = Completion(
        tokens,
        ids,
        _finite(line["reward"]),
        {str(name): _finite(value) for name, value in rewards.items()},
        sum(entropies) / len(entropies) if entropies else _finite(line.get("entropy")),
        bool(line.get("truncated", False)),
        kept if isinstance(kept, bool) else None,
        _numbers(line, "weights", len(tokens)),
        entropies,
    )
    key = ("prompt", prompt) if group is None else ("group", group if isinstance(group, int) else str(group))
    return completion, prompt or "", (None if step is None else int(step), key), by_words


def _tokens(line: Mapping[str, Any], tokenizer: Any, words: dict[str, int]) -> tuple[list[str], list[int], bool]:
    """Texts and ids of a completion's tokens, and whether words had to stand for them."""
    tokens, ids = line.get("tokens"), line.get("token_ids")
    if tokens is not None and not (isinstance(tokens, list) and all(isinstance(t, str) for t in tokens)):
        # Evaluations call the number of tokens by this name.
        tokens = None
    if ids is not None and not (isinstance(ids, list) and all(isinstance(i, int) and 0 <= i < MAX_ID for i in ids)):
        raise ValueError("token_ids must be a list of whole numbers from 0")
    text = _text(line.get("completion"))
    by_words = False
    if ids is None and tokens is None:
        if text is None:
            raise ValueError("it needs a completion, tokens or token_ids")
        if tokenizer is not None:
            ids = list(tokenizer(text, add_special_tokens=False).input_ids)
        else:
            tokens, by_words = re.findall(r"\s*\S+|\s+$", text), True
    if ids is None:
        ids = [words.setdefault(token, len(words)) for token in tokens or []]
    if tokens is None:
        from trimtab.policy.token_texts import token_texts

        tokens = [f"⟨{i}⟩" for i in ids] if tokenizer is None else token_texts(tokenizer, ids)
    if len(tokens) != len(ids):
        raise ValueError(f"there are {len(tokens)} tokens but {len(ids)} token_ids")
    return tokens, ids, by_words


def _numbers(line: Mapping[str, Any], key: str, count: int) -> list[float] | None:
    values = line.get(key)
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{key} must be a list of {count} numbers, one a token")
    if not all(value is None or _is_number(value) for value in values):
        raise ValueError(f"{key} must be numbers")
    return [_finite(value) or 0.0 for value in values]


def _text(value: Any) -> str | None:
    """Plain text, also of a list of chat messages."""
    if isinstance(value, list):
        contents = [m.get("content") if isinstance(m, dict) else None for m in value]
        return "\n".join(c for c in contents if isinstance(c, str))
    return value if isinstance(value, str) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _finite(value: Any) -> float | None:
    """A number; None for anything else."""
    return float(value) if _is_number(value) and math.isfinite(value) else None


def _own_method(path: Path) -> dict[str, Any]:
    """The method section of a run's config.yaml; empty when there is none to read."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    method = values.get("method") if isinstance(values, dict) else None
    if isinstance(method, str):
        return {"name": method}
    return method if isinstance(method, dict) and isinstance(method.get("name"), str) else {}


def _initial_entropy(path: Path) -> float | None:
    """What the run measured at step 0."""
    try:
        with path.open(encoding="utf-8") as file:
            value = json.loads(file.readline()).get("initial_entropy")
    except (OSError, ValueError, AttributeError):
        return None
    return _finite(value)


def _load_tokenizer(name: str) -> Any:
    from trimtab.policy.loading import BUILTIN_PREFIX, load_tokenizer

    if name.startswith(BUILTIN_PREFIX):
        return load_tokenizer(name)
    from transformers import AutoTokenizer

    # A folder with a tokenizer alone is enough here, so the checks of a whole model do not apply.
    try:
        return AutoTokenizer.from_pretrained(str(Path(name).expanduser()) if Path(name).expanduser().exists() else name)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"--tokenizer {name}: no tokenizer can be loaded from there ({reason})") from None
