"""Parameters of a merge file: a number, a gradient over the layers, or others for tensors that a filter names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trimtab.errors import InputError

Parameters = Mapping[str, Any]


def check_setting(setting: Any, where: str) -> None:
    """Whether a value has a form that `evaluate` can read.

    Raises:
        InputError: it has not.
    """
    if _is_scalar(setting):
        return
    if isinstance(setting, Mapping):
        unknown = [str(key) for key in setting if key not in ("value", "filter")]
        if unknown or "value" not in setting or not isinstance(setting.get("filter", ""), str | None):
            raise InputError(f"{where}: a filtered value is written {{filter: PART OF A NAME, value: NUMBER}}.")
        if isinstance(setting["value"], Mapping):
            raise InputError(f"{where}: a filtered value holds a number or a list of numbers.")
        check_setting(setting["value"], where)
    elif isinstance(setting, list) and setting:
        if not all(map(_is_scalar, setting)) and not all(isinstance(part, Mapping) for part in setting):
            raise InputError(f"{where}: a list holds numbers (a gradient over layers) or filtered values, not both.")
        for part in setting:
            check_setting(part, where)
    else:
        raise InputError(f"{where} is {setting!r}; it must be a number, a list of numbers, or filtered values.")


def evaluate(setting: Any, tensor: str, depth: float) -> Any:
    """The value for one tensor.

    Args:
        setting: a scalar; a list of scalars, a gradient: evenly spaced over the layers, numbers interpolated, words and
            flags stepped; or mappings with `value` and maybe `filter`, of which the first counts whose filter is a part
            of the tensor's name (none, or `*`: any).
        tensor: its name.
        depth: 0 at the first layer, 1 at the last.

    Returns:
        The value, or None where no filter fits.
    """
    if _is_scalar(setting):
        return setting
    if isinstance(setting, Mapping):
        setting = [setting]
    if isinstance(setting[0], Mapping):
        fitting = (part["value"] for part in setting if (part.get("filter") or "*") == "*" or part["filter"] in tensor)
        value = next(fitting, None)
        return None if value is None else evaluate(value, tensor, depth)
    place = depth * (len(setting) - 1)
    below = int(place)
    if not all(_is_number(value) for value in setting):
        return setting[below]
    above = min(below + 1, len(setting) - 1)
    return (1 - (place - below)) * setting[below] + (place - below) * setting[above]


def find(key: str, scopes: Iterable[Parameters], tensor: str, depth: float) -> Any:
    """The value of the first scope that has one for this tensor; None when none has."""
    values = (evaluate(scope[key], tensor, depth) for scope in scopes if key in scope)
    return next((value for value in values if value is not None), None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)
