"""The detector on series made by hand; what a run does about a collapse is in test_rollback.py."""

import json
import math
from typing import Any

import numpy as np
import pytest

from trimtab.training.monitor import EFFECT, HARMONIC, Finding, Monitor, Signal, find_change, log_evidence, replay

STEPS = 80


def noise(seed: int = 0, steps: int = STEPS) -> Any:
    return np.random.default_rng(seed).standard_normal(steps)


def healthy(seed: int = 0, steps: int = STEPS) -> dict[str, Any]:
    """A run that learns: reward and format rise, entropy falls, completions grow, the KL leaves zero."""
    way = np.linspace(0, 1, steps)
    return {
        "entropy": (0.5 - 0.25 * way) * np.exp(0.03 * noise(seed, steps)),
        "completions/mean_length": (50 + 20 * way) * np.exp(0.08 * noise(seed + 1, steps)),
        "grad_norm": 0.3 * np.exp(0.3 * noise(seed + 2, steps)),
        "kl": 0.04 * way * np.exp(0.1 * noise(seed + 3, steps)),
        "reward": 14 + 2 * way + noise(seed + 4, steps),
        "rewards/format/mean": np.minimum(10, 8 + 4 * way + 0.3 * noise(seed + 5, steps)),
        "rewards/accuracy/mean": 5 + 2 * way + noise(seed + 6, steps),
    }


def lines(columns: dict[str, Any]) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl, from step 1."""
    steps = len(next(iter(columns.values())))
    return [{"step": i + 1, **{name: float(values[i]) for name, values in columns.items()}} for i in range(steps)]


def changed(name: str, step: int, factor: float, *, until: int = STEPS) -> list[Finding]:
    """The findings of a healthy run in which one metric is multiplied from a step on."""
    columns = healthy()
    columns[name][step - 1 : until] *= factor
    return replay(lines(columns))


@pytest.mark.parametrize("seed", range(0, 50, 10))
def test_progress_is_no_finding(seed: int) -> None:
    assert replay(lines(healthy(seed))) == []


@pytest.mark.parametrize(
    ("name", "factor", "direction", "says"),
    [
        ("entropy", 1.6, "up", "entropy left its band at step 41 ("),
        ("entropy", 0.05, "down", "entropy left its band at step 41 ("),
        ("completions/mean_length", 3.0, "up", "completions/mean_length rose at step 41 ("),
        ("completions/mean_length", 0.2, "down", "completions/mean_length fell at step 41 ("),
        ("grad_norm", 6.0, "up", "grad_norm rose at step 41 ("),
        ("kl", 20.0, "up", "kl rose at step 41 ("),
        ("reward", 0.5, "down", "reward fell at step 41 ("),
        ("rewards/format/mean", 0.7, "down", "rewards/format/mean fell at step 41 ("),
        ("rewards/accuracy/mean", 0.2, "down", "rewards/accuracy/mean fell at step 41 ("),
    ],
)
def test_a_change_for_the_worse_is_found_within_twelve_steps_and_dated(
    name: str, factor: float, direction: str, says: str
) -> None:
    first = changed(name, 41, factor)[0]
    assert (first.signal, first.direction, first.onset, first.collapse) == (name, direction, 41, False)
    assert first.message.startswith(says)
    assert 41 <= first.step <= 53
    assert (first.after > first.before) == (direction == "up")


def test_a_finding_names_the_levels_before_and_after() -> None:
    values = np.concatenate([np.full(30, 10.0), np.full(10, 4.0)]) + 0.1 * noise(0, 40)
    finding = replay(lines({"reward": values}))[0]
    assert (finding.before, finding.after) == (pytest.approx(10, abs=0.1), pytest.approx(4, abs=0.2))
    assert finding.message == "reward fell at step 31 (9.99 -> 3.94)"


@pytest.mark.parametrize("name", ["entropy", "grad_norm", "reward", "completions/mean_length"])
def test_one_step_out_of_line_is_no_finding(name: str) -> None:
    for factor in (0.1, 10.0):
        assert changed(name, 41, factor, until=41) == []


def test_a_change_that_is_certain_but_small_is_no_finding() -> None:
    values = np.where(np.arange(STEPS) < 40, 10.0, 9.5) + 0.01 * noise()
    assert replay(lines({"reward": values})) == []


def test_a_format_reward_that_never_varied_may_slip_once() -> None:
    values = np.full(STEPS, 10.0)
    values[[30, 50, 51]] = 9.84
    assert replay(lines({"rewards/format/mean": values})) == []


def test_what_was_learnt_late_is_missed_when_it_is_lost() -> None:
    # Above its first level all the time, far below what it had reached.
    values = np.concatenate([np.full(40, 2.0), np.full(40, 8.0), np.full(20, 4.0)]) + 0.2 * noise(0, 100)
    first = replay(lines({"reward": values}))[0]
    assert (first.onset, first.before) == (81, pytest.approx(8, abs=0.2))


def test_a_signal_can_fall_twice() -> None:
    values = np.concatenate([np.full(30, 10.0), np.full(30, 8.5), np.full(30, 7.0)]) + 0.1 * noise(0, 90)
    assert [f.onset for f in replay(lines({"rewards/x/mean": values}))] == [31, 61]


def test_values_that_are_missing_or_not_finite_are_passed_over() -> None:
    rows = lines(healthy())
    gaps = [{k: v for k, v in row.items() if k == "step" or (row["step"] + len(k)) % 3} for row in rows]
    assert replay(gaps) == []
    monitor = Monitor()
    assert monitor.observe(1, {"entropy": None, "reward": math.nan, "grad_norm": 0.0, "kl": math.inf}) == []
    assert not any(series.values for series in monitor.series.values())


def test_evaluations_that_come_rarely_are_watched_too() -> None:
    rows = lines(healthy(steps=200))
    for place, row in enumerate(rows):
        if place % 10 == 0:
            row["eval/accuracy"] = (0.6 if place < 120 else 0.3) + 0.005 * (place // 10 % 3)
    found = replay(rows)
    assert [(f.signal, f.onset, f.collapse) for f in found] == [
        ("eval/accuracy", 121, False),
        ("eval/accuracy", 121, True),
    ]


def test_collapse_is_a_reward_that_fell_by_a_third_and_stayed_down() -> None:
    found = [f for f in changed("reward", 41, 0.5) if f.collapse]
    assert [(f.signal, f.onset) for f in found] == [("reward", 41)]
    assert 50 <= found[0].step <= 53
    assert found[0].message.startswith("collapse: reward fell at step 41 and stayed down (")
    # A quarter is a finding, but not yet a collapse; neither is what has come back.
    assert [f.collapse for f in changed("reward", 41, 0.75)] == [False]
    assert not any(f.collapse for f in changed("reward", 41, 0.5, until=46))


def test_nothing_but_a_lost_reward_is_a_collapse() -> None:
    for name, factor in (("entropy", 1.6), ("grad_norm", 6.0), ("completions/mean_length", 3.0)):
        assert not any(f.collapse for f in changed(name, 41, factor))
    # One part given up while the whole keeps rising is a trade.
    assert [f.signal for f in changed("rewards/accuracy/mean", 41, 0.2)] == ["rewards/accuracy/mean"]


def test_a_finding_stays_open_until_its_signal_is_back_or_it_led_to_nothing() -> None:
    def onsets(columns: dict[str, Any]) -> list[int | None]:
        monitor, seen = Monitor(), []
        for line in lines(columns):
            monitor.observe(line["step"], line)
            seen.append(monitor.onset)
        return seen

    back = np.where((np.arange(120) >= 40) & (np.arange(120) < 70), 0.8, 0.4) * np.exp(0.03 * noise(0, 120))
    seen = onsets({"entropy": back})
    assert seen[39] is None and seen[60] == 41 and seen[90] is None
    seen = onsets({"entropy": np.where(np.arange(320) < 40, 0.4, 0.8) * np.exp(0.03 * noise(0, 320))})
    assert seen[200] == 41 and seen[-1] is None


def test_the_onset_is_that_of_the_earliest_open_finding() -> None:
    columns = healthy()
    columns["entropy"] = np.where(np.arange(STEPS) < 29, 0.4, 0.8) * np.exp(0.03 * noise())
    columns["reward"][44:] *= 0.4
    monitor = Monitor()
    for line in lines(columns):
        monitor.observe(line["step"], line)
    assert monitor.onset == 30
    assert monitor.collapse is not None and monitor.collapse.signal == "reward"


def test_the_evidence_is_the_bayes_factor_of_the_t_test() -> None:
    from scipy import integrate, stats

    values, k = np.array([1.0, 0.2, 0.7, 0.4, 1.9, 2.6, 1.4]), 4
    evidence, shift = log_evidence(values, 0.0)
    t = stats.ttest_ind(values[k:], values[:k]).statistic
    freedom, pairs = len(values) - 2, k * (len(values) - k) / len(values)

    def weighed(delta: float) -> float:
        return float(stats.nct.pdf(t, freedom, delta * math.sqrt(pairs)) * stats.norm.pdf(delta, scale=EFFECT))

    factor = integrate.quad(weighed, -8 * EFFECT, 8 * EFFECT, limit=200)[0] / stats.t.pdf(t, freedom)
    assert evidence[k - 1] + math.log(k * HARMONIC) == pytest.approx(math.log(factor), rel=1e-4)
    assert shift[k - 1] == pytest.approx(values[k:].mean() - values[:k].mean())


def test_noise_around_one_level_exceeds_the_bound_no_more_often_than_stated() -> None:
    generator, alarms, probability = np.random.default_rng(1), 0, 0.2
    for _ in range(200):
        values = generator.standard_normal(60)
        alarms += any(find_change(values[:n], math.log(1 / probability), Signal(size=0.0), 0.0) for n in range(6, 61))
    assert 0 < alarms <= 200 * probability


def test_values_that_follow_their_neighbours_count_for_less() -> None:
    generator, alarms = np.random.default_rng(2), 0
    for _ in range(60):
        values = generator.standard_normal(100)
        for place in range(1, 100):
            values[place] = 0.5 * values[place - 1] + math.sqrt(0.75) * values[place]
        alarms += bool(replay(lines({"reward": values})))
    assert alarms <= 4


def test_what_is_found_depends_on_the_lines_alone() -> None:
    columns = healthy()
    columns["reward"][40:] *= 0.5
    rows = lines(columns)
    whole = replay(rows)
    again = Monitor()
    for line in json.loads(json.dumps(rows[:45])):
        again.observe(line["step"], line)
    late = [f for line in rows[45:] for f in again.observe(line["step"], line)]
    assert late == [f for f in whole if f.step > 45]


def test_the_log_of_another_trainer_is_read_as_it_is() -> None:
    columns = healthy()
    columns["rewards/format_reward/mean"] = columns.pop("rewards/format/mean")
    columns["rewards/format_reward/mean"][40:] *= 0.5
    columns["rewards/format_reward/std"] = noise()
    log = [{**row, "epoch": 0.1, "frac_reward_zero_std": 0.0} for row in lines(columns)]
    found = replay([*log, {"train_runtime": 12.0}])
    assert [(f.signal, f.onset) for f in found] == [("rewards/format_reward/mean", 41)]


def test_a_long_run_is_judged_by_its_last_hundreds_of_steps() -> None:
    values = 10 + 0.3 * noise(0, 1500)
    values[1400:] *= 0.8
    monitor = Monitor()
    found = [f for line in lines({"reward": values}) for f in monitor.observe(line["step"], line)]
    assert [f.onset for f in found] == [1401]
    assert len(monitor.series["reward"].steps) < 512
