import json
import re
from pathlib import Path
from typing import Any

import pytest

from trimtab import demo
from trimtab.config_file import parse_config
from trimtab.demo import Arm
from trimtab.errors import InputError, RunError


def line(step: int, **values: float) -> dict[str, Any]:
    evaluation = {"eval/accuracy": 0.5, "eval/pass@4": 0.8, "eval/format": 1.0, "eval/entropy": 0.4}
    pushed = {"pushed_down/before": 0.0, "pushed_down/after": 0.0, "pushed_down/active_groups": 0.0}
    named = {key.replace("__", "/"): value for key, value in values.items()}
    return {"step": step, **evaluation, **pushed, **named}


def test_every_arm_is_a_valid_configuration_and_only_method_rate_and_seed_differ(tmp_path: Path) -> None:
    arms = [Arm(method, pace, seed) for method in demo.METHODS for pace in demo.RATES for seed in (0, 1)]
    configs = [demo.arm_config(arm, tmp_path, 10) for arm in arms]
    for config in configs:
        parse_config(config)
        config["method"] = config["seed"] = config["output"] = config["optimizer"]["learning_rate"] = None
    assert all(config == configs[0] for config in configs)


@pytest.mark.parametrize(
    ("accuracy", "form", "expected"), [(0.25, 1.0, False), (0.24, 1.0, True), (0.5, 0.5, False), (0.5, 0.49, True)]
)
def test_a_run_has_collapsed_below_half_of_its_first_accuracy_or_half_of_the_format(
    accuracy: float, form: float, expected: bool
) -> None:
    assert demo.collapsed([line(0), line(9, **{"eval/accuracy": accuracy, "eval/format": form})]) is expected


def test_the_share_pushed_down_counts_groups_not_steps() -> None:
    # 1 of 2 groups, then 6 of 6: 7 of 8, whatever the untouched model's line says. The mean of the shares would be 3/4.
    lines = [
        line(0, pushed_down__before=1.0, pushed_down__active_groups=5.0),
        line(1, pushed_down__before=0.5, pushed_down__active_groups=2.0),
        line(2, pushed_down__before=1.0, pushed_down__active_groups=6.0),
    ]
    assert demo.pushed_share(lines, "before") == 0.875
    assert demo.pushed_share(lines, "after") == 0.0
    assert demo.pushed_share([line(0), line(1)], "before") == 0.0


def test_the_table_holds_the_warm_start_then_means_with_the_range_over_seeds() -> None:
    lines = {Arm("gtpo", "healthy", seed): [line(0), line(4, **{"eval/accuracy": 0.1 + seed})] for seed in (0, 1)}
    timings = {
        arm: [{"step": 0, "seconds": 99.0}, {"step": 4, "seconds": 3.0, "peak_memory_mib": 7.0}] for arm in lines
    }
    start, row = demo.table_rows(lines, timings)
    assert start[:3] == ("warm start", "0.500 (0.500–0.500)", "0.800 (0.800–0.800)")
    assert row[:2] == ("GTPO, healthy", "0.600 (0.100–1.100)")
    assert row[-3:] == ("1 of 2", "3 (3–3)", "7 (7–7)")
    assert len(start) == len(row) == len(demo.COLUMNS)


def test_the_printed_table_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    arms = [Arm(m, pace, seed) for m in demo.METHODS for pace in demo.RATES for seed in (0, 1, 2)]
    lines = {arm: [line(0), line(4)] for arm in arms}
    timings = {arm: [{"step": 4, "seconds": 123.0, "peak_memory_mib": 1234.0}] * 2 for arm in arms}
    demo.print_table(demo.table_rows(lines, timings))
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert printed.count("0.500–0.500") == 5
    for word in ("accuracy", "pass@4", "collapsed", "0 of 3", "1234", "aggressive"):
        assert word in printed


def test_the_demo_runs_from_the_embedded_model_to_a_page_and_does_not_repeat_finished_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "HELD_OUT", 4)
    demo.run_demo(tmp_path, seeds=1, steps=1, workers=2)
    printed = capsys.readouterr().out
    assert "GTPO" in printed and "index.html" in printed
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "Held-out accuracy" in page and "GRPO, aggressive" in page
    # It is a report of the runs, with the demo's own table in front.
    assert re.findall(r'role="tab" id="tab-(\w+)"', page) == ["overview", "curves", "groups", "cost"]
    assert page.index("What came out") < page.index("Pushed down, plain advantages")
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/metrics.jsonl")}
    assert len(written) == 4
    first = json.loads((tmp_path / "gtpo-healthy-seed0" / "metrics.jsonl").read_text().splitlines()[0])
    assert 0.0 < first["initial_entropy"] < 1.0

    demo.run_demo(tmp_path, seeds=1, steps=1, workers=2)
    assert {path: path.stat().st_mtime_ns for path in written} == written
    with pytest.raises(InputError, match="holds a demo with other settings"):
        demo.run_demo(tmp_path, seeds=1, steps=2, workers=2)


def test_a_run_that_fails_ends_the_demo_with_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MODEL", "builtin:no-such-model")
    with pytest.raises(RunError, match=r"failed with exit code 2: .*builtin:no-such-model"):
        demo.run_demo(tmp_path, seeds=1, steps=1, workers=1)
