"""Rewards: the built-in functions, presets, loading by name, and scoring that a broken function cannot stop.

A reward function has the signature that TRL uses: ``f(prompts, completions, completion_ids, **columns) -> list[float |
None]``, all passed by keyword, every column a list with one entry per completion. None means that the reward does not
apply.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from trimtab.errors import InputError, did_you_mean
from trimtab.tasks._builtin_rewards import (
    Completion,
    accuracy_reward,
    binary_accuracy_reward,
    binary_format_reward,
    completion_text,
    format_reward,
    has_full_format,
)

__all__ = [
    "PRESETS",
    "Completion",
    "RewardFunction",
    "RewardPart",
    "RewardTable",
    "accuracy_reward",
    "binary_accuracy_reward",
    "binary_format_reward",
    "completion_text",
    "format_reward",
    "has_full_format",
    "load_rewards",
    "needed_columns",
    "score_completions",
    "wrap_verl",
]

RewardFunction = Callable[..., Sequence[float | None]]
MAX_MESSAGES = 5

# TRL keeps these from the reward functions, or passes them under the name of an argument.
_RESERVED = frozenset({"prompt", "completion", "prompts", "completions", "completion_ids"})


@dataclass(frozen=True)
class RewardPart:
    """One reward function with the name it is logged under and its weight in the total."""

    name: str
    function: RewardFunction
    weight: float = 1.0


PRESETS: dict[str, list[RewardPart]] = {
    "paper": [RewardPart("format", format_reward), RewardPart("accuracy", accuracy_reward)],
    "binary": [RewardPart("accuracy", binary_accuracy_reward)],
    # For a method that learns from a teacher alone.
    "none": [],
}


def load_rewards(spec: str | Sequence[Mapping[str, Any]]) -> list[RewardPart]:
    """Turn the config's reward entry into reward parts.

    Args:
        spec: A preset's name, or a list of ``{"function": "module:function", "weight": 1.0, "name": ...}``. The name
            defaults to the function's, the weight to 1. ``verl:module:function`` wraps a verl `compute_score`. Modules
            are searched for on the import path, to which the command line adds the current folder.

    Raises:
        InputError: A preset, module, function or key is unknown (the nearest name is suggested), or two parts share a
            name.
    """
    if isinstance(spec, str):
        if spec not in PRESETS:
            raise InputError(
                f"the reward preset {spec!r} is unknown (there are {_listed(PRESETS)}){did_you_mean(spec, PRESETS)}"
            )
        return list(PRESETS[spec])
    parts = [_load_part(entry, number) for number, entry in enumerate(spec, start=1)]
    if not parts:
        raise InputError("the list of rewards is empty; name at least one reward function or a preset.")
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two rewards are called {name!r}; give one of them another `name`.")
    return parts


def _load_part(entry: Mapping[str, Any], number: int) -> RewardPart:
    keys = ("function", "weight", "name")
    if not isinstance(entry, Mapping) or "function" not in entry:
        raise InputError(
            f"reward {number} must be a mapping with the key 'function', such as function: my_module:my_reward."
        )
    for key in entry:
        if key not in keys:
            raise InputError(f"reward {number} has the unknown key {key!r}{did_you_mean(str(key), keys)}")
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise InputError(f"reward {number}: the weight must be a finite number, but it is {weight!r}.")
    path = str(entry["function"])
    function = _import_function(path.removeprefix("verl:"), path)
    name = entry.get("name") or getattr(function, "__name__", type(function).__name__)
    return RewardPart(str(name), wrap_verl(function) if path.startswith("verl:") else function, float(weight))


def _import_function(path: str, shown: str) -> Callable[..., Any]:
    module_name, separator, function_name = path.partition(":")
    if not separator or not module_name or not function_name or ":" in function_name:
        raise InputError(f"the reward {shown!r} must have the form module:function (or verl:module:function).")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            hint = did_you_mean(module_name, _sibling_modules(module_name))
            raise InputError(f"the reward {shown!r}: there is no module {error.name!r}{hint}") from error
        raise InputError(f"the reward {shown!r}: importing {module_name} failed ({error}).") from error
    except Exception as error:
        raise InputError(
            f"the reward {shown!r}: importing {module_name} failed ({describe_failure(error)})."
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        problem = "has no function" if function is None else "has something that cannot be called under the name"
        hint = did_you_mean(function_name, names)
        raise InputError(f"the reward {shown!r}: the module {module_name} {problem} {function_name!r}{hint}")
    return function  # type: ignore[no-any-return]


def _sibling_modules(module_name: str) -> list[str]:
    parent = module_name.rpartition(".")[0]
    if not parent:
        return [module.name for module in pkgutil.iter_modules()]
    try:
        paths = importlib.import_module(parent).__path__
    except (ImportError, AttributeError):
        return _sibling_modules(parent)
    return [f"{parent}.{module.name}" for module in pkgutil.iter_modules(paths)]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def needed_columns(parts: Sequence[RewardPart]) -> list[str]:
    """Columns that the reward functions cannot do without: parameters without a default that TRL does not supply."""
    needed: dict[str, None] = {}
    for part in parts:
        try:
            parameters = inspect.signature(part.function).parameters.values()
        except (TypeError, ValueError):  # some callables do not tell their parameters
            continue
        for parameter in parameters:
            named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if named and parameter.default is parameter.empty and parameter.name not in _RESERVED:
                needed[parameter.name] = None
    return list(needed)


def wrap_verl(compute_score: Callable[..., Any]) -> RewardFunction:
    """Give verl's ``compute_score(data_source, solution_str, ground_truth, extra_info)`` a reward function's
    signature.

    Args:
        compute_score: Returns a number, or a mapping with the key "score". It is called once per completion.

    Returns:
        A function that reads the columns `data_source`, `extra_info` (both optional) and the gold from
        ``reward_model["ground_truth"]`` or else `answer`.
    """

    def reward(completions: Sequence[Completion], **columns: Any) -> list[float | None]:
        scores = []
        for index, completion in enumerate(completions):
            row = {name: values[index] for name, values in columns.items() if values is not None}
            gold = row["reward_model"]["ground_truth"] if row.get("reward_model") else row["answer"]
            score = compute_score(
                data_source=row.get("data_source"),
                solution_str=completion_text(completion),
                ground_truth=gold,
                extra_info=row.get("extra_info"),
            )
            scores.append(score["score"] if isinstance(score, Mapping) else score)
        return scores

    return reward


@dataclass(frozen=True)
class RewardTable:
    """The rewards of N completions.

    Attributes:
        parts: Per part N values, unweighted; nan where the part does not apply or failed.
        total: N weighted sums over the parts that apply; nan for a row that is excluded.
        failures: Per part the number of rows it failed on (0 when none).
        messages: The first few distinct failures, in words.
    """

    parts: dict[str, list[float]]
    total: list[float]
    failures: dict[str, int]
    messages: list[str] = field(default_factory=list)


def score_completions(
    parts: Sequence[RewardPart],
    prompts: Sequence[Any],
    completions: Sequence[Completion],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
) -> RewardTable:
    """Score completions with every part; a failing reward function costs rows, never the run.

    None from a part means "does not apply": the other parts count, and a row to which no part applies is excluded.
    NaN, infinity, anything that is no number, and an exception are failures: the row is excluded and counted. When a
    call for the whole batch raises or returns the wrong number of values, the function is called again for each row
    alone, so that only the offending rows are lost. KeyboardInterrupt and SystemExit pass through.

    Args:
        parts: From `load_rewards`.
        prompts: N prompts, strings or lists of messages.
        completions: N completions, strings or chat-shaped; a string that answers messages is passed on as a list of
            one message, as TRL does.
        completion_ids: N lists of token ids.
        columns: The data set's other columns, N values each.

    Raises:
        InputError: The arguments do not have the same length.
    """
    count = len(completions)
    # TRL's convention: the answer to messages is a message, the answer to text is text.
    completions = [
        [{"role": "assistant", "content": completion}]
        if isinstance(completion, str) and not isinstance(prompt, str)
        else completion
        for prompt, completion in zip(prompts, completions, strict=False)
    ]
    batch = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
    batch |= {name: values for name, values in columns.items() if name not in _RESERVED}
    for name, values in batch.items():
        if len(values) != count:
            raise InputError(f"there are {count} completions, but {name!r} has {len(values)} values.")
    table: dict[str, list[float]] = {}
    failures: dict[str, int] = {}
    messages: list[str] = []
    total, applies, excluded = [0.0] * count, [False] * count, [False] * count
    for part in parts:
        values, errors = _call(part.function, batch, count)
        table[part.name] = [math.nan if value is None else value for value in values]
        failures[part.name] = sum(error is not None for error in errors)
        for index, (value, error) in enumerate(zip(values, errors, strict=True)):
            if error is not None:
                excluded[index] = True
                message = f"{part.name}: {error}"
                if message not in messages and len(messages) < MAX_MESSAGES:
                    messages.append(message)
            elif value is not None:
                applies[index] = True
                total[index] += part.weight * value
    keep = [applies[index] and not excluded[index] and math.isfinite(total[index]) for index in range(count)]
    return RewardTable(
        table, [value if kept else math.nan for value, kept in zip(total, keep, strict=True)], failures, messages
    )


def _call(
    function: RewardFunction, batch: Mapping[str, Sequence[Any]], count: int
) -> tuple[list[float | None], list[str | None]]:
    """N values (None: does not apply, or failed) and N failure texts (None: no failure)."""
    try:
        results = as_list(function(**batch), count)
    except Exception as error:
        if count <= 1:
            return [None] * count, [describe_failure(error)] * count
        rows = [_call(function, {name: values[i : i + 1] for name, values in batch.items()}, 1) for i in range(count)]
        return [values[0] for values, _ in rows], [errors[0] for _, errors in rows]
    checked = [check_value(result) for result in results]
    return [value for value, _ in checked], [error for _, error in checked]


def as_list(result: Any, count: int) -> list[Any]:
    """What a user's function returned for `count` completions, as a list of as many. Raises TypeError or ValueError."""
    if isinstance(result, str | bytes | Mapping | set | frozenset):
        raise TypeError(f"returned a {type(result).__name__} instead of a list of numbers")
    values = list(result)
    if len(values) != count:
        raise ValueError(f"returned {len(values)} values for {count} completions")
    return values


def check_value(result: Any) -> tuple[float | None, str | None]:
    """A finite number (None: does not apply), and what is wrong with it otherwise."""
    if result is None:
        return None, None
    try:
        number = result.item() if hasattr(result, "item") else result  # numpy's and torch's scalars
        if not isinstance(number, Real):
            return None, f"returned {type(number).__name__}, which is not a number"
        value = float(number)
    except Exception as error:
        return None, describe_failure(error)
    return (value, None) if math.isfinite(value) else (None, f"returned {value}, which is not a finite number")


def describe_failure(error: BaseException) -> str:
    """An exception of a user's function in words, whatever its own text does."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
