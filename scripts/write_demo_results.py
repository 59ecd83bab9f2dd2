"""Turn the runs of `make demo` into the README's picture and table: nothing in either is typed by hand.

make demo
.venv/bin/python scripts/write_demo_results.py runs/demo
"""

import argparse
import re
from pathlib import Path

from trimtab.demo import COLUMNS, arms_of, demo_charts, table_rows
from trimtab.files import read_lines
from trimtab.report.charts import chart_grid, save_chart

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

    charts = demo_charts(lines, SHOWN)
    (ROOT / "docs" / "images").mkdir(exist_ok=True)
    save_chart(chart_grid([charts[:2], charts[2:]]), ROOT / "docs" / "images" / "demo.svg")

    table = [f"| {' | '.join(row)} |" for row in (COLUMNS, ["---"] * len(COLUMNS), *table_rows(lines, timings))]
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(BLOCK.sub(lambda block: block[1] + "\n".join(table) + "\n" + block[2], text), encoding="utf-8")


if __name__ == "__main__":
    main()
