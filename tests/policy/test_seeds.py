"""Draws depend on a seed, a step and a name, and on nothing that was drawn before."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trimtab.seeds import derive_seed, row_uniforms

PARTS = st.lists(st.integers() | st.text(max_size=5), max_size=4)


def test_a_seed_is_the_same_on_every_machine_and_in_every_release() -> None:
    # Written down once: another value would silently change every run that is resumed.
    assert derive_seed() == 8238016292129134938
    assert derive_seed(0, "sample", 3) == 3354006642128496560


@given(PARTS)
def test_a_seed_fits_in_63_bits(parts: list[int | str]) -> None:
    assert 0 <= derive_seed(*parts) < 2**63


@given(PARTS, PARTS)
def test_different_parts_give_different_seeds(first: list[int | str], second: list[int | str]) -> None:
    assert (derive_seed(*first) == derive_seed(*second)) == (first == second)


def test_a_number_and_its_digits_are_different_parts_and_joining_them_is_no_shortcut() -> None:
    seeds = {derive_seed(1), derive_seed("1"), derive_seed(1, 2), derive_seed("1", "2"), derive_seed(12)}
    assert len(seeds | {derive_seed("1, 2"), derive_seed(2, 1)}) == 7


def test_a_row_depends_on_the_seed_and_its_own_number_alone() -> None:
    all_RD = row_uniforms(7, range(0, 10), 5)
    assert np.array_equal(row_uniforms(7, range(4, 6), 5), all_RD[4:6])
    assert np.array_equal(row_uniforms(7, range(9, 10), 5), all_RD[9:])


def test_more_draws_only_add_to_the_row() -> None:
    assert np.array_equal(row_uniforms(7, range(3), 50)[:, :5], row_uniforms(7, range(3), 5))


def test_rows_and_seeds_differ_from_one_another() -> None:
    values = np.concatenate([row_uniforms(seed, range(50), 4) for seed in (0, 1, 2**63 - 1)])
    assert len(np.unique(values, axis=0)) == 150


def test_numbers_are_uniform_and_never_reach_one() -> None:
    values = row_uniforms(0, range(2000), 50)
    assert values.dtype == np.float32 and values.shape == (2000, 50)
    assert values.min() >= 0 and values.max() < 1
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    # Chi-square with 19 degrees of freedom: 43.8 is exceeded once in a thousand seeds, and this seed is fixed.
    assert ((counts - 5000) ** 2 / 5000).sum() < 43.8
    # A column across rows (what one decoding step uses) is as uniform as a row.
    assert abs(values[:, 0].mean() - 0.5) < 4 / np.sqrt(12 * 2000)


def test_no_rows_or_no_draws_give_an_empty_table() -> None:
    assert row_uniforms(0, range(0), 3).shape == (0, 3)
    assert row_uniforms(0, range(3), 0).shape == (3, 0)
