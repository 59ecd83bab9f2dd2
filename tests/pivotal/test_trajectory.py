import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.pivotal.memo import Outcome
from trimtab.pivotal.policy import Request
from trimtab.pivotal.statistics import Counts
from trimtab.pivotal.tabular import TabularPolicy, make_table
from trimtab.pivotal.trajectory import Question, Trajectory


def make_trajectory(seed: int, positions: int = 12) -> tuple[TabularPolicy, Trajectory]:
    policy = TabularPolicy([make_table(seed, positions=positions, decisions=3)])
    ids = tuple(policy.sample_rows(Request((0,), (), None, 0, 1, seed))[0].tolist())
    trajectory = Trajectory(Question("q", "0", (0,)), ids, bool(policy.tables[0].success_rates(ids)[-1]), -1)
    trajectory.logps = policy.score([((0,), ids)])[0]
    return policy, trajectory


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000))
def test_no_segment_changes_the_rate_by_more_than_the_chance_to_leave_it(seed: int) -> None:
    policy, trajectory = make_trajectory(seed)
    rates = policy.tables[0].success_rates(trajectory.token_ids)
    for start in range(12):
        for end in range(start + 1, 13):
            assert abs(rates[end] - rates[start]) <= 1 - trajectory.stay(start, end) + 1e-9


def test_the_two_disjoint_rates_give_the_exact_change_of_a_segment() -> None:
    policy, t = make_trajectory(3)
    rates = policy.tables[0].success_rates(t.token_ids)
    rows = policy.sample([Request((0,), (), None, 0, 40_000, 1)])[0]
    judged = policy.judge(["0"] * len(rows), [row.token_ids for row in rows])
    t.take(t.key(0), [Outcome(row.token_ids, value > 0.5, False) for row, value in zip(rows, judged, strict=True)])
    after, apart = t.rate(3), t.rate_apart(0, 3)
    assert after.trials + apart.trials == 40_000
    assert after.trials / 40_000 == pytest.approx(t.stay(0, 3), abs=0.02)
    change = (1 - t.stay(0, 3)) * (after.mean - apart.mean)
    assert change == pytest.approx(rates[3] - rates[0], abs=0.02)


def test_a_rollout_counts_wherever_it_still_follows_the_trajectory() -> None:
    t = Trajectory(Question("q", "0", (0,)), (5, 6, 7, 8), True, number=1)
    outcomes = [Outcome((5, 6, 9), True, False), Outcome((5, 6, 7, 8), True, False), Outcome((4,), False, False)]
    t.take(t.key(0), outcomes)
    t.take(t.key(2), [Outcome((7, 1), False, False)])
    # The second rollout is the trajectory itself, which was chosen for its outcome.
    assert [t.rate(k) for k in range(4)] == [Counts(1, 2), Counts(1, 1), Counts(1, 2), Counts(0, 1)]
    assert t.rate(4) == Counts(1, 1, exact=True)
    assert t.rate_apart(0, 1) == Counts(0, 1)
    assert t.rate_apart(0, 3) == Counts(1, 2)
    assert t.rate_apart(2, 4) == Counts(1, 2)


def test_rollouts_that_must_avoid_the_token_say_nothing_of_the_prefix_before_it() -> None:
    t = Trajectory(Question("q", "0", (0,)), (5, 6, 7), True, number=-1)
    t.take(t.key(1, banned=True), [Outcome((2,), True, False), Outcome((3,), False, False)])
    assert t.rate(1) == Counts(0, 0)
    assert t.rate_apart(1, 2) == Counts(1, 2)
    assert t.rate_apart(1, 3) == Counts(0, 0)


def test_taking_more_rollouts_of_a_key_counts_only_the_new_ones() -> None:
    t = Trajectory(Question("q", "0", (0,)), (5, 6), True, number=-1)
    outcomes = [Outcome((5, 9), True, False), Outcome((4,), False, False)]
    t.take(t.key(0), outcomes[:1])
    t.take(t.key(0), outcomes)
    t.take(t.key(0), outcomes)
    assert t.rate(0) == Counts(1, 2)


@given(st.lists(st.floats(-6, -0.001), min_size=2, max_size=20))
def test_a_cut_leaves_at_least_half_of_the_surprisal_before_it_and_no_half_empty(logps: list[float]) -> None:
    t = Trajectory(Question("q", "0", (0,)), tuple(range(len(logps))), True, -1)
    t.logps = logps
    cut = t.split(0, len(logps), "logprob")
    assert 0 < cut < len(logps)
    half = np.sum(logps) / 2
    assert np.sum(logps[: cut - 1]) >= half - 1e-9 or cut == 1
    assert np.sum(logps[:cut]) <= half + 1e-9 or cut == len(logps) - 1
    assert t.split(0, len(logps), "middle") == len(logps) // 2
