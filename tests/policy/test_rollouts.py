"""Selecting rows, moving them, and padding on either side."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trimtab.policy.rollouts import Rollouts, pad_left, pad_right
from trimtab.policy.scorer import Scorer


@pytest.fixture
def full(awkward: Rollouts) -> Rollouts:
    """With every optional tensor; row i holds i in all of them, so that a row that strays shows."""
    cells_NT = torch.arange(6.0)[:, None].expand(awkward.mask_NT.shape)
    return dataclasses.replace(
        awkward,
        old_logps_NT=-cells_NT,
        entropies_NT=cells_NT + 0.5,
        rewards_N=torch.arange(6.0),
        reward_parts={"accuracy": torch.arange(6.0) * 10, "format": torch.arange(6.0) * 100},
    )


def test_padding_that_no_selected_row_fills_is_cut_off_on_both_sides(full: Rollouts) -> None:
    # Row 3 answers prompt 0 (5 tokens) with 3 tokens, row 2 answers prompt 1 (2 tokens) with 4.
    part = full.select(torch.tensor([3, 2]))
    assert part.prompt_ids_PL.shape == part.prompt_mask_PL.shape == (2, 5)
    assert part.completion_ids_NT.shape == part.mask_NT.shape == (2, 4)
    assert part.old_logps_NT is not None and part.old_logps_NT.shape == (2, 4)
    assert part.entropies_NT is not None and part.entropies_NT.shape == (2, 4)
    assert part.prompt_mask_PL.sum(dim=1).tolist() == [5, 2]
    assert part.mask_NT.sum(dim=1).tolist() == [3, 4]


@pytest.mark.parametrize("rows", [[0], [5, 1], [2, 0, 4], [4, 3, 2, 1], [0, 1, 2, 3, 4, 5], [1, 1, 2]])
def test_every_selected_row_keeps_its_prompt_its_completion_and_its_numbers(rows: list[int], full: Rollouts) -> None:
    part = full.select(torch.tensor(rows))
    assert part.completion_lists() == [full.completion_lists()[row] for row in rows]
    for place, row in enumerate(rows):
        group, old = int(part.group_ids_N[place]), int(full.group_ids_N[row])
        assert torch.equal(
            part.prompt_ids_PL[group][part.prompt_mask_PL[group]], full.prompt_ids_PL[old][full.prompt_mask_PL[old]]
        )
        assert part.truncated_N[place] == full.truncated_N[row]
    assert part.old_logps_NT is not None and part.entropies_NT is not None and part.rewards_N is not None
    assert part.old_logps_NT[:, 0].tolist() == [-row for row in rows]
    assert part.entropies_NT[:, -1].tolist() == [row + 0.5 for row in rows]
    assert part.rewards_N.tolist() == rows
    assert {name: values.tolist() for name, values in part.reward_parts.items()} == {
        "accuracy": [row * 10 for row in rows],
        "format": [row * 100 for row in rows],
    }


def test_groups_are_numbered_anew_and_prompts_that_no_row_needs_are_left_out(full: Rollouts) -> None:
    part = full.select(torch.tensor([5, 2, 1]))
    # Prompt 0 is gone; prompts 1 and 2 keep their order.
    assert part.group_ids_N.tolist() == [1, 0, 1]
    assert torch.equal(part.prompt_ids_PL, full.prompt_ids_PL[1:])


def test_what_was_not_recorded_stays_absent(awkward: Rollouts) -> None:
    part = awkward.select(torch.tensor([0, 2]))
    assert part.old_logps_NT is part.entropies_NT is part.rewards_N is None
    assert part.reward_parts == {}


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("rows", [[3], [4, 2], [5, 0, 1, 3]])
def test_selected_rows_score_as_they_do_in_the_whole(
    rows: list[int], architecture: str, tiny: Callable[..., Any], awkward: Rollouts
) -> None:
    scorer = Scorer(tiny(architecture))
    whole, part = awkward, awkward.select(torch.tensor(rows))
    for of_whole_NT, of_part_MT in zip(
        scorer.score(whole, entropy_temperature=1.0), scorer.score(part, entropy_temperature=1.0), strict=True
    ):
        width = part.mask_NT.shape[1]
        torch.testing.assert_close(of_part_MT, of_whole_NT[rows, :width], rtol=0, atol=1e-5)


def test_moving_takes_every_tensor_along(full: Rollouts) -> None:
    moved = full.to("meta")
    for entry in dataclasses.fields(moved):
        value = getattr(moved, entry.name)
        tensors = value.values() if isinstance(value, dict) else [value]
        assert all(tensor.device.type == "meta" for tensor in tensors), entry.name


def test_completions_come_back_without_padding_even_where_padding_looks_like_a_token() -> None:
    ids_NT, mask_NT = pad_right([[5, 5], [5], [7, 5, 5]], 5)
    prompt_ids_PL, prompt_mask_PL = pad_left([[5]], 5)
    rollouts = Rollouts(
        prompt_ids_PL, prompt_mask_PL, ids_NT, mask_NT, torch.zeros(3, dtype=torch.long), torch.zeros(3).bool()
    )
    assert rollouts.completion_lists() == [[5, 5], [5], [7, 5, 5]]


def test_prompts_are_padded_on_the_left_and_completions_on_the_right() -> None:
    ids, mask = pad_left([[1, 2, 3], [4]], 9)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert mask.tolist() == [[True, True, True], [False, False, True]]
    ids, mask = pad_right([[1, 2, 3], [4]], 9)
    assert ids.tolist() == [[1, 2, 3], [4, 9, 9]]
    assert mask.tolist() == [[True, True, True], [True, False, False]]
    assert ids.dtype == torch.long and mask.dtype == torch.bool
