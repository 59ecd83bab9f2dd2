"""What the merging methods can be told, and whether a value will do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trimtab.errors import InputError, did_you_mean

Value = float | bool | str | Sequence[float] | None


@dataclass(frozen=True)
class Setting:
    """One thing a method can be told.

    Attributes:
        key: its name in a merge file; `SETTINGS` has it under the keyword of `merge_tensors`.
        kind: `number`; `share`, a number from 0 to 1; `flag`; `rescale`, a flag or "l1".
        per_tensor: whether it may be a list with one value for each tensor.
    """

    key: str
    kind: Literal["number", "share", "flag", "rescale"]
    per_tensor: bool = False


SETTINGS: dict[str, Setting] = {
    "weights": Setting("weight", "number", per_tensor=True),
    "density": Setting("density", "share", per_tensor=True),
    "gamma": Setting("gamma", "share", per_tensor=True),
    "epsilon": Setting("epsilon", "share", per_tensor=True),
    "normalize": Setting("normalize", "flag"),
    "rescale": Setting("rescale", "rescale"),
    "lambda_": Setting("lambda", "number"),
    "t": Setting("t", "number"),
    "select_topk": Setting("select_topk", "share"),
    "filter_wise": Setting("filter_wise", "flag"),
    "nuslerp_flatten": Setting("nuslerp_flatten", "flag"),
    "nuslerp_row_wise": Setting("nuslerp_row_wise", "flag"),
    "scale": Setting("scale", "number"),
}


def checked_settings(
    method: str, defaults: Mapping[str, Any], given: Mapping[str, Value], count: int, where: str = ""
) -> dict[str, Any]:
    """All settings of a method: those given over the defaults, as lists where they may differ from tensor to tensor.

    Args:
        method: its name, for errors.
        defaults: keyword -> default; None must be given.
        given: keyword -> value; None is the default.
        count: of tensors.
        where: the end of "in which tensor", for errors.

    Raises:
        InputError: an unknown setting, a list of the wrong length, a value of the wrong kind or out of range.
    """
    for keyword in given:
        if keyword not in defaults:
            known = ", ".join(defaults) or "none"
            raise InputError(f"{method} has no setting {keyword!r}, only {known}{did_you_mean(keyword, defaults)}")
    values: dict[str, Any] = {}
    for keyword, default in defaults.items():
        value = default if given.get(keyword) is None else given[keyword]
        if value is None:
            raise InputError(f"{method} needs {keyword}{where}; it has no default.")
        if not SETTINGS[keyword].per_tensor:
            values[keyword] = _checked(keyword, value, where)
            continue
        listed = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value] * count
        if len(listed) != count:
            raise InputError(
                f"{keyword} has {len(listed)} values for {count} tensors{where}; give one number, or one each."
            )
        values[keyword] = [_checked(keyword, one, where) for one in listed]
    return values


def _checked(keyword: str, value: Any, where: str) -> float | bool | str:
    kind = SETTINGS[keyword].kind
    if kind == "flag" or kind == "rescale":
        if isinstance(value, bool) or (kind == "rescale" and value == "l1"):
            return value
        raise InputError(f"{keyword} is {value!r}{where}; it must be true{', l1' * (kind == 'rescale')} or false.")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{keyword} is {value!r}{where}; it must be a number.")
    if kind == "share" and not 0 <= value <= 1:
        raise InputError(f"{keyword} is {value}{where}; it must be from 0 to 1.")
    return float(value)
