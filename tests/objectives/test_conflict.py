"""GTPO's conflict masks against hand-worked groups and against a slow reference written from the definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trimtab.objectives.conflict import conflict_runs, conflict_weights, pushed_down_groups

EOS = 2


def batch(rows: list[list[int]], pad: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids padded on the right, and their mask."""
    width = max(map(len, rows))
    ids_NT = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    mask_NT = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids_NT, mask_NT


def weights_of(rows: list[list[int]], advantages: list[float], group_ids: list[int] | None = None) -> list[list[float]]:
    """lambda of every token, without the padding."""
    ids_NT, mask_NT = batch(rows)
    found_NT = conflict_weights(ids_NT, mask_NT, torch.tensor(advantages), torch.tensor(group_ids or [0] * len(rows)))
    return [found[: len(row)] for found, row in zip(found_NT.tolist(), rows, strict=True)]


def slow_runs(
    ids: list[list[int]], mask: list[list[int]], advantages: list[float], group_ids: list[int]
) -> tuple[list[list[bool]], list[list[bool]]]:
    """Forward and backward runs by the definition: for every row, from each end, step while the token conflicts."""
    columns = [[column for column, inside in enumerate(row) if inside] for row in mask]
    tokens = [[ids[row][column] for column in columns[row]] for row in range(len(ids))]
    results = []
    for backwards in (False, True):
        walks = [(list(reversed(row)) if backwards else row) for row in tokens]
        places = [(list(reversed(row)) if backwards else row) for row in columns]
        flags = [[False] * len(row) for row in mask]
        for row, walk in enumerate(walks):
            for position, token in enumerate(walk):
                signs = set()
                for other, other_walk in enumerate(walks):
                    same = group_ids[other] == group_ids[row]
                    if same and position < len(other_walk) and other_walk[position] == token:
                        signs.add((advantages[other] > 1e-6) - (advantages[other] < -1e-6))
                # A row of advantage 0 is not in either set, so it has no conflicts of its own.
                if not {1, -1} <= signs or abs(advantages[row]) <= 1e-6:
                    break
                flags[row][places[row][position]] = True
        results.append(flags)
    return results[0], results[1]


def random_batch(seed: int, groups: int, rows: int, width: int, vocabulary: int, left: bool) -> tuple[Tensor, ...]:
    """Interleaved groups of unequal sizes and lengths (empty rows too); padding drawn from the real vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    ids_NT = torch.randint(0, vocabulary, (rows, width), generator=generator)
    lengths_N = torch.randint(0, width + 1, (rows,), generator=generator)
    mask_NT = (torch.arange(width) < lengths_N[:, None]).long()
    group_ids_N = torch.randint(0, groups, (rows,), generator=generator) * 37 - 5
    advantages_N = torch.randint(-1, 2, (rows,), generator=generator) * (0.1 + torch.rand(rows, generator=generator))
    return ids_NT, mask_NT.flip(1) if left else mask_NT, advantages_N, group_ids_N


SHAPES = {
    "seed": st.integers(0, 2**32 - 1),
    "groups": st.integers(1, 24),
    "rows": st.integers(1, 96),
    "width": st.integers(1, 7),
    "vocabulary": st.integers(1, 4),
    "left": st.booleans(),
}
# Derandomised: the same five thousand groups and more everywhere, and nothing written to disk.
MANY = settings(max_examples=500, deadline=None, derandomize=True, database=None)


@MANY
@given(**SHAPES)
def test_the_tensor_version_agrees_with_the_definition(
    seed: int, groups: int, rows: int, width: int, vocabulary: int, left: bool
) -> None:
    ids_NT, mask_NT, advantages_N, group_ids_N = random_batch(seed, groups, rows, width, vocabulary, left)
    expected = slow_runs(ids_NT.tolist(), mask_NT.tolist(), advantages_N.tolist(), group_ids_N.tolist())
    forward_NT, backward_NT = conflict_runs(ids_NT, mask_NT, advantages_N, group_ids_N)
    assert forward_NT.tolist() == expected[0]
    assert backward_NT.tolist() == expected[1]
    strength_N1 = torch.where(advantages_N > 0, 2.0, 0.0)[:, None]
    union_NT = torch.tensor(expected[0]) | torch.tensor(expected[1])
    found_NT = conflict_weights(ids_NT, mask_NT, advantages_N, group_ids_N)
    assert torch.equal(found_NT, torch.where(union_NT, strength_N1, 1.0))


@settings(MANY, max_examples=80)
@given(**SHAPES)
def test_row_order_group_labels_and_padding_change_nothing(
    seed: int, groups: int, rows: int, width: int, vocabulary: int, left: bool
) -> None:
    ids_NT, mask_NT, advantages_N, group_ids_N = random_batch(seed, groups, rows, width, vocabulary, left)
    expected_NT = conflict_weights(ids_NT, mask_NT, advantages_N, group_ids_N)
    generator = torch.Generator().manual_seed(seed)
    order_N = torch.randperm(rows, generator=generator)
    labels_K, index_N = torch.unique(group_ids_N, return_inverse=True)
    renamed_N = (torch.randperm(len(labels_K), generator=generator) * -11 + 3)[index_N]
    found_NT = conflict_weights(ids_NT[order_N], mask_NT[order_N], advantages_N[order_N], renamed_N[order_N])
    assert torch.equal(found_NT, expected_NT[order_N])
    for pad in (0, vocabulary - 1, 10**6):
        before, after = (int(torch.randint(0, 4, (), generator=generator)) for _ in range(2))
        wide_NT = torch.nn.functional.pad(ids_NT.masked_fill(mask_NT == 0, pad), (before, after), value=pad)
        wide_mask_NT = torch.nn.functional.pad(mask_NT, (before, after))
        found_NT = conflict_weights(wide_NT, wide_mask_NT, advantages_N, group_ids_N)
        assert torch.equal(found_NT[:, before : before + width], expected_NT)
        assert (found_NT[wide_mask_NT == 0] == 1).all()


def test_shared_ends_are_reweighted_and_a_conflict_in_the_middle_is_not() -> None:
    # All begin with 5 6 and end with 8 EOS. Token 7 stands at position 3 of the first and of the third row, which is a
    # conflict too, but position 2 before it is none (10 against 12), and neither is 9 or 13 after it.
    rows = [
        [5, 6, 10, 7, 9, 8, EOS],  # A > 0
        [5, 6, 11, 8, EOS],  # A > 0, shorter
        [5, 6, 12, 7, 13, 14, 8, EOS],  # A < 0, longer
    ]
    assert weights_of(rows, [2.0, 1.0, -3.0]) == [
        [2, 2, 1, 1, 1, 2, 2],
        [2, 2, 1, 2, 2],
        [0, 0, 1, 1, 1, 1, 0, 0],
    ]


def test_conflicts_are_existential_at_each_position() -> None:
    # Position 0: 1 and 5 stand in rows of both signs. Position 1: 2 and 3 do, in rows with other first tokens.
    # Position 2: 9 is positive only and 8 negative only, so the forward run has length 2 and there is no backward run.
    rows = [[1, 2, 9], [5, 3, 9], [1, 3, 8], [5, 2, 8]]
    assert weights_of(rows, [1.0, 1.0, -1.0, -1.0]) == [[2, 2, 1], [2, 2, 1], [0, 0, 1], [0, 0, 1]]


def test_the_backward_run_is_aligned_at_each_rows_own_last_token() -> None:
    # From the end: EOS and 4 conflict; then 3 against 9 does not. The forward run is empty: 3 against 9.
    assert weights_of([[3, 4, EOS], [9, 9, 9, 4, EOS]], [1.0, -1.0]) == [[1, 2, 2], [1, 1, 1, 0, 0]]


def test_overlapping_runs_are_joined_and_never_multiplied() -> None:
    # Identical completions: both runs cover the row.
    assert weights_of([[3, 4, EOS], [3, 4, EOS]], [1.0, -1.0]) == [[2, 2, 2], [0, 0, 0]]


def test_the_product_reaches_four_where_the_runs_overlap() -> None:
    # Row 0 and row 1 share 3 4 from the left. From the right row 0 meets row 2 (EOS, 4) and then 3 against 7.
    ids_NT, mask_NT = batch([[3, 4, EOS], [3, 4, 8, 8], [7, 7, 4, EOS]])
    product_NT = conflict_weights(
        ids_NT, mask_NT, torch.tensor([2.0, -1.0, -1.0]), torch.zeros(3, dtype=torch.long), combine="product"
    )
    assert product_NT.tolist() == [[2, 4, 2, 1], [0, 0, 1, 1], [1, 1, 0, 0]]


def test_groups_do_not_see_each_other() -> None:
    rows = [[5, 6], [5, 7], [5, 6], [5, 7]]
    # Interleaved: rows 0 and 2 are all positive, rows 1 and 3 have both signs and share both tokens.
    assert weights_of(rows, [1.0, 1.0, 1.0, -1.0], [8, 3, 8, 3]) == [[1, 1], [2, 2], [1, 1], [0, 0]]


def test_rows_without_advantage_take_no_part_and_keep_one() -> None:
    # 1e-7 counts as zero: the third row neither makes a conflict with the first nor has one.
    assert weights_of([[5, 6], [9, 6], [5, 7]], [1.0, -1.0, -1e-7]) == [[1, 2], [1, 0], [1, 1]]


def test_a_pad_id_that_equals_the_end_of_sequence_changes_nothing() -> None:
    rows = [[5, 9, EOS], [5, EOS], [5, 8, 7, EOS]]
    for pad in (EOS, 5, 0):
        ids_NT, mask_NT = batch(rows, pad=pad)
        found_NT = conflict_weights(ids_NT, mask_NT, torch.tensor([1.0, 1.0, -2.0]), torch.zeros(3, dtype=torch.long))
        assert found_NT.tolist() == [[2, 1, 2, 1], [2, 2, 1, 1], [0, 1, 1, 0]]


def test_empty_rows_and_empty_batches_have_no_conflicts() -> None:
    ids_NT = torch.tensor([[5, 6], [5, 6], [5, 6]])
    mask_NT = torch.tensor([[0, 0], [1, 1], [0, 0]])
    found_NT = conflict_weights(ids_NT, mask_NT, torch.tensor([1.0, -1.0, 1.0]), torch.zeros(3, dtype=torch.long))
    assert found_NT.tolist() == [[1, 1]] * 3
    for shape in ((0, 4), (3, 0), (0, 0)):
        nothing_NT = torch.zeros(shape, dtype=torch.long)
        zeros_N = torch.zeros(shape[0])
        assert conflict_weights(nothing_NT, nothing_NT, zeros_N, zeros_N.long()).shape == shape


@pytest.mark.parametrize(
    ("sides", "expected"),
    [
        ("both", [[2, 1, 2], [0, 1, 1, 0]]),
        ("prefix", [[2, 1, 1], [0, 1, 1, 1]]),
        ("suffix", [[1, 1, 2], [1, 1, 1, 0]]),
        ("none", [[1, 1, 1], [1, 1, 1, 1]]),
    ],
)
def test_each_side_can_be_used_alone(sides: str, expected: list[list[float]]) -> None:
    ids_NT, mask_NT = batch([[5, 6, EOS], [5, 7, 7, EOS]])
    found_NT = conflict_weights(
        ids_NT,
        mask_NT,
        torch.tensor([1.0, -1.0]),
        torch.zeros(2, dtype=torch.long),
        sides=sides,  # type: ignore[arg-type]
    )
    assert [row[: len(want)] for row, want in zip(found_NT.tolist(), expected, strict=True)] == expected


def test_the_two_strengths_can_be_set() -> None:
    ids_NT, mask_NT = batch([[5, 6], [5, 7]])
    found_NT = conflict_weights(
        ids_NT, mask_NT, torch.tensor([1.0, -1.0]), torch.zeros(2, dtype=torch.long), negative=0.25, positive=1.5
    )
    assert found_NT.tolist() == [[1.5, 1], [0.25, 1]]


def test_ids_as_large_as_a_vocabulary_and_many_groups_do_not_collide() -> None:
    # 1000 groups of two rows: the pairs share the first token only, and neighbouring groups share nothing.
    first_K = torch.arange(1000) + 150_000
    ids_NT = torch.stack([torch.stack([first_K, first_K * 0 + 1]), torch.stack([first_K, first_K * 0 + 3])])
    ids_NT = ids_NT.permute(2, 0, 1).reshape(2000, 2)
    advantages_N = torch.tensor([1.0, -1.0]).repeat(1000)
    found_NT = conflict_weights(
        ids_NT.int(), torch.ones_like(ids_NT), advantages_N, torch.arange(1000).repeat_interleave(2)
    )
    assert found_NT.tolist() == [[2, 1], [0, 1]] * 1000


def test_shapes_that_do_not_fit_and_unknown_options_are_refused() -> None:
    ids_NT, ones_N, ids_N = torch.ones(2, 3, dtype=torch.long), torch.ones(2), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(2, 2\).*do not fit"):
        conflict_weights(ids_NT, torch.ones(2, 2), ones_N, ids_N)
    with pytest.raises(ValueError, match="do not fit"):
        conflict_weights(ids_NT, ids_NT, torch.ones(3), ids_N)
    with pytest.raises(ValueError, match="sides must be one of both, prefix, suffix, none, not 'left'"):
        conflict_weights(ids_NT, ids_NT, ones_N, ids_N, sides="left")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="combine must be one of union, product, not 'sum'"):
        conflict_weights(ids_NT, ids_NT, ones_N, ids_N, combine="sum")  # type: ignore[arg-type]


def test_signal_is_preserved_when_the_group_shares_all_its_tokens() -> None:
    # A = 3, 1, -2, -2: the conflicts cover everything, so sum lambda A = 2 (3 + 1) - 0 = 8 = sum |A| at every position.
    advantages_N = torch.tensor([3.0, 1.0, -2.0, -2.0])
    ids_NT, mask_NT = batch([[5, 6, EOS]] * 4)
    lambda_NT = conflict_weights(ids_NT, mask_NT, advantages_N, torch.zeros(4, dtype=torch.long))
    assert (lambda_NT * advantages_N[:, None]).sum(dim=0).tolist() == [8, 8, 8]
    assert advantages_N.abs().sum() == 8


def test_signal_is_not_preserved_when_the_group_shares_only_some_tokens() -> None:
    # As above, but the first row has another token at position 0 and the last one at position 1. Position 0:
    # 3 (lambda 1) + 2 * 1 + 0 + 0 = 5. Position 1: 2 * 3 + 2 * 1 + 0 - 2 (lambda 1) = 6. Position 2: 8.
    advantages_N = torch.tensor([3.0, 1.0, -2.0, -2.0])
    ids_NT, mask_NT = batch([[8, 6, EOS], [5, 6, EOS], [5, 6, EOS], [5, 9, EOS]])
    lambda_NT = conflict_weights(ids_NT, mask_NT, advantages_N, torch.zeros(4, dtype=torch.long))
    assert (lambda_NT * advantages_N[:, None]).sum(dim=0).tolist() == [5, 6, 8]


# One positive row of length 4, one negative of length 2, sharing the first token 5; A = 1, -1 over their lengths:
# 1/4 - 1/2 = -1/4 < 0, so token 5 is pushed down. After the masks it receives 2/4 - 0 = 1/2 > 0.
LONG_POSITIVE = [[5, 6, 7, 8], [5, 9]]


def test_longer_positives_push_the_shared_prefix_down_before_the_masks_and_not_after() -> None:
    ids_NT, mask_NT = batch(LONG_POSITIVE)
    advantages_N, group_ids_N = torch.tensor([1.0, -1.0]), torch.tensor([4, 4])
    plain_NT = advantages_N[:, None] * mask_NT
    pushed_K, active_K = pushed_down_groups(ids_NT, mask_NT, plain_NT, advantages_N, group_ids_N)
    assert (pushed_K.tolist(), active_K.tolist()) == ([True], [True])
    masked_NT = plain_NT * conflict_weights(ids_NT, mask_NT, advantages_N, group_ids_N)
    pushed_K, active_K = pushed_down_groups(ids_NT, mask_NT, masked_NT, advantages_N, group_ids_N)
    assert (pushed_K.tolist(), active_K.tolist()) == ([False], [True])


def test_pushed_down_groups_are_told_apart_and_come_in_the_order_of_their_ids() -> None:
    # Group -1: as above with the lengths exchanged: 1/2 - 1/4 > 0, active and not pushed down.
    # Group 3: as above, pushed down. Group 7: nothing shared, not active. Rows interleave.
    rows = [LONG_POSITIVE[0], [5, 9], [1, 1], LONG_POSITIVE[1], [5, 6, 7, 8], [2, 2]]
    ids_NT, mask_NT = batch(rows)
    advantages_N = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    group_ids_N = torch.tensor([3, -1, 7, 3, -1, 7])
    pushed_K, active_K = pushed_down_groups(ids_NT, mask_NT, advantages_N[:, None] * mask_NT, advantages_N, group_ids_N)
    assert pushed_K.tolist() == [False, True, False]
    assert active_K.tolist() == [True, True, False]


def test_rows_of_advantage_zero_add_what_their_weights_say_to_a_pushed_down_token() -> None:
    # Lengths 2, 2, 2; weights 1, -1 cancel; a third row of advantage 0 but weight -0.1 (an entropy penalty) tips it.
    ids_NT, mask_NT = batch([[5, 6], [5, 7], [5, 8]])
    advantages_N, group_ids_N = torch.tensor([1.0, -1.0, 0.0]), torch.zeros(3, dtype=torch.long)
    for third, expected in ((0.0, False), (-0.1, True), (0.1, False)):
        weights_NT = torch.tensor([1.0, -1.0, third])[:, None] * mask_NT
        pushed_K, _ = pushed_down_groups(ids_NT, mask_NT, weights_NT, advantages_N, group_ids_N)
        assert pushed_K.tolist() == [expected]


def test_a_token_is_shared_and_correct_only_inside_the_run_of_a_positive_row() -> None:
    # Position 0: 5 conflicts and gets 2/2 - 3/4 > 0. Position 1: 2 conflicts and gets 1/2 - 3/4 < 0, but it lies
    # in the run of the negative row alone: the positive row that holds it began with 8.
    ids_NT, mask_NT = batch([[5, 7], [8, 2], [5, 2, 4, 4]])
    advantages_N = torch.tensor([2.0, 1.0, -3.0])
    pushed_K, active_K = pushed_down_groups(
        ids_NT, mask_NT, advantages_N[:, None] * mask_NT, advantages_N, torch.zeros(3, dtype=torch.long)
    )
    assert (pushed_K.tolist(), active_K.tolist()) == ([False], [True])


def test_pushed_down_needs_a_conflict() -> None:
    ids_NT, mask_NT = batch([[1, 2], [3, 2]])
    pushed_K, active_K = pushed_down_groups(
        ids_NT, mask_NT, torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), torch.tensor([1.0, -1.0]), torch.tensor([0, 0])
    )
    assert (pushed_K.tolist(), active_K.tolist()) == ([False], [False])
