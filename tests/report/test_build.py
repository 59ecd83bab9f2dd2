import json
import re

import pytest

from trimtab.errors import InputError
from trimtab.report import curves
from trimtab.report.arms import arms_of
from trimtab.report.build import note_sections, report_tabs, runs_section, write_report
from trimtab.report.cost import cost_sections, count_text, seconds_text
from trimtab.report.curves import curve_sections, findings_section, thinned
from trimtab.report.runs import read_run

FINDING = {"step": 3, "onset": 2, "signal": "entropy", "message": "entropy left its band at step 2 (0.4 -> 0.6)"}


def arms(*folders):
    return arms_of([read_run(folder) for folder in folders])


def titles(sections):
    return [chart.to_dict()["title"]["text"] for section in sections for chart in section.charts]


def text(cell):
    return cell if isinstance(cell, str) else f"{cell.text}|{cell.note}"


def test_what_was_measured_has_a_curve_and_what_was_not_has_none(write_run):
    extra = {
        "kl": 0.1,
        "gtpo/kept_fraction": 0.9,
        "rewards/accuracy/mean": 5.0,
        "eval/pass@1": 0.5,
        "eval/pass@16": 0.9,
    }
    found = titles(curve_sections(arms(write_run("run", extra={**extra, "clip_ratio": 0.0, "loss": 0.1}))))
    assert "Held-out pass@16" in found and "Held-out pass@1" not in found  # pass@1 is the accuracy
    for title in (
        "Held-out accuracy",
        "Reward",
        "Reward: format",
        "Reward: accuracy",
        "Entropy",
        "KL to the reference",
    ):
        assert found.count(title) == 1
    for title in ("Length", "Gradient norm", "Kept completions", "Pushed down, plain advantages"):
        assert title in found
    # Nothing was ever clipped, and a policy gradient's loss measures nothing.
    assert "Clipped tokens" not in found and "Loss" not in found


def test_runs_with_different_metrics_and_steps_share_charts_and_keep_their_colours(write_run):
    runs = arms(write_run("a", steps=2), write_run("b", {"method": {"name": "grpo"}}, steps=4, extra={"kl": 0.1}))
    sections = curve_sections(runs)
    kl = next(chart for section in sections for chart in section.charts if "KL" in str(chart.title))
    values = kl.to_dict()["data"]["values"]
    assert {point["label"] for point in values} == {"GRPO, steps 4"}
    assert kl.to_dict()["layer"][0]["encoding"]["color"]["scale"]["domain"] == ["GTPO, steps 2", "GRPO, steps 4"]
    assert [entry.label for entry in sections[0].legend] == ["GTPO, steps 2", "GRPO, steps 4"]
    assert "different numbers of steps, from 2 to 4" in note_sections(runs)[0].paragraphs[0]


def test_a_supervised_run_shows_its_loss(write_run):
    folder = write_run("sft", {"method": {"name": "sft"}})
    lines = [{"step": step, "loss": 2.0 - step} for step in range(3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert titles(curve_sections(arms(folder))) == ["Loss"]


def test_findings_are_a_table_and_marks_on_the_curve_of_their_signal(write_run):
    collapse = {"step": 4, "onset": 4, "signal": "reward", "message": "reward lost", "collapse": True}
    sections = curve_sections(arms(write_run("a", findings=[collapse, FINDING]), write_run("b", {"seed": 1})))
    rows = [[text(cell) for cell in row] for row in sections[1].table.rows]
    assert rows == [
        ["GTPO", "0", "3", "2", "notice", FINDING["message"]],
        ["GTPO", "0", "4", "4", "collapse|", "reward lost"],
    ]
    charts = {chart.to_dict()["title"]["text"]: chart.to_dict() for section in sections for chart in section.charts}
    mark = charts["Entropy"]["layer"][3]["data"]["values"]
    assert mark == [{"label": "GTPO", "x": 2, "text": f"seed 0: {FINDING['message']}"}]
    assert len(charts["Length"]["layer"]) == 3


def test_no_finding_is_told_from_no_monitor(write_run):
    quiet, off = write_run("quiet"), write_run("off", {"seed": 1, "monitor.on_collapse": "off"})
    assert findings_section(arms(quiet)).paragraphs == ["Nothing left its band in the runs that were watched."]
    assert findings_section(arms(off)).paragraphs == ["No collapse monitor watched these runs."]
    assert findings_section(arms(quiet, off)).paragraphs[0] == "Not watched: off."


def test_a_long_line_is_thinned_to_means_and_keeps_its_ends(monkeypatch):
    monkeypatch.setattr(curves, "MOST_POINTS", 3)
    assert thinned([0, 1, 2, 3, 4, 5, 6], [9, 1, 2, 3, 4, 5, 6]) == ([0, 3, 6], [9, 2, 5])
    assert thinned([0, 1, 2], [9, 1, 2]) == ([0, 1, 2], [9, 1, 2])


def test_the_overview_holds_first_and_last_values_over_seeds(write_run):
    (row,) = runs_section(arms(write_run("a"), write_run("b", {"seed": 1}))).table.rows
    assert [text(cell) for cell in row] == [
        "GTPO|a and 1 more",
        "2",
        "4",
        "0.500 → 0.590|0.540 – 0.640",
        "11.50 → 14.50|14.00 – 15.00",
        "0|",
        "8 s",
    ]


def test_the_cost_of_a_run_is_its_time_tokens_memory_and_machine(write_run):
    training, environment = cost_sections(arms(write_run("a"), write_run("b", {"seed": 1}, drop=["timings.jsonl"])), [])
    rows = training.table.rows
    # 4 steps x 40 tokens x 8 completions; step 0 is an evaluation.
    assert rows[0] == (
        *("GTPO", "0", "4", "4 s", "2 s", "0.5 s", "1.3 k", "704 MiB"),
        "x86_64, 2 cores, 1 thread",
    )
    assert rows[1][3:8] == ("–", "–", "–", "1.3 k", "–")
    assert environment.table.columns == ["", "all of them"]
    assert ["torch", "2.13.0"] in environment.table.rows


def test_runs_on_different_machines_have_a_column_each(write_run):
    one, other = write_run("one"), write_run("other", {"seed": 1})
    path = other / "environment.json"
    path.write_text(json.dumps({"machine": {"gpus": ["NVIDIA H200"] * 2}, "versions": {"torch": "2.8.0"}}))
    training, environment = cost_sections(arms(one, other), [])
    assert [row[-1] for row in training.table.rows] == ["x86_64, 2 cores, 1 thread", "2 x NVIDIA H200"]
    assert environment.table.columns == ["", "one", "other"]
    assert ["torch", "2.13.0", "2.8.0"] in environment.table.rows


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.478, "0.48 s"), (9.96, "10 s"), (58.4, "58 s"), (182, "3 min 2 s"), (3900, "1 h 5 min")]
)
def test_durations_read_as_people_write_them(seconds, said):
    assert seconds_text(seconds) == said


def test_large_counts_are_short():
    assert [count_text(count) for count in (812, 49_152, 3_100_000)] == ["812", "49.2 k", "3.1 M"]


def test_there_are_tabs_for_what_is_there_and_no_others(write_run, write_evaluation, published, tmp_path):
    run = write_run("run")
    assert [tab.name for tab in report_tabs(arms(run))] == ["Overview", "Curves", "Cost"]
    sample = {"step": 1, "group": 0, "prompt": "1 + 1 =", "completion": "2", "tokens": ["2"], "token_ids": [7]}
    sampled = write_run("sampled", samples=[{**sample, "reward": 1.0}, {**sample, "reward": 0.0}])
    assert "Groups" in [tab.name for tab in report_tabs(arms(sampled))]
    # Examples of supervised fine-tuning are no groups.
    examples = write_run("examples", samples=[{"step": 1, "prompt": "1 + 1 =", "completion": "2"}])
    assert "Groups" not in [tab.name for tab in report_tabs(arms(examples))]


def test_a_run_whose_method_is_not_at_hand_is_shown_without_its_groups(write_run):
    sample = {"step": 1, "group": 0, "prompt": "1 + 1 =", "completion": "2", "reward": 1.0}
    run = write_run("run", {"method": {"name": "no_such_module:method"}}, samples=[sample])
    (groups,) = [tab for tab in report_tabs(arms(run)) if tab.name == "Groups"]
    assert groups.sections[0].html == ""
    assert re.match(r"Not shown: .*no_such_module", groups.sections[0].paragraphs[0])


def test_a_run_whose_method_cannot_weigh_a_group_is_shown_without_its_groups(write_run, monkeypatch):
    def refuse(group):
        raise InputError("distill cannot weigh the group")

    monkeypatch.setattr("trimtab.report.build.weigh_group", refuse)
    sample = {"step": 1, "group": 0, "prompt": "1 + 1 =", "completion": "2", "tokens": ["2"], "token_ids": [7]}
    run = write_run("run", samples=[{**sample, "reward": 1.0}, {**sample, "reward": 0.0}])
    (groups,) = [tab for tab in report_tabs(arms(run)) if tab.name == "Groups"]
    assert groups.sections[0].paragraphs == ["Not shown: distill cannot weigh the group"]


def test_the_command_writes_one_page_from_any_mix(command, write_run, write_evaluation, published, tmp_path):
    page = tmp_path / "new" / "page.html"
    done = command("report", write_run("run"), write_evaluation(), published, "-o", page)
    assert (done.code, done.out) == (0, f"written: {page}\n")
    html = page.read_text(encoding="utf-8")
    assert "<h1>GTPO and GRPO</h1>" in html and "1 training run, 1 evaluation, 1 table" in html


def test_the_command_ends_with_one_sentence_and_code_2_when_a_folder_is_empty(command, tmp_path):
    (tmp_path / "empty").mkdir()
    done = command("report", tmp_path / "empty", "-o", tmp_path / "page.html")
    assert done.code == 2 and "this folder is empty" in done.err and len(done.err.splitlines()) == 1
    assert not (tmp_path / "page.html").exists()


def test_text_of_a_run_cannot_become_markup(write_run, tmp_path):
    nasty = "</script><img src=x onerror=alert(1)>"
    write_report([write_run("run", findings=[{**FINDING, "message": nasty}])], tmp_path / "page.html")
    body = (tmp_path / "page.html").read_text(encoding="utf-8").split("<body>")[-1]
    assert "&lt;img src=x" in body and "<img" not in body


def test_a_page_that_cannot_be_written_is_an_input_error(write_run, tmp_path):
    with pytest.raises(InputError, match="this is a folder"):
        write_report([write_run("run")], tmp_path)
