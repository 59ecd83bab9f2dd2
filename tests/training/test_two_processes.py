"""Data parallelism with gloo: two processes do the work of one."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from child_process import Child, Hit
from run_folder import RunFolder, distance

Train = Callable[..., RunFolder]
Configure = Callable[..., Path]
SGD = {"optimizer": {"name": "sgd", "learning_rate": 0.5}}


def start_two(path: Path, log: Path, *, hit: Hit | None = None) -> list[Child]:
    """`trimtab train` as a launcher starts it: two processes that find each other through the environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    children = []
    for rank in range(2):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        # A signal reaches the second process only; both have to stop.
        child_hit = hit if rank == 1 else None
        children.append(Child(["train", str(path)], log.with_suffix(f".{rank}"), child_hit, environment))
    return children


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "gtpo", "training.updates_per_rollout": 2},
        {"method": {"name": "dapo", "beta": 0.04}, "rewards": [{"function": "toy_rewards:raises_on_every_fourth"}]},
        {"method": "sft", "training.batch_size": 4},
        {"method": "gtpo", "model.lora": {"rank": 2}},
        {
            "method": {"name": "gvpo", "reference": "frozen"},
            "training.updates_per_rollout": 2,
            "optimizer": {"name": "sgd", "learning_rate": 0.02},
            "off_policy": {"share": 0.5, "replay": 4},
        },
    ],
    ids=["gtpo", "dapo with a reference and failing rewards", "sft", "adapters", "gvpo with a replay buffer"],
)
def test_two_processes_end_where_one_does(
    changes: dict[str, Any], train: Train, configure: Configure, tmp_path: Path
) -> None:
    changes = {**SGD, "training.max_excluded_rows": 1.0, "training.steps": 4, **changes}
    one = train(changes, name="one")
    children = start_two(configure(changes, name="two"), tmp_path / "log")
    assert [child.wait() for child in children] == [0, 0], [child.said for child in children]
    two = RunFolder(tmp_path / "two")
    assert two.steps == one.steps
    # A share of tokens, averaged over processes that hold unequal numbers of them: not the share of all tokens.
    inexact = {"gtpo/conflict_fraction"}
    if "off_policy" in changes:
        # A mean over groups, which are here of unequal size.
        inexact.add("gvpo/variance")
    for ours, theirs in zip(two.metrics, one.metrics, strict=True):
        assert ours.keys() == theirs.keys()
        assert {key for key in ours if ours[key] is None} == {key for key in theirs if theirs[key] is None}
        exact = {key for key in ours.keys() - inexact if ours[key] is not None}
        assert [ours[key] for key in exact] == pytest.approx([theirs[key] for key in exact], abs=1e-5, rel=1e-4)
    if "model.lora" in changes:
        return
    assert distance(one.weights, two.weights) < 1e-5
    # Progress is shown once.
    assert "step 4/4" in children[0].said and "step" not in children[1].said


def test_two_processes_share_stored_groups_of_unequal_size(train: Train, configure: Configure, tmp_path: Path) -> None:
    lines = [
        json.dumps({"prompt": f"{n} + {n} =", "completion": f" {k}", "reward": k}) + "\n"
        for n in range(6)
        for k in range(2 + n % 3)
    ]
    (tmp_path / "stored.jsonl").write_text("".join(lines), encoding="utf-8")
    stored = {"source": str(tmp_path / "stored.jsonl")}
    changes = {
        "method": {"name": "gvpo", "reference": "ema", "ema_decay": 0.5},
        "data": stored,
        "off_policy": {"share": 1.0, "data": stored},
        "rewards": "none",
        "optimizer": {"name": "sgd", "learning_rate": 0.02},
        "training.updates_per_rollout": 2,
    }
    one = train(changes, name="one")
    children = start_two(configure(changes, name="two"), tmp_path / "log")
    assert [child.wait() for child in children] == [0, 0], [child.said for child in children]
    two = RunFolder(tmp_path / "two")
    assert distance(one.weights, two.weights) < 1e-5
    for key in ("reward", "completions/mean_length", "grad_norm", "gvpo/weight_max", "gvpo/log_ratio_abs"):
        assert two.column(key) == pytest.approx(one.column(key), rel=1e-4)


def test_a_process_whose_rows_are_all_masked_adds_nothing_to_the_denominator(
    train: Train, configure: Configure, tmp_path: Path
) -> None:
    changes = {
        **SGD,
        "method": {"name": "grpo", "mask_truncated": True, "beta": 0.04},
        "sampling.max_completion_tokens": 30,
        "training.steps": 6,
        "log": {"samples": 8, "samples_every": 1},
    }
    one = train(changes, name="one")
    truncated = [sample["truncated"] for sample in one.lines("samples.jsonl")]
    halves = [(all(truncated[i : i + 4]), all(truncated[i + 4 : i + 8])) for i in range(0, len(truncated), 8)]
    assert any(first != second for first, second in halves)
    children = start_two(configure(changes, name="two"), tmp_path / "log")
    assert [child.wait() for child in children] == [0, 0], [child.said for child in children]
    two = RunFolder(tmp_path / "two")
    assert two.column("grad_norm") == pytest.approx(one.column("grad_norm"), rel=1e-4)
    assert distance(one.weights, two.weights) < 1e-5


def test_a_signal_to_one_process_stops_both_at_the_same_step_and_the_run_continues(
    train: Train, configure: Configure, tmp_path: Path
) -> None:
    changes = {**SGD, "training.steps": 5, "checkpoint.every": 100}
    one = train(changes, name="one")
    path = configure(changes, name="two")
    children = start_two(path, tmp_path / "log", hit=Hit("trimtab.training.rollout:score_completions", 2, 15))
    assert [child.wait() for child in children] == [143, 143], [child.said for child in children]
    two = RunFolder(tmp_path / "two")
    assert two.checkpoint.name == "step_2"
    children = start_two(path, tmp_path / "log")
    assert [child.wait() for child in children] == [0, 0], [child.said for child in children]
    assert two.column("reward") == pytest.approx(one.column("reward"))
    assert distance(one.weights, two.weights) < 1e-5


def test_a_batch_that_two_processes_cannot_share_is_refused_by_both(configure: Configure, tmp_path: Path) -> None:
    children = start_two(configure({"training.batch_size": 4}), tmp_path / "log")
    assert [child.wait() for child in children] == [2, 2]
    for child in children:
        assert "training.batch_size: 1 groups a step cannot be shared by 2 processes; make it a multiple" in child.said
        assert "Traceback" not in child.said
    assert not (tmp_path / "run").exists()


def test_two_processes_go_back_to_the_same_step(train: Train, configure: Configure, tmp_path: Path) -> None:
    changes = {**SGD, "training.steps": 32, "checkpoint.every": 5, "monitor": {"on_collapse": "rollback"}}
    changes["rewards"] = [{"function": "toy_rewards:falls_on_cue"}]
    for name in ("one", "two"):
        row = json.dumps({"prompt": "1 + 1 =", "folder": str(tmp_path / name), "cue": "16 once"})
        (tmp_path / f"{name}.rows.jsonl").write_text(f"{row}\n" * 8, encoding="utf-8")
    one = train({**changes, "data.source": str(tmp_path / "one.rows.jsonl")}, name="one")
    path = configure({**changes, "data.source": str(tmp_path / "two.rows.jsonl")}, name="two")
    children = start_two(path, tmp_path / "log")
    assert [child.wait() for child in children] == [0, 0], [child.said for child in children]
    two = RunFolder(tmp_path / "two")
    assert two.column("learning_rate") == one.column("learning_rate") == [0.5] * 15 + [0.25] * 17
    assert two.column("reward") == pytest.approx(one.column("reward"), abs=1e-5)
    assert [line["step"] for line in two.lines("discarded.jsonl")] == [
        line["step"] for line in one.lines("discarded.jsonl")
    ]


def test_two_processes_stop_together(configure: Configure, tmp_path: Path) -> None:
    row = json.dumps({"prompt": "1 + 1 =", "folder": str(tmp_path / "run"), "cue": "16"})
    (tmp_path / "cue.jsonl").write_text(f"{row}\n" * 8, encoding="utf-8")
    changes = {
        **SGD,
        "training.steps": 32,
        "monitor": {"on_collapse": "stop"},
        "data.source": str(tmp_path / "cue.jsonl"),
    }
    children = start_two(
        configure({**changes, "rewards": [{"function": "toy_rewards:falls_on_cue"}]}), tmp_path / "log"
    )
    assert [child.wait() for child in children] == [1, 1], [child.said for child in children]
    assert "stopped: reward fell at step 16 (" in children[0].said
    assert "stopped: the first process found a collapse" in children[1].said
