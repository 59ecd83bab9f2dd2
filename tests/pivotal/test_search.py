import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab.errors import InputError, RunError
from trimtab.pivotal import SearchSettings, search, write_records
from trimtab.pivotal.policy import Request
from trimtab.pivotal.tabular import Table, TabularPolicy, make_table
from trimtab.pivotal.trajectory import Question

QUICK = SearchSettings(trajectories=1, seed=3)


def problems(count: int = 6, seed: int = 0, positions: int = 20) -> tuple[TabularPolicy, list[Question]]:
    tables = [make_table(100 * seed + n, positions=positions, decisions=4) for n in range(count)]
    return TabularPolicy(tables), [Question(f"q{n}", str(n), (n,)) for n in range(count)]


def planted() -> Table:
    """Ten positions, of which only the fifth decides: token 0 (probability 0.5) leads to success."""
    probabilities = np.tile(np.array([0.7, 0.2, 0.1]), (10, 3, 1))
    probabilities[4] = [0.5, 0.3, 0.2]
    following = np.broadcast_to(np.arange(3)[None, :, None], (10, 3, 3)).copy()
    following[4] = [1, 2, 2]
    return Table(probabilities, following, np.array([False, True, False]))


def test_the_one_token_that_decides_is_found_with_its_exact_rates(tmp_path: Path) -> None:
    policy = TabularPolicy([planted()])
    result = search(policy, [Question("q", "0", (0,))], policy.judge, settings=replace(QUICK, trajectories=2))
    assert result.finished and result.kept == 1 and result.trajectories == 2
    assert [token.position for token in result.tokens] == [4, 4]
    for token in result.tokens:
        # Exactly: from 0.5 to 1 by the right token, to 0 by a wrong one.
        assert token.delta_low - 0.05 <= (0.5 if token.success else -0.5) <= token.delta_high + 0.05
        assert token.after.rate == float(token.success)
        instead = (1 - token.probability) * token.instead.rate
        assert token.before == pytest.approx(token.probability * token.after.rate + instead)
        assert token.q_value <= 0.05 and token.delta_low <= token.delta <= token.delta_high
        assert token.prefix_ids == token.trajectory_ids[:4] and token.token_id == token.trajectory_ids[4]
    write_records(tmp_path / "tokens.jsonl", result.tokens)
    lines = [json.loads(line) for line in (tmp_path / "tokens.jsonl").read_text().splitlines()]
    assert [line["prefix_ids"] for line in lines] == [list(token.prefix_ids) for token in result.tokens]
    assert all(line["after"]["trials"] >= 16 and line["written"].startswith("20") for line in lines)


def test_most_pivotal_tokens_are_found_and_hardly_a_false_one() -> None:
    policy, questions = problems(40, seed=1)
    result = search(policy, questions, policy.judge, settings=QUICK)
    found, true, false = 0, 0, 0
    searched = {(token.question_id, token.trajectory_ids) for token in result.tokens}
    for token in result.tokens:
        rates = policy.tables[token.prompt_ids[0]].success_rates(token.trajectory_ids)
        change = rates[token.position + 1] - rates[token.position]
        found += 1
        false += abs(change) < 0.1
        assert np.sign(change) == np.sign(token.delta)
    pivotal = 0
    for question_id, ids in searched:
        rates = policy.tables[int(question_id[1:])].success_rates(ids)
        pivotal += sum(abs(b - a) >= 0.2 for a, b in pairwise(rates))
        mine = {token.position for token in result.tokens if token.question_id == question_id}
        true += sum(abs(rates[k + 1] - rates[k]) >= 0.2 for k in mine)
    assert found >= 20
    assert false <= 1
    assert true >= 0.7 * pivotal


def test_nothing_is_found_where_nothing_decides() -> None:
    random = np.random.default_rng(0)
    tables = []
    for _ in range(15):
        # Success is a coin thrown at the last position alone, with 40 %: no token before it matters.
        probabilities = random.dirichlet([3, 1, 1], (12, 2))
        following = np.zeros((12, 2, 3), dtype=int)
        probabilities[-1], following[-1] = [0.15, 0.25, 0.6], [1, 1, 0]
        tables.append(Table(probabilities, following, np.array([False, True])))
    policy = TabularPolicy(tables)
    questions = [Question(f"q{n}", str(n), (n,)) for n in range(15)]
    result = search(policy, questions, policy.judge, settings=QUICK)
    assert result.kept >= 12
    assert {token.position for token in result.tokens} <= {11}


def test_questions_that_are_too_easy_or_too_hard_are_left_out_after_few_rollouts() -> None:
    table = planted()
    easy = replace(table, success_S=np.array([True, True, True]))
    hard = replace(table, success_S=np.array([False, False, False]))
    policy = TabularPolicy([easy, table, hard])
    questions = [Question(f"q{n}", str(n), (n,)) for n in range(3)]
    result = search(policy, questions, policy.judge, settings=QUICK)
    assert (result.questions, result.kept) == (3, 1)
    assert {token.question_id for token in result.tokens} == {"q1"}


def test_a_second_search_is_free_and_the_same(tmp_path: Path) -> None:
    policy, questions = problems()
    first = search(policy, questions, policy.judge, settings=QUICK, folder=tmp_path)
    again = TabularPolicy(policy.tables)
    second = search(again, questions, again.judge, settings=QUICK, folder=tmp_path)
    assert first.tokens and second.tokens == first.tokens
    assert (second.usage.rollouts, second.usage.decoded_tokens, second.usage.prefilled_tokens) == (0, 0, 0)
    assert again.decoded_tokens == 0
    # A wider search pays for what is new alone.
    wider = search(again, questions, again.judge, settings=replace(QUICK, cap=96, close=0.01), folder=tmp_path)
    fresh = search(policy, questions, policy.judge, settings=replace(QUICK, cap=96, close=0.01))
    assert wider.tokens == fresh.tokens
    assert 0 < wider.usage.rollouts < fresh.usage.rollouts


class Killed(TabularPolicy):
    """Dies in the n-th call."""

    def __init__(self, tables: list[Table], calls: int) -> None:
        super().__init__(tables)
        self.left = calls

    def sample(self, requests: Any) -> Any:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return super().sample(requests)


def test_a_search_killed_again_and_again_equals_an_unbroken_one_and_pays_no_rollout_twice(tmp_path: Path) -> None:
    policy, questions = problems()
    whole = search(policy, questions, policy.judge, settings=QUICK, rows_at_once=40)
    paid = 0
    for calls in (1, 2, 5, 9, 17, 4, 1000):
        killed = Killed(policy.tables, calls)
        try:
            result = search(killed, questions, policy.judge, settings=QUICK, folder=tmp_path, rows_at_once=40)
        except KeyboardInterrupt:
            with next(tmp_path.glob("*.jsonl")).open("a") as file:
                file.write('{"question": "torn')
        paid += killed.decoded_tokens
    assert result.tokens == whole.tokens and whole.tokens
    assert paid == whole.usage.decoded_tokens == policy.decoded_tokens


def test_neither_the_order_of_the_questions_nor_the_size_of_a_batch_changes_the_result() -> None:
    policy, questions = problems()
    results = [
        search(policy, order, policy.judge, settings=QUICK, rows_at_once=rows)
        for order, rows in ((questions, 256), (questions[::-1], 256), (questions, 7))
    ]
    assert results[0].tokens and all(result.tokens == results[0].tokens for result in results)
    assert len({result.usage.rollouts for result in results}) == 1


def test_other_seeds_draw_other_rollouts() -> None:
    policy, questions = problems()
    one, two = (search(policy, questions, policy.judge, settings=replace(QUICK, seed=seed)) for seed in (0, 1))
    assert one.usage.decoded_tokens != two.usage.decoded_tokens


def test_a_budget_ends_the_search_with_what_was_found_and_the_rest_can_follow(tmp_path: Path) -> None:
    policy, questions = problems()
    whole = search(policy, questions, policy.judge, settings=QUICK)
    limit = int(0.8 * whole.usage.decoded_tokens)
    part = search(policy, questions, policy.judge, settings=QUICK, folder=tmp_path, max_tokens=limit, rows_at_once=16)
    assert not part.finished
    assert limit <= part.usage.decoded_tokens <= limit + 16 * 20
    assert {(t.question_id, t.position) for t in part.tokens} <= {(t.question_id, t.position) for t in whole.tokens}
    assert part.tokens
    rest = search(policy, questions, policy.judge, settings=QUICK, folder=tmp_path)
    assert rest.finished and rest.tokens == whole.tokens
    assert part.usage.decoded_tokens + rest.usage.decoded_tokens == whole.usage.decoded_tokens


def test_no_seconds_means_nothing_is_sampled() -> None:
    policy, questions = problems(2)
    result = search(policy, questions, policy.judge, settings=QUICK, max_seconds=0.0)
    assert not result.finished and result.tokens == [] and policy.decoded_tokens == 0


def test_progress_is_told_after_every_batch() -> None:
    policy, questions = problems(2)
    seen: list[tuple[int, int]] = []
    search(
        policy,
        questions,
        policy.judge,
        settings=QUICK,
        on_round=lambda state, usage: seen.append((state.resolved, usage.rollouts)),
    )
    assert len(seen) > 3 and seen == sorted(seen) and seen[-1][0] > 0


def test_rollouts_of_another_policy_seed_or_oracle_are_kept_apart(tmp_path: Path) -> None:
    policy, questions = problems(2)
    search(policy, questions, policy.judge, settings=QUICK, folder=tmp_path)
    policy.identity = {**policy.identity, "temperature": 0.5}
    result = search(policy, questions, policy.judge, settings=QUICK, folder=tmp_path)
    assert result.usage.rollouts > 0
    assert len(list(tmp_path.glob("rollouts-*.jsonl"))) == 2


def test_a_damaged_memo_is_named(tmp_path: Path) -> None:
    policy, questions = problems(1)
    search(policy, questions, policy.judge, settings=QUICK, folder=tmp_path)
    path = next(tmp_path.glob("*.jsonl"))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + "{broken\n" + "".join(lines[1:]))
    with pytest.raises(InputError, match=r"rollouts-.*line 2 .*remove the file"):
        search(policy, questions, policy.judge, settings=QUICK, folder=tmp_path)


def test_an_oracle_that_fails_is_told_and_costs_nothing_that_was_judged(tmp_path: Path) -> None:
    policy, questions = problems(2)
    calls = 0

    def fragile(**columns: Any) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise ZeroDivisionError("no")
        return policy.judge(**columns)

    with pytest.raises(RunError, match="the oracle failed"):
        search(policy, questions, fragile, settings=QUICK, folder=tmp_path)
    rest = search(policy, questions, fragile, settings=QUICK, folder=tmp_path)
    whole = search(policy, questions, policy.judge, settings=QUICK)
    # The key of the rollouts on disk names the oracle, and these are two.
    assert [replace(token, search_key="") for token in rest.tokens] == [
        replace(token, search_key="") for token in whole.tokens
    ]
    assert 0 < rest.usage.rollouts < whole.usage.rollouts


@pytest.mark.parametrize(
    ("change", "words"),
    [({"gap": 0.0}, "gap"), ({"split": "half"}, "split"), ({"start": 99}, "start"), ({"confirm": (8, 4)}, "confirm")],
)
def test_a_setting_that_makes_no_sense_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        replace(QUICK, **change)


def test_no_questions_or_one_without_tokens_is_refused() -> None:
    policy = TabularPolicy([planted()])
    with pytest.raises(InputError, match="no questions"):
        search(policy, [], policy.judge)
    with pytest.raises(InputError, match="question q"):
        search(policy, [Question("q", "", ())], policy.judge)


def test_exact_rates_of_a_table_equal_the_share_of_many_samples() -> None:
    policy, _ = problems(1)
    rows = policy.sample_rows(Request((0,), (), None, 0, 20_000, 5)).tolist()
    share = np.mean(policy.judge(["0"] * len(rows), rows))
    assert share == pytest.approx(policy.tables[0].rates_TS[0, 0], abs=0.015)
