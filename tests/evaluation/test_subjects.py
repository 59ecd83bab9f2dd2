from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trimtab.config_file import parse_config_as
from trimtab.errors import InputError
from trimtab.evaluation.config import EvaluateConfig
from trimtab.evaluation.subjects import Subject, find_subjects

MakeRun = Callable[..., Path]


def subjects(*models: Any, **more: Any) -> list[Subject]:
    values = {"models": list(models), "data": [{"source": "rows.jsonl"}], "output": "out", **more}
    return find_subjects(parse_config_as(EvaluateConfig, values))


def test_a_model_is_called_by_the_last_part_of_its_name() -> None:
    (found,) = subjects({"model": "Qwen/Qwen2.5-3B-Instruct"})
    assert (found.label, found.base, found.method, found.training) == ("Qwen2.5-3B-Instruct",) * 2 + ("", "")
    assert found.model is not None and found.model.name == "Qwen/Qwen2.5-3B-Instruct"


def test_an_endpoint_is_called_by_the_servers_name_of_the_model() -> None:
    (found,) = subjects({"endpoint": {"url": "http://localhost:1", "model": "org/big"}})
    assert (found.label, found.model) == ("big", None)


def test_a_run_brings_its_method_seed_data_and_final_checkpoint(make_run: MakeRun) -> None:
    run = make_run("mine", steps=[2, 10, 4], seed=7, method="dr_grpo")
    (found,) = subjects({"run": str(run)})
    assert (found.label, found.method, found.training, found.seed) == ("mine", "Dr. GRPO", "arithmetic", 7)
    assert found.checkpoint == "final, step 10"
    assert found.model is not None and found.model.name == str(run / "checkpoints" / "step_10")
    assert found.prompt is not None and found.prompt.template == "{prompt} "


def test_a_pattern_stands_for_every_run_that_matches(make_run: MakeRun, tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        make_run(f"gtpo-seed{seed}", steps=[1], seed=seed)
    make_run("grpo-seed0", steps=[1])
    found = subjects({"run": str(tmp_path / "gtpo-seed*"), "label": "ours"})
    assert [(s.label, s.seed) for s in found] == [(f"ours gtpo-seed{n}", n) for n in (0, 1, 2)]


def test_the_best_checkpoint_is_marked_as_selected_and_says_by_what(make_run: MakeRun) -> None:
    run = make_run("mine", steps=[2, 4], accuracy={0: 0.9, 2: 0.5, 4: 0.25})
    (found,) = subjects({"run": str(run), "checkpoint": "best"})
    assert found.checkpoint == "selected, step 2: best eval/accuracy of 2 on the run's held-out rows"


def test_all_checkpoints_and_a_numbered_one_can_be_asked_for(make_run: MakeRun) -> None:
    run = make_run("mine", steps=[2, 4])
    assert [s.label for s in subjects({"run": str(run), "checkpoint": "all"})] == ["mine step_2", "mine step_4"]
    assert [s.checkpoint for s in subjects({"run": str(run), "checkpoint": 2})] == ["step 2"]


def test_what_is_not_there_is_said_in_one_sentence(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("mine", steps=[2, 4])
    (tmp_path / "empty").mkdir()
    cases = [
        ({"run": str(tmp_path / "nowhere*")}, "models.0.run: there is no folder"),
        ({"run": str(tmp_path / "empty")}, "is not the folder of a training run"),
        ({"run": str(run), "checkpoint": 3}, r"has no checkpoint 3 \(there are 2, 4\)"),
        ({"run": str(run), "checkpoint": "best"}, "measured no eval/accuracy at any checkpoint"),
        ({"run": str(make_run("early", steps=[]))}, "has no checkpoint yet"),
        ({"model": "a", "run": "b"}, "give exactly one of model, run and endpoint, not model and run"),
        ({"model": "a", "checkpoint": 3}, "checkpoint belongs to a run"),
        ({"modle": "a"}, "models.0.modle is not a key; did you mean 'model'"),
    ]
    for model, message in cases:
        with pytest.raises(InputError, match=message):
            subjects(model)


def test_two_of_one_name_and_an_unknown_baseline_are_refused() -> None:
    with pytest.raises(InputError, match="2 of them are called 'x'; give each a label"):
        subjects({"model": "a/x"}, {"model": "b/x"})
    with pytest.raises(InputError, match=r"baseline: 'y' is none of the models \('x'\)"):
        subjects({"model": "a/x"}, baseline="y")


def test_two_data_sets_of_one_name_are_refused() -> None:
    with pytest.raises(InputError, match="two data sets are called 'rows'; give one of them a label"):
        subjects({"model": "a"}, data=[{"source": "a/rows.jsonl"}, {"source": "b/rows.jsonl"}])
