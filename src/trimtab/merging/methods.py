"""One table: a merging method's name, its function, and what it can be told.

    merged = merge_tensors("ties", [first, second], base=base, weights=[1, 0.5], density=0.6)

The functions see the tensors of one name in all models and nothing else: no files, no state, no order. Arithmetic is in
float32, and the result is cast once, to the dtype of the first tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from trimtab.errors import InputError, did_you_mean
from trimtab.merging import _combinations as combinations
from trimtab.merging._settings import SETTINGS, Value, checked_settings
from trimtab.merging._streams import Inputs, all_finite
from trimtab.merging._task_vectors import merge_task_vectors, sce


@dataclass(frozen=True)
class MergeMethod:
    """A merging method.

    Attributes:
        name: as in a merge file.
        source: arXiv id and section, or what else describes it.
        summary: one line.
        merge: the function of flat tensors; its keywords are those of `defaults`.
        defaults: the method's settings by keyword; None must be given.
        base: whether the method needs the base model's tensor, can use it, or takes none.
        least: fewest tensors, the base not counted.
        most: most tensors; None: any number.
    """

    name: str
    source: str
    summary: str
    merge: Callable[..., Tensor]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    base: Literal["required", "optional", "none"] = "none"
    least: int = 1
    most: int | None = None

    @property
    def needs_base(self) -> bool:
        """Whether there must be a base."""
        return self.base == "required"

    @property
    def parameters(self) -> dict[str, tuple[str, Any]]:
        """The method's settings as a merge file names them: key -> (keyword of `merge_tensors`, default)."""
        return {SETTINGS[keyword].key: (keyword, default) for keyword, default in self.defaults.items()}


def _of_task_vectors(
    name: str, source: str, summary: str, *, normalize: bool, rescale: bool, own: Mapping[str, Any], **fixed: Any
) -> MergeMethod:
    defaults = {"weights": 1.0, "density": 1.0, "normalize": normalize, "rescale": rescale, "lambda_": 1.0, **own}
    return MergeMethod(name, source, summary, partial(merge_task_vectors, **fixed), defaults, base="required")


METHODS: dict[str, MergeMethod] = {
    method.name: method
    for method in (
        MergeMethod(
            "linear",
            "2203.05482, section 2",
            "weighted mean",
            combinations.linear,
            {"weights": 1.0, "normalize": True},
        ),
        MergeMethod(
            "slerp",
            "Shoemake, SIGGRAPH 1985",
            "along the arc between two tensors",
            combinations.slerp,
            {"t": None},
            least=2,
            most=2,
        ),
        MergeMethod(
            "nuslerp",
            "Shoemake, SIGGRAPH 1985",
            "slerp with two weights, of whole tensors or of rows, from a base or from zero",
            combinations.nuslerp,
            {"weights": 1.0, "nuslerp_flatten": True, "nuslerp_row_wise": False},
            base="optional",
            least=2,
            most=2,
        ),
        MergeMethod(
            "task_arithmetic",
            "2212.04089, section 2",
            "base plus the weighted sum of the task vectors",
            combinations.task_arithmetic,
            {"weights": 1.0, "normalize": False, "lambda_": 1.0},
            base="required",
        ),
        _of_task_vectors(
            "ties",
            "2306.01708, section 4",
            "largest task values, elected sign, mean of those that agree",
            kind="magnitude",
            elect=True,
            normalize=True,
            rescale=False,
            own={},
        ),
        _of_task_vectors(
            "dare_linear",
            "2311.03099, section 3",
            "random task values, scaled up, summed",
            kind="random",
            elect=False,
            normalize=False,
            rescale=True,
            own={},
        ),
        _of_task_vectors(
            "dare_ties",
            "2311.03099, section 3",
            "random task values, scaled up, with an elected sign",
            kind="random",
            elect=True,
            normalize=False,
            rescale=True,
            own={},
        ),
        _of_task_vectors(
            "della",
            "2406.11617, section 3",
            "random task values, large ones more often, with an elected sign",
            kind="rank",
            elect=True,
            normalize=True,
            rescale=True,
            own={"epsilon": 0.15},
        ),
        _of_task_vectors(
            "della_linear",
            "2406.11617, section 3",
            "random task values, large ones more often, summed",
            kind="rank",
            elect=False,
            normalize=False,
            rescale=True,
            own={"epsilon": 0.15},
        ),
        _of_task_vectors(
            "breadcrumbs",
            "2312.06795, section 3",
            "task values that are neither the largest nor small, summed",
            kind="outliers",
            elect=False,
            normalize=False,
            rescale=False,
            own={"gamma": 0.01},
        ),
        _of_task_vectors(
            "breadcrumbs_ties",
            "2312.06795, section 3",
            "task values that are neither the largest nor small, with an elected sign",
            kind="outliers",
            elect=True,
            normalize=False,
            rescale=False,
            own={"gamma": 0.01},
        ),
        MergeMethod(
            "model_stock",
            "2403.19522, section 4",
            "from the base towards the mean, as far as the angle between the task vectors says",
            combinations.model_stock,
            {"filter_wise": False},
            base="required",
            least=2,
        ),
        MergeMethod(
            "sce",
            "2408.07990, section 3",
            "task values of largest variance, weights from their squares, elected sign",
            sce,
            {"select_topk": 1.0},
            base="required",
            least=2,
        ),
        MergeMethod("passthrough", "no paper", "the tensor itself", combinations.passthrough, {"scale": 1.0}, most=1),
    )
}


def find_method(name: str) -> MergeMethod:
    """The method of that name.

    Raises:
        InputError: there is none.
    """
    if name not in METHODS:
        raise InputError(
            f"There is no merging method {name!r}; there are {', '.join(METHODS)}{did_you_mean(name, METHODS)}"
        )
    return METHODS[name]


@torch.no_grad()
def merge_tensors(
    method: str,
    tensors: Sequence[Tensor],
    *,
    base: Tensor | None = None,
    seed: int = 0,
    key: str = "",
    names: Sequence[str] | None = None,
    **settings: Value,
) -> Tensor:
    """Merge the tensors of one name.

    Tensors that are not of floating point (counters, masks) are not merged: they must be equal.

    Args:
        method: a name of `METHODS`.
        tensors: one of each model, the base not among them; any equal shape, on one device.
        base: the base model's tensor.
        seed: of random masks. A mask depends on the seed, the key and the tensor's place in `tensors`, and on nothing
            else: neither on the order in which tensors are merged nor on the machine.
        key: the tensors' name; also used in errors.
        names: what to call the tensors in errors; the default is their number, from 1.
        settings: those of the method, see `METHODS[method].defaults`: `weights`, `density`, `normalize`, `lambda_`...
            None, like a setting left out, is the default. Settings with `per_tensor` in `SETTINGS` may be lists.

    Returns:
        The merged tensor, in shape and device of the inputs and the dtype of the first; where nothing is to be
        calculated it may be the first tensor itself.

    Raises:
        InputError: an unknown method or setting, a value out of range, a base or tensors too few or too many; tensors
            that differ in shape, hold NaN or infinity, or are not of floating point and differ; a result that
            overflows.
    """
    chosen = find_method(method)
    of_key = f" of {key!r}" if key else ""
    _check_number(chosen, len(tensors), base is not None, of_key)
    values = checked_settings(chosen.name, chosen.defaults, settings, len(tensors), of_key)
    labels = names or [f"tensor {number}" for number in range(1, len(tensors) + 1)]
    labelled = list(zip(labels, tensors, strict=True)) + ([("the base", base)] if base is not None else [])
    first_label, first = labelled[0]
    for label, tensor in labelled:
        if tensor.shape != first.shape:
            raise InputError(
                f"{label}{of_key} has shape {list(tensor.shape)}, {first_label} has {list(first.shape)}; only tensors "
                "of equal shape can be merged."
            )
    if not all(tensor.is_floating_point() for _, tensor in labelled):
        return _passed_on(labelled, of_key)
    flat = [tensor.contiguous().view(-1) for _, tensor in labelled]
    for (label, _), tensor in zip(labelled, flat, strict=True):
        if not all_finite(tensor):
            raise InputError(f"{label}{of_key} holds NaN or infinity and cannot be merged.")
    if not first.numel():
        return first
    inputs = Inputs(flat[: len(tensors)], flat[-1] if base is not None else None, first.shape, seed, key)
    merged = chosen.merge(inputs, **values)
    if not all_finite(merged):
        raise InputError(f"The merge{of_key} overflows {_plain(first.dtype)}; use a wider dtype or smaller weights.")
    return merged.view(first.shape)


def _check_number(method: MergeMethod, count: int, has_base: bool, of_key: str) -> None:
    if count < method.least or (method.most is not None and count > method.most):
        wanted = str(method.least) if method.least == method.most else f"at least {method.least}"
        raise InputError(f"{method.name} merges {wanted} tensors besides the base; there are {count}{of_key}.")
    if method.base == "required" and not has_base:
        raise InputError(f"{method.name} needs the base model's tensor{of_key}; there is none.")
    if method.base == "none" and has_base:
        raise InputError(f"{method.name} takes no base; put that tensor{of_key} among the others.")


def _passed_on(labelled: list[tuple[str, Tensor]], of_key: str) -> Tensor:
    """The first of several equal tensors."""
    first_label, first = labelled[0]
    for label, tensor in labelled:
        if tensor.dtype != first.dtype or not torch.equal(tensor, first):
            raise InputError(
                f"{label}{of_key} ({_plain(tensor.dtype)}) differs from {first_label} ({_plain(first.dtype)}), and not "
                "all are of floating point; such tensors are not merged, only passed on when they are equal."
            )
    return first


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
