"""Pivotal token search against the truth: a language model that is a table, whose success probabilities are exact.

    python benchmarks/pivotal_tabular.py            # five seeds of 100 questions, a few minutes of one core
    python benchmarks/pivotal_tabular.py --quick    # two seeds of 20 questions

The same completions are searched by trimtab and by the fixed-N search of the Phi-4 report (N rollouts for every prefix,
segments cut in the middle, a token emitted when its two estimates differ by the gap). A token is pivotal when its exact
change is at least the gap of 0.2, and a false one when it is below half of it. Recall is over all pivotal tokens of the
completions, false rate and precision over what was emitted.

Decoded tokens are those that were sampled. Prefilled tokens of the fixed-N search are counted twice: `each row` runs
prompt and prefix anew for every rollout (transformers' generate), `each call` once for every prefix.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from trimtab.pivotal import SearchSettings, search
from trimtab.pivotal.policy import Request
from trimtab.pivotal.tabular import TabularPolicy, make_table
from trimtab.pivotal.trajectory import Question, Trajectory
from trimtab.seeds import derive_seed

GAP = 0.2
Places = set[tuple[int, int]]
"""(trajectory, position)"""


@dataclass(frozen=True)
class Score:
    """One method on one seed."""

    precision: float
    recall: float
    false_rate: float
    true_positives: int
    decoded: int
    prefilled: int
    prefilled_each_row: int
    prefilled_each_call: int
    seconds: float


def fixed_search(policy: TabularPolicy, trajectory: Trajectory, number: int, rollouts: int, seed: int) -> Places:
    """The report's search with a fixed number of rollouts."""
    question, ids = trajectory.question, trajectory.token_ids
    table = policy.tables[question.prompt_ids[0]]
    rates: dict[int, float] = {len(ids): float(trajectory.success)}

    def rate(position: int) -> float:
        if position not in rates:
            draw = derive_seed(seed, "fixed", number, position)
            rows = policy.sample_rows(Request(question.prompt_ids, ids[:position], None, 0, rollouts, draw))
            ends = np.full(rollouts, table.states(ids[:position])[-1])
            for t in range(rows.shape[1]):
                ends = table.next_TSV[position + t][ends, rows[:, t]]
            rates[position] = float(table.success_S[ends].mean())
        return rates[position]

    found: Places = set()

    def subdivide(start: int, end: int) -> None:
        if abs(rate(end) - rate(start)) < GAP:
            return
        if end == start + 1:
            found.add((number, start))
            return
        middle = (start + end) // 2
        subdivide(start, middle)
        subdivide(middle, end)

    subdivide(0, len(ids))
    return found


def adaptive_search(
    policy: TabularPolicy, trajectories: list[Trajectory], settings: SearchSettings, rows_at_once: int = 4096
) -> Places:
    """trimtab's search."""
    numbers = {(t.question.id, t.token_ids): number for number, t in enumerate(trajectories)}
    result = search(policy, [], policy.judge, settings=settings, trajectories=trajectories, rows_at_once=rows_at_once)
    return {(numbers[token.question_id, token.trajectory_ids], token.position) for token in result.tokens}


def make_problems(seed: int, questions: int) -> tuple[TabularPolicy, list[Trajectory]]:
    """Questions and one sampled completion of each."""
    policy = TabularPolicy([make_table(derive_seed(seed, "question", n)) for n in range(questions)])
    trajectories = []
    for n, table in enumerate(policy.tables):
        ids = tuple(policy.sample_rows(Request((n,), (), None, 0, 1, derive_seed(seed, "trajectory", n)))[0].tolist())
        question = Question(f"{n:04d}", str(n), (n,))
        trajectories.append(Trajectory(question, ids, bool(table.success_rates(ids)[-1]), -1))
    return policy, trajectories


def measure(seed: int, questions: int, method: Callable[[TabularPolicy, list[Trajectory]], Places]) -> Score:
    """One method on one seed's questions."""
    policy, trajectories = make_problems(seed, questions)
    changes: dict[tuple[int, int], float] = {}
    for number, trajectory in enumerate(trajectories):
        rates = policy.tables[number].success_rates(trajectory.token_ids)
        changes |= {(number, k): abs(b - a) for k, (a, b) in enumerate(pairwise(rates))}
    policy = TabularPolicy(policy.tables)
    started = time.perf_counter()
    found = method(policy, trajectories)
    seconds = time.perf_counter() - started
    pivotal = {place for place, change in changes.items() if change >= GAP}
    true = len(found & pivotal)
    false = sum(changes[place] < GAP / 2 for place in found)
    return Score(
        precision=true / max(1, len(found)),
        recall=true / len(pivotal),
        false_rate=false / max(1, len(found)),
        true_positives=true,
        decoded=policy.decoded_tokens,
        prefilled=policy.prefilled_tokens,
        prefilled_each_row=policy.prefilled_each_row,
        prefilled_each_call=policy.prefilled_each_call,
        seconds=seconds,
    )


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half width of Student's 95 % interval over seeds."""
    from scipy.stats import t

    if len(values) < 2:
        return values[0], float("nan")
    half = t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    return float(np.mean(values)), float(half)


def methods() -> dict[str, Callable[[int], Callable[[TabularPolicy, list[Trajectory]], Places]]]:
    """What is compared; each takes a seed."""

    def fixed(rollouts: int) -> Callable[[int], Callable[[TabularPolicy, list[Trajectory]], Places]]:
        def on_seed(seed: int) -> Callable[[TabularPolicy, list[Trajectory]], Places]:
            def run(policy: TabularPolicy, trajectories: list[Trajectory]) -> Places:
                return set().union(
                    *(fixed_search(policy, t, number, rollouts, seed) for number, t in enumerate(trajectories))
                )

            return run

        return on_seed

    def adaptive(seed: int) -> Callable[[TabularPolicy, list[Trajectory]], Places]:
        return lambda policy, trajectories: adaptive_search(policy, trajectories, SearchSettings(gap=GAP, seed=seed))

    return {**{f"fixed N = {n}": fixed(n) for n in (10, 50, 100)}, "trimtab": adaptive}


def main() -> None:
    """Print the table and whether the target is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two seeds of 20 questions")
    parser.add_argument("--seeds", type=int, help="seeds (default 5; quick: 2)")
    parser.add_argument("--questions", type=int, help="questions a seed (default 100; quick: 20)")
    options = parser.parse_args()
    seeds = options.seeds or (2 if options.quick else 5)
    questions = options.questions or (20 if options.quick else 100)
    means: dict[str, dict[str, float]] = {}
    recalls: dict[str, list[float]] = {}
    print(
        "| method | precision | recall | false rate | decoded a true positive | prefilled a true positive | seconds |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, method in methods().items():
        scores = [measure(seed, questions, method(seed)) for seed in range(seeds)]
        # A fixed search keeps no keys and values between calls.
        own = "prefilled" if name == "trimtab" else "prefilled_each_row"
        columns = {
            "precision": [score.precision for score in scores],
            "recall": [score.recall for score in scores],
            "false": [score.false_rate for score in scores],
            "decoded": [score.decoded / max(1, score.true_positives) for score in scores],
            "prefilled": [getattr(score, own) / max(1, score.true_positives) for score in scores],
            "prefilled_each_call": [score.prefilled_each_call / max(1, score.true_positives) for score in scores],
            "decoded_all": [float(score.decoded) for score in scores],
            "prefilled_all": [float(getattr(score, own)) for score in scores],
            "prefilled_each_call_all": [float(score.prefilled_each_call) for score in scores],
        }
        recalls[name] = columns["recall"]
        summary = {key: interval(values) for key, values in columns.items()}
        means[name] = {key: value for key, (value, _) in summary.items()}
        rates = " | ".join("{:.3f} ± {:.3f}".format(*summary[key]) for key in ("precision", "recall", "false"))
        decoded = "{:,.0f} ± {:,.0f}".format(*summary["decoded"])
        prefilled = "{:,.0f} ± {:,.0f}".format(*summary["prefilled"])
        if name != "trimtab":
            prefilled += f" ({means[name]['prefilled_each_call']:,.0f} each call)"
        seconds = sum(score.seconds for score in scores) / len(scores)
        print(f"| {name} | {rates} | {decoded} | {prefilled} | {seconds:.1f} |", flush=True)
    ours, theirs = means["trimtab"], means["fixed N = 50"]
    print(
        f"\nagainst N = 50: decoded {ours['decoded_all'] / theirs['decoded_all']:.1%} in all, "
        f"{ours['decoded'] / theirs['decoded']:.1%} a true positive; prefilled "
        f"{ours['prefilled_all'] / theirs['prefilled_all']:.2%} of each row, "
        f"{ours['prefilled_all'] / theirs['prefilled_each_call_all']:.1%} of each call"
    )
    differences = [a - b for a, b in zip(recalls["trimtab"], recalls["fixed N = 50"], strict=True)]
    print("recall minus that of N = 50, by seed: {:+.3f} ± {:.3f}".format(*interval(differences)))
    met = (
        ours["false"] <= 0.02
        and ours["recall"] >= theirs["recall"]
        and ours["decoded_all"] <= 0.6 * theirs["decoded_all"]
        and ours["prefilled_all"] <= 0.02 * theirs["prefilled_all"]
    )
    print(
        "target (false rate <= 2 %, recall of N = 50, 60 % of its decoded and 2 % of its prefilled tokens): "
        + ("met" if met else "missed")
    )


if __name__ == "__main__":
    main()
