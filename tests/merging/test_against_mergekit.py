"""Equality with another implementation: mergekit 0.1.5's functions of tensors, on random tensors, to 1e-6.

Random masks are drawn differently there. So its draws are replaced by our masks, which are read off from what our own
method leaves of a tensor; what it does with a mask is compared.

Left out on purpose, because the results differ there and should: elements at which the task vectors cancel exactly,
negative weights under an election, a zero tensor in slerp, sums of squares below 1e-6 (mergekit then weighs the models
of sce alike), and 1 / p as the scale of dare and della (mergekit matches sums, which is our `rescale: l1`).
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from trimtab.merging import METHODS, merge_tensors

mergekit = pytest.importorskip(
    "mergekit.merge_methods", reason="the comparison needs mergekit: pip install 'trimtab[oracle]'"
)

SHAPES = [(24, 40), (960,)]


def random_tensors(shape: tuple[int, ...], count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(shape, generator=generator)
    return [base, *(base + 0.5 * torch.randn(shape, generator=generator) for _ in range(count))]


def theirs(name: str, tensors: list[Tensor], base_index: int | None = 0, **parameters: Any) -> Tensor:
    merged = mergekit.merge_tensors(tensors, name, base_index=base_index, parameters=parameters)
    assert isinstance(merged, Tensor)
    return merged


def assert_equal(ours: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(ours, other, rtol=1e-6, atol=1e-6)


def theirs_of_task_vectors(name: str, tensors: list[Tensor], settings: dict[str, Any]) -> Tensor:
    keys = {"weights": "weight", "lambda_": "lambda"}
    return theirs(name, tensors, **{keys.get(key, key): value for key, value in settings.items()})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normalize", [True, False])
def test_linear(shape: tuple[int, ...], normalize: bool) -> None:
    tensors = random_tensors(shape, 3)
    weights = [1.0, 0.5, -0.2, 2.0]
    assert_equal(
        merge_tensors("linear", tensors, weights=weights, normalize=normalize),
        theirs("linear", tensors, None, weight=weights, normalize=normalize),
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("t", [0.0, 0.3, 0.5, 1.0])
def test_slerp(shape: tuple[int, ...], t: float) -> None:
    first, near = random_tensors(shape, 1)
    for second in (near, torch.randn(shape, generator=torch.Generator().manual_seed(9)), 1.001 * first, -first):
        assert_equal(merge_tensors("slerp", [first, second], t=t), theirs("slerp", [first, second], t=t))


@pytest.mark.parametrize("with_base", [True, False])
@pytest.mark.parametrize(("flatten", "row_wise"), [(True, False), (False, False), (False, True)])
def test_nuslerp(with_base: bool, flatten: bool, row_wise: bool) -> None:
    base, *models = random_tensors((24, 40), 2)
    settings = {"nuslerp_flatten": flatten, "nuslerp_row_wise": row_wise}
    assert_equal(
        merge_tensors("nuslerp", models, base=base if with_base else None, weights=[1.0, 0.5], **settings),
        theirs(
            "nuslerp", [base, *models] if with_base else models, 0 if with_base else None, weight=[1.0, 0.5], **settings
        ),
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("name", ["task_arithmetic", "ties", "breadcrumbs", "breadcrumbs_ties"])
def test_methods_without_chance(name: str, density: float, count: int, normalize: bool, shape: tuple[int, ...]) -> None:
    tensors = random_tensors(shape, count)
    settings: dict[str, Any] = {"weights": [1.0, 0.5, 0.3][:count], "normalize": normalize, "lambda_": 0.7}
    if name != "task_arithmetic":
        settings |= {"density": [density] * count, "rescale": normalize}
    if "breadcrumbs" in name:
        settings |= {"gamma": 0.05}
    ours = merge_tensors(name, tensors[1:], base=tensors[0], **settings)
    assert_equal(ours, theirs_of_task_vectors(name, tensors, settings))


def test_default_settings_are_the_same() -> None:
    tensors = random_tensors((24, 40), 2)
    for name in ("task_arithmetic", "ties", "dare_linear", "dare_ties", "breadcrumbs", "breadcrumbs_ties", "della"):
        ours = merge_tensors(name, tensors[1:], base=tensors[0])
        assert_equal(ours, theirs(name, tensors, weight=1.0))
        specification = {one.name: one for one in mergekit.get(name).spec.parameters if not one.required}
        for key, (_, default) in METHODS[name].parameters.items():
            if key in specification:
                assert specification[key].default == default, (name, key)


def our_masks(name: str, tensors: list[Tensor], settings: dict[str, Any]) -> Iterator[Tensor]:
    """The mask of each model, float: what is not zero where the others and the base are."""
    base, *models = tensors
    zero = torch.zeros_like(base)
    for place, model in enumerate(models):
        alone = [model - base if here == place else zero for here in range(len(models))]
        yield (merge_tensors(name, alone, base=zero, **settings) != 0).float()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("name", ["dare_linear", "dare_ties", "della", "della_linear"])
def test_methods_with_chance_given_our_masks(
    name: str, rescale: bool, normalize: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = random_tensors(shape, 2)
    settings: dict[str, Any] = {"weights": [1.0, 0.5], "density": [0.5, 0.3], "normalize": normalize}
    settings |= {"lambda_": 0.7, **({"epsilon": [0.2, 0.1]} if "della" in name else {})}
    ours_settings = {**settings, "rescale": "l1" if rescale else False}
    ours = merge_tensors(name, tensors[1:], base=tensors[0], **ours_settings)
    masks = our_masks(name, tensors, ours_settings)
    monkeypatch.setattr(torch, "bernoulli", lambda chances: next(masks).reshape(chances.shape))
    assert_equal(ours, theirs_of_task_vectors(name, tensors, {**settings, "rescale": rescale}))
    assert next(masks, None) is None, "both masks were used"


def test_the_probabilities_of_della_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    base, theta = random_tensors((24, 40), 1)
    chances: list[Tensor] = []

    def keep_all(given: Tensor) -> Tensor:
        chances.append(given)
        return torch.ones_like(given)

    monkeypatch.setattr(torch, "bernoulli", keep_all)
    theirs("della_linear", [base, theta], weight=1.0, density=0.5, epsilon=0.2)
    # Scaled by 1 / p, what survives shows p.
    ours = merge_tensors("della_linear", [theta - base], base=torch.zeros_like(base), density=0.5, epsilon=0.2)
    kept = ours != 0
    assert 300 < kept.sum() < 660
    torch.testing.assert_close((theta - base)[kept] / ours[kept], chances[0][kept])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("filter_wise", [True, False])
@pytest.mark.parametrize("count", [2, 3])
def test_model_stock(shape: tuple[int, ...], filter_wise: bool, count: int) -> None:
    tensors = random_tensors(shape, count)
    # A common direction keeps the cosine away from the pole of the formula.
    tensors[1:] = [tensor + 0.5 * tensors[0].roll(1) for tensor in tensors[1:]]
    assert_equal(
        merge_tensors("model_stock", tensors[1:], base=tensors[0], filter_wise=filter_wise),
        theirs("model_stock", tensors, filter_wise=filter_wise),
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("count", [2, 3])
def test_sce(shape: tuple[int, ...], share: float, count: int) -> None:
    tensors = random_tensors(shape, count)
    assert_equal(
        merge_tensors("sce", tensors[1:], base=tensors[0], select_topk=share), theirs("sce", tensors, select_topk=share)
    )


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_passthrough(scale: float) -> None:
    (tensor,) = random_tensors((24, 40), 0)
    assert_equal(
        merge_tensors("passthrough", [tensor], scale=scale), theirs("passthrough", [tensor], None, scale=scale)
    )


def test_bfloat16_models_calculated_in_float32() -> None:
    tensors = [tensor.bfloat16() for tensor in random_tensors((24, 40), 2)]
    base, first, second = (tensor.float() for tensor in tensors)
    cancelling = (first - base) + (second - base) == 0
    assert 0 < cancelling.sum() < 10
    for name in ("ties", "task_arithmetic"):
        other = mergekit.merge_tensors(
            tensors, name, base_index=0, parameters={"weight": 1.0}, dtype=torch.float32, out_dtype=torch.bfloat16
        )
        ours = merge_tensors(name, tensors[1:], base=tensors[0])
        # One unit in the last place, where the float32 results lie on either side of a midpoint.
        torch.testing.assert_close(ours[~cancelling], other[~cancelling], rtol=2**-8, atol=0)
        assert (ours == other)[~cancelling].float().mean() > 0.999
