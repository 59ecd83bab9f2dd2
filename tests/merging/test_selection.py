"""Exactly k of the largest, against a sort."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trimtab.merging.selection import Cut, count_of, find_cuts, largest_mask, mask_maker

# Few different values, so that most draws have ties at the threshold; subnormal, huge and equal-but-for-one-bit ones.
NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.0000001, 2.0, -2.0, 1e-45, 3e-39, 3.4e38, 0.5, -65504.0])


def by_sorting(values: list[float], count: int) -> list[bool]:
    order = sorted(range(len(values)), key=lambda place: (-abs(values[place]), place))
    return [place in order[:count] for place in range(len(values))]


@given(st.lists(NUMBERS, min_size=1, max_size=40), st.data())
def test_the_mask_is_that_of_a_stable_sort_by_magnitude(values: list[float], data: st.DataObject) -> None:
    values = torch.tensor(values).tolist()
    count = data.draw(st.integers(0, len(values)))
    assert largest_mask(torch.tensor(values), count).tolist() == by_sorting(values, count)


@given(st.lists(NUMBERS, min_size=2, max_size=40), st.integers(1, 7), st.data())
def test_cuts_do_not_depend_on_how_the_numbers_are_split(values: list[float], width: int, data: st.DataObject) -> None:
    magnitudes = torch.tensor(values).abs()
    counts = data.draw(st.lists(st.integers(0, len(values)), min_size=1, max_size=3))
    cuts = find_cuts(lambda: magnitudes.split(width), counts)
    assert cuts == find_cuts(lambda: [magnitudes], counts)
    for cut, count in zip(cuts, counts, strict=True):
        mask = mask_maker(cut)
        assert torch.cat([mask(chunk) for chunk in magnitudes.split(width)]).sum() == count


def test_a_million_random_numbers_are_cut_where_a_sort_cuts_them() -> None:
    values = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    for count in (1, 12_345, 999_999):
        mask = largest_mask(values, count)
        assert mask.sum() == count
        assert values.abs()[mask].min() == values.abs().sort(descending=True).values[count - 1]


def test_of_equal_numbers_the_first_are_taken_and_shape_is_kept() -> None:
    mask = largest_mask(torch.tensor([[1.0, -3.0, 3.0], [3.0, 0.0, -3.0]], dtype=torch.bfloat16), 3)
    assert mask.tolist() == [[False, True, True], [True, False, False]]


def test_the_set_of_k_contains_the_set_of_k_minus_one() -> None:
    values = torch.randint(-4, 5, (200,), generator=torch.Generator().manual_seed(1)).float()
    masks = [largest_mask(values, count) for count in range(201)]
    assert all(bool((inner <= outer).all()) for inner, outer in itertools.pairwise(masks))


def test_none_of_many_is_an_infinite_cut_and_too_many_are_refused() -> None:
    assert find_cuts(lambda: [torch.ones(4)], [0]) == [Cut(math.inf, 0, 0)]
    assert find_cuts(lambda: [torch.zeros(0)], [0]) == [Cut(math.inf, 0, 0)]
    with pytest.raises(ValueError, match="cannot keep \\[5\\] of 4 numbers"):
        find_cuts(lambda: [torch.ones(4)], [5])


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        largest_mask(torch.tensor([1.0, math.nan]), 1)


@pytest.mark.parametrize(
    ("share", "size", "count"),
    [(0.29, 100, 29), (0.7, 10, 7), (0.1, 10, 1), (0.01, 99, 0), (1.0, 7, 7), (0.0, 7, 0), (1 / 3, 9, 2), (1e-9, 7, 0)],
)
def test_a_share_counts_as_the_decimal_number_it_is_written_as(share: float, size: int, count: int) -> None:
    assert count_of(share, size) == count


def test_no_number_is_looked_at_more_often_than_twice() -> None:
    passes = 0
    magnitudes = torch.rand(1000)

    def chunks() -> list[Tensor]:
        nonlocal passes
        passes += 1
        return list(magnitudes.split(100))

    find_cuts(chunks, [10, 200, 900])
    assert passes == 2
