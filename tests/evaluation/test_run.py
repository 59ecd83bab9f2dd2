import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from completion_server import CompletionServer

from trimtab.config_file import load_config_as
from trimtab.errors import InputError, RunError
from trimtab.evaluation import run as module
from trimtab.evaluation.config import EvaluateConfig
from trimtab.evaluation.run import run_evaluation
from trimtab.files import held_alone
from trimtab.policy.completions import LocalCompleter
from trimtab.policy.sampler import LocalSampler

Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def _on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def evaluate(path: Path, *overrides: str) -> dict[str, Any]:
    return run_evaluation(load_config_as(EvaluateConfig, path, list(overrides)), quiet=True)


def samples(folder: Path, label: str = "tiny") -> list[dict[str, Any]]:
    path = folder / "samples" / label / "problems.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted(lines, key=lambda line: (line["problem"], line["sample"]))


def test_an_evaluation_leaves_every_sample_and_the_numbers(evaluation: Write, tmp_path: Path) -> None:
    results = evaluate(evaluation())
    folder = tmp_path / "evaluation"
    assert json.loads((folder / "results.json").read_text()) == results
    lines = samples(folder)
    assert [(line["problem"], line["sample"]) for line in lines] == [(p, s) for p in range(3) for s in range(4)]
    assert {line["id"] for line in lines} == {"p0", "p1", "p2"}
    for line in lines:
        assert len(line["token_ids"]) == len(line["logps"]) == line["tokens"] <= 6
    (subject,) = results["subjects"]
    data = subject["data"]["problems"]
    assert (subject["label"], data["problems"], data["samples"]) == ("tiny", 3, 4)
    assert data["tokens"] == sum(line["tokens"] for line in lines) and data["seconds"] > 0
    assert {(s["metric"], s["k"]) for s in data["scores"]} >= {("pass", 1), ("pass", 4), ("maj", 4), ("first", 4)}
    assert (folder / "environment.json").exists() and (folder / "config.yaml").exists()


def test_an_interrupted_evaluation_continues_where_it_stopped_and_ends_alike(
    evaluation: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken = evaluate(evaluation({"output": str(tmp_path / "unbroken")}))
    path = evaluation({"rows_at_once": 4})
    drawn: list[int] = []
    original = LocalSampler.sample

    def dies(self: Any, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        if len(drawn) == 2:
            drawn.append(-1)
            raise RunError("the power went")
        drawn.append(kwargs["first_row"])
        return original(self, prompts, *args, **kwargs)

    monkeypatch.setattr(LocalSampler, "sample", dies)
    with pytest.raises(RunError, match="the power went"):
        evaluate(path)
    assert len(samples(tmp_path / "evaluation")) == 8
    assert not (tmp_path / "evaluation" / "results.json").exists()
    continued = evaluate(path)
    assert drawn == [0, 4, -1, 8]
    same = ("problem", "sample", "completion", "token_ids", "verdict")
    assert [[line[k] for k in same] for line in samples(tmp_path / "evaluation")] == [
        [line[k] for k in same] for line in samples(tmp_path / "unbroken")
    ]
    values = [
        [(s["metric"], s["k"], pytest.approx(s["value"])) for s in r["subjects"][0]["data"]["problems"]["scores"]]
        for r in (unbroken, continued)
    ]
    assert values[0] == values[1]


def test_a_finished_evaluation_loads_no_model_and_more_models_can_join(
    evaluation: Write, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = evaluate(evaluation())
    loaded: list[str] = []
    original = module.Backend

    def backend(subject: Any, config: Any) -> Any:
        loaded.append(subject.label)
        return original(subject, config)

    monkeypatch.setattr(module, "Backend", backend)
    assert evaluate(evaluation())["subjects"] == first["subjects"]
    assert loaded == []
    both = [{"model": str(tiny_model), "label": "tiny"}, {"model": str(tiny_model), "label": "again"}]
    results = evaluate(evaluation({"models": both}))
    assert loaded == ["again"]
    (comparison,) = results["comparisons"]
    assert (comparison["label"], comparison["baseline"], comparison["difference"]) == ("again", "tiny", 0.0)
    # The same weights and the same seed say the same.
    assert [s["value"] for s in results["subjects"][1]["data"]["problems"]["scores"]] == [
        s["value"] for s in results["subjects"][0]["data"]["problems"]["scores"]
    ]


def test_other_settings_do_not_mix_with_samples_that_are_there(evaluation: Write) -> None:
    path = evaluation()
    evaluate(path)
    with pytest.raises(InputError, match=r"samples of another samples \(4, now 5\); name another output"):
        evaluate(path, "samples=5")
    with pytest.raises(InputError, match="samples of another sampling"):
        evaluate(path, "sampling.temperature=0.5")


def test_other_numbers_of_the_same_samples_are_had_without_sampling(
    evaluation: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = evaluation()
    evaluate(path)
    monkeypatch.setattr(LocalCompleter, "complete", None)
    scores = evaluate(path, "k=[2, 3]")["subjects"][0]["data"]["problems"]["scores"]
    assert [s["k"] for s in scores if s["metric"] == "pass"] == [2, 3]


def test_a_gold_that_cannot_be_parsed_is_counted_and_left_out(
    evaluation: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "1 + 1 =", "answer": "2"}, {"prompt": "1 + 2 =", "answer": ""}]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = evaluation()
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = evaluate(path)["subjects"][0]["data"]["problems"]
    assert (data["problems"], data["unparsable_gold"]) == (1, 1)
    assert "1 of 2 gold answers cannot be parsed" in caplog.text


def test_a_run_is_evaluated_at_its_checkpoint_with_the_prompt_it_was_trained_with(
    evaluation: Write, make_run: Write, tmp_path: Path
) -> None:
    run = make_run("gtpo-seed3", steps=[2, 4], seed=3)
    results = evaluate(evaluation({"models": [{"run": str(run)}]}))
    (subject,) = results["subjects"]
    assert (subject["method"], subject["seed"], subject["checkpoint"]) == ("GTPO", 3, "final, step 4")
    about = json.loads((tmp_path / "evaluation" / "samples" / "gtpo-seed3" / "about.json").read_text())
    assert about["prompt"]["template"] == "{prompt} "
    # The run went on: what "final" meant has changed.
    (run / "checkpoints" / "step_6").mkdir()
    for file in (run / "checkpoints" / "step_4").iterdir():
        (run / "checkpoints" / "step_6" / file.name).symlink_to(file.resolve())
    with pytest.raises(InputError, match="samples of another subject"):
        evaluate(evaluation({"models": [{"run": str(run)}]}))


def test_the_folder_of_a_training_run_is_not_written_into(evaluation: Write, make_run: Write) -> None:
    run = make_run("mine", steps=[1])
    with pytest.raises(InputError, match="is the folder of a training run; name another"):
        evaluate(evaluation({"output": str(run)}))


def test_labels_that_need_the_same_folder_are_refused(evaluation: Write, tiny_model: Path) -> None:
    models = [{"model": str(tiny_model), "label": label} for label in ("a b", "a/b")]
    with pytest.raises(InputError, match="the labels 'a b' and 'a/b' need one folder"):
        evaluate(evaluation({"models": models}))


def test_the_command_checks_evaluates_and_says_what_came_out(
    evaluation: Write, command: Callable[..., Any], tmp_path: Path
) -> None:
    path = evaluation()
    outcome = command("evaluate", path, "--check")
    assert outcome.code == 0 and "1 models x 3 problems x 4 samples = 12 completions" in outcome.out
    assert not (tmp_path / "evaluation").exists()
    outcome = command("evaluate", path)
    assert outcome.code == 0 and "pass@4" in outcome.out and "tiny" in outcome.out
    assert "tiny: problem 3/3" in outcome.err
    outcome = command("evaluate", path, "smaples=3")
    assert outcome.code == 2 and "smaples is not a key; did you mean 'samples'" in outcome.err
    outcome = command("evaluate", path, "models=[{model: nowhere/at-all}]", f"output={tmp_path / 'other'}")
    assert outcome.code == 2 and "nowhere/at-all" in outcome.err
    assert not (tmp_path / "other" / "results.json").exists()


def test_an_endpoint_that_dies_half_way_loses_nothing_and_the_same_command_continues_wherever_it_comes_back(
    evaluation: Write, command: Callable[..., Any], tmp_path: Path
) -> None:
    with CompletionServer(dies_after=2) as server:
        section = {"url": server.url, "model": "served", "concurrency": 1, "retries": 0, "timeout": 20}
        path = evaluation({"models": [{"endpoint": section, "label": "served"}]})
        outcome = command("evaluate", path)
        assert outcome.code == 1 and "2 of 3 prompts" in outcome.err and server.url in outcome.err
    first = samples(tmp_path / "evaluation", "served")
    assert sorted({line["problem"] for line in first}) == [0, 1] and len(first) == 8
    with CompletionServer() as server:
        moved = {"endpoint": {**section, "url": server.url}, "label": "served"}
        assert command("evaluate", evaluation({"models": [moved]})).code == 0
        assert len(server.seen) == 1
    whole = samples(tmp_path / "evaluation", "served")
    assert len(whole) == 12 and [line for line in whole if line["problem"] < 2] == first


def test_a_torn_end_is_sampled_again_and_nothing_else(
    evaluation: Write, command: Callable[..., Any], tmp_path: Path
) -> None:
    with CompletionServer() as server:
        section = {"url": server.url, "model": "served", "concurrency": 1, "retries": 0, "timeout": 20}
        path = evaluation({"models": [{"endpoint": section, "label": "served"}]})
        assert command("evaluate", path).code == 0
        whole = samples(tmp_path / "evaluation", "served")
        file = tmp_path / "evaluation" / "samples" / "served" / "problems.jsonl"
        kept = [line for line in file.read_text().splitlines(keepends=True) if json.loads(line)["problem"] != 1]
        file.write_text("".join(kept) + '{"problem": 1, "sam')
        asked = len(server.seen)
        assert command("evaluate", path).code == 0
        assert len(server.seen) == asked + 1
        assert samples(tmp_path / "evaluation", "served") == whole
    assert {line["token_ids"] for line in whole} == {None}


def test_data_sets_that_need_the_same_file_are_refused(evaluation: Write, tmp_path: Path) -> None:
    data = [{"source": str(tmp_path / "problems.jsonl"), "label": label} for label in ("a b", "a/b")]
    with pytest.raises(InputError, match="the labels 'a b' and 'a/b' need one file"):
        evaluate(evaluation({"data": data}))


def test_an_output_folder_that_cannot_be_made_is_named(evaluation: Write, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"output: .*below cannot be made \(.*\); name another folder"):
        evaluate(evaluation({"output": str(tmp_path / "file" / "below")}))


def test_a_second_evaluation_into_a_folder_is_refused_while_the_first_one_writes(
    evaluation: Write, tmp_path: Path
) -> None:
    folder = tmp_path / "evaluation"
    folder.mkdir()
    with held_alone(folder), pytest.raises(InputError, match="another process writes to it"):
        evaluate(evaluation())
    assert [path.name for path in folder.iterdir()] == [".lock"]
    evaluate(evaluation())


def test_times_that_cannot_be_read_are_named(evaluation: Write, tmp_path: Path) -> None:
    evaluate(evaluation())
    (tmp_path / "evaluation" / "timings.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(InputError, match=r"timings\.jsonl: cannot be read .*; remove it"):
        evaluate(evaluation())


def test_labels_with_square_brackets_are_printed_as_they_are(
    evaluation: Write, command: Callable[..., Any], tiny_model: Path
) -> None:
    models = [{"model": str(tiny_model), "label": label} for label in ("[/a]", "[red]")]
    outcome = command("evaluate", evaluation({"models": models}), "--quiet")
    assert outcome.code == 0 and "[/a]" in outcome.out and "[red] against [/a]" in outcome.out


def test_a_prompt_without_room_is_counted_once_and_the_model_is_not_loaded_again_for_it(
    evaluation: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = evaluation()
    rows = [{"prompt": "1 + 1 =", "answer": 2}, {"prompt": "long " * 40, "answer": 2}]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = evaluate(path)["subjects"][0]["data"]["problems"]
    assert (data["problems"], data["too_long_prompts"]) == (1, 1)
    monkeypatch.setattr(module, "Backend", None)
    assert evaluate(path)["subjects"][0]["data"]["problems"] == data


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "q", "answer": {"x": 1}}, "row 1: the answer is a dict; it must be text or a number"),
        ({"prompt": "q", "answer": True}, "row 1: the answer is a bool"),
        ({"prompt": 5, "answer": 1}, "row 1: the column 'prompt' must be a string"),
    ],
)
def test_a_row_of_the_wrong_kind_is_named_before_anything_is_written(
    row: dict[str, Any], message: str, evaluation: Write, tmp_path: Path
) -> None:
    path = evaluation()
    (tmp_path / "problems.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(InputError, match=message):
        evaluate(path)
    assert not (tmp_path / "evaluation").exists()


def test_samples_without_a_record_of_how_they_were_drawn_are_not_adopted(evaluation: Write, tmp_path: Path) -> None:
    path = evaluation()
    evaluate(path)
    (tmp_path / "evaluation" / "samples" / "tiny" / "about.json").unlink()
    with pytest.raises(InputError, match="nobody knows how the samples beside it were drawn"):
        evaluate(path, "seed=5")
