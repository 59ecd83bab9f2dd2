"""Rewards for the steps of a completion: cutting a text into steps, scoring them, and the token at which each ends.

A step scorer has the signature ``f(prompts, completions, steps, **columns) -> list[list[float | None]]``, all passed by
keyword: N prompts, N completions as text, for each the texts of its steps, and every column of the data. It returns one
number a step; None means "no reward for this step".
"""

from __future__ import annotations

import bisect
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.errors import InputError, did_you_mean
from trimtab.policy.token_texts import REPLACEMENT, token_texts
from trimtab.tasks.arithmetic import check_equations
from trimtab.tasks.rewards import MAX_MESSAGES, RewardPart, as_list, check_value, describe_failure, needed_columns

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ARITHMETIC = "arithmetic"
DELIMITER = "\n\n"

ScoringFunction = Callable[..., Sequence[Sequence[float | None]]]

# Arguments of a scorer that are no columns of the data.
_RESERVED = frozenset({"prompt", "completion", "prompts", "completions", "completion_ids", "steps"})


class Step(NamedTuple):
    """A part of a completion: `text == completion[start:end]`, in characters."""

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class StepScorer:
    """Where a completion's steps end, and what each is worth.

    Attributes:
        name: as people write it, in messages and logs.
        function: see the module; a function or an object that can be called.
        split: cuts a completion into steps.
    """

    name: str
    function: ScoringFunction
    split: Callable[[str], list[Step]]


@dataclass(frozen=True)
class StepTable:
    """The steps of N completions.

    Attributes:
        ends: For each completion the position of the token that ends each step, counted from 0.
        rewards: A reward a step; nan where there is none.
        failed: Rows that the scorer failed on: they have no rewards, and should be excluded.
        messages: The first few distinct failures, in words.
    """

    ends: list[list[int]]
    rewards: list[list[float]]
    failed: list[bool]
    messages: list[str] = field(default_factory=list)


def split_steps(text: str, delimiter: str = DELIMITER) -> list[Step]:
    """The pieces between delimiters, without the delimiters; blank pieces are no steps.

    A step ends with its last character before the delimiter, so a delimiter belongs to no step's text.

    Raises:
        InputError: the delimiter is empty.
    """
    if not delimiter:
        raise InputError("the step delimiter is empty; give the text that separates two steps, such as a blank line.")
    steps, start = [], 0
    for piece in text.split(delimiter):
        if piece.strip():
            steps.append(Step(piece, start, start + len(piece)))
        start += len(piece) + len(delimiter)
    return steps


def equation_steps(text: str) -> list[Step]:
    """The reasoning, cut behind each equation that `check_equations` finds; what follows the last one is no step."""
    steps, start = [], 0
    for end, _ in check_equations(_reasoning(text)):
        steps.append(Step(text[start:end], start, end))
        start = end
    return steps


def arithmetic_steps(completions: Sequence[str], steps: Sequence[Sequence[str]], **_: Any) -> list[list[float | None]]:
    """1 for each equation of the reasoning that holds, else 0; the steps are those of `equation_steps`.

    Whether an equation has to do with the problem is not judged.
    """
    return [[float(holds) for _, holds in check_equations(_reasoning(text))] for text in completions]


def _reasoning(text: str) -> str:
    return text.partition("<answer>")[0]


def load_step_scorer(
    spec: str, *, delimiter: str = DELIMITER, separator: str = "\n", device: torch.device | str = "cpu"
) -> StepScorer:
    """The step scorer that a config names.

    Args:
        spec: `arithmetic` (each equation of the reasoning is a step), `module:attribute` (a function with the signature
            above, or a `StepScorer`, which brings its own steps), or a local folder with a token-classification model.
        delimiter: what separates two steps of a completion; `arithmetic` and a `StepScorer` do without.
        separator: what separates two steps in the text that a token-classification model reads.
        device: where that model runs.

    Raises:
        InputError: there is no such scorer, or it cannot be loaded.
    """
    if spec == ARITHMETIC:
        return StepScorer(ARITHMETIC, arithmetic_steps, equation_steps)
    split_steps("", delimiter)
    if Path(spec).expanduser().is_dir():
        from trimtab.tasks.step_model import TokenClassificationScorer

        model = TokenClassificationScorer(spec, separator=separator, device=device)
        return StepScorer(spec, model, partial(split_steps, delimiter=delimiter))
    module_name, colon, attribute = spec.partition(":")
    if not (module_name and colon and attribute):
        raise InputError(
            f"there is no step scorer {spec!r}: give {ARITHMETIC!r}, module:function, or a local folder with a "
            "token-classification model."
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing a user's module may fail in any way
        raise InputError(
            f"the step scorer {spec!r}: importing {module_name} failed ({describe_failure(error)})."
        ) from error
    found = getattr(module, attribute, None)
    if isinstance(found, StepScorer):
        return found
    if not callable(found):
        raise InputError(
            f"the step scorer {spec!r}: the module {module_name} has no function {attribute!r}"
            f"{did_you_mean(attribute, [name for name, value in vars(module).items() if callable(value)])}"
        )
    return StepScorer(spec, found, partial(split_steps, delimiter=delimiter))


def step_columns(scorer: StepScorer) -> list[str]:
    """Columns that the scorer cannot do without: its parameters without a default, besides the three it always gets."""
    columns = needed_columns([RewardPart(scorer.name, scorer.function)])  # type: ignore[arg-type]
    return [name for name in columns if name not in _RESERVED]


def score_steps(
    scorer: StepScorer,
    prompts: Sequence[Any],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
    *,
    tokenizer: Any,
) -> StepTable:
    """Cut completions into steps and score them; a failing scorer costs rows, never the run.

    A row fails when the scorer raises for it, cuts it where it has no text, or returns another number of values than
    the row has steps, or one that is no finite number. When a call for the whole batch raises or returns no list of N,
    the scorer is called again for each row alone, so that only the offending rows are lost. KeyboardInterrupt and
    SystemExit pass through.

    Args:
        scorer: From `load_step_scorer`.
        prompts: N prompts, strings or lists of messages.
        completions: N completions as text, as the tokenizer decodes them without special tokens.
        completion_ids: N lists of token ids.
        columns: The data set's other columns, N values each.
        tokenizer: The one that decoded the completions.

    Raises:
        InputError: The arguments do not have the same length.
        ValueError: A completion is not the text of its ids.
    """
    cuts = [_split(scorer, text) for text in completions]
    steps = [row for row, _ in cuts]
    batch: dict[str, Sequence[Any]] = {"prompts": prompts, "completions": completions}
    batch["steps"] = [[step.text for step in row] for row in steps]
    batch |= {name: values for name, values in columns.items() if name not in _RESERVED}
    for name, values in (batch | {"completion_ids": completion_ids}).items():
        if len(values) != len(completions):
            raise InputError(f"there are {len(completions)} completions, but {name!r} has {len(values)} values.")
    scored = [
        (values, cut_error or error)
        for (values, error), (_, cut_error) in zip(_call(scorer.function, batch, len(completions)), cuts, strict=True)
    ]
    ends = [
        token_ends(tokenizer, ids, text, [step.end for step in row])
        for ids, text, row in zip(completion_ids, completions, steps, strict=True)
    ]
    errors = dict.fromkeys(error for _, error in scored if error is not None)
    return StepTable(
        ends,
        [[math.nan if value is None else value for value in values] for values, _ in scored],
        [error is not None for _, error in scored],
        [f"{scorer.name}: {error}" for error in errors][:MAX_MESSAGES],
    )


def _split(scorer: StepScorer, text: str) -> tuple[list[Step], str | None]:
    """A completion's steps, and in words why it has none: a cut of the user's own may fail in any way."""
    try:
        steps = list(scorer.split(text))
        ends = [0, *(int(step.end) for step in steps), len(text)]
    except Exception as error:
        return [], describe_failure(error)
    if ends != sorted(ends) or 0 in ends[1:-1]:
        return [], f"the steps end at {ends[1:-1]} in a text of {len(text)} characters, which is no rising order in it"
    return steps, None


Scored = tuple[list[float | None], str | None]
"""A row's rewards (all None when it failed), and the failure in words."""


def _call(function: ScoringFunction, batch: Mapping[str, Sequence[Any]], count: int) -> list[Scored]:
    try:
        results = as_list(function(**batch), count)
    except Exception as error:
        if count <= 1:
            return [([None] * len(steps), describe_failure(error)) for steps in batch["steps"]]
        alone = ({name: values[row : row + 1] for name, values in batch.items()} for row in range(count))
        return [_call(function, row, 1)[0] for row in alone]
    return [_check_row(result, len(steps)) for result, steps in zip(results, batch["steps"], strict=True)]


def _check_row(result: Any, count: int) -> Scored:
    try:
        values = list(result)
    except Exception as error:
        return [None] * count, describe_failure(error)
    if len(values) != count:
        return [None] * count, f"returned {len(values)} values for {count} steps"
    checked = [check_value(value) for value in values]
    failure = next((failure for _, failure in checked if failure is not None), None)
    return ([None] * count if failure else [value for value, _ in checked]), failure


def token_ends(tokenizer: Any, token_ids: Sequence[int], text: str, ends: Sequence[int]) -> list[int]:
    """The token that completes `text[:end]`, for each end: the first one up to which the ids decode to all of it.

    Args:
        tokenizer: a Hugging Face tokenizer.
        token_ids: of the completion.
        text: the ids decoded without special tokens.
        ends: positions in characters, from 1 to the text's length, in rising order.

    Raises:
        ValueError: the ids do not decode to the text.
    """
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    texts = [
        "" if number in special else piece
        for number, piece in zip(token_ids, token_texts(tokenizer, token_ids), strict=True)
    ]
    if "".join(texts) == text and REPLACEMENT not in text:
        through = list(accumulate(map(len, texts)))
        return [bisect.bisect_left(through, end) for end in ends]
    return _ends_by_decoding(tokenizer, token_ids, text, ends)


def _ends_by_decoding(tokenizer: Any, token_ids: Sequence[int], text: str, ends: Sequence[int]) -> list[int]:
    """`token_ends` by its definition: for broken characters, and where a special token changes what is around it."""

    def covers(end: int, position: int) -> bool:
        decoded = tokenizer.decode(list(token_ids[: position + 1]), skip_special_tokens=True)
        return bool(decoded.startswith(text[:end]))

    found: list[int] = []
    for end in ends:
        start = found[-1] if found else 0
        position = bisect.bisect_left(range(start, len(token_ids)), True, key=partial(covers, end)) + start
        if position == len(token_ids):
            raise ValueError(f"the token ids of a completion do not decode to its text up to character {end}")
        found.append(position)
    return found


def step_tensors(table: StepTable, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """(step_ends_NS, step_rewards_NS) as `process_weights` takes them: int64 filled up with -1, float32 with NaN."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ends = [torch.tensor(row, dtype=torch.long) for row in table.ends]
    rewards = [torch.tensor(row, dtype=torch.float32) for row in table.rewards]
    return (
        pad_sequence(ends, batch_first=True, padding_value=-1).to(device),
        pad_sequence(rewards, batch_first=True, padding_value=math.nan).to(device),
    )
