"""Outcome against process rewards: GRPO with 0 or 1 for the answer, and with a reward for every equation before it.

    python benchmarks/process_rewards.py            # about 10 minutes of one core; continues where it was
    python benchmarks/process_rewards.py --docs     # and rewrite the table in docs/methods/grpo_process.md

48 rollouts, learning rate 5e-5, gradient norm clipped at 1, one update a rollout, 3 seeds. The rule-based scorer gives
1 to an equation that holds and 0 to another; the answer (0 or 1) is the last step. What comes out is shown whatever it
is.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from studies import Lines, Rows, markdown, run_study, write_block

from trimtab.demo import Arm, collapsed, spread

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "outcome": ("GRPO, outcome alone", {"method": "grpo"}),
    "sum": ("steps and outcome, sum", {"method": {"name": "grpo_process", "form": "sum"}}),
    "min": ("steps and outcome, min", {"method": {"name": "grpo_process", "form": "min"}}),
    "steps": ("steps alone, sum", {"method": {"name": "grpo_process", "form": "sum", "outcome": "none"}}),
}
STEPS = 48
COLUMNS = (
    "rewards",
    "accuracy",
    "pass@4",
    "format",
    "entropy",
    "tokens",
    "equations that hold",
    "collapsed",
)


def change(arm: Arm, values: dict[str, Any]) -> None:
    """The configuration of one run."""
    values |= SETTINGS[arm.method][1]
    values["rewards"] = "binary"
    if arm.method != "outcome":
        values["process"] = {"scorer": "arithmetic"}


def table_rows(runs: dict[Arm, Lines]) -> Rows:
    """The warm start, then a row for each setting: mean over seeds and range, after the last step."""
    measured = ("eval/accuracy", "eval/pass@4", "eval/format", "eval/entropy", "eval/mean_length")
    first = [runs[arm][0] for arm in runs if arm.method == "outcome"]
    rows: Rows = [("warm start", *(spread([line[key] for line in first]) for key in measured), "–", "–")]
    for name, (title, _) in SETTINGS.items():
        arms = [arm for arm in runs if arm.method == name]
        last = [runs[arm][-1] for arm in arms]
        steps = [line.get("process/step_reward") for line in last]
        rows.append(
            (
                title,
                *(spread([line[key] for line in last]) for key in measured),
                "–" if None in steps else spread([float(value) for value in steps if value is not None]),
                f"{sum(collapsed(runs[arm]) for arm in arms)} of {len(arms)}",
            )
        )
    return rows


def main() -> None:
    """Run what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/process_rewards"), help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3, help="seeds a row")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--docs", action="store_true", help="rewrite the table")
    options = parser.parse_args()
    arms = [Arm(name, "48", seed) for seed in range(options.seeds) for name in SETTINGS]
    runs = run_study(arms, change, options.output, steps=STEPS, workers=options.workers)
    table = markdown(COLUMNS, table_rows(runs))
    print(table)
    if options.docs:
        write_block("methods/grpo_process.md", "outcome against process", table)


if __name__ == "__main__":
    main()
