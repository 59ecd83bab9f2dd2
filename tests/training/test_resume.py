"""A run that is killed at any moment and started again ends as the unbroken run does, to the last bit."""

import json
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from child_process import Child, Hit
from run_folder import RunFolder

from trimtab.training import loop

Train = Callable[..., RunFolder]
Configure = Callable[..., Path]

SCORING = "trimtab.training.rollout:score_completions"
SFT_STEP = "trimtab.training.sft:supervised_rollouts"
SYNC = "trimtab.files:sync"

RUNS: dict[str, dict[str, Any]] = {
    "gtpo": {"method": "gtpo", "training.updates_per_rollout": 2},
    "grpo with a reference": {"method": {"name": "grpo", "beta": 0.04}},
    "sft": {"method": "sft", "training.batch_size": 3},
    "adapters with a reference": {
        "method": {"name": "grpo", "beta": 0.04},
        "model.lora": {"rank": 2, "dropout": 0.2},
    },
    "gvpo with a moving reference and a replay buffer": {
        "method": {"name": "gvpo", "reference": "ema", "ema_decay": 0.5},
        "off_policy": {"share": 0.5, "replay": 8},
        "training.updates_per_rollout": 2,
    },
}


@pytest.fixture
def start(configure: Configure, tmp_path: Path) -> Callable[..., Child]:
    """Starts `trimtab train` in a process of its own, on the run that `train` knows by the same changes and name."""

    def run(changes: dict[str, Any], *, name: str = "run", hit: Hit | None = None) -> Child:
        return Child(["train", str(configure(changes, name=name)), "--quiet"], tmp_path / f"{name}.log", hit)

    return run


def with_evaluation(changes: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same run, with held-out rows judged every 3 steps."""
    evaluation = {"every": 3, "samples": 2, "k": [1], "data": {"source": str(folder / "rows.jsonl")}}
    return {**changes, "evaluation": evaluation}


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_killed_between_and_inside_checkpoints_ends_as_the_unbroken_one(
    kind: str, train: Train, start: Callable[..., Child], tmp_path: Path
) -> None:
    changes = with_evaluation(RUNS[kind], tmp_path)
    unbroken = train(changes, name="unbroken")
    step = SFT_STEP if kind == "sft" else SCORING
    # In step 4; then while step 4's checkpoint is written (starting again syncs five files first).
    for hit in (Hit(step, 4), Hit(SYNC, 8)):
        child = start(changes, name="broken", hit=hit)
        assert child.wait() == -signal.SIGKILL, child.said
    broken = RunFolder(tmp_path / "broken")
    assert broken.checkpoint.name == "step_2"
    assert list((broken.path / "checkpoints").glob(".step_4.*.tmp"))
    child = start(changes, name="broken")
    assert child.wait() == 0, child.said
    assert broken.everything == unbroken.everything
    assert not list((broken.path / "checkpoints").glob(".*"))
    starts = json.loads((broken.path / "environment.json").read_text(encoding="utf-8"))["starts"]
    assert [s["resumed_at_step"] for s in starts] == [None, 2, 2]


@pytest.mark.parametrize(
    "hits",
    [
        [Hit(SCORING, 1)],
        [Hit("trimtab.training.loop:save_checkpoint", 1)],
        [Hit(SYNC, 4), Hit(SYNC, 1)],
        [Hit("trimtab.training.loop:save_checkpoint", 3), Hit(SYNC, 2), Hit(SYNC, 5)],
        [Hit("trimtab.training.loop:append_lines", 9), Hit(SCORING, 2), Hit(SCORING, 2)],
    ],
    ids=["in step 1", "before a checkpoint", "in a checkpoint", "while starting again", "inside the log, three times"],
)
def test_every_moment_is_as_good_as_another_to_be_killed(
    hits: list[Hit], train: Train, start: Callable[..., Child], tmp_path: Path
) -> None:
    changes = RUNS["gtpo"]
    unbroken = train(changes, name="unbroken")
    for hit in hits:
        child = start(changes, name="broken", hit=hit)
        assert child.wait() == -signal.SIGKILL, child.said
    child = start(changes, name="broken")
    assert child.wait() == 0, child.said
    assert RunFolder(tmp_path / "broken").everything == unbroken.everything


def test_a_run_killed_from_outside_ends_as_the_unbroken_one(
    train: Train, start: Callable[..., Child], tmp_path: Path
) -> None:
    changes = {**RUNS["gtpo"], "training.steps": 60, "checkpoint.every": 7}
    unbroken = train(changes, name="unbroken")
    metrics = tmp_path / "broken" / "metrics.jsonl"
    for lines in (5, 16):
        child = start(changes, name="broken")
        while child.process.is_alive() and (not metrics.exists() or metrics.read_bytes().count(b"\n") < lines):
            time.sleep(0.001)
        child.process.kill()
        assert child.wait() == -signal.SIGKILL, child.said
    child = start(changes, name="broken")
    assert child.wait() == 0, child.said
    assert RunFolder(tmp_path / "broken").everything == unbroken.everything


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_writes_a_checkpoint_and_the_run_goes_on_from_there(
    number: int, code: int, train: Train, start: Callable[..., Child], tmp_path: Path
) -> None:
    changes = {**RUNS["gtpo"], "checkpoint.every": 100, "training.steps": 5}
    unbroken = train(changes, name="unbroken")
    child = start(changes, name="broken", hit=Hit(SCORING, 3, number))
    assert child.wait() == code, child.said
    assert child.said.splitlines()[-1].startswith("trimtab: stopped by a signal")
    assert "Traceback" not in child.said
    broken = RunFolder(tmp_path / "broken")
    assert broken.checkpoint.name == "step_3"
    assert broken.steps == [0, 1, 2, 3]
    train(changes, name="broken")
    assert broken.everything == unbroken.everything


def test_a_torn_checkpoint_is_skipped_with_a_warning_and_written_again(
    train: Train, caplog: pytest.LogCaptureFixture
) -> None:
    unbroken = train(RUNS["gtpo"], name="unbroken")
    torn = train(RUNS["gtpo"], name="torn")
    weights = torn.checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with caplog.at_level(logging.WARNING, "trimtab"):
        train(RUNS["gtpo"], name="torn")
    assert caplog.text.count("step_6 is not whole and is skipped: model.safetensors has the wrong size") == 1
    assert torn.everything == unbroken.everything


def test_without_any_whole_checkpoint_the_run_starts_over(train: Train) -> None:
    run = train({"training.steps": 2})
    before = run.everything
    (run.checkpoint / "trainer_state.json").unlink()
    assert train({"training.steps": 2}).everything == before
    assert run.steps == [0, 1, 2]


def test_a_finished_run_started_again_changes_nothing_and_returns_its_last_metrics(
    command: Callable[..., Any], configure: Configure, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train()
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    outcome = command("train", configure(), "--quiet")
    assert (outcome.code, outcome.out, outcome.err) == (0, f"done: {run.path}\n", "")
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    values = loop.last_metrics(run.path / "metrics.jsonl")
    assert values == {key: value for key, value in run.metrics[-1].items() if key != "step"}


def test_a_finished_run_can_be_made_longer_and_equals_one_that_was_long_from_the_start(train: Train) -> None:
    long = train({"training.steps": 6}, name="long")
    train({"training.steps": 4}, name="short")
    short = train({"training.steps": 6}, name="short")
    assert short.everything == long.everything


def test_splitting_the_batch_otherwise_is_allowed_half_way(train: Train) -> None:
    train({"training.steps": 2})
    run = train({"training.steps": 4, "training.micro_batch_tokens": 50, "training.max_excluded_rows": 0.9})
    assert run.steps == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"method": {"name": "gtpo", "gamma": 0.2}}, "method"),
        ({"seed": 1}, "seed"),
        ({"optimizer.learning_rate": 0.02}, "optimizer"),
        ({"rewards": "binary"}, "rewards"),
        ({"training.batch_size": 16}, "training.batch_size"),
        ({"training.updates_per_rollout": 2}, "training.updates_per_rollout"),
        ({"model.lora": {"rank": 2}}, "model"),
    ],
)
def test_a_folder_that_holds_a_run_with_another_configuration_is_refused_and_left_alone(
    changes: dict[str, Any], key: str, command: Callable[..., Any], configure: Configure, tmp_path: Path
) -> None:
    assert command("train", configure({"training.steps": 1}), "--quiet").code == 0
    folder = tmp_path / "run"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    outcome = command("train", configure(changes), "--quiet")
    assert outcome.code == 2
    assert outcome.err == (
        f"trimtab: output: {folder} holds a run with another {key}; continue it with the configuration it was started "
        "with, or name another folder\n"
    )
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
