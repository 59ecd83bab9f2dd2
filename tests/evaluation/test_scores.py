import csv
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trimtab.errors import InputError
from trimtab.evaluation.scores import (
    HERE,
    PAPER,
    Score,
    collect_scores,
    load_scores,
    paper_scores,
    read_scores_csv,
    scores_csv,
    write_scores_csv,
)
from trimtab.tasks.named import NAMED_DATA

Evaluation = Callable[..., Path]

PUBLISHED: Any = {"value": 0.25, "low": None, "high": None, "interval": "", "note": ""}
"""What the paper's row has otherwise than one's own."""

SHIPPED = Path(__file__).parents[2] / "src" / "trimtab" / "data" / "gtpo-paper-table-1.csv"


def subject(
    method: str = "GTPO", seed: int | None = None, values: dict[str, float] | None = None, **changes: Any
) -> Any:
    """A record of results.json with pass@8 and its bootstrap interval on each data set."""
    return {
        "label": f"{method.lower()}-{seed}",
        "model": "Qwen2.5-3B-Instruct",
        "training": "GSM8K",
        "method": method,
        "seed": seed,
        "checkpoint": "final, step 300",
        "data": {
            data: {
                "problems": 30,
                "scores": [
                    {
                        "metric": "pass",
                        "k": 8,
                        "value": value,
                        "low": value - 0.1,
                        "high": value + 0.1,
                        "interval": "bootstrap over problems",
                    }
                ],
            }
            for data, value in (values or {"AIME 2024": 0.5}).items()
        },
        **changes,
    }


@pytest.fixture
def evaluation(tmp_path: Path) -> Evaluation:
    """Writes an evaluation's results: `evaluation(subject(...), ..., name="eval")`."""

    def write(*subjects: Any, name: str = "eval", level: float = 0.95) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        results = {"subjects": list(subjects), "comparisons": [], "level": level}
        (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
        return folder

    return write


def test_one_run_keeps_its_bootstrap_interval_and_says_how_its_checkpoint_was_chosen(evaluation: Evaluation) -> None:
    assert load_scores(evaluation(subject(seed=0, values={"AIME 2024": 0.5}))) == [
        Score(
            model="Qwen2.5-3B-Instruct",
            training="GSM8K",
            method="GTPO",
            data="AIME 2024",
            metric="pass",
            k=8,
            value=0.5,
            low=0.4,
            high=0.6,
            seeds=1,
            interval="bootstrap over problems, 95 %",
            source=HERE,
            note="final, step 300",
        )
    ]


def test_seeds_become_their_mean_with_a_student_t_interval(evaluation: Evaluation) -> None:
    runs = [subject(seed=seed, values={"AIME 2024": value}) for seed, value in enumerate((0.2, 0.3, 0.4))]
    [score] = load_scores(evaluation(*runs))
    # Standard deviation 0.1, and 4.302653 is the 97.5 % point of Student's t with 2 degrees of freedom.
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert score.value == pytest.approx(0.3)
    assert (score.low, score.high) == (pytest.approx(0.3 - half), pytest.approx(0.3 + half))
    assert (score.seeds, score.method, score.interval) == (3, "GTPO", "Student t over seeds, 95 %")


def test_seeds_of_several_folders_are_merged_at_the_evaluations_level(evaluation: Evaluation) -> None:
    folders = [
        evaluation(subject(seed=seed, values={"AIME 2024": value}), name=f"eval{seed}", level=0.5)
        for seed, value in enumerate((0.2, 0.4))
    ]
    [score] = load_scores(*folders)
    # With one degree of freedom the 75 % point is tan(pi / 4) = 1, and the standard error is 0.1.
    assert (score.low, score.high) == (pytest.approx(0.2), pytest.approx(0.4))
    assert score.interval == "Student t over seeds, 50 %"


def test_seeds_of_equal_value_have_no_interval_and_raise_no_alarm(evaluation: Evaluation) -> None:
    folder = evaluation(*(subject(seed=seed, values={"AIME 2024": 0.0}) for seed in range(3)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        [score] = load_scores(folder)
    assert (score.value, score.low, score.high, score.seeds, score.interval) == (0.0, None, None, 3, "")


def test_a_data_set_that_only_some_seeds_have_counts_only_those(evaluation: Evaluation) -> None:
    both, one = {"AIME 2024": 0.2, "AMC 2023": 0.6}, {"AIME 2024": 0.4}
    aime, amc = load_scores(evaluation(subject(seed=0, values=both), subject(seed=1, values=one)))
    assert (aime.data, aime.seeds) == ("AIME 2024", 2)
    assert (amc.data, amc.seeds, amc.value, amc.low) == ("AMC 2023", 1, 0.6, None)


def test_checkpoints_of_one_run_stay_apart_by_their_step(evaluation: Evaluation) -> None:
    runs = [
        subject(seed=seed, label=f"gtpo-{seed} step_{step}", checkpoint=f"step {step}")
        for seed in (0, 1)
        for step in (100, 200)
    ]
    scores = load_scores(evaluation(*runs))
    assert [(score.method, score.seeds) for score in scores] == [("GTPO (step 100)", 2), ("GTPO (step 200)", 2)]


def test_models_that_differ_by_their_label_alone_carry_it(evaluation: Evaluation) -> None:
    models = [subject(method="", label=label, checkpoint="") for label in ("served", "local")]
    assert [score.method for score in load_scores(evaluation(*models))] == ["(served)", "(local)"]


def test_notes_of_merged_seeds_are_kept_once_each(evaluation: Evaluation) -> None:
    chosen = ("selected, step 100", "selected, step 200", "selected, step 100")
    runs = [subject(seed=seed, checkpoint=words) for seed, words in enumerate(chosen)]
    [score] = load_scores(evaluation(*runs))
    assert score.note == "selected, step 100; selected, step 200"


def test_one_subject_in_two_folders_gains_the_other_data_sets(evaluation: Evaluation) -> None:
    first = evaluation(subject(seed=0, values={"AIME 2024": 0.2}), name="a")
    second = evaluation(subject(seed=0, values={"AMC 2023": 0.4}), name="b")
    scores = load_scores(first, second)
    assert [(score.method, score.data, score.value) for score in scores] == [
        ("GTPO", "AIME 2024", 0.2),
        ("GTPO", "AMC 2023", 0.4),
    ]


def test_one_thing_that_was_evaluated_twice_is_refused(evaluation: Evaluation) -> None:
    folders = [evaluation(subject(seed=0), name=name) for name in "ab"]
    with pytest.raises(InputError, match=r"b/results\.json: 'gtpo-0' on AIME 2024 is in another folder too; leave one"):
        load_scores(*folders)


@pytest.mark.parametrize("text", ["", "[]", '{"subjects": [{"label": "x"}]}', '{"subjects": 3}'])
def test_results_that_are_none_are_refused_with_their_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"results\.json: not the results of an evaluation"):
        load_scores(tmp_path)


def test_an_empty_folder_is_refused_with_what_should_be_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"results\.json: cannot be read .* name what `trimtab evaluate` wrote"):
        load_scores(tmp_path)


SCORES = [
    Score("Qwen", "GSM8K", 'GRPO, β = "0.04"', "AIME 2024", "pass", 8, 1 / 3, 0.1, 0.7, 3, "Student t", HERE, "a\nb"),
    Score("Qwen", "", "", "AMC 2023", "entropy", None, 1.25),
]


def test_scores_survive_a_csv_file(tmp_path: Path) -> None:
    write_scores_csv(tmp_path / "scores.csv", SCORES)
    assert read_scores_csv(tmp_path / "scores.csv") == SCORES


def test_a_csv_needs_few_columns_in_any_order_and_may_begin_with_comments_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    path.write_text(
        "\ufeff# a comment, with a comma\r\nvalue,k,metric,data,method,training,model\r\n0.5, 8 ,pass,AIME,GTPO,,Q\r\n",
        encoding="utf-8",
    )
    assert read_scores_csv(path) == [Score("Q", "", "GTPO", "AIME", "pass", 8, 0.5)]


def test_a_line_without_a_value_is_left_out(tmp_path: Path) -> None:
    write_scores_csv(tmp_path / "scores.csv", SCORES)
    text = (tmp_path / "scores.csv").read_text(encoding="utf-8").replace(",1.25,", ",,")
    (tmp_path / "scores.csv").write_text(text, encoding="utf-8")
    assert read_scores_csv(tmp_path / "scores.csv") == SCORES[:1]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("Q,,GTPO,AIME,pass,8,53.3", "line 3: value is '53.3'; write a share from 0 to 1, 0.533 for 53.3 %"),
        ("Q,,GTPO,AIME,pass,8,n/a", "line 3: value is 'n/a'; write a number, such as 0.533"),
        ("Q,,GTPO,AIME,pass,8,nan", "line 3: value is 'nan'; write a number, such as 0.533"),
        ("Q,,GTPO,AIME,pass,8.5,0.5", "line 3: k is '8.5'; write a whole number from 1"),
        ("Q,,GRPO, b = 0,AIME,pass,8,0.5", "line 3: more fields than columns; put quotes around a field"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(tmp_path: Path, line: str, sentence: str) -> None:
    path = tmp_path / "scores.csv"
    path.write_text(f"# comment\nmodel,training,method,data,metric,k,value\n{line}\n", encoding="utf-8")
    with pytest.raises(InputError) as refusal:
        read_scores_csv(path)
    assert f"scores.csv, {sentence}" in str(refusal.value)


def test_missing_columns_are_named(tmp_path: Path) -> None:
    (tmp_path / "scores.csv").write_text("model,value\nQ,0.5\n", encoding="utf-8")
    with pytest.raises(InputError, match="the columns training, method, data, metric are missing"):
        read_scores_csv(tmp_path / "scores.csv")


def test_the_papers_frame_fills_in_and_comes_to_stand_beside_an_evaluation(
    evaluation: Evaluation, tmp_path: Path
) -> None:
    lines = SHIPPED.read_text(encoding="utf-8").splitlines()
    copy = tmp_path / "paper.csv"
    copy.write_text("\n".join(line.replace(f',,"{PAPER}"', f',0.25,"{PAPER}"') for line in lines), encoding="utf-8")
    ours, *papers = collect_scores([evaluation(subject(seed=0)), copy])
    assert ours.source == HERE
    assert len(papers) == len(lines) - 2 and {score.source for score in papers} == {PAPER}
    alike = [paper for paper in papers if replace(paper, source=HERE, note="") == replace(ours, **PUBLISHED)]
    assert len(alike) == 1
    assert {paper.data for paper in papers} <= {named.title for named in NAMED_DATA.values()}


def test_the_papers_scores_are_those_that_its_file_has_values_for() -> None:
    with SHIPPED.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    assert len(rows) == 2 * 2 * 3 * 3 * (5 + 4)
    assert len(paper_scores()) == sum(bool(row["value"]) for row in rows)


def test_a_paper_without_numbers_is_refused_with_the_file_to_fill_in(evaluation: Evaluation) -> None:
    assert paper_scores() == [], "the numbers ship now: test that they come with --paper"
    with pytest.raises(InputError, match=r"--paper: .* do not ship .*gtpo-paper-table-1\.csv and name that file"):
        collect_scores([evaluation(subject())], paper=True)


def test_the_text_of_scores_begins_with_the_names_of_the_fields() -> None:
    assert scores_csv(SCORES[1:]) == (
        "model,training,method,data,metric,k,value,low,high,seeds,interval,source,note\n"
        "Qwen,,,AMC 2023,entropy,,1.25,,,1,,,\n"
    )
