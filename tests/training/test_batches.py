from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.policy.rollouts import Rollouts, pad_left, pad_right
from trimtab.training.batches import micro_batches, step_rows


def rollouts(prompts: list[int], owners: list[int], lengths: list[int]) -> Rollouts:
    """Prompts and completions of given lengths; `owners` says which prompt each completion answers."""
    prompt_ids_PL, prompt_mask_PL = pad_left([[1] * n for n in prompts], 0)
    completion_ids_NT, mask_NT = pad_right([[1] * n for n in lengths], 0)
    truncated_N = torch.zeros(len(owners), dtype=torch.bool)
    return Rollouts(prompt_ids_PL, prompt_mask_PL, completion_ids_NT, mask_NT, torch.tensor(owners), truncated_N)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[int], int]:
    prompts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    owners = draw(st.lists(st.integers(0, len(prompts) - 1), min_size=1, max_size=16))
    lengths = draw(st.lists(st.integers(1, 12), min_size=len(owners), max_size=len(owners)))
    rows = draw(st.lists(st.integers(0, len(owners) - 1), unique=True, max_size=len(owners)))
    return prompts, owners, lengths, rows, draw(st.integers(1, 80))


@settings(deadline=None)
@given(cases())
def test_batches_cover_each_row_once_within_the_budget_and_keep_groups_whole_that_fit(
    case: tuple[list[int], list[int], list[int], list[int], int],
) -> None:
    prompts, owners, lengths, rows, budget = case

    def cost(batch: list[int]) -> int:
        asked = {owners[row] for row in batch}
        return len(batch) * max(lengths[row] for row in batch) + len(asked) * max(prompts[p] for p in asked)

    batches = [b.tolist() for b in micro_batches(rollouts(prompts, owners, lengths), torch.tensor(rows).long(), budget)]
    assert sorted(row for batch in batches for row in batch) == sorted(rows)
    for batch in batches:
        assert len(batch) == 1 or cost(batch) <= budget
    for group in set(owners):
        members = [row for row in rows if owners[row] == group]
        if members and cost(members) <= budget:
            assert sum(any(row in members for row in batch) for batch in batches) == 1


def test_no_rows_make_no_batch() -> None:
    assert list(micro_batches(rollouts([3], [0, 0], [2, 2]), torch.tensor([]).long(), 100)) == []


def test_rows_of_like_length_meet() -> None:
    batches = micro_batches(rollouts([1, 1, 1, 1], [0, 1, 2, 3], [10, 2, 9, 2]), torch.arange(4), 24)
    assert [sorted(batch.tolist()) for batch in batches] == [[1, 3], [0, 2]]


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 5), st.integers(1, 4))
def test_every_pass_over_the_data_takes_each_row_once(count: int, per_step: int, seed: int, epochs: int) -> None:
    steps = -(-count * epochs // per_step)
    taken = [row for step in range(1, steps + 1) for row in step_rows(count, per_step, step, seed)]
    for epoch in range(epochs):
        assert sorted(taken[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_the_rows_of_a_step_depend_on_the_seed_and_the_step_alone() -> None:
    forwards = [step_rows(10, 4, step, 3) for step in range(1, 9)]
    backwards = [step_rows(10, 4, step, 3) for step in range(8, 0, -1)]
    assert forwards == backwards[::-1]
    assert forwards != [step_rows(10, 4, step, 4) for step in range(1, 9)]


def test_two_passes_over_the_data_have_different_orders() -> None:
    assert step_rows(30, 30, 1, 0) != step_rows(30, 30, 2, 0)


def test_a_step_larger_than_the_data_takes_rows_again() -> None:
    assert Counter(step_rows(3, 7, 1, 0)).most_common()[0][1] == 3
