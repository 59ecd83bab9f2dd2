"""How many updates a rollout bears: GRPO with its clip, GTPO, GVPO against the sampling policy and against the start.

    python benchmarks/staleness.py --output runs/staleness            # about an hour of one core; continues where it
    was python benchmarks/staleness.py --output runs/staleness --docs     # rewrite docs/staleness.md and its picture
    from it

Every run is an ordinary `trimtab train` from the embedded warm start: 24 rollouts of 8 prompts x 8 completions, the
paper's rewards, learning rate 5e-5, gradient norm clipped at 1, 1 to 16 updates on each rollout, 3 seeds. So more
updates also are more training, at equal rollouts: what samples cost is held equal, what steps cost is not. What comes
out is shown whatever it is.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import yaml

from trimtab.demo import Arm, arm_config, collapsed, run_arms, spread
from trimtab.files import read_lines

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
DOCS = Path(__file__).resolve().parent.parent / "docs"
BLOCK = re.compile(r"(<!-- staleness -->\n).*?(<!-- end of staleness -->)", re.DOTALL)
COLUMNS = (
    *("method", "updates", "accuracy", "format", "entropy", "KL to the sampler", "clipped", "max abs. weight"),
    *("collapsed", "seconds"),
)


def write_config(arm: Arm, folder: Path) -> Path:
    """The configuration of one run, without another one's file being touched."""
    values = arm_config(Arm("gtpo", "healthy", arm.seed), folder, STEPS)
    values["method"] = METHODS[arm.method]
    values["training"]["updates_per_rollout"] = int(arm.pace)
    values["evaluation"]["every"] = STEPS
    values |= {"log": {"samples": 0, "samples_every": STEPS}, "output": str(folder / arm.name)}
    values["checkpoint"] = {"every": STEPS, "keep": 1}
    path = folder / f"{arm.name}.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return path


def table_rows(runs: dict[Arm, list[dict[str, Any]]], seconds: dict[Arm, float]) -> list[tuple[str, ...]]:
    """A row for each method and number of updates: mean over seeds and range."""
    rows: list[tuple[str, ...]] = []
    for method in METHODS:
        for updates in UPDATES:
            arms = [arm for arm in runs if (arm.method, arm.pace) == (method, str(updates))]
            if not arms:
                continue
            last = [runs[arm][-1] for arm in arms]

            def of(key: str, arms: list[Arm] = arms) -> list[float]:
                """The largest value of a run, for each seed."""
                return [
                    max((line[key] for line in runs[arm][1:] if line.get(key) is not None), default=0.0) for arm in arms
                ]

            rows.append(
                (
                    TITLES[method],
                    str(updates),
                    spread([line["eval/accuracy"] for line in last]),
                    spread([line["eval/format"] for line in last]),
                    spread([line["eval/entropy"] for line in last]),
                    spread(of("kl_old"), 4) if updates > 1 else "–",
                    spread(of("clip_ratio")) if method == "grpo" and updates > 1 else "–",
                    spread(of("gvpo/weight_max"), 1) if method.startswith("gvpo") else "–",
                    f"{sum(collapsed(runs[arm]) for arm in arms)} of {len(arms)}",
                    spread([seconds[arm] for arm in arms], 0),
                )
            )
    return rows


def markdown(rows: list[tuple[str, ...]]) -> str:
    """The rows as a Markdown table."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def write_docs(rows: list[tuple[str, ...]], runs: dict[Arm, list[dict[str, Any]]]) -> None:
    """Put the table into docs/staleness.md and draw its picture."""
    import altair as alt

    from trimtab.report.charts import curve_chart, save_chart

    page = DOCS / "staleness.md"
    table = markdown(rows)
    page.write_text(BLOCK.sub(lambda m: f"{m[1]}{table}{m[2]}", page.read_text(encoding="utf-8")), encoding="utf-8")
    charts = []
    for key, title in (("eval/accuracy", "Held-out accuracy"), ("eval/entropy", "Entropy, nats a token")):
        series = []
        for method in METHODS:
            for seed in sorted({arm.seed for arm in runs}):
                own = {int(arm.pace): runs[arm][-1][key] for arm in runs if (arm.method, arm.seed) == (method, seed)}
                series.append((TITLES[method], seed, sorted(own), [own[x] for x in sorted(own)]))
        charts.append(curve_chart(series, title=title, x_title="updates per rollout", y_title=""))
    save_chart(alt.vconcat(*charts) if len(charts) > 1 else charts[0], DOCS / "images" / "staleness.svg")


def main() -> None:
    """Run what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/staleness"), help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3, help="seeds a row")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--docs", action="store_true", help="rewrite the page and the picture")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    arms = [Arm(m, str(u), seed) for seed in range(options.seeds) for u in UPDATES for m in METHODS]
    configs = {arm: write_config(arm, options.output) for arm in arms}
    run_arms(configs, steps=STEPS, workers=options.workers)
    runs = {arm: read_lines(options.output / arm.name / "metrics.jsonl") for arm in arms}
    timings = {arm: read_lines(options.output / arm.name / "timings.jsonl") for arm in arms}
    seconds = {arm: sum(line["seconds"] for line in lines[1:]) for arm, lines in timings.items()}
    rows = table_rows(runs, seconds)
    print(markdown(rows))
    if options.docs:
        write_docs(rows, runs)


if __name__ == "__main__":
    main()
