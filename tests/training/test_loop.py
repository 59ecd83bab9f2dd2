import math
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from run_folder import RunFolder

from trimtab.config import OptimizerSection
from trimtab.training.loop import Signals, learning_rate_at, make_optimizer, update

Train = Callable[..., RunFolder]


@pytest.mark.parametrize(
    ("settings", "steps", "expected"),
    [
        ({}, 4, [1, 1, 1, 1]),
        ({"warmup_ratio": 0.5}, 4, [1 / 2, 1, 1, 1]),
        ({"schedule": "linear"}, 4, [1, 3 / 4, 2 / 4, 1 / 4]),
        ({"schedule": "linear", "warmup_ratio": 0.2}, 5, [1, 1, 3 / 4, 2 / 4, 1 / 4]),
        ({"schedule": "cosine"}, 4, [1, (1 + math.sqrt(0.5)) / 2, 1 / 2, (1 - math.sqrt(0.5)) / 2]),
        ({"schedule": "cosine", "warmup_ratio": 1 / 3}, 6, [1 / 2, 1, 1, (1 + math.sqrt(0.5)) / 2, 1 / 2, None]),
        ({"schedule": "linear", "warmup_ratio": 0.3}, 5, [1 / 1.5, 1, 1 - 0.5 / 3.5, 1 - 1.5 / 3.5, 1 - 2.5 / 3.5]),
        ({"schedule": "linear", "warmup_ratio": 1.0}, 4, [1 / 4, 2 / 4, 3 / 4, 1]),
        ({"schedule": "cosine"}, 1, [1]),
    ],
)
def test_the_learning_rate_rises_to_its_peak_and_falls_as_computed_by_hand(
    settings: dict[str, Any], steps: int, expected: list[float | None]
) -> None:
    section = OptimizerSection(learning_rate=2e-4, **settings)
    rates = [learning_rate_at(step, steps, section) / 2e-4 for step in range(1, steps + 1)]
    for rate, value in zip(rates, expected, strict=True):
        assert value is None or rate == pytest.approx(value)
    assert max(rates) <= 1 + 1e-12


def test_vectors_get_no_weight_decay() -> None:
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    groups = make_optimizer([vector, matrix], OptimizerSection(weight_decay=0.1)).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 0.1), (1, 0.0)]
    assert groups[0]["params"][0] is matrix


def test_micro_batch_losses_add_up_and_the_norm_before_clipping_is_returned() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    losses = (weight @ torch.tensor(direction) for direction in ([3.0, 0.0], [0.0, 4.0]))
    assert update(losses, [weight], optimizer, Accelerator(cpu=True), 1.0) == pytest.approx(5.0)
    torch.testing.assert_close(weight.data, torch.tensor([-0.6, -0.8]))


def test_an_update_without_a_loss_or_with_a_gradient_that_is_not_finite_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=1.0)
    assert update([], [weight], optimizer, Accelerator(cpu=True), 1.0) is None
    assert caplog.text == ""
    assert update([weight.sum() * math.inf], [weight], optimizer, Accelerator(cpu=True), 1.0) is None
    assert "the gradient is not finite; this update is left out" in caplog.text
    assert weight.data.tolist() == [1.0, 1.0]
    assert not optimizer.state


def test_a_signal_sets_the_exit_code_a_second_interrupt_leaves_at_once_and_the_old_handlers_return() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.code == 143
        with pytest.raises(SystemExit) as leaving:
            os.kill(os.getpid(), signal.SIGINT)
        assert leaving.value.code == 130
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_training_in_a_thread_leaves_the_signals_alone() -> None:
    codes = []

    def work() -> None:
        with Signals() as signals:
            codes.append(signals.code)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert codes == [0]


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(train: Train) -> None:
    one, two, other = train(name="one"), train(name="two"), train({"seed": 1}, name="other")
    assert one.everything == two.everything
    assert one.metrics != other.metrics
    assert one.everything["step_6/model.safetensors"] != other.everything["step_6/model.safetensors"]


def test_new_adapters_come_from_the_seed_too(train: Train) -> None:
    changes = {"model.lora": {"rank": 2}, "training.steps": 1}
    one, two = train(changes, name="one"), train(changes, name="two")
    other = train({**changes, "seed": 1}, name="other")
    adapters = [(run.checkpoint / "adapter_model.safetensors").read_bytes() for run in (one, two, other)]
    assert adapters[0] == adapters[1] != adapters[2]


def test_the_metrics_of_a_run_stand_in_one_line_a_step_and_the_last_is_returned(
    configure: Callable[..., Any], tmp_path: Any
) -> None:
    from trimtab.config_file import load_config
    from trimtab.training.run import run_training

    last = run_training(load_config(configure()), quiet=True)
    run = RunFolder(tmp_path / "run")
    assert run.steps == [0, 1, 2, 3, 4, 5, 6]
    assert {"step": 6, **last} == run.metrics[-1]
    assert [line["step"] for line in run.lines("timings.jsonl")] == run.steps
    assert all(line["seconds"] > 0 for line in run.lines("timings.jsonl"))


def test_the_learning_rate_of_each_step_is_logged(train: Train) -> None:
    run = train({"optimizer": {"learning_rate": 0.01, "schedule": "linear"}, "training.steps": 4})
    assert run.column("learning_rate") == pytest.approx([0.01, 0.0075, 0.005, 0.0025])


def test_steps_follow_from_the_epochs_when_they_are_not_given(train: Train) -> None:
    # 5 rows, 2 groups a step: 1.6 passes hold 4 steps.
    assert train({"training": {"batch_size": 8, "epochs": 1.6}}).steps[-1] == 4


def test_a_tensorboard_file_holds_every_step(train: Train) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train({"log": {"trackers": ["tensorboard"], "project": "mine"}, "training.steps": 3})
    events = EventAccumulator(str(run.path / "mine"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward")] == [1, 2, 3]
    assert [event.value for event in events.Scalars("reward")] == pytest.approx(run.column("reward"))
