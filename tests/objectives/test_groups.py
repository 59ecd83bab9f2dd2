"""Group statistics and the weights of every method whose completions carry one advantage."""

import math

import pytest
import torch

from trimtab.objectives.groups import advantages_and_uniform, effective_mask, group_advantages, outcome_weights

NAN, INF = math.nan, math.inf


def advantages(rewards: list[float], group_ids: list[int], **options: str) -> list[float]:
    found_N = group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(group_ids), **options)  # type: ignore[arg-type]
    return [round(value, 12) for value in found_N.tolist()]


def test_the_mean_of_the_group_is_subtracted() -> None:
    # (4 + 0 + 2) / 3 = 2
    assert advantages([4, 0, 2], [0, 0, 0]) == [2, -2, 0]


def test_std_is_the_sample_standard_deviation() -> None:
    # squares 4 + 4 + 0 = 8, over 3 - 1 = 4, root 2; the population's root of 8 / 3 would give +-1.2247
    assert advantages([4, 0, 2], [0, 0, 0], normalise="std") == [1, -1, 0]


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    # 4 - (0 + 2) / 2 = 3, 0 - (4 + 2) / 2 = -3, 2 - (4 + 0) / 2 = 0
    assert advantages([4, 0, 2], [0, 0, 0], baseline="leave_one_out") == [3, -3, 0]


def test_without_a_baseline_the_rewards_stay_as_they_are() -> None:
    assert advantages([4, 0, 2, NAN], [0, 0, 0, 0], baseline="none") == [4, 0, 2, 0]


def test_groups_are_found_by_id_when_they_interleave_and_differ_in_size() -> None:
    # group 9: 1, 3 (mean 2); group -4: 10, 20, 30, 40 (mean 25); ids may be negative or huge
    big = 2**40
    assert advantages([10, 1, 20, 30, 3, 40], [-4, big, -4, -4, big, -4]) == [-15, -1, -5, 5, 1, 15]


def test_new_group_labels_and_a_new_row_order_change_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards_N = torch.rand(40, generator=generator)
    ids_N = torch.randint(0, 7, (40,), generator=generator)
    order_N = torch.randperm(40, generator=generator)
    label_K = torch.tensor([500, -3, 12, 0, 77, -90, 4])
    for baseline in ("mean", "leave_one_out"):
        for normalise in ("none", "std"):
            expected_N = group_advantages(rewards_N, ids_N, baseline=baseline, normalise=normalise)
            found_N = group_advantages(
                rewards_N[order_N],
                label_K[ids_N][order_N],
                baseline=baseline,
                normalise=normalise,
            )
            torch.testing.assert_close(found_N, expected_N[order_N], atol=1e-6, rtol=0)


@pytest.mark.parametrize("missing", [NAN, INF, -INF])
def test_a_row_without_a_reward_is_left_out_of_its_groups_statistics(missing: float) -> None:
    # mean of 4, 0, 2 alone, std of 4, 0, 2 alone, other rows' mean of 4, 0, 2 alone
    assert advantages([4, missing, 0, 2], [1, 1, 1, 1]) == [2, 0, -2, 0]
    assert advantages([4, missing, 0, 2], [1, 1, 1, 1], normalise="std") == [1, 0, -1, 0]
    assert advantages([4, missing, 0, 2], [1, 1, 1, 1], baseline="leave_one_out") == [3, 0, -3, 0]


@pytest.mark.parametrize("normalise", ["none", "std"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "none"])
def test_a_group_without_any_reward_gets_zeros(baseline: str, normalise: str) -> None:
    assert advantages([NAN, NAN, NAN], [0, 0, 0], baseline=baseline, normalise=normalise) == [0, 0, 0]


@pytest.mark.parametrize("normalise", ["none", "std"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_a_group_of_one_valid_row_gets_zeros(baseline: str, normalise: str) -> None:
    assert advantages([7, 3, NAN], [0, 1, 1], baseline=baseline, normalise=normalise) == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("reward", "count"), [(0.1, 3), (0.7, 7), (1 / 3, 11), (-2.3, 6), (123.4, 11)])
@pytest.mark.parametrize("normalise", ["none", "std"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_equal_rewards_give_exactly_zero(
    reward: float, count: int, dtype: torch.dtype, baseline: str, normalise: str
) -> None:
    rewards_N = torch.full((count,), reward, dtype=dtype)
    ids_N = torch.zeros(count, dtype=torch.long)
    found_N = group_advantages(rewards_N, ids_N, baseline=baseline, normalise=normalise)  # type: ignore[arg-type]
    assert found_N.tolist() == [0.0] * count
    assert advantages_and_uniform(rewards_N, ids_N)[1].all()


def test_the_standard_deviation_never_divides_by_a_small_number() -> None:
    # 1e-7 apart: std 7.1e-8 lies below the floor of 1e-6, so the group counts as uniform
    assert advantages([0.5, 0.5 + 1e-7], [0, 0], normalise="std") == [0, 0]
    # 1e-5 apart: std 1e-5 / sqrt(2), so the advantages are +-(1e-5 / 2) / (1e-5 / sqrt(2)) = +-1 / sqrt(2)
    assert advantages([0.5 + 1e-5, 0.5], [0, 0], normalise="std") == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-9)
    # whatever the rewards, |A| / std is at most (n - 1) / sqrt(n)
    for exponent in range(-12, 3):
        spread = 10.0**exponent
        found = advantages([0.3, 0.3 + spread, 0.3 + spread / 3, 0.3], [0] * 4, normalise="std")
        assert max(map(abs, found)) <= 3 / 2 + 1e-9


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.int64, torch.float32),
        (torch.bool, torch.float32),
    ],
)
def test_advantages_are_float32_unless_the_rewards_are_float64(given: torch.dtype, expected: torch.dtype) -> None:
    found_N = group_advantages(torch.tensor([1, 0], dtype=given), torch.tensor([0, 0]))
    assert found_N.dtype == expected
    assert found_N.tolist() == [0.5, -0.5]


def test_no_rows_give_no_advantages() -> None:
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


def test_shapes_that_do_not_fit_and_unknown_options_are_refused() -> None:
    ids_N = torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"\(2, 1\)"):
        group_advantages(torch.zeros(2, 1), ids_N)
    with pytest.raises(ValueError, match=r"\(3,\) and \(2,\)"):
        group_advantages(torch.zeros(3), ids_N)
    with pytest.raises(ValueError, match="baseline must be one of mean, leave_one_out, none, not 'median'"):
        group_advantages(torch.zeros(2), ids_N, baseline="median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="normalise must be one of none, std, not 'range'"):
        group_advantages(torch.zeros(2), ids_N, normalise="range")  # type: ignore[arg-type]


# Two groups of two rows; row 1 is truncated, row 3 has no reward.
MASK_NT = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]])
TRUNCATED_N = torch.tensor([False, True, False, False])


def test_rows_without_reward_and_truncated_rows_leave_the_mask() -> None:
    rewards_N = torch.tensor([1.0, 0.0, 1.0, NAN])
    assert effective_mask(MASK_NT, rewards_N).int().tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]]
    masked_NT = effective_mask(MASK_NT, rewards_N, truncated_N=TRUNCATED_N, mask_truncated=True)
    assert masked_NT.int().tolist() == [[1, 1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]]
    with pytest.raises(ValueError, match="mask_truncated needs truncated_N"):
        effective_mask(MASK_NT, rewards_N, mask_truncated=True)


def test_truncated_rows_are_kept_unless_asked() -> None:
    kept_NT = effective_mask(MASK_NT, torch.ones(4), truncated_N=TRUNCATED_N)
    assert torch.equal(kept_NT, MASK_NT.bool())


def test_every_token_carries_the_advantage_and_padding_carries_nothing() -> None:
    found = outcome_weights(
        torch.zeros_like(MASK_NT), MASK_NT, torch.tensor([4.0, 0.0, 3.0, 3.0]), torch.tensor([0, 0, 1, 1])
    )
    # group 0: mean 2; group 1 is uniform
    assert found.weights_NT.tolist() == [[2, 2, 0], [-2, -2, -2], [0, 0, 0], [0, 0, 0]]
    assert torch.equal(found.mask_NT, MASK_NT.bool())
    assert found.entropy_weights_NT is None
    assert found.metrics["frac_reward_zero_std"].item() == 0.5
    assert found.metrics["advantage_abs"].item() == 1.0  # (2 + 2 + 0 + 0) / 4


def test_a_truncated_row_still_counts_in_its_groups_mean() -> None:
    found = outcome_weights(
        torch.zeros_like(MASK_NT),
        MASK_NT,
        torch.tensor([4.0, 0.0, 1.0, 0.0]),
        torch.tensor([0, 0, 1, 1]),
        truncated_N=TRUNCATED_N,
        mask_truncated=True,
    )
    assert found.weights_NT.tolist() == [[2, 2, 0], [0, 0, 0], [0.5, 0, 0], [-0.5, -0.5, 0]]
    assert found.mask_NT.int().tolist() == [[1, 1, 0], [0, 0, 0], [1, 0, 0], [1, 1, 0]]


def test_uniform_groups_leave_the_denominator_only_when_asked() -> None:
    arguments = (
        torch.zeros_like(MASK_NT),
        MASK_NT,
        torch.tensor([4.0, 0.0, 3.0, 3.0]),
        torch.tensor([0, 0, 1, 1]),
    )
    assert outcome_weights(*arguments).mask_NT.sum() == 8
    dropped = outcome_weights(*arguments, drop_uniform_groups=True)
    assert dropped.mask_NT.int().tolist() == [[1, 1, 0], [1, 1, 1], [0, 0, 0], [0, 0, 0]]
    assert dropped.weights_NT.tolist() == outcome_weights(*arguments).weights_NT.tolist()
