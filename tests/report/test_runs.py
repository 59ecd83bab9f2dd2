import json

import pytest

from trimtab.errors import InputError
from trimtab.report.runs import read_material, read_run, values_of


def test_runs_evaluations_and_tables_are_told_apart_and_what_is_named_twice_counts_once(
    write_run, write_evaluation, published
):
    run, evaluation = write_run("run"), write_evaluation()
    material = read_material([run, evaluation, published, run / ".." / "run"])
    assert [found.name for found in material.runs] == ["run"]
    assert [found.name for found in material.evaluations] == ["evaluation"]
    assert material.tables == [published]


def test_a_whole_run_has_no_notes_and_knows_its_seed_and_its_steps(write_run):
    run = read_run(write_run("run", {"seed": 3}, steps=4))
    assert (run.notes, run.seed, run.steps) == ((), 3, 4)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: None, "there is no such folder"),
        (lambda folder: folder.mkdir(), "this folder is empty"),
        (lambda folder: folder.write_text("x"), "this is a file"),
        (lambda folder: (folder.mkdir(), (folder / "notes.txt").touch()), "not the folder of a run"),
        (lambda folder: (folder.mkdir(), (folder / "config.yaml").touch()), "nothing has been measured yet"),
        (lambda folder: (folder.mkdir(), (folder / "metrics.jsonl").touch()), "no step has been measured yet"),
        (
            lambda folder: (folder.mkdir(), (folder / "a").mkdir(), (folder / "a" / "metrics.jsonl").touch()),
            "holds 1 runs; name them themselves",
        ),
        (
            lambda folder: (folder.mkdir(), (folder / "results.json").write_text('{"subjects": []}')),
            "holds no scores",
        ),
        (lambda folder: (folder.mkdir(), (folder / "results.json").write_text("{")), "not valid JSON"),
    ],
)
def test_a_path_that_is_no_run_is_refused_with_what_to_do_instead(tmp_path, make, said):
    make(tmp_path / "thing")
    with pytest.raises(InputError, match=said) as error:
        read_material([tmp_path / "thing"])
    assert "thing" in str(error.value) and "\n" not in str(error.value)


def test_a_torn_last_line_is_left_out_and_the_run_says_up_to_where_it_is_shown(write_run):
    folder = write_run("run", steps=4)
    metrics = folder / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-20])
    run = read_run(folder)
    assert run.steps == 3
    assert "not whole" in run.notes[0] and run.notes[0].endswith("Shown up to step 3.")


def test_a_damaged_line_in_the_middle_is_refused_with_its_number(write_run):
    folder = write_run("run")
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(lines[0] + "{oops\n" + "".join(lines[1:]))
    with pytest.raises(InputError, match=r"metrics\.jsonl: line 2"):
        read_run(folder)


def test_a_run_without_anything_but_metrics_is_read_and_says_what_it_lacks(write_run):
    run = read_run(write_run("run", drop=["config.yaml", "environment.json", "timings.jsonl"]))
    assert (run.config, run.timings, run.environment, run.findings, run.seed) == ({}, [], {}, None, None)
    assert [word in " ".join(run.notes) for word in ("timings.jsonl", "config.yaml")] == [True, True]


def test_a_watched_run_without_findings_is_told_from_one_that_nobody_watched(write_run):
    assert read_run(write_run("watched")).findings == []
    assert read_run(write_run("off", {"monitor.on_collapse": "off"})).findings is None


def test_lines_of_another_trainer_without_a_step_are_counted(tmp_path):
    folder = tmp_path / "foreign"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"reward": 1.0}\n{"reward": 2.0}\n')
    assert values_of(read_run(folder), "reward") == ([0, 1], [1.0, 2.0])


def test_values_that_are_missing_or_not_finite_are_no_points(write_run):
    folder = write_run("run", steps=1)
    lines = [{"step": 0, "kl": None}, {"step": 1}, {"step": 2, "kl": float("nan")}, {"step": 3, "kl": 0.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert values_of(read_run(folder), "kl") == ([3], [0.5])
