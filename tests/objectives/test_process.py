"""Process rewards: values worked by hand, a slow reference, invariances, and GRPO as the case of one step."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trimtab.objectives import (
    find_method,
    loss_denominator,
    outcome_weights,
    process_advantages,
    process_weights,
)

NAN = math.nan

# Two rows of one group. Rewards 1, 4, 2 and 1: mean 2, sample variance (1 + 4 + 0 + 1) / 3 = 2.
MASK_NT = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
ENDS_NS = torch.tensor([[1, 2, 4], [2, -1, -1]])
REWARDS_NS = torch.tensor([[1.0, 4.0, 2.0], [1.0, NAN, NAN]])
GROUP_N = torch.zeros(2, dtype=torch.long)
ROOT = math.sqrt(2)


def close(found_NT: Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(found_NT, torch.tensor(expected, dtype=found_NT.dtype), atol=1e-6, rtol=0)


def test_a_token_answers_for_the_sum_of_the_steps_that_end_at_it_or_after_it() -> None:
    # centred: -1, 2, 0 and -1; ahead of tokens 0 and 1: -1 + 2 + 0, of token 2: 2 + 0, of 3 and 4: 0
    close(
        process_advantages(MASK_NT, ENDS_NS, REWARDS_NS, GROUP_N, normalise="none"),
        [[1, 1, 2, 0, 0, 0], [-1, -1, -1, 0, 0, 0]],
    )
    close(
        process_advantages(MASK_NT, ENDS_NS, REWARDS_NS, GROUP_N),
        [[1 / ROOT, 1 / ROOT, 2 / ROOT, 0, 0, 0], [-1 / ROOT] * 3 + [0, 0, 0]],
    )


def test_the_worst_step_takes_all_credit_up_to_its_end_and_leaves_none_behind_it() -> None:
    close(
        process_advantages(MASK_NT, ENDS_NS, REWARDS_NS, GROUP_N, form="min"),
        [[-1 / ROOT, -1 / ROOT, 0, 0, 0, 0], [-1 / ROOT] * 3 + [0, 0, 0]],
    )
    # A worst step at the end: every token up to it had a part in it. Rewards 4, 2, 1, 1: the same mean.
    close(
        process_advantages(MASK_NT, ENDS_NS, torch.tensor([[4, 2, 1], [1, NAN, NAN]]), GROUP_N, form="min"),
        [[-1 / ROOT] * 5 + [0], [-1 / ROOT] * 3 + [0, 0, 0]],
    )


def test_of_two_equally_bad_steps_the_later_one_counts() -> None:
    rewards_NS = torch.tensor([[1.0, 5.0, 1.0], [1.0, NAN, NAN]])
    found_NT = process_advantages(MASK_NT, ENDS_NS, rewards_NS, GROUP_N, form="min", normalise="none")
    close(found_NT, [[-1, -1, -1, -1, -1, 0], [-1, -1, -1, 0, 0, 0]])


def test_the_minimum_is_the_limit_of_pures_softmin_weights() -> None:
    rewards_NS = torch.tensor([[0.3, -0.7, 0.9, -0.1], [0.2, 0.4, -0.5, 0.8]], dtype=torch.float64)
    ends_NS = torch.arange(4).expand(2, 4)
    mask_NT = torch.ones(2, 4)
    centred_NS = rewards_NS - rewards_NS.mean()
    softmin_NS = torch.softmax(-centred_NS / 1e-3, dim=1) * centred_NS
    expected_NT = softmin_NS.flip(1).cumsum(1).flip(1)
    found_NT = process_advantages(mask_NT, ends_NS, rewards_NS, GROUP_N, form="min", normalise="none")
    torch.testing.assert_close(found_NT, expected_NT, atol=1e-9, rtol=0)


def test_steps_that_end_at_one_token_all_count() -> None:
    ends_NS = torch.tensor([[1, 1], [1, -1]])
    rewards_NS = torch.tensor([[3.0, 1.0], [2.0, NAN]])
    mask_NT = torch.ones(2, 2)
    # mean 2, std 1
    close(process_advantages(mask_NT, ends_NS, rewards_NS, GROUP_N), [[0, 0], [0, 0]])
    close(process_advantages(mask_NT, ends_NS, rewards_NS, GROUP_N, form="min"), [[-1, -1], [0, 0]])


# --- a slow, obvious reference ---


def reference(mask: list[int], rows: list[list[tuple[int, float]]], groups: list[int], form: str) -> list[list[float]]:
    """Row by row, token by token; `mask` holds the lengths."""
    found = []
    for row, steps in enumerate(rows):
        pool = [r for other, s in enumerate(rows) if groups[other] == groups[row] for _, r in s if math.isfinite(r)]
        mean = math.fsum(pool) / max(1, len(pool))
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in pool) / max(1, len(pool) - 1))
        normal = [(e, 0.0 if std < 1e-6 else (r - mean) / std) for e, r in steps if math.isfinite(r)]
        worst = min((a for _, a in normal), default=0.0)
        tokens = []
        for t in range(mask[row]):
            ahead = [a for e, a in normal if e >= t]
            if form == "sum":
                tokens.append(math.fsum(ahead))
            else:
                tokens.append(worst if worst in ahead else 0.0)
        found.append(tokens + [0.0] * (max(mask) - mask[row]))
    return found


Row = tuple[int, int, list[tuple[int, float]]]


@st.composite
def rows_of_groups(draw: st.DrawFn) -> list[Row]:
    """(group, length, steps) of each row: interleaved groups, different numbers of steps in any order."""
    rows = []
    for _ in range(draw(st.integers(1, 7))):
        length = draw(st.integers(1, 6))
        reward = st.sampled_from([0.0, 1.0, 0.1, -2.5, 7.0, NAN, math.inf])
        steps = draw(st.lists(st.tuples(st.integers(0, length - 1), reward), max_size=5))
        rows.append((draw(st.sampled_from([3, -1, 40])), length, steps))
    return rows


def as_tensors(rows: list[Row], *, spare: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mask, ends, rewards and groups, with `spare` columns of padding more than needed, filled with junk."""
    width = max(length for _, length, _ in rows) + spare
    columns = max(len(steps) for *_, steps in rows) + spare
    mask_NT = torch.arange(width) < torch.tensor([length for _, length, _ in rows])[:, None]
    ends_NS = torch.full((len(rows), columns), -1)
    rewards_NS = torch.full((len(rows), columns), 1e9 if spare else NAN, dtype=torch.float64)
    for row, (_, _, steps) in enumerate(rows):
        for place, (end, reward) in enumerate(steps):
            ends_NS[row, place], rewards_NS[row, place] = end, reward
    return mask_NT, ends_NS, rewards_NS, torch.tensor([group for group, *_ in rows])


@settings(max_examples=150, deadline=None)
@given(rows_of_groups(), st.sampled_from(["sum", "min"]), st.randoms(use_true_random=False))
def test_any_batch_agrees_with_the_reference_whatever_its_padding_and_order(
    rows: list[Row], form: str, random: object
) -> None:
    expected_NT = torch.tensor(
        reference([n for _, n, _ in rows], [s for *_, s in rows], [g for g, *_ in rows], form), dtype=torch.float64
    )
    width = expected_NT.shape[1]
    found_NT = process_advantages(*as_tensors(rows), form=form)  # type: ignore[arg-type]
    torch.testing.assert_close(found_NT, expected_NT, atol=1e-12, rtol=1e-12)
    padded_NT = process_advantages(*as_tensors(rows, spare=2), form=form)  # type: ignore[arg-type]
    torch.testing.assert_close(padded_NT[:, :width], found_NT, atol=1e-12, rtol=1e-12)
    assert not padded_NT[:, width:].any()
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled_NT = process_advantages(*as_tensors([rows[i] for i in order]), form=form)  # type: ignore[arg-type]
    torch.testing.assert_close(shuffled_NT, found_NT[order], atol=1e-12, rtol=1e-12)


# --- edges ---


def test_a_pool_of_equal_rewards_or_of_one_step_gives_zeros() -> None:
    for form in ("sum", "min"):
        for rewards in ([[0.1, 0.1, 0.1], [0.1, NAN, NAN]], [[0.3, NAN, NAN], [NAN, NAN, NAN]]):
            found_NT = process_advantages(MASK_NT, ENDS_NS, torch.tensor(rewards), GROUP_N, form=form)  # type: ignore[arg-type]
            assert not found_NT.any()


def test_a_row_alone_in_its_group_compares_its_own_steps() -> None:
    found_NT = process_advantages(MASK_NT[:1], torch.tensor([[1, 3]]), torch.tensor([[0.0, 2.0]]), GROUP_N[:1])
    close(found_NT, [[0, 0, 1 / ROOT, 1 / ROOT, 0, 0]])


def test_a_batch_without_any_step_has_no_advantages() -> None:
    nothing_NS = torch.zeros(2, 0)
    assert not process_advantages(MASK_NT, nothing_NS.long(), nothing_NS, GROUP_N).any()


def test_advantages_are_float32_unless_the_rewards_are_float64() -> None:
    assert process_advantages(MASK_NT, ENDS_NS, REWARDS_NS, GROUP_N).dtype == torch.float32
    assert process_advantages(MASK_NT, ENDS_NS, REWARDS_NS.bfloat16(), GROUP_N).dtype == torch.float32
    assert process_advantages(MASK_NT, ENDS_NS, REWARDS_NS.double(), GROUP_N).dtype == torch.float64


def test_steps_outside_the_completion_shapes_that_do_not_fit_and_unknown_options_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"row 1: a step ends at token 3, counted from 0, but the completion has 3 tokens"
    ):
        process_advantages(MASK_NT, torch.tensor([[1, 2, 4], [3, -1, -1]]), REWARDS_NS, GROUP_N)
    with pytest.raises(ValueError, match=r"not \(2, 3\) and \(2, 2\)"):
        process_advantages(MASK_NT, ENDS_NS, REWARDS_NS[:, :2], GROUP_N)
    with pytest.raises(ValueError, match="form must be one of sum, min, not 'max'"):
        process_advantages(MASK_NT, ENDS_NS, REWARDS_NS, GROUP_N, form="max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="normalise must be one of none, std"):
        process_advantages(MASK_NT, ENDS_NS, REWARDS_NS, GROUP_N, normalise="range")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="outcome must be one of last_step, none"):
        process_weights(MASK_NT, MASK_NT, torch.ones(2), GROUP_N, outcome="first")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="process rewards need step_ends_NS and step_rewards_NS"):
        process_weights(MASK_NT, MASK_NT, torch.ones(2), GROUP_N)


# --- the method ---


def test_the_outcome_is_a_step_that_ends_at_the_last_token() -> None:
    # Pool 1, 4, 2, 1 and the outcomes 4, 0: mean 2, centred -1, 2, 0, +2 and -1, -2.
    found = process_weights(
        MASK_NT,
        MASK_NT,
        torch.tensor([4.0, 0.0]),
        GROUP_N,
        step_ends_NS=ENDS_NS,
        step_rewards_NS=REWARDS_NS,
        normalise="none",
    )
    close(found.weights_NT, [[3, 3, 4, 2, 2, 2], [-3, -3, -3, 0, 0, 0]])
    assert torch.equal(found.mask_NT, MASK_NT.bool())
    assert found.metrics["process/steps"].item() == 2.0  # three and one
    assert found.metrics["process/step_reward"].item() == 2.0  # (1 + 4 + 2 + 1) / 4
    assert found.metrics["advantage_abs"].item() == pytest.approx((16 / 6 + 3) / 2)
    assert found.metrics["frac_reward_zero_std"].item() == 0.0


def test_without_the_outcome_the_steps_alone_count_and_the_tokens_behind_them_carry_nothing() -> None:
    found = process_weights(
        MASK_NT,
        MASK_NT,
        torch.tensor([4.0, 0.0]),
        GROUP_N,
        step_ends_NS=ENDS_NS,
        step_rewards_NS=REWARDS_NS,
        outcome="none",
    )
    assert torch.equal(found.weights_NT, process_advantages(MASK_NT, ENDS_NS, REWARDS_NS, GROUP_N))
    assert found.mask_NT[0, 5] and found.weights_NT[0, 5] == 0


@pytest.mark.parametrize("outcome", ["last_step", "none"])
def test_a_row_without_a_reward_leaves_the_pool_the_weights_and_the_mask(outcome: str) -> None:
    rewards_N = torch.tensor([4.0, 0.0, NAN])
    mask_NT = torch.cat([MASK_NT, MASK_NT[:1]])
    found = process_weights(
        mask_NT,
        mask_NT,
        rewards_N,
        torch.zeros(3, dtype=torch.long),
        step_ends_NS=torch.cat([ENDS_NS, ENDS_NS[:1]]),
        step_rewards_NS=torch.cat([REWARDS_NS, torch.full((1, 3), 100.0)]),
        outcome=outcome,  # type: ignore[arg-type]
    )
    alone = process_weights(
        MASK_NT,
        MASK_NT,
        rewards_N[:2],
        GROUP_N,
        step_ends_NS=ENDS_NS,
        step_rewards_NS=REWARDS_NS,
        outcome=outcome,  # type: ignore[arg-type]
    )
    assert torch.equal(found.weights_NT[:2], alone.weights_NT)
    assert not found.weights_NT[2].any() and not found.mask_NT[2].any()
    assert found.metrics["process/steps"] == 2.0


def test_truncated_rows_and_uniform_groups_leave_the_denominator_when_asked() -> None:
    mask_NT = torch.ones(4, 2)
    arguments = (mask_NT, mask_NT, torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1]))
    steps = {
        "step_ends_NS": torch.zeros(4, 1, dtype=torch.long),
        "step_rewards_NS": torch.tensor([[1.0], [1.0], [1.0], [NAN]]),
    }
    truncated_N = torch.tensor([True, False, False, False])
    plain = process_weights(*arguments, **steps, truncated_N=truncated_N)  # type: ignore[arg-type]
    assert plain.mask_NT.all()
    masked = process_weights(*arguments, **steps, truncated_N=truncated_N, mask_truncated=True)  # type: ignore[arg-type]
    assert masked.mask_NT[:, 0].tolist() == [False, True, True, True]
    # The truncated row's steps stay in the pool.
    assert plain.weights_NT[0].any() and not masked.weights_NT[0].any()
    assert torch.equal(masked.weights_NT[1], plain.weights_NT[1])
    dropped = process_weights(*arguments, **steps, drop_uniform_groups=True)  # type: ignore[arg-type]
    assert dropped.mask_NT[:, 0].tolist() == [True, True, False, False]
    assert dropped.metrics["frac_reward_zero_std"].item() == 0.5


def test_one_step_at_the_last_token_of_every_row_is_grpo() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths_N = torch.tensor([3, 6, 1, 5, 4, 6, 2, 6])
    mask_NT = torch.arange(6) < lengths_N[:, None]
    rewards_N = torch.tensor([1.0, 0.1, 0.3, NAN, 2.0, 0.0, 5.0, 2.0])
    groups_N = torch.tensor([5, 2, 5, 5, 2, 5, 2, 2])
    ids_NT = torch.zeros(8, 6, dtype=torch.long)
    expected = outcome_weights(ids_NT, mask_NT, rewards_N, groups_N, normalise="std")
    as_steps = {"step_ends_NS": lengths_N[:, None] - 1, "step_rewards_NS": rewards_N[:, None]}
    no_steps = {"step_ends_NS": torch.zeros(8, 0, dtype=torch.long), "step_rewards_NS": torch.zeros(8, 0)}
    method, grpo = find_method("grpo_process"), find_method("grpo")
    logps_NT = torch.randn(8, 6, generator=generator)
    old_NT = logps_NT + 0.5 * torch.randn(8, 6, generator=generator)
    denominator = loss_denominator(expected.mask_NT)
    for form in ("sum", "min"):
        for steps, outcome in ((as_steps, "none"), (no_steps, "last_step")):
            of_weights, of_loss = method.split({"form": form, "outcome": outcome})
            found = method.weights(ids_NT, mask_NT, rewards_N, groups_N, **steps, **of_weights)
            torch.testing.assert_close(found.weights_NT, expected.weights_NT, atol=1e-7, rtol=0)
            assert torch.equal(found.mask_NT, expected.mask_NT)
            for name in ("advantage_abs", "frac_reward_zero_std"):
                torch.testing.assert_close(found.metrics[name], expected.metrics[name])
            assert of_loss == grpo.split({})[1]
            loss, _ = method.loss(logps_NT, old_NT, found.weights_NT, found.mask_NT, denominator=denominator, **of_loss)
            plain, _ = grpo.loss(
                logps_NT, old_NT, expected.weights_NT, expected.mask_NT, denominator=denominator, **grpo.split({})[1]
            )
            torch.testing.assert_close(loss, plain)


def test_what_the_trainer_supplies_is_no_setting() -> None:
    settings_of = set(find_method("grpo_process").settings())
    assert {"form", "outcome", "normalise", "mask_truncated", "drop_uniform_groups", "clip_low"} <= settings_of
    assert not {"step_ends_NS", "step_rewards_NS", "truncated_N"} & settings_of
