from trimtab.report.arms import arms_of
from trimtab.report.runs import read_run


def labels(*folders, **options):
    return [(arm.label, len(arm.runs)) for arm in arms_of([read_run(folder) for folder in folders], **options)]


def test_runs_that_differ_by_seed_and_by_what_decides_nothing_are_one_arm(write_run):
    one, other = write_run("one"), write_run("two", {"seed": 1, "training.threads": 8})
    assert labels(one, other) == [("GTPO", 2)]


def test_arms_are_named_by_method_and_by_the_settings_in_which_they_differ(write_run):
    runs = [
        write_run("a"),
        write_run("b", {"method": {"name": "grpo"}}),
        write_run("c", {"optimizer.learning_rate": 0.0005}),
        write_run("d", {"model": {"name": "org/large"}}),
    ]
    assert [label for label, _ in labels(*runs)] == [
        "GTPO, small, learning rate 5e-5",
        "GRPO, small, learning rate 5e-5",
        "GTPO, small, learning rate 5e-4",
        "GTPO, large, learning rate 5e-5",
    ]


def test_runs_with_different_numbers_of_steps_are_different_arms(write_run):
    assert labels(write_run("a"), write_run("b", {"seed": 1}, steps=6)) == [("GTPO, steps 4", 1), ("GTPO, steps 6", 1)]


def test_the_same_seed_twice_is_no_repetition_and_the_folders_tell_the_runs_apart(write_run):
    assert labels(write_run("a"), write_run("b")) == [("GTPO (a)", 1), ("GTPO (b)", 1)]


def test_runs_without_a_configuration_go_by_their_folders(write_run):
    bare = [write_run(name, drop=["config.yaml"]) for name in ("a", "b")]
    assert labels(*bare, write_run("c")) == [("a", 1), ("b", 1), ("GTPO", 1)]


def test_given_labels_decide(write_run):
    folders = [write_run("a"), write_run("b", {"seed": 1}), write_run("c", {"seed": 2})]
    assert labels(*folders, labels={"a": "first", "b": "first", "c": "second"}) == [("first", 2), ("second", 1)]
