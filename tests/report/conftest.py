"""Folders as runs and evaluations leave them, small enough to read."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

WriteRun = Callable[..., Path]
WriteEvaluation = Callable[..., Path]


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def metrics_of(step: int, seed: int) -> dict[str, Any]:
    values = {"step": step, "reward": 10 + step + seed, "rewards/format/mean": 9.0, "entropy": 0.4 + 0.01 * step}
    values |= {"completions/mean_length": 40.0, "grad_norm": 1.0 + seed, "pushed_down/before": 0.5}
    return (
        {"step": 0, "eval/accuracy": 0.5} if step == 0 else values | {"eval/accuracy": 0.5 + 0.01 * step + 0.1 * seed}
    )


def run_writer(base: Path) -> WriteRun:
    """Writes a run's folder; `changes` are keys of the configuration, `drop` are files to leave out."""

    def write(
        name: str,
        changes: dict[str, Any] | None = None,
        *,
        steps: int = 4,
        findings: Sequence[dict[str, Any]] = (),
        samples: Sequence[dict[str, Any]] = (),
        drop: Sequence[str] = (),
        extra: dict[str, Any] | None = None,
    ) -> Path:
        folder = base / name
        folder.mkdir()
        config: dict[str, Any] = {
            "method": {"name": "gtpo"},
            "model": {"name": "org/small"},
            "optimizer": {"learning_rate": 5e-05},
            "training": {"batch_size": 8, "steps": steps, "threads": 1},
            "monitor": {"on_collapse": "warn"},
            "output": str(folder),
            "seed": 0,
        }
        for dotted, value in (changes or {}).items():
            section, _, key = dotted.partition(".")
            if key:
                config[section] = {**config[section], key: value}
            else:
                config[section] = value
        machine = {"cores": 2, "processor": "x86_64", "torch_threads": 1, "gpus": [], "system": "Linux"}
        environment = {"versions": {"trimtab": "0.1.0", "torch": "2.13.0"}, "machine": machine}
        timings = [{"step": 0, "seconds": 2.0}] + [
            {"step": step, "seconds": 0.5, "peak_memory_mib": 700.0 + step} for step in range(1, steps + 1)
        ]
        (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
        lines = [{**metrics_of(step, config["seed"]), **(extra or {})} for step in range(steps + 1)]
        write_lines(folder / "metrics.jsonl", lines)
        write_lines(folder / "timings.jsonl", timings)
        for file, own in (("findings.jsonl", findings), ("samples.jsonl", samples)):
            if own:
                write_lines(folder / file, own)
        for file in drop:
            (folder / file).unlink()
        return folder

    return write


def score(metric: str, k: int | None, value: float, half: float | None = 0.05) -> dict[str, Any]:
    limits = (None, None) if half is None else (value - half, value + half)
    over = "" if half is None else "bootstrap over problems"
    return {"metric": metric, "k": k, "value": value, "low": limits[0], "high": limits[1], "interval": over}


def evaluation_writer(base: Path) -> WriteEvaluation:
    """Writes an evaluation's folder: model "small" untrained, GRPO and GTPO, and model "large" untrained."""

    def write(name: str = "evaluation", *, comparisons: Sequence[dict[str, Any]] = ()) -> Path:
        folder = base / name
        folder.mkdir()
        subjects = []
        for model, training, method, level in (
            ("small", "", "", 0.2),
            ("small", "GSM8K", "GRPO", 0.3),
            ("small", "GSM8K", "GTPO", 0.4),
            ("large", "", "", 0.5),
        ):
            data = {
                title: {
                    "problems": 30,
                    "samples": 16,
                    "unparsable_gold": 1,
                    "seconds": 95.0,
                    "tokens": 48000,
                    "scores": [
                        score("mean", None, level + plus),
                        *(score("pass", k, level + plus + 0.01 * k) for k in (1, 4, 16)),
                        score("maj", 16, level + plus + 0.1, None),
                        score("entropy", None, 0.312, 0.01),
                    ],
                }
                for title, plus in (("AIME 2024", 0.0), ("MATH-500", 0.2))
            }
            names = {"label": f"{model} {method}".strip(), "model": model, "training": training, "method": method}
            subjects.append({**names, "seed": 0, "checkpoint": "final, step 300" if method else "", "data": data})
        results = {"level": 0.95, "subjects": subjects, "comparisons": list(comparisons)}
        (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
        return folder

    return write


def write_published(base: Path) -> Path:
    """A file of published scores for the model "small"."""
    path = base / "published.csv"
    path.write_text(
        "model,training,method,data,metric,k,value,source,note\n"
        'small,GSM8K,GTPO,AIME 2024,pass,4,0.61,"arXiv 2508.03772v5, Table 1",from the first k samples\n',
        encoding="utf-8",
    )
    return path


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Writes runs into the test's folder."""
    return run_writer(tmp_path)


@pytest.fixture
def write_evaluation(tmp_path: Path) -> WriteEvaluation:
    """Writes evaluations into the test's folder."""
    return evaluation_writer(tmp_path)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Published scores in the test's folder."""
    return write_published(tmp_path)


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of three runs (two differ by seed alone), an evaluation and published scores."""
    from trimtab.report.build import write_report

    base = tmp_path_factory.mktemp("report")
    write_run = run_writer(base)
    finding = {"step": 3, "onset": 2, "signal": "entropy", "message": "entropy left its band", "collapse": True}
    sample = {"step": 1, "group": 0, "prompt": "1 + 1 =", "completion": "2", "tokens": ["2"], "token_ids": [7]}
    samples = [{**sample, "reward": 1.0}, {**sample, "reward": 0.0, "completion": "3", "token_ids": [8]}]
    folders = [
        write_run("a", findings=[finding], samples=samples),
        write_run("b", {"seed": 1}),
        write_run("c", {"method": {"name": "grpo"}}, steps=2, extra={"kl": 0.1}),
        evaluation_writer(base)(),
        write_published(base),
    ]
    write_report(folders, base / "report.html")
    return base / "report.html"
