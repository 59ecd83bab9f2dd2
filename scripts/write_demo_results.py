"""Turn the runs of `make demo` into the README's picture and table: nothing in either is typed by hand.

make demo
.venv/bin/python scripts/write_demo_results.py runs/demo
"""

import argparse
import re
from pathlib import Path

import altair

from trimtab.demo import COLUMNS, arms_of, demo_charts, table_rows
from trimtab.files import read_lines
from trimtab.report.charts import save_chart

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- demo -->\n).*?(<!-- end of demo -->)", re.DOTALL)
SHOWN = ("Held-out accuracy", "Entropy", "Pushed down, plain advantages", "Pushed down, the method's weights")


def main() -> None:
    """Write docs/images/demo.svg and the block between the README's markers."""
    parser = argparse.ArgumentParser(description="Write the README's picture and table from a demo's runs.")
    parser.add_argument("folder", type=Path, help="folder of a finished demo")
    folder = parser.parse_args().folder
    lines = {arm: read_lines(folder / arm.name / "metrics.jsonl") for arm in arms_of(folder)}
    timings = {arm: read_lines(folder / arm.name / "timings.jsonl") for arm in lines}

    charts = [chart.properties(width=340, height=190) for chart in demo_charts(lines, SHOWN)]
    style = charts[0].config
    for chart in charts:
        chart.config = chart.background = altair.Undefined  # a part of a grid may have no style of its own
    grid = altair.vconcat(altair.hconcat(*charts[:2]), altair.hconcat(*charts[2:]), config=style, background="white")
    (ROOT / "docs" / "images").mkdir(exist_ok=True)
    save_chart(grid, ROOT / "docs" / "images" / "demo.svg")

    table = [f"| {' | '.join(row)} |" for row in (COLUMNS, ["---"] * len(COLUMNS), *table_rows(lines, timings))]
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(BLOCK.sub(lambda block: block[1] + "\n".join(table) + "\n" + block[2], text), encoding="utf-8")


if __name__ == "__main__":
    main()
