"""Who judges a completion: the maths verifier, or any reward function by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trimtab.errors import InputError, RunError
from trimtab.tasks.rewards import as_list, check_value, describe_failure, load_rewards

Oracle = Callable[..., Sequence[Any]]
"""Called as a reward function is, all by keyword: prompts, completions, completion_ids and the rows' columns, lists of
one length. A value of at least `SUCCESS` is a success."""

SUCCESS = 0.5


def load_oracle(name: str) -> Oracle:
    """`verify` compares with the column `answer`; `module:function` is any reward function.

    Raises:
        InputError: there is no such function.
    """
    if name == "verify":
        return verify_oracle
    if ":" not in name:
        raise InputError(f"the oracle {name!r} is unknown: use verify, or module:function")
    return load_rewards([{"function": name}])[0].function


def verify_oracle(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[bool]:
    """Whether each completion's answer equals the gold answer (tasks/verify.py).

    Raises:
        InputError: a gold answer cannot be parsed.
    """
    from trimtab.tasks.verify import verify_all

    verdicts = verify_all(golds=answer, predictions=completions)
    for verdict, gold in zip(verdicts, answer, strict=True):
        if verdict is None:
            raise InputError(f"the gold answer {gold!r} cannot be parsed, so nothing can be judged by it; leave it out")
    return [bool(verdict) for verdict in verdicts]


def judge(
    oracle: Oracle,
    prompts: Sequence[Any],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    rows: Sequence[dict[str, Any]],
) -> list[bool]:
    """Success or failure of each completion.

    Args:
        oracle: from `load_oracle`, or any function of its signature.
        prompts: what each completion answers.
        completions: their texts.
        completion_ids: their token ids.
        rows: the row that each belongs to; every column is passed on.

    Raises:
        InputError: the oracle lacks a column, or says that one cannot be used.
        RunError: the oracle failed, or gave something that is no finite number.
    """
    names = list(dict.fromkeys(name for row in rows for name in row if name not in ("prompts", "completions")))
    columns = {name: [row.get(name) for row in rows] for name in names}
    columns |= {"prompts": list(prompts), "completions": list(completions)}
    columns["completion_ids"] = [list(ids) for ids in completion_ids]
    try:
        values = as_list(oracle(**columns), len(completions))
    except InputError:
        raise
    except Exception as error:
        raise RunError(f"the oracle failed ({describe_failure(error)}); what was judged before is kept") from error
    result = []
    for value in values:
        number, problem = check_value(value)
        if number is None:
            raise RunError(f"the oracle {problem or 'returned None'}; it must say success or failure of every row")
        result.append(number >= SUCCESS)
    return result
