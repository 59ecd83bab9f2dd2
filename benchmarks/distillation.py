"""A teacher of 2 million parameters and a student of 0.7: on-policy distillation against SFT on the teacher's samples.

    python benchmarks/distillation.py --output runs/distillation            # about an hour of one core; resumable
    python benchmarks/distillation.py --output runs/distillation --docs     # rewrite docs/distillation.md from it

The teacher, a wider and deeper Llama with the student's tokenizer, learns the built-in task from random weights. Every
arm starts from the embedded warm start and sees the same prompts once each, with 8 completions a prompt: its own or
those of the teacher. Learning rates are chosen for every arm on its own, from the same few, in shorter runs of seed 0
and on other held-out problems than the result. All runs are ordinary `trimtab train` configurations, left in the
folder. What comes out is shown whatever it is.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import yaml

from trimtab.demo import HELD_OUT, MODEL, Arm, run_arms, spread
from trimtab.files import read_lines, replace_file

TEACHER = Arm("teacher", "sft", 0)
TEACHER_SHAPE = {"hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 4, "num_attention_heads": 6}
TEACHER_STEPS, TEACHER_ROWS = 1200, 32
STEPS, TUNING_STEPS, PROMPTS, GROUP, MAX_TOKENS = 60, 30, 8, 8, 128
RATES = (3e-5, 1e-4, 3e-4, 1e-3)
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("SFT, teacher's samples", {"name": "sft"}),
    "stored": ("distill, sequence form, teacher's samples", {"name": "distill"}),
    "sequence": ("distill, sequence form, own samples", {"name": "distill"}),
    "token": ("distill, token form, own samples", {"name": "distill", "form": "token"}),
    "mixed": ("distill, sequence form, half and half", {"name": "distill"}),
    "verifier": ("distill, sequence form, own samples, verifier η 2", {"name": "distill", "eta": 2.0}),
    "beyond": ("distill, sequence form, own samples, λ 1.25", {"name": "distill", "lambdas": [1.25]}),
}
SHARES = {"stored": 1.0, "mixed": 0.5}
"""Of the teacher's samples in a group."""
TUNED_AS = {"mixed": "sequence", "verifier": "sequence", "beyond": "sequence"}
"""Arms that take over the learning rate of another."""
DOCS = Path(__file__).resolve().parent.parent / "docs"
BLOCK = re.compile(r"(<!-- distillation -->\n).*?(<!-- end of distillation -->)", re.DOTALL)
COLUMNS = ("", "accuracy", "over SFT", "pass@4", "format", "entropy", "rate", "student tokens", "seconds", "peak MiB")


def common_config(steps: int, seed: int, problems: int, output: Path) -> dict[str, Any]:
    """What all runs share; `problems` is the seed of the held-out problems."""
    return {
        "rewards": "none",
        "sampling": {"group_size": GROUP, "max_completion_tokens": MAX_TOKENS},
        "training": {"steps": steps, "batch_size": PROMPTS * GROUP, "threads": 1},
        "evaluation": {
            "data": {
                "source": "builtin:arithmetic",
                "split": "test",
                "limit": HELD_OUT,
                "arithmetic": {"seed": problems},
            },
            "every": steps // 3,
            "samples": 4,
            "k": [1, 4],
        },
        "checkpoint": {"every": steps, "keep": 1},
        "log": {"samples": 0, "samples_every": steps},
        "output": str(output),
        "seed": seed,
    }


def teacher_config(folder: Path) -> dict[str, Any]:
    """SFT from random weights on rows that never repeat."""
    values = common_config(TEACHER_STEPS, TEACHER.seed, 1, folder / TEACHER.name)
    rows = {"rows": TEACHER_STEPS * TEACHER_ROWS, "seed": 7}
    values["training"]["batch_size"] = TEACHER_ROWS
    return values | {
        "method": "sft",
        "model": {"name": str(folder / "random")},
        "data": {"source": "builtin:arithmetic", "arithmetic": rows},
        "optimizer": {
            "learning_rate": 2e-3,
            "beta2": 0.95,
            "weight_decay": 0.01,
            "schedule": "cosine",
            "warmup_ratio": 0.04,
        },
        "checkpoint": {"every": 200, "keep": 1},
    }


def arm_config(arm: Arm, folder: Path, runs: Path, *, steps: int, rate: float, problems: int) -> dict[str, Any]:
    """One student: `folder` holds the teacher and its samples, `runs` gets the run."""
    values = common_config(steps, arm.seed, problems, runs / arm.name)
    values["evaluation"]["every"] = 20 if steps == STEPS else steps
    values |= {
        "method": ARMS[arm.method][1],
        "model": {"name": MODEL},
        "data": {
            "source": "builtin:arithmetic",
            "arithmetic": {"rows": STEPS * PROMPTS, "seed": prompts_seed(arm.seed)},
        },
        "optimizer": {"learning_rate": rate, "schedule": "cosine", "warmup_ratio": 0.05},
    }
    samples = {"source": str(samples_path(folder, arm.seed))}
    if arm.method == "sft":
        values["data"] = samples
    else:
        values["teachers"] = [{"name": str(folder / "teacher")}]
    if arm.method in SHARES:
        values["off_policy"] = {"share": SHARES[arm.method], "data": samples}
    if arm.method == "verifier":
        values["rewards"] = "binary"
    return values


def prompts_seed(seed: int) -> int:
    """Seed of a run's training problems; the teacher's own are of another."""
    return 100 + seed


def samples_path(folder: Path, seed: int) -> Path:
    """The teacher's completions of the prompts of a seed."""
    return folder / f"samples-seed{seed}.jsonl"


def write_config(values: dict[str, Any]) -> Path:
    """Leave a configuration beside its run's folder."""
    path = Path(values["output"]).with_name(Path(values["output"]).name + ".yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return path


def make_teacher(folder: Path) -> None:
    """Train it, and leave its weights as a plain Hugging Face folder `teacher`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from trimtab.policy.loading import load_tokenizer, resolve_model
    from trimtab.training.checkpoint import newest_checkpoint

    if (folder / "teacher").exists():
        return
    if not (folder / "random").exists():
        torch.manual_seed(TEACHER.seed)
        heads = {"num_key_value_heads": TEACHER_SHAPE["num_attention_heads"]}
        width = {"head_dim": TEACHER_SHAPE["hidden_size"] // TEACHER_SHAPE["num_attention_heads"]}
        config = AutoConfig.from_pretrained(resolve_model(MODEL), **TEACHER_SHAPE, **heads, **width)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "random")
        load_tokenizer(MODEL).save_pretrained(folder / "random")
    run_arms({TEACHER: write_config(teacher_config(folder))}, steps=TEACHER_STEPS, workers=1)
    found = newest_checkpoint(folder / TEACHER.name)
    assert found is not None
    shutil.copytree(found[0], folder / "teacher", ignore=shutil.ignore_patterns("trainer*"))


def sample_teacher(folder: Path, seed: int) -> None:
    """Write 8 completions of every training prompt of a seed, and beside them what they cost."""
    import torch

    from trimtab.policy.loading import load_policy
    from trimtab.policy.sampler import LocalSampler, SamplingParams
    from trimtab.tasks.arithmetic import make_rows
    from trimtab.tasks.verify import verify_all

    path = samples_path(folder, seed)
    if path.exists():
        return
    torch.set_num_threads(1)
    policy = load_policy(str(folder / "teacher"))
    sampler = LocalSampler(policy.model, end_ids=policy.end_ids, pad_id=policy.pad_id)
    rows = make_rows(STEPS * PROMPTS, seed=prompts_seed(seed))
    lines: list[dict[str, Any]] = []
    started, longer = time.monotonic(), 0
    for start in range(0, len(rows), 64):
        part = rows[start : start + 64]
        ids = [policy.tokenizer(row["prompt"]).input_ids for row in part]
        sampled = sampler.sample(ids, GROUP, SamplingParams(max_tokens=MAX_TOKENS), seed, first_row=start * GROUP)
        texts = policy.tokenizer.batch_decode(sampled.completion_lists(), skip_special_tokens=True)
        truncated = sampled.truncated_N.tolist()
        for place, text in enumerate(texts):
            row = part[place // GROUP]
            # A text without its end would be learnt as if it had one.
            longer += truncated[place]
            if not truncated[place]:
                lines.append({"prompt": row["prompt"], "answer": row["answer"], "completion": text})
    seconds = time.monotonic() - started
    verdicts = verify_all(golds=[line["answer"] for line in lines], predictions=[line["completion"] for line in lines])
    facts = {"seconds": seconds, "truncated": longer, "accuracy": sum(map(bool, verdicts)) / len(lines)}
    path.with_suffix(".json").write_text(json.dumps(facts), encoding="utf-8")
    replace_file(path, "".join(json.dumps(line) + "\n" for line in lines).encode())


def tune(folder: Path) -> dict[str, dict[float, float]]:
    """Held-out accuracy of the shorter runs, by arm and learning rate."""
    runs = folder / "tuning"
    arms = {Arm(method, f"{rate:g}", 0): rate for method in ARMS if method not in TUNED_AS for rate in RATES}
    configs = {
        arm: write_config(arm_config(arm, folder, runs, steps=TUNING_STEPS, rate=rate, problems=2))
        for arm, rate in arms.items()
    }
    run_arms(configs, steps=TUNING_STEPS, workers=1)
    found: dict[str, dict[float, float]] = {}
    for arm, rate in arms.items():
        found.setdefault(arm.method, {})[rate] = read_lines(runs / arm.name / "metrics.jsonl")[-1]["eval/accuracy"]
    return found


def best_rates(tuned: dict[str, dict[float, float]]) -> dict[str, float]:
    """The learning rate of every arm."""
    rates = {method: max(own, key=lambda rate: own[rate]) for method, own in tuned.items()}
    return rates | {method: rates[other] for method, other in TUNED_AS.items()}


def table_rows(folder: Path, runs: dict[Arm, list[dict[str, Any]]], rates: dict[str, float]) -> list[tuple[str, ...]]:
    """Warm start, teacher, then every arm: mean over seeds and range; differences to SFT are of the same seed."""
    measured = ("eval/accuracy", "eval/pass@4", "eval/format", "eval/entropy")
    seeds = sorted({arm.seed for arm in runs})
    teacher = read_lines(folder / TEACHER.name / "metrics.jsonl")[-1]
    rows: list[tuple[str, ...]] = []
    for title, lines in (
        ("warm start", [runs[Arm("sft", "study", seed)][0] for seed in seeds]),
        ("teacher", [teacher]),
    ):
        first, *others = (spread([line[key] for line in lines]) for key in measured)
        rows.append((title, first, "–", *others, *["–"] * 4))
    for method, (title, _) in ARMS.items():
        own = [runs[Arm(method, "study", seed)] for seed in seeds]
        first, *others = (spread([lines[-1][key] for lines in own]) for key in measured)
        gains = [
            lines[-1]["eval/accuracy"] - runs[Arm("sft", "study", seed)][-1]["eval/accuracy"]
            for seed, lines in zip(seeds, own, strict=True)
        ]
        timings = [read_lines(folder / f"{method}-study-seed{seed}" / "timings.jsonl")[1:] for seed in seeds]
        rows.append(
            (
                title,
                first,
                "–" if method == "sft" else spread(gains),
                *others,
                f"{rates[method]:g}",
                spread(
                    [
                        student_tokens(method, lines, runs[Arm("stored", "study", seed)])
                        for seed, lines in zip(seeds, own, strict=True)
                    ],
                    0,
                ),
                spread([sum(line["seconds"] for line in lines) for lines in timings], 0),
                spread([max(line["peak_memory_mib"] for line in lines) for lines in timings], 0),
            )
        )
    return rows


def student_tokens(method: str, lines: list[dict[str, Any]], stored: list[dict[str, Any]]) -> float:
    """Completion tokens, end tokens included, that a run has learnt from.

    Args:
        method: the run's arm.
        lines: its metrics, which tell the length of the fresh completions where there are any.
        stored: metrics of the run on the teacher's samples of the same prompts alone, for the length of these.
    """
    share = SHARES.get(method, 0.0) % 1
    mean = [sum(line["completions/mean_length"] for line in run if line["step"] > 0) for run in (lines, stored)]
    return ((1 - share) * mean[0] + share * mean[1]) * PROMPTS * GROUP


def markdown(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    return "".join("| " + " | ".join(line) + " |\n" for line in [columns, ("---",) * len(columns), *rows])


def block(
    folder: Path, runs: dict[Arm, list[dict[str, Any]]], tuned: dict[str, dict[float, float]], rates: dict[str, float]
) -> str:
    """All that was measured, as Markdown."""
    from trimtab.policy.loading import load_policy

    seeds = sorted({arm.seed for arm in runs})
    facts = [json.loads(samples_path(folder, seed).with_suffix(".json").read_text(encoding="utf-8")) for seed in seeds]
    lines = read_lines(folder / TEACHER.name / "metrics.jsonl")
    timings = read_lines(folder / TEACHER.name / "timings.jsonl")
    seconds = sum(line["seconds"] for line in timings)
    peak = max(line.get("peak_memory_mib", 0.0) for line in timings)
    size = load_policy(str(folder / "teacher")).model.num_parameters()  # type: ignore[operator]
    shape = f"{TEACHER_SHAPE['num_hidden_layers']} layers, hidden {TEACHER_SHAPE['hidden_size']}"
    tuning = [
        (ARMS[method][0], *(f"{own[rate]:.3f}" for rate in RATES), f"{rates[method]:g}")
        for method, own in tuned.items()
    ]
    return (
        f"Teacher: {size:,} parameters ({shape}, {size * 4 / 2**20:.1f} MiB of weights), trained for "
        f"{lines[-1]['step']} steps of {TEACHER_ROWS} rows in {seconds:.0f} s, peak memory {peak:.0f} MiB. Of its "
        f"{STEPS * PROMPTS * GROUP:,} completions a seed, {spread([f['accuracy'] for f in facts])} are right; sampling "
        f"them took {spread([f['seconds'] for f in facts], 0)} s, which the seconds below leave out. Without an end, "
        f"and left out: {sum(f['truncated'] for f in facts)} over all seeds.\n\n"
        + markdown(COLUMNS, table_rows(folder, runs, rates))
        + f"\nTuning: held-out accuracy after {TUNING_STEPS} steps of seed 0, on other problems than above.\n\n"
        + markdown(("", *(f"{rate:g}" for rate in RATES), "taken"), tuning)
    )


def write_docs(text: str, runs: dict[Arm, list[dict[str, Any]]]) -> None:
    """Put the block into docs/distillation.md and draw its picture."""
    from trimtab.report.charts import curve_chart, save_chart

    page = DOCS / "distillation.md"
    page.write_text(BLOCK.sub(lambda m: f"{m[1]}{text}{m[2]}", page.read_text(encoding="utf-8")), encoding="utf-8")
    series = []
    for arm, lines in runs.items():
        points = [line for line in lines if line.get("eval/accuracy") is not None]
        # Nominal steps, not tokens, on the axis: seeds whose points lie at unlike x would not form one band.
        series.append(
            (ARMS[arm.method][0], arm.seed, [p["step"] for p in points], [p["eval/accuracy"] for p in points])
        )
    chart = curve_chart(
        series,
        title="Held-out accuracy of the student",
        x_title="step (64 completions, about 3,000 student tokens)",
        y_title="share of completions",
    )
    save_chart(chart, DOCS / "images" / "distillation.svg")


def main() -> None:
    """Run what is missing, print what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/distillation"), help="folder of the study")
    parser.add_argument("--seeds", type=int, default=3, help="seeds an arm")
    parser.add_argument("--docs", action="store_true", help="rewrite the page and the picture")
    options = parser.parse_args()
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    make_teacher(folder)
    for seed in range(options.seeds):
        sample_teacher(folder, seed)
    tuned = tune(folder)
    rates = best_rates(tuned)
    arms = [Arm(method, "study", seed) for method in ARMS for seed in range(options.seeds)]
    configs = {
        arm: write_config(arm_config(arm, folder, folder, steps=STEPS, rate=rates[arm.method], problems=1))
        for arm in arms
    }
    run_arms(configs, steps=STEPS, workers=1)
    runs = {arm: read_lines(folder / arm.name / "metrics.jsonl") for arm in arms}
    text = block(folder, runs, tuned, rates)
    print(text)
    if options.docs:
        write_docs(text, runs)


if __name__ == "__main__":
    main()
