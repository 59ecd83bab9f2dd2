"""Every merging method by hand, against a slow reference, and what all of them have in common."""

import inspect
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab.errors import InputError
from trimtab.merging import METHODS, SETTINGS, _streams, find_method, merge_tensors

# A call of every method that leaves no option at a value that does nothing.
CALLS: dict[str, dict[str, Any]] = {
    "linear": {"weights": [1.0, 0.5]},
    "slerp": {"t": 0.3},
    "nuslerp": {"weights": [1.0, 0.5], "nuslerp_flatten": False},
    "task_arithmetic": {"weights": [1.0, 0.5], "normalize": True, "lambda_": 0.7},
    "ties": {"weights": [1.0, 0.5], "density": [0.5, 0.4], "rescale": True},
    "dare_linear": {"weights": [1.0, 0.5], "density": [0.5, 0.4]},
    "dare_ties": {"weights": [1.0, 0.5], "density": 0.5, "rescale": "l1"},
    "della": {"weights": [1.0, 0.5], "density": 0.5, "epsilon": [0.2, 0.1]},
    "della_linear": {"weights": [1.0, 0.5], "density": 0.5, "rescale": "l1"},
    "breadcrumbs": {"weights": [1.0, 0.5], "density": 0.5, "gamma": 0.1},
    "breadcrumbs_ties": {"weights": [1.0, 0.5], "density": 0.5, "gamma": [0.1, 0.2], "rescale": True},
    "model_stock": {"filter_wise": True},
    "sce": {"select_topk": 0.5},
    "passthrough": {"scale": 0.5},
}


def random_tensors(shape: tuple[int, ...] = (24, 40), count: int = 3, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def call(name: str, tensors: list[Tensor], **more: Any) -> Tensor:
    """A call of a method, with the first tensor as its base or as another tensor, and as many as it takes."""
    method = METHODS[name]
    takes_base = method.base != "none"
    models = tensors[1:] if takes_base else tensors
    return merge_tensors(
        name, models[: method.most or 2], base=tensors[0] if takes_base else None, **{**CALLS[name], **more}
    )


def sign(value: float) -> int:
    return (value > 0) - (value < 0)


# Tensors of multiples of 1/64: the float32 sums and halves of a few of them are exact, and ties are frequent.
DYADIC = st.integers(-64, 64).map(lambda number: number / 64)


@st.composite
def model_lists(draw: st.DrawFn, count: int | None = None) -> list[list[float]]:
    """The base and one to four models, as lists of equal length."""
    size = draw(st.integers(1, 12))
    models = count if count is not None else draw(st.integers(1, 4))
    return [draw(st.lists(DYADIC, min_size=size, max_size=size)) for _ in range(models + 1)]


# --- the formulas


def test_linear_is_the_weighted_mean_or_the_weighted_sum() -> None:
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, -2.0])]
    assert merge_tensors("linear", tensors, weights=[1, 3]).tolist() == [2.5, -1.0]
    assert merge_tensors("linear", tensors, weights=[1, 3], normalize=False).tolist() == [10.0, -4.0]
    assert merge_tensors("linear", tensors).tolist() == [2.0, 0.0]


def test_slerp_by_hand() -> None:
    tensors = [torch.tensor([2.0, 0.0]), torch.tensor([0.0, 4.0])]
    half = merge_tensors("slerp", tensors, t=0.5)
    torch.testing.assert_close(half, torch.tensor([math.sqrt(2), 2 * math.sqrt(2)]))
    assert torch.equal(merge_tensors("slerp", tensors, t=0.0), tensors[0])
    torch.testing.assert_close(merge_tensors("slerp", tensors, t=1.0), tensors[1])
    third = merge_tensors("slerp", [torch.tensor([1.0, 0.0]), torch.tensor([0.5, math.sqrt(3) / 2])], t=1 / 3)
    torch.testing.assert_close(third, torch.tensor([math.cos(math.pi / 9), math.sin(math.pi / 9)]))


@pytest.mark.parametrize("second", [[1.0, 0.03], [1.0, 0.0], [-1.0, 0.0], [-2.0, 0.01]])
def test_slerp_of_tensors_on_one_line_is_linear(second: list[float]) -> None:
    first = torch.tensor([1.0, 0.0])
    expected = 0.75 * first + 0.25 * torch.tensor(second)
    torch.testing.assert_close(merge_tensors("slerp", [first, torch.tensor(second)], t=0.25), expected)


def test_slerp_is_spherical_below_a_cosine_of_0_9995() -> None:
    angle = math.acos(0.9994)
    second = torch.tensor([math.cos(angle), math.sin(angle)])
    merged = merge_tensors("slerp", [torch.tensor([1.0, 0.0]), second], t=0.5)
    assert abs(merged.norm().item() - 1) < 1e-6


@pytest.mark.parametrize("zero_first", [True, False])
def test_slerp_with_a_zero_tensor_is_linear(zero_first: bool) -> None:
    tensors = [torch.zeros(3), torch.tensor([1.0, -2.0, 4.0])]
    merged = merge_tensors("slerp", tensors if zero_first else tensors[::-1], t=0.25)
    assert torch.equal(merged, tensors[1] * (0.25 if zero_first else 0.75))
    assert not merge_tensors("slerp", [torch.zeros(3)] * 2, t=0.5).any()


def test_slerp_of_tiny_and_of_huge_tensors_neither_vanishes_nor_overflows() -> None:
    tensors = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])]
    for size in (1e-30, 1e30):
        merged = merge_tensors("slerp", [size * tensor for tensor in tensors], t=0.5)
        torch.testing.assert_close(merged / size, torch.full((2,), math.sqrt(0.5)))


def test_nuslerp_is_slerp_at_the_share_of_the_second_weight_also_from_a_base_and_of_rows_and_columns() -> None:
    base, first, second = random_tensors((5, 7))
    whole = merge_tensors("nuslerp", [first, second], weights=[1, 3])
    torch.testing.assert_close(whole, merge_tensors("slerp", [first, second], t=0.75))
    from_base = merge_tensors("nuslerp", [first, second], base=base, weights=[1, 3])
    torch.testing.assert_close(from_base, base + merge_tensors("slerp", [first - base, second - base], t=0.75))
    rows = merge_tensors("nuslerp", [first, second], weights=[1, 3], nuslerp_flatten=False)
    one_row = [merge_tensors("slerp", [a, b], t=0.75) for a, b in zip(first, second, strict=True)]
    torch.testing.assert_close(rows, torch.stack(one_row))
    columns = merge_tensors(
        "nuslerp", [first, second], base=base, weights=[1, 3], nuslerp_flatten=False, nuslerp_row_wise=True
    )
    turned = merge_tensors("nuslerp", [first.T, second.T], base=base.T, weights=[1, 3], nuslerp_flatten=False)
    torch.testing.assert_close(columns, turned.T)
    cancelled = merge_tensors("nuslerp", [first, second], weights=[1, -1])
    torch.testing.assert_close(cancelled, merge_tensors("slerp", [first, second], t=0.5))


@given(model_lists(), st.data())
def test_task_arithmetic_adds_the_weighted_task_vectors(models: list[list[float]], data: st.DataObject) -> None:
    base, *thetas = models
    weights = data.draw(st.lists(st.sampled_from([0.25, 1.0, 2.0]), min_size=len(thetas), max_size=len(thetas)))
    normalize, scale = data.draw(st.booleans()), data.draw(st.sampled_from([1.0, 0.5]))
    merged = merge_tensors(
        "task_arithmetic",
        [torch.tensor(theta) for theta in thetas],
        base=torch.tensor(base),
        weights=weights,
        normalize=normalize,
        lambda_=scale,
    )
    divisor = sum(weights) if normalize else 1.0
    expected = [
        start + scale * sum(w * (theta[i] - start) for w, theta in zip(weights, thetas, strict=True)) / divisor
        for i, start in enumerate(base)
    ]
    torch.testing.assert_close(merged, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def trimmed(vector: list[float], density: float, gamma: float = 0.0) -> list[float]:
    """The `density` largest after the `gamma` largest, by sorting."""
    order = sorted(range(len(vector)), key=lambda place: (-abs(vector[place]), place))
    kept = max(1, math.floor(density * len(vector) + 1e-9)) if density else 0
    top = min(math.floor(gamma * len(vector) + 1e-9), len(vector) - kept) if density < 1 else 0
    return [value if place in order[top : top + kept] else 0.0 for place, value in enumerate(vector)]


def consensus(vectors: list[list[float]], weights: list[float], normalize: bool) -> list[float]:
    result = []
    for values in zip(*vectors, strict=True):
        elected = sign(sum(w * value for w, value in zip(weights, values, strict=True)))
        agree = [(w, value) for w, value in zip(weights, values, strict=True) if elected and sign(value) == elected]
        divisor = sum(w for w, _ in agree) if normalize and agree else 1.0
        result.append(sum(w * value for w, value in agree) / divisor)
    return result


@settings(max_examples=200)
@given(model_lists(), st.data())
def test_ties_and_breadcrumbs_equal_their_definition(models: list[list[float]], data: st.DataObject) -> None:
    base, *thetas = models
    count = len(thetas)
    weights = data.draw(st.lists(st.sampled_from([0.25, 1.0, 2.0]), min_size=count, max_size=count))
    densities = data.draw(st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0]), min_size=count, max_size=count))
    gamma = data.draw(st.sampled_from([0.0, 0.1, 0.5]))
    normalize, scale = data.draw(st.booleans()), data.draw(st.sampled_from([1.0, 0.5]))
    vectors = [[value - start for value, start in zip(theta, base, strict=True)] for theta in thetas]
    for name in ("ties", "breadcrumbs_ties", "breadcrumbs"):
        top = {} if name == "ties" else {"gamma": gamma}
        merged = merge_tensors(
            name,
            [torch.tensor(theta) for theta in thetas],
            base=torch.tensor(base),
            weights=weights,
            density=densities,
            normalize=normalize,
            lambda_=scale,
            **top,
        )
        cut = [trimmed(vector, one, top.get("gamma", 0.0)) for vector, one in zip(vectors, densities, strict=True)]
        if name == "breadcrumbs":
            divisor = sum(weights) if normalize else 1.0
            added = [
                sum(w * v for w, v in zip(weights, values, strict=True)) / divisor for values in zip(*cut, strict=True)
            ]
        else:
            added = consensus(cut, weights, normalize)
        expected = torch.tensor([start + scale * value for start, value in zip(base, added, strict=True)])
        torch.testing.assert_close(merged, expected, rtol=1e-6, atol=1e-6)


def test_ties_by_hand() -> None:
    base = torch.tensor([10.0, 10.0, 10.0, 10.0, 10.0])
    first = base + torch.tensor([4.0, -3.0, 0.5, 0.25, 2.0])
    second = base + torch.tensor([2.0, 5.0, 4.0, -1.0, -2.0])
    # Trimmed to 4 of 5: the first loses its 0.25, the second its −1. Where 2 and −2 cancel, the base stays.
    merged = merge_tensors("ties", [first, second], base=base, density=0.8)
    assert merged.tolist() == [13.0, 15.0, 12.25, 10.0, 10.0]
    summed = merge_tensors("ties", [first, second], base=base, density=0.8, normalize=False, lambda_=2.0)
    assert summed.tolist() == [22.0, 20.0, 19.0, 10.0, 10.0]


def test_a_negative_weight_under_an_election_turns_a_task_vector_round_and_counts_with_its_size() -> None:
    base = torch.zeros(2)
    first, second = torch.tensor([1.0, 1.0]), torch.tensor([-4.0, 4.0])
    merged = merge_tensors("ties", [first, second], base=base, weights=[1.0, -0.5])
    assert merged.tolist() == [2.0, -4.0]
    assert merge_tensors("ties", [first, second], base=base, weights=[1.0, -1.0]).tolist() == [2.5, -4.0]
    assert merge_tensors("ties", [first, second], base=base, weights=[-1.0, 0.5]).tolist() == [-2.0, 4.0]


def test_breadcrumbs_by_hand_drops_the_largest_and_the_smallest() -> None:
    theta = torch.tensor([[5.0, -4.0, 3.0, -2.0, 1.0]])
    assert merge_tensors("breadcrumbs", [theta], base=torch.zeros(1, 5), density=0.4, gamma=0.2).tolist() == [
        [0.0, -4.0, 3.0, 0.0, 0.0]
    ]
    # With density + gamma above 1 the density wins.
    assert merge_tensors("breadcrumbs", [theta], base=torch.zeros(1, 5), density=0.8, gamma=0.6).tolist() == [
        [0.0, -4.0, 3.0, -2.0, 1.0]
    ]


@given(model_lists(count=2))
def test_rombodawgs_recipe_is_instruct_plus_half_of_the_lora_or_the_larger_of_the_two_changes(
    models: list[list[float]],
) -> None:
    """Base, instruct and instruct + LoRA, merged with TIES at weight 1, density 1 and normalisation.

    With d = instruct − base and L the LoRA's change, the two task vectors are d and d + L. Where both have one sign the
    result is base + (2 d + L) / 2 = instruct + L / 2. Elsewhere (opposite signs, or one of them 0) it is the base plus
    whichever of d and d + L has the larger magnitude, that is, instruct or instruct + L; and where they cancel exactly,
    L = −2 d, it is the base. With values of few bits all of this is exact.
    """
    base, instruct, lora = (torch.tensor(values) for values in models)
    merged = merge_tensors("ties", [instruct, instruct + lora], base=base, weights=1.0, density=1.0, normalize=True)
    change, both = instruct - base, instruct + lora - base
    larger = torch.where(both.abs() > change.abs(), instruct + lora, instruct)
    larger = torch.where((both == -change), base, larger)
    assert torch.equal(merged, torch.where(change * both > 0, instruct + lora / 2, larger))


def test_l1_rescaling_gives_what_survives_the_absolute_sum_of_the_whole() -> None:
    base, theta = torch.zeros(30, 20), random_tensors((30, 20), 1)[0]
    for name in ("ties", "breadcrumbs", "breadcrumbs_ties", "dare_linear", "della_linear"):
        merged = merge_tensors(name, [theta], base=base, density=0.5, rescale="l1", normalize=False)
        torch.testing.assert_close(merged.abs().sum(), theta.abs().sum())
        assert (merged != 0).sum() < 400
    flag = merge_tensors("ties", [theta], base=base, density=0.5, rescale=True)
    assert torch.equal(flag, merge_tensors("ties", [theta], base=base, density=0.5, rescale="l1"))


def test_model_stock_by_hand() -> None:
    base = torch.tensor([1.0, 1.0])
    first, second = base + torch.tensor([2.0, 0.0]), base + torch.tensor([1.0, math.sqrt(3)])
    # A cosine of 1/2: t = 2 · 0.5 / 1.5 = 2/3.
    expected = base + 2 / 3 * ((first + second) / 2 - base)
    torch.testing.assert_close(merge_tensors("model_stock", [first, second], base=base), expected)
    same = merge_tensors("model_stock", [first, first, first], base=base)
    torch.testing.assert_close(same, first)
    apart = merge_tensors("model_stock", [first, base + torch.tensor([0.0, 3.0])], base=base)
    torch.testing.assert_close(apart, base)
    opposite = merge_tensors("model_stock", [first, 2 * base - first], base=base)
    assert torch.equal(opposite, base)
    assert torch.equal(merge_tensors("model_stock", [base, base], base=base), base)


def test_model_stock_takes_the_mean_of_the_cosines_of_all_pairs_and_by_row_when_told() -> None:
    base, *thetas = random_tensors((6, 9), 4)
    vectors = [theta - base for theta in thetas]

    def expected(base: Tensor, vectors: list[Tensor]) -> Tensor:
        pairs = [(0, 1), (0, 2), (1, 2)]
        cosine = sum(torch.cosine_similarity(vectors[a].ravel(), vectors[b].ravel(), dim=0) for a, b in pairs) / 3
        t = 3 * cosine / (1 + 2 * cosine)
        return t * (base + sum(vectors) / 3) + (1 - t) * base

    torch.testing.assert_close(merge_tensors("model_stock", thetas, base=base), expected(base, vectors))
    rows = torch.stack([expected(base[row], [vector[row] for vector in vectors]) for row in range(6)])
    torch.testing.assert_close(merge_tensors("model_stock", thetas, base=base, filter_wise=True), rows)


def test_model_stock_does_not_depend_on_the_size_of_the_task_vectors() -> None:
    first, second = random_tensors((8,), 2)
    whole = merge_tensors("model_stock", [first, second], base=torch.zeros(8))
    small = merge_tensors("model_stock", [1e-8 * first, 1e-8 * second], base=torch.zeros(8))
    torch.testing.assert_close(small * 1e8, whole)


def sce_reference(base: list[float], thetas: list[list[float]], share: float) -> list[float]:
    vectors = [[value - start for value, start in zip(theta, base, strict=True)] for theta in thetas]
    columns = list(zip(*vectors, strict=True))
    means = [sum(column) / len(column) for column in columns]
    variances = [sum((v - m) ** 2 for v in column) / len(column) for column, m in zip(columns, means, strict=True)]
    if share < 1:
        varied = sum(variance > 0 for variance in variances)
        kept = max(1, math.floor(share * varied + 1e-9)) if varied and share else 0
        order = sorted(range(len(columns)), key=lambda place: (-variances[place], place))[:kept]
        vectors = [[v if place in order else 0.0 for place, v in enumerate(vector)] for vector in vectors]
    weights = [sum(v * v for v in vector) for vector in vectors]
    result = []
    for place, start in enumerate(base):
        values = [vector[place] for vector in vectors]
        elected = sign(sum(values))
        agree = [(w, v) for w, v in zip(weights, values, strict=True) if elected and sign(v) == elected]
        total = sum(w for w, _ in agree)
        result.append(start + (sum(w * v for w, v in agree) / total if agree else 0.0))
    return result


# Over two or four models variances of such values are exact in float32, so ties in them are true ties.
@settings(max_examples=200)
@given(st.sampled_from([2, 4]).flatmap(lambda count: model_lists(count)), st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]))
def test_sce_equals_its_definition(models: list[list[float]], share: float) -> None:
    base, *thetas = models
    merged = merge_tensors("sce", [torch.tensor(t) for t in thetas], base=torch.tensor(base), select_topk=share)
    torch.testing.assert_close(merged, torch.tensor(sce_reference(base, thetas, share)), rtol=1e-5, atol=1e-6)


def test_sce_weighs_small_task_vectors_as_it_weighs_large_ones() -> None:
    first, second = random_tensors((50,), 2)
    whole = merge_tensors("sce", [first, 2 * second], base=torch.zeros(50))
    small = merge_tensors("sce", [1e-6 * first, 2e-6 * second], base=torch.zeros(50))
    torch.testing.assert_close(small * 1e6, whole)


def test_passthrough_returns_the_tensor_or_a_scaled_copy() -> None:
    (theta,) = random_tensors(count=1)
    assert torch.equal(merge_tensors("passthrough", [theta]), theta)
    assert torch.equal(merge_tensors("passthrough", [theta], scale=0.5), theta / 2)


# --- random masks


def masks(name: str, places: int = 2, **settings: Any) -> list[Tensor]:
    """The masks of tensors at each place: all tensors but one are zero, so what is not 0 survived there."""
    theta, zero = torch.ones(50, 40), torch.zeros(50, 40)
    return [
        merge_tensors(
            name, [theta if here == place else zero for here in range(places)], base=zero, density=0.3, **settings
        )
        != 0
        for place in range(places)
    ]


@pytest.mark.parametrize("name", ["dare_linear", "dare_ties", "della", "della_linear"])
def test_masks_follow_from_seed_key_and_place_alone(name: str) -> None:
    first, second = masks(name, seed=3, key="a")
    assert torch.equal(first, masks(name, seed=3, key="a")[0])
    assert torch.equal(first, masks(name, places=5, seed=3, key="a")[0])
    for other in (second, masks(name, seed=4, key="a")[0], masks(name, seed=3, key="b")[0]):
        # Two independent masks of probability 0.3 agree on 58% of the elements.
        assert 0.5 < (first == other).float().mean() < 0.66
    assert first.float().mean().sub(0.3).abs() < 5 * math.sqrt(0.3 * 0.7 / 2000)


def test_merging_in_parallel_and_in_another_order_gives_the_same_tensors() -> None:
    base, *thetas = random_tensors((300, 300))

    def merge(key: str) -> Tensor:
        return merge_tensors("dare_ties", thetas, base=base, density=0.4, key=key)

    keys = [f"layers.{number}" for number in range(6)]
    in_order = {key: merge(key) for key in keys}
    with ThreadPoolExecutor(3) as pool:
        in_parallel = dict(zip(keys[::-1], pool.map(merge, keys[::-1]), strict=True))
    assert all(torch.equal(in_order[key], in_parallel[key]) for key in keys)


def test_torch_and_numpy_generators_are_neither_read_nor_moved() -> None:
    base, theta, _ = random_tensors()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = merge_tensors("dare_linear", [theta], base=base, density=0.5)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(1)
    assert torch.equal(first, merge_tensors("dare_linear", [theta], base=base, density=0.5))


def test_dare_scales_what_survives_by_the_inverse_of_its_probability() -> None:
    theta = random_tensors(count=1)[0]
    zero = torch.zeros_like(theta)
    merged = merge_tensors("dare_linear", [theta], base=zero, density=0.25)
    kept = merged != 0
    assert torch.equal(merged[kept], 4 * theta[kept])
    plain = merge_tensors("dare_linear", [theta], base=zero, density=0.25, rescale=False)
    assert torch.equal(plain, torch.where(kept, theta, 0.0))


def test_della_keeps_with_a_probability_that_is_linear_in_the_rank_in_the_row() -> None:
    theta = random_tensors((200, 21), 1)[0]
    zero = torch.zeros_like(theta)
    ranks = theta.abs().argsort(dim=1).argsort(dim=1)
    chance = 0.4 - 0.3 + 2 * 0.3 * ranks / 20
    survived = torch.zeros_like(theta)
    for seed in range(40):
        merged = merge_tensors("della_linear", [theta], base=zero, density=0.4, epsilon=0.3, seed=seed)
        kept = merged != 0
        torch.testing.assert_close(merged[kept], (theta / chance)[kept])
        survived += kept
    for rank in range(21):
        probability = chance[ranks == rank][0].item()
        share = survived[ranks == rank].mean().item() / 40
        assert abs(share - probability) < 5 * math.sqrt(probability * (1 - probability) / 8000)


def test_della_without_a_range_is_dare() -> None:
    theta = random_tensors((7, 9), 1)[0]
    call = {"base": torch.zeros(7, 9), "density": 0.5}
    assert torch.equal(
        merge_tensors("della_linear", [theta], epsilon=0.0, **call), merge_tensors("dare_linear", [theta], **call)
    )
    # Rows of one element have one rank.
    assert merge_tensors("della_linear", [theta[:, :1]], base=torch.zeros(7, 1), density=0.5).isfinite().all()


# --- what all methods have in common


@pytest.mark.parametrize("name", METHODS)
def test_inputs_stay_as_they_are_and_the_result_has_the_first_dtype(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        tensors = [tensor.to(dtype).requires_grad_() for tensor in random_tensors()]
        copies = [tensor.detach().clone() for tensor in tensors]
        merged = call(name, tensors)
        assert merged.dtype == dtype and merged.shape == (24, 40) and not merged.requires_grad
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_half_precision_inputs_are_calculated_in_float32_and_cast_once(name: str) -> None:
    tensors = [tensor.bfloat16() for tensor in random_tensors()]
    assert torch.equal(call(name, tensors), call(name, [tensor.float() for tensor in tensors]).bfloat16())


@pytest.mark.parametrize("name", METHODS)
def test_strides_scalars_and_empty_tensors_make_no_difference(name: str) -> None:
    tensors = random_tensors()
    assert torch.equal(call(name, [tensor.T.contiguous().T for tensor in tensors]), call(name, tensors))
    assert call(name, [tensor[0, 0] for tensor in tensors]).shape == ()
    assert call(name, [tensor[:0] for tensor in tensors]).shape == (0, 40)
    assert call(name, [tensor[:2, None, :, None] for tensor in tensors]).shape == (2, 1, 40, 1)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("piece", [7, 64, 1000])
def test_the_size_of_the_pieces_does_not_matter(name: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Values of few bits have many ties, which must be counted through all pieces.
    tensors = [tensor.mul(4).round().div(4) for tensor in random_tensors()]
    whole = call(name, tensors)
    monkeypatch.setattr(_streams, "PIECE", piece)
    torch.testing.assert_close(call(name, tensors), whole, rtol=1e-6, atol=1e-6)


class LargeStorages(TorchDispatchMode):
    """Records the memory of every tensor of at least so many bytes that an operation returns."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least
        self.seen: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() >= self.least:
                self.seen.append(tensor.untyped_storage())
        return result


@pytest.mark.parametrize("name", METHODS)
def test_no_second_tensor_of_full_size_is_made_beside_the_result(name: str) -> None:
    tensors = [tensor.bfloat16() for tensor in random_tensors((1024, 2048))]
    inputs = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    with LargeStorages(least=tensors[0].nbytes // 2) as record:
        call(name, tensors)
    assert len({storage.data_ptr() for storage in record.seen} - inputs) == 1


@pytest.mark.parametrize("name", [name for name in METHODS if "density" in METHODS[name].defaults])
def test_density_one_changes_nothing_and_density_zero_leaves_the_base(name: str) -> None:
    base, *thetas = random_tensors()
    like = "ties" if "ties" in name or name == "della" else "task_arithmetic"
    plain = merge_tensors(like, thetas, base=base, normalize=METHODS[name].defaults["normalize"])
    assert torch.equal(merge_tensors(name, thetas, base=base, density=1.0), plain)
    assert torch.equal(merge_tensors(name, thetas, base=base, density=0.0), base)
    half = merge_tensors(name, thetas, base=base, density=[1.0, 0.0], weights=[1.0, 1.0], normalize=False)
    assert torch.equal(half, base + (thetas[0] - base))


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].base == "required"])
def test_models_that_equal_the_base_leave_it_as_it_is(name: str) -> None:
    base = random_tensors(count=1)[0]
    assert torch.equal(call(name, [base, base, base]), base)
    zero = torch.zeros(4, 5)
    assert not call(name, [zero, zero, zero]).any()


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].least == 1])
def test_a_single_model_is_returned(name: str) -> None:
    base, theta, _ = random_tensors()
    merged = merge_tensors(name, [theta], base=base if METHODS[name].needs_base else None)
    torch.testing.assert_close(merged, theta, rtol=1e-6, atol=1e-6)


@given(st.integers(2, 400), st.sampled_from([0.1, 0.29, 0.5, 0.9]), st.integers(0, 99))
def test_exactly_k_elements_survive_also_among_equal_ones(size: int, density: float, seed: int) -> None:
    theta = torch.randint(1, 3, (size,), generator=torch.Generator().manual_seed(seed)).float()
    merged = merge_tensors("ties", [theta], base=torch.zeros(size), density=density)
    assert (merged != 0).sum() == max(1, int(round(density * 100) * size // 100))


# --- bad input


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_are_refused_by_the_tensor_they_are_in(name: str, value: float) -> None:
    tensors = random_tensors()
    tensors[-1 if METHODS[name].base != "none" else 0][3, 5] = value
    which = "tensor 2" if METHODS[name].base != "none" else "tensor 1"
    with pytest.raises(InputError, match=f"{which} of 'layer.weight' holds NaN or infinity"):
        call(name, tensors, key="layer.weight")


def test_a_base_with_nan_is_named_and_models_bear_the_names_they_are_given() -> None:
    base, *thetas = random_tensors()
    base[0, 0] = math.nan
    with pytest.raises(InputError, match="the base of 'w' holds NaN"):
        merge_tensors("ties", thetas, base=base, key="w")
    with pytest.raises(InputError, match=r"coder of 'w' has shape \[3\], chat has \[2\]"):
        merge_tensors("linear", [torch.zeros(2), torch.zeros(3)], names=["chat", "coder"], key="w")


def test_values_whose_sum_overflows_are_still_finite() -> None:
    large = torch.full((3,), 3e38)
    assert torch.equal(merge_tensors("linear", [large]), large)


def test_a_result_too_large_for_its_dtype_is_refused() -> None:
    theta = torch.full((2,), 60000.0, dtype=torch.float16)
    with pytest.raises(InputError, match="overflows float16"):
        merge_tensors("linear", [theta, theta], normalize=False, key="w")


def test_shapes_that_differ_are_both_named() -> None:
    with pytest.raises(InputError, match=r"the base of 'w' has shape \[4, 3\], tensor 1 has \[4, 2\]"):
        merge_tensors("ties", [torch.zeros(4, 2)], base=torch.zeros(4, 3), key="w")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_tensors_that_are_not_of_floating_point_pass_when_equal_and_are_refused_when_not(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1]).to(dtype)
    for name in METHODS:
        assert torch.equal(call(name, [tensor, tensor, tensor]), tensor)
    other = torch.tensor([1, 1, 1]).to(dtype)
    with pytest.raises(InputError, match=r"tensor 2 of 'ids' .* differs from tensor 1 .* only passed on when they are"):
        merge_tensors("ties", [tensor, other], base=tensor, key="ids")
    with pytest.raises(InputError, match="differs"):
        merge_tensors("linear", [tensor, tensor.float()])


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"density": 1.2}, "density is 1.2 of 'w'; it must be from 0 to 1"),
        ({"density": [0.5, -0.1]}, "density is -0.1"),
        ({"density": [0.5]}, "density has 1 values for 2 tensors of 'w'"),
        ({"density": "0.5"}, "density is '0.5' of 'w'; it must be a number"),
        ({"weights": [1.0, math.nan]}, "weights is nan"),
        ({"weights": [True, 1.0]}, "weights is True"),
        ({"normalize": 1}, "normalize is 1 of 'w'; it must be true or false"),
        ({"rescale": "l2"}, "rescale is 'l2' of 'w'; it must be true, l1 or false"),
        ({"densty": 0.5}, "ties has no setting 'densty'.*did you mean 'density'"),
        ({"t": 0.5}, "ties has no setting 't'"),
    ],
)
def test_bad_settings_are_refused(given: dict[str, Any], sentence: str) -> None:
    base, *thetas = random_tensors((2, 2))
    with pytest.raises(InputError, match=sentence):
        merge_tensors("ties", thetas, base=base, key="w", **given)


@pytest.mark.parametrize("name", ["linear", "task_arithmetic", "dare_linear", "breadcrumbs", "della_linear"])
def test_weights_that_cancel_cannot_be_normalized(name: str) -> None:
    base, *thetas = random_tensors((2, 2))
    base_or_none = base if METHODS[name].needs_base else None
    for weights in ([1.0, -1.0], [0.0, 0.0]):
        with pytest.raises(InputError, match="sum to 0 and cannot be normalized; use normalize: false"):
            merge_tensors(name, thetas, base=base_or_none, weights=weights, normalize=True)
        assert merge_tensors(name, thetas, base=base_or_none, weights=weights, normalize=False).isfinite().all()


def test_della_refuses_probabilities_outside_zero_to_one_and_says_what_fits() -> None:
    base, *thetas = random_tensors((2, 2))
    with pytest.raises(InputError, match=r"epsilon of at most 0\.1"):
        merge_tensors("della", thetas, base=base, density=0.9)
    assert merge_tensors("della", thetas, base=base, density=0.9, epsilon=0.1).isfinite().all()


def test_bases_and_numbers_of_tensors_are_checked() -> None:
    base, first, second = random_tensors((2, 2))
    with pytest.raises(InputError, match="ties needs the base model's tensor of 'w'"):
        merge_tensors("ties", [first], key="w")
    with pytest.raises(InputError, match="linear takes no base"):
        merge_tensors("linear", [first], base=base)
    with pytest.raises(InputError, match="slerp merges 2 tensors"):
        merge_tensors("slerp", [first], t=0.5)
    with pytest.raises(InputError, match="model_stock merges at least 2 tensors"):
        merge_tensors("model_stock", [first], base=base)
    with pytest.raises(InputError, match="passthrough merges 1 tensor"):
        merge_tensors("passthrough", [first, second])
    with pytest.raises(InputError, match="linear merges at least 1 tensor"):
        merge_tensors("linear", [])
    with pytest.raises(InputError, match="slerp needs t"):
        merge_tensors("slerp", [first, second])


def test_an_unknown_method_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match=r"no merging method 'tie'.*did you mean 'ties'"):
        find_method("tie")


@pytest.mark.parametrize("name", METHODS)
def test_the_table_lists_the_settings_its_function_takes(name: str) -> None:
    method = METHODS[name]
    taken = inspect.signature(method.merge).parameters
    fixed = getattr(method.merge, "keywords", {})
    required = {key for key, value in taken.items() if value.default is inspect.Parameter.empty} - {"inputs"}
    assert required <= set(method.defaults) | set(fixed)
    assert set(method.defaults) <= set(taken) and set(method.defaults) <= set(SETTINGS)
    assert {keyword for keyword, _ in method.parameters.values()} == set(method.defaults)
    assert find_method(name).source and method.summary
