"""What a run does about a collapse. The reward falls on cue: in the cue's step, counted from 0."""

import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from child_process import Child, Hit
from run_folder import RunFolder

from trimtab.training.checkpoint import checkpoints
from trimtab.training.monitor import replay

Configure = Callable[..., Path]
Run = Callable[..., dict[str, Any]]
FILES = ("metrics.jsonl", "samples.jsonl", "findings.jsonl", "discarded.jsonl")
SCORING = "trimtab.training.rollout:score_completions"


@pytest.fixture
def collapsing(tmp_path: Path) -> Run:
    """Changes that make a run of 40 steps, with a checkpoint every 5, collapse on cue."""

    def changes(on_collapse: str, cue: str = "20", *, name: str = "run", **more: Any) -> dict[str, Any]:
        rows = tmp_path / f"{name}.rows.jsonl"
        folder = tmp_path / name
        rows.write_text(
            "".join(f'{{"prompt": "{i} + 1 =", "folder": "{folder}", "cue": "{cue}"}}\n' for i in range(8)), "utf-8"
        )
        return {
            "data.source": str(rows),
            "rewards": [{"function": "toy_rewards:falls_on_cue", "name": "low"}],
            "optimizer.learning_rate": 1e-3,
            "training.steps": 40,
            "checkpoint.every": 5,
            "monitor": {"on_collapse": on_collapse, **more},
        }

    return changes


def steps_kept(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in checkpoints(run)]


def content(run: RunFolder) -> dict[str, bytes]:
    """What must not depend on when a run was killed."""
    logs = {name: (run.path / name).read_bytes() for name in FILES if (run.path / name).exists()}
    for name, text in logs.items():
        # Times are discarded with the rest, and no two runs have the same.
        logs[name] = b"".join(line for line in text.splitlines(True) if b'"seconds"' not in line)
    return {**logs, "weights": (run.checkpoint / "model.safetensors").read_bytes()}


def test_a_run_warns_with_date_and_levels_and_goes_on(
    collapsing: Run, train: Callable[..., RunFolder], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trimtab"):
        run = train(collapsing("warn"))
    assert run.steps[-1] == 40
    findings = run.lines("findings.jsonl")
    assert findings == [finding.line() for finding in replay(run.metrics)]
    first = findings[0]
    assert first.keys() == {"step", "onset", "signal", "direction", "before", "after", "message", "collapse"}
    assert (first["onset"], first["direction"], first["collapse"]) == (20, "down", False)
    assert [f["onset"] for f in findings if f["collapse"]] == [20]
    assert f"step {first['step']}: reward fell at step 20 (" in caplog.text
    assert ": collapse: reward fell at step 20 and stayed down (" in caplog.text


def test_a_monitor_that_is_off_writes_nothing(collapsing: Run, train: Callable[..., RunFolder]) -> None:
    run = train(collapsing("off"))
    assert run.steps[-1] == 40
    assert not (run.path / "findings.jsonl").exists()


def test_watching_changes_nothing_in_a_run(collapsing: Run, train: Callable[..., RunFolder]) -> None:
    watched, alone = (train(collapsing(kind, name=kind), name=kind) for kind in ("warn", "off"))
    assert watched.everything == alone.everything


def test_the_last_good_checkpoint_is_not_pruned_while_a_finding_is_open(
    collapsing: Run, train: Callable[..., RunFolder]
) -> None:
    changes = {**collapsing("warn", "17"), "checkpoint": {"every": 15, "keep": 1}, "training.steps": 45}
    assert steps_kept(train(changes).path) == [15, 45]
    changes = {**collapsing("warn", "1000", name="healthy"), "checkpoint": {"every": 15, "keep": 1}}
    assert steps_kept(train(changes, name="healthy").path) == [40]


def test_a_run_that_may_go_back_keeps_one_that_is_old_enough_and_the_next_to_be(
    collapsing: Run, train: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimtab.training.rollback.MARGIN", 12)
    changes = {**collapsing("stop", "1000"), "checkpoint": {"every": 5, "keep": 1}}
    assert steps_kept(train(changes).path) == [25, 35, 40]


def test_a_run_stops_with_a_checkpoint_and_a_sentence_and_so_it_does_when_it_is_started_again(
    collapsing: Run, command: Callable[..., Any], configure: Configure, tmp_path: Path
) -> None:
    path, run = configure(collapsing("stop")), RunFolder(tmp_path / "run")
    outcome = command("train", path, "--quiet")
    assert outcome.code == 1
    last = run.lines("findings.jsonl")[-1]
    assert last["collapse"] and run.steps[-1] == last["step"] < 40
    assert steps_kept(run.path)[-1] == last["step"]
    good = run.path / "checkpoints" / "step_15"
    sentence = outcome.err.splitlines()[-1]
    assert sentence.startswith("trimtab: stopped: reward fell at step 20 (")
    assert sentence.endswith(f"and stayed down; the last good checkpoint is {good} (monitor.on_collapse: stop)")
    assert good.exists()
    before = content(run)
    again = command("train", path, "--quiet")
    assert (again.code, again.err.splitlines()[-1]) == (1, sentence)
    assert content(run) == before
    # Who wants it to go on says so.
    assert command("train", path, "monitor.on_collapse=warn", "--quiet").code == 0
    assert run.steps[-1] == 40


def test_the_sentence_says_when_no_good_checkpoint_is_left(
    collapsing: Run, command: Callable[..., Any], configure: Configure
) -> None:
    changes = {**collapsing("stop", "10"), "checkpoint": {"every": 100}}
    outcome = command("train", configure(changes), "--quiet")
    assert outcome.code == 1
    assert "no checkpoint from before it is left (monitor.on_collapse: stop)" in outcome.err


def test_a_run_goes_back_to_before_the_onset_and_on_with_other_draws_and_a_lower_rate(
    collapsing: Run, train: Callable[..., RunFolder], caplog: pytest.LogCaptureFixture
) -> None:
    collapsed = train(collapsing("warn", name="collapsed"), name="collapsed")
    run = train(collapsing("rollback", "20 once", rate_factor=0.25))
    assert run.steps == list(range(41))
    declared = next(f["step"] for f in collapsed.lines("findings.jsonl") if f["collapse"])
    assert run.metrics[:16] == collapsed.metrics[:16]
    rates = run.column("learning_rate")
    assert rates == pytest.approx([1e-3] * 15 + [2.5e-4] * 25)
    # The same step, from the same weights: what was drawn is what differs.
    assert run.metrics[16]["reward"] != collapsed.metrics[16]["reward"]
    discarded = [line for line in run.lines("discarded.jsonl") if line["file"] == "metrics.jsonl"]
    assert [line["step"] for line in discarded] == list(range(16, declared + 1))
    stripped = [{k: v for k, v in line.items() if k not in ("attempt", "file")} for line in discarded]
    assert stripped == collapsed.metrics[16 : declared + 1]
    (mark,) = run.lines("findings.jsonl")
    assert (mark["step"], mark["attempt"], mark["signal"]) == (15, 1, "reward")
    message = f"went back from step {declared} to step 15: other draws, the learning rate times 0.25"
    assert mark["message"] == message
    assert message in caplog.text
    assert steps_kept(run.path)[-1] == 40


def test_a_run_that_collapses_at_once_goes_back_to_the_untouched_policy(
    collapsing: Run, train: Callable[..., RunFolder]
) -> None:
    run = train({**collapsing("rollback", "12 once"), "checkpoint": {"every": 100}})
    assert run.steps == list(range(41))
    assert run.lines("findings.jsonl")[0]["message"].endswith(" to step 0: other draws, the learning rate times 0.5")
    assert run.column("learning_rate") == [0.0005] * 40


def test_a_run_that_always_collapses_stops_after_the_last_rollback(
    collapsing: Run, command: Callable[..., Any], configure: Configure, tmp_path: Path
) -> None:
    path = configure(collapsing("rollback", max_rollbacks=2))
    outcome = command("train", path, "--quiet")
    assert outcome.code == 1
    assert outcome.err.splitlines()[-1].startswith("trimtab: stopped after 2 rollbacks: reward fell at step 20 (")
    run = RunFolder(tmp_path / "run")
    assert sorted({line["attempt"] for line in run.lines("discarded.jsonl")}) == [0, 1]
    assert run.column("learning_rate")[-1] == pytest.approx(0.00025)


@pytest.mark.parametrize(
    "hits",
    [
        [Hit(SCORING, 24)],
        [Hit("trimtab.training.run:roll_back", 1)],
        [Hit("trimtab.training.rollback:keep_lines", 4)],
        [Hit("trimtab.training.rollback:replace_file", 1), Hit("trimtab.training.rollback:replace_file", 1)],
        [Hit("trimtab.training.run:newest_checkpoint", 2), Hit(SCORING, 9)],
    ],
    ids=["before", "about to go back", "in the logs", "before it is settled, twice", "after"],
)
def test_a_run_killed_around_its_rollback_ends_as_the_unbroken_one(
    hits: list[Hit], collapsing: Run, train: Callable[..., RunFolder], configure: Configure, tmp_path: Path
) -> None:
    unbroken = train(collapsing("rollback", "20 once", name="unbroken"), name="unbroken")
    path = configure(collapsing("rollback", "20 once", name="broken"), name="broken")
    for hit in hits:
        child = Child(["train", str(path), "--quiet"], tmp_path / "log", hit)
        assert child.wait() == -signal.SIGKILL, child.said
    child = Child(["train", str(path), "--quiet"], tmp_path / "log")
    assert child.wait() == 0, child.said
    assert content(RunFolder(tmp_path / "broken")) == content(unbroken)


def test_findings_of_a_killed_run_are_written_once(
    collapsing: Run, train: Callable[..., RunFolder], configure: Configure, tmp_path: Path
) -> None:
    unbroken = train(collapsing("warn", name="unbroken"), name="unbroken")
    path = configure(collapsing("warn", name="broken"), name="broken")
    for call in (23, 12):
        child = Child(["train", str(path), "--quiet"], tmp_path / "log", Hit(SCORING, call))
        assert child.wait() == -signal.SIGKILL, child.said
    child = Child(["train", str(path), "--quiet"], tmp_path / "log")
    assert child.wait() == 0, child.said
    assert content(RunFolder(tmp_path / "broken")) == content(unbroken)
