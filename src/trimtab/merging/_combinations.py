"""Methods whose result is a weighted sum of the models: the weights are given, or follow from lengths and angles.

Angles need the inner products of all pairs, which are summed piece by piece in float64: a product of two float32
numbers neither overflows nor vanishes there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trimtab.errors import InputError
from trimtab.merging._streams import Inputs

Coefficients = Callable[[Tensor], Tensor]
"""From inner products (R rows, N models, N models), float64, to the weight of each model (R, N)."""

SLERP_LERP_ABOVE = 0.9995
# Below this sine the two vectors are one line in float32, and the spherical weights are 0 / 0.
_NUSLERP_LERP_ABOVE = 1 - 1e-12


def linear(inputs: Inputs, *, weights: list[float], normalize: bool) -> Tensor:
    """Σ wᵢ θᵢ, divided by Σ wᵢ with `normalize`. Model soups, arXiv 2203.05482."""
    return _sum(inputs, torch.tensor([shares(weights) if normalize else weights], dtype=torch.float64))


def task_arithmetic(inputs: Inputs, *, weights: list[float], normalize: bool, lambda_: float) -> Tensor:
    """base + λ Σ wᵢ τᵢ with τᵢ = θᵢ − base; Σ divided by Σ wᵢ with `normalize`. arXiv 2212.04089, section 2."""
    given = shares(weights) if normalize else weights
    return _sum(inputs, lambda_ * torch.tensor([given], dtype=torch.float64))


def slerp(inputs: Inputs, *, t: float) -> Tensor:
    """The point at t on the arc from the first tensor (t = 0) to the second (t = 1), with Ω the angle between them.

    sin((1 − t) Ω) / sin Ω · a + sin(t Ω) / sin Ω · b. Shoemake, Animating Rotation with Quaternion Curves, SIGGRAPH
    1985. Above |cos Ω| = 0.9995, and where one of the tensors is zero and there is no angle: (1 − t) a + t b.
    """
    return _sum(inputs, lambda products: _arc(products, t, SLERP_LERP_ABOVE))


def nuslerp(inputs: Inputs, *, weights: list[float], nuslerp_flatten: bool, nuslerp_row_wise: bool) -> Tensor:
    """Spherical interpolation of two tensors, or of what they add to a base, at t = w₂ / (w₁ + w₂).

    One angle for the whole tensor with `nuslerp_flatten`; else one for each vector along the last dimension, or along
    the first with `nuslerp_row_wise`. Weights that sum to 0 count as equal.
    """
    total = sum(weights)
    t = weights[1] / total if abs(total) > 1e-6 else 0.5

    def arc(products: Tensor) -> Tensor:
        return _arc(products, t, _NUSLERP_LERP_ABOVE)

    if nuslerp_flatten or not nuslerp_row_wise or len(inputs.shape) < 2:
        return _sum(inputs, arc, by_row=not nuslerp_flatten)

    def turned(flat: Tensor) -> Tensor:
        return flat.view(inputs.shape).transpose(0, -1).reshape(-1)

    swapped = torch.Size((inputs.shape[-1], *inputs.shape[1:-1], inputs.shape[0]))
    base = None if inputs.base is None else turned(inputs.base)
    merged = _sum(
        replace(inputs, tensors=list(map(turned, inputs.tensors)), base=base, shape=swapped), arc, by_row=True
    )
    return merged.view(swapped).transpose(0, -1).reshape(-1)


def model_stock(inputs: Inputs, *, filter_wise: bool) -> Tensor:
    """t · mean(θ) + (1 − t) · base with t = N cos Ω / (1 + (N − 1) cos Ω), cos Ω the mean cosine of all pairs of τ.

    arXiv 2403.19522, section 4. One angle for the whole tensor, or with `filter_wise` for each row. A τ of length 0
    has cosine 0 with every other. Where the denominator is 0 (the τ cancel) the result is the base.
    """
    count = len(inputs.tensors)

    def weights(products: Tensor) -> Tensor:
        lengths = products.diagonal(dim1=1, dim2=2).sqrt()
        scale = lengths[:, :, None] * lengths[:, None, :]
        cosines = torch.where(scale > 0, products / scale, 0.0)
        above = torch.triu_indices(count, count, offset=1)
        cosine = cosines[:, above[0], above[1]].mean(dim=1).clamp(-1, 1)
        denominator = 1 + (count - 1) * cosine
        t = torch.where(denominator.abs() > 1e-6, count * cosine / denominator, 0.0)
        return (t / count)[:, None].expand(-1, count)

    return _sum(inputs, weights, by_row=filter_wise)


def passthrough(inputs: Inputs, *, scale: float) -> Tensor:
    """The one tensor itself, times `scale`."""
    return inputs.tensors[0] if scale == 1 else _sum(inputs, torch.tensor([[scale]], dtype=torch.float64))


def shares(weights: Sequence[float]) -> list[float]:
    """Weights over their sum.

    Raises:
        InputError: the sum is 0, up to rounding.
    """
    total = sum(weights)
    if abs(total) <= 1e-9 * sum(map(abs, weights)):
        raise InputError(f"The weights {list(weights)} sum to 0 and cannot be normalized; use normalize: false.")
    return [weight / total for weight in weights]


def _arc(products: Tensor, t: float, lerp_above: float) -> Tensor:
    """Weights of the two ends of an arc, from the inner products (R, 2, 2)."""
    scale = (products[:, 0, 0] * products[:, 1, 1]).sqrt()
    cosine = torch.where(scale > 0, products[:, 0, 1] / scale, 1.0).clamp(-1, 1)
    straight = cosine.abs() > lerp_above
    angle = torch.where(straight, torch.pi / 2, cosine.acos())
    first = torch.where(straight, 1 - t, ((1 - t) * angle).sin() / angle.sin())
    second = torch.where(straight, t, (t * angle).sin() / angle.sin())
    return torch.stack([first, second], dim=1)


def _sum(inputs: Inputs, weights: Coefficients | Tensor, *, by_row: bool = False) -> Tensor:
    """The base (if there is one) plus the weighted sum of the models' vectors.

    Args:
        inputs: what is merged.
        weights: (1, N), or a function of the inner products of the whole tensors, or of each row.
        by_row: whether the function gets the products of each row.
    """
    output = inputs.output()
    pieces = inputs.pieces(whole_rows=by_row)
    if callable(weights) and not by_row:
        weights = weights(sum((_products(inputs.vectors(piece), 1) for piece in pieces), torch.zeros(())))
    for piece in pieces:
        vectors = inputs.vectors(piece)
        rows = len(vectors[0]) // inputs.width if by_row else 1
        weights_RN = weights(_products(vectors, rows)) if callable(weights) else weights
        weights_RN = weights_RN.to(vectors[0])
        merged = torch.zeros_like(vectors[0])
        for index, vector in enumerate(vectors):
            merged.view(rows, -1).addcmul_(vector.view(rows, -1), weights_RN[:, index, None])
        inputs.write(output, piece, merged)
    return output


def _products(vectors: list[Tensor], rows: int) -> Tensor:
    """Inner products of all pairs of vectors in each row, (R, N, N), float64."""
    stacked_RNC = torch.stack([vector.view(rows, -1) for vector in vectors], dim=1).double()
    return stacked_RNC @ stacked_RNC.mT
