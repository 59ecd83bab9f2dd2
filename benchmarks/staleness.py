"""How many updates a rollout bears: GRPO with its clip, GTPO, GVPO against the sampling policy and against the start.

    python benchmarks/staleness.py            # about an hour of one core; continues where it was
    python benchmarks/staleness.py --docs     # and rewrite docs/staleness.md and its picture

24 rollouts, the paper's rewards, learning rate 5e-5, gradient norm clipped at 1, 1 to 16 updates on each rollout,
3 seeds. More updates are also more training: what samples cost is held equal, what steps cost is not. What comes out is
shown whatever it is.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from studies import DOCS, Lines, Rows, largest, markdown, run_study, write_block

from trimtab.demo import Arm, collapsed, spread

METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo"},
    "gtpo": {"name": "gtpo"},
    "gvpo-rollout": {"name": "gvpo", "beta": 1.0, "reference": "rollout"},
    "gvpo-frozen": {"name": "gvpo", "beta": 1.0, "reference": "frozen"},
}
TITLES = {
    "grpo": "GRPO, clip 0.2",
    "gtpo": "GTPO",
    "gvpo-rollout": "GVPO, reference rollout",
    "gvpo-frozen": "GVPO, reference frozen",
}
UPDATES = (1, 2, 4, 8, 16)
STEPS = 24
COLUMNS = (
    *("method", "updates", "accuracy", "format", "entropy", "KL to the sampler", "clipped", "max weight"),
    "collapsed",
)


def change(arm: Arm, values: dict[str, Any]) -> None:
    """The configuration of one run."""
    values["method"] = METHODS[arm.method]
    values["training"]["updates_per_rollout"] = int(arm.pace)


def table_rows(runs: dict[Arm, Lines]) -> Rows:
    """A row for each method and number of updates: mean over seeds and range, of a run's end or its largest value."""
    rows: Rows = []
    for method in METHODS:
        for updates in UPDATES:
            arms = [arm for arm in runs if (arm.method, arm.pace) == (method, str(updates))]
            lines = [runs[arm] for arm in arms]
            last = [own[-1] for own in lines]
            stale = updates > 1
            rows.append(
                (
                    TITLES[method],
                    str(updates),
                    spread([line["eval/accuracy"] for line in last]),
                    spread([line["eval/format"] for line in last]),
                    spread([line["eval/entropy"] for line in last]),
                    spread(largest(lines, "kl_old"), 4) if stale else "–",
                    spread(largest(lines, "clip_ratio")) if stale and method == "grpo" else "–",
                    spread(largest(lines, "gvpo/weight_max"), 1) if method.startswith("gvpo") else "–",
                    f"{sum(map(collapsed, lines))} of {len(arms)}",
                )
            )
    return rows


def draw(runs: dict[Arm, Lines]) -> None:
    """Accuracy and entropy against the number of updates, the seeds as a band."""
    from trimtab.report.charts import chart_grid, curve_chart, save_chart

    charts = []
    for key, title in (("eval/accuracy", "Held-out accuracy"), ("eval/entropy", "Entropy, nats a token")):
        series = []
        for method in METHODS:
            for seed in sorted({arm.seed for arm in runs}):
                own = {int(arm.pace): runs[arm][-1][key] for arm in runs if (arm.method, arm.seed) == (method, seed)}
                series.append((TITLES[method], seed, sorted(own), [own[x] for x in sorted(own)]))
        charts.append(curve_chart(series, title=title, x_title="updates per rollout", y_title=""))
    save_chart(chart_grid([charts]), DOCS / "images" / "staleness.svg")


def main() -> None:
    """Run what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/staleness"), help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3, help="seeds a row")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--docs", action="store_true", help="rewrite the page and the picture")
    options = parser.parse_args()
    arms = [Arm(method, str(u), seed) for seed in range(options.seeds) for u in UPDATES for method in METHODS]
    runs = run_study(arms, change, options.output, steps=STEPS, workers=options.workers)
    table = markdown(COLUMNS, table_rows(runs))
    print(table)
    if options.docs:
        write_block("staleness.md", "staleness", table)
        draw(runs)


if __name__ == "__main__":
    main()
