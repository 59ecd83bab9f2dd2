"""One GRPO step costs less CPU time and less memory here than in TRL 1.16's GRPOTrainer, for the same work.

The work: 8 prompts x 8 completions of fixed length from one random Qwen2-architecture model (hidden 256, 4 layers, 4
heads of which 2 for keys and values, float32); generation, rewards, GRPO loss with clip and without KL, one AdamW step.

How it is measured: each side runs in a fresh process per shape and repetition, A B A B, one step to warm up and then
`--steps` steps. CPU time is the process's own, over all threads, from the end of one step to the end of the next, so
other load on the machine shifts it little. Memory is the peak resident set during all steps (gradients and optimizer
states included) less the resident set after set-up and a first tiny generation. Medians over steps, then repetitions.

What TRL gets: beta 0 (no reference model), one micro-batch of all 64 rows, fused AdamW, gradient checkpointing (its own
default; under glibc's allocator it costs no more CPU time here and much less memory, `--no-checkpointing` turns it
off), generation with its key-value cache, no logging, no saving. This package runs its own training code,
`GroupRelative` and `update`, without checkpointing. `--micro-batches` splits the step on both sides, which saves memory
on both. Both inherit the caller's allocator: with glibc's own settings temporaries above 32 MiB, of which TRL makes
more, are mapped anew each time. MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=17179869184 spares both that,
for more memory, and is the fairer comparison of the arithmetic.

`--check-gradients` compares the gradients of both losses on the same rollouts, to 1e-5 of their norm. Linux only.
The last line says `ratio_cpu=... ratio_memory=...`: this package over TRL for vocabulary 8192, 64 + 64 tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROMPTS, GROUP = 8, 8
VOCABULARIES = (512, 8192, 32768)
LENGTHS = ((64, 64), (256, 64))
HEADLINE = (8192, 64, 64)
RATE = 1e-6


def make_model(vocabulary: int) -> Any:
    """The random model, the same on both sides."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            pad_token_id=0,
            eos_token_id=None,
        )
    )


def make_tokenizer(vocabulary: int) -> Any:
    """One word an id: w0 is padding; the end token lies beyond what the model can say, so every completion is full."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(WordLevel({f"w{i}": i for i in range(vocabulary + 1)}, unk_token="w1"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", eos_token=f"w{vocabulary}", unk_token="w1")


def make_prompts(vocabulary: int, length: int, count: int) -> list[list[int]]:
    """Different prompts of equal length."""
    import torch

    ids = torch.randint(3, vocabulary, (count, length), generator=torch.Generator().manual_seed(1))
    return ids.tolist()  # type: ignore[no-any-return]


def reward(prompts: Any, completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    """Costs next to nothing and differs inside every group."""
    return [sum(ids) % 97 / 96 for ids in completion_ids]


def to_text(ids: list[int]) -> str:
    """What the tokenizer turns back into these ids."""
    return " ".join(f"w{i}" for i in ids)


def resident_mib() -> float:
    """Resident memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_mib() -> float:
    """Highest resident memory since `forget_peak`; /proc, because getrusage remembers the parent's and the set-up's."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 2**10


def forget_peak() -> None:
    """Let the peak start at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def cpu_seconds() -> float:
    """User and system time of this process so far, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def trl_trainer(
    model: Any, vocabulary: int, prompts: list[list[int]], completion: int, folder: str, options: argparse.Namespace
) -> Any:
    """A GRPOTrainer set up for the least cost that leaves the work the same."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined]

    config = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        max_steps=1 + options.steps,
        per_device_train_batch_size=PROMPTS * GROUP // options.micro_batches,
        gradient_accumulation_steps=options.micro_batches,
        steps_per_generation=options.micro_batches,
        num_generations=GROUP,
        max_completion_length=completion,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        gradient_checkpointing=options.checkpointing,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [to_text(ids) for ids in prompts]}),
        processing_class=make_tokenizer(vocabulary),
    )


def trimtab_objective(
    model: Any, vocabulary: int, prompts: list[list[int]], completion: int, options: argparse.Namespace
) -> Any:
    """The objective that `trimtab train` would build."""
    from accelerate import Accelerator

    from trimtab.config import RunConfig
    from trimtab.policy.loading import as_policy
    from trimtab.tasks.problems import Prompts
    from trimtab.tasks.rewards import RewardPart
    from trimtab.training.rl import GroupRelative

    tokens = (PROMPTS * len(prompts[0]) + PROMPTS * GROUP * completion) // options.micro_batches
    config = RunConfig.model_validate(
        {
            "method": "grpo",
            "model": {"name": "random"},
            "data": {"source": "random"},
            "sampling": {"group_size": GROUP, "max_completion_tokens": completion},
            "optimizer": {"learning_rate": RATE, "max_grad_norm": 1.0},
            "training": {"batch_size": PROMPTS * GROUP, "micro_batch_tokens": tokens},
            "output": "unused",
        }
    )
    texts: list[Any] = [to_text(ids) for ids in prompts]
    numbers = list(range(1, len(texts) + 1))
    rows = Prompts(rows=[{"prompt": text} for text in texts], prompts=texts, ids=prompts, numbers=numbers)
    policy = as_policy(model, make_tokenizer(vocabulary))
    return GroupRelative(config, policy, rows, None, [RewardPart("reward", reward)], Accelerator(cpu=True))


def run_side(side: str, shape: tuple[int, int, int], options: argparse.Namespace) -> dict[str, float]:
    """Train for 1 + `--steps` steps in this process."""
    import torch

    vocabulary, prompt, completion = shape
    torch.set_num_threads(options.threads)
    model = make_model(vocabulary).train()
    prompts = make_prompts(vocabulary, prompt, PROMPTS * (1 + options.steps))
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        if side == "trl":
            from transformers import TrainerCallback

            trainer = trl_trainer(model, vocabulary, prompts, completion, folder, options)

            class Clock(TrainerCallback):  # type: ignore[misc]
                def on_step_end(self, *_: Any, **__: Any) -> None:
                    assert trainer._metrics["train"]["completions/min_length"][-1] == completion
                    ends.append(cpu_seconds())

            trainer.add_callback(Clock())
            model.generate(torch.tensor(prompts[:1]), max_new_tokens=2, do_sample=True)
            forget_peak()
            before = resident_mib()
            trainer.train()
        else:
            from trimtab.policy.sampler import SamplingParams
            from trimtab.training.loop import make_optimizer, update

            objective = trimtab_objective(model, vocabulary, prompts, completion, options)
            settings = objective.config.optimizer
            parameters = list(model.parameters())
            optimizer = make_optimizer(parameters, settings)
            objective.sampler.sample(prompts[:1], 1, SamplingParams(max_tokens=2), 0)
            forget_peak()
            before = resident_mib()
            for step in range(1, 2 + options.steps):
                for losses in objective.updates(step):
                    update(losses, parameters, optimizer, objective.accelerator, settings.max_grad_norm)
                assert objective.metrics()["completions/clipped_ratio"] == 1.0
                ends.append(cpu_seconds())
    steps = [after - start for start, after in itertools.pairwise(ends)]
    peak = peak_mib()
    return {"cpu": statistics.median(steps), "memory": peak - before, "peak": peak}


def gradient_difference(shape: tuple[int, int, int], options: argparse.Namespace) -> float:
    """Distance of the two gradients over the norm of TRL's, on rollouts of unequal length with equal advantages."""
    from dataclasses import replace

    import torch

    from trimtab.objectives import loss_denominator

    vocabulary, prompt, completion = shape
    torch.set_num_threads(options.threads)
    model = make_model(vocabulary).train()
    prompts = make_prompts(vocabulary, prompt, PROMPTS)
    objective = trimtab_objective(model, vocabulary, prompts, completion, options)
    rollouts = objective.maker.make(1).rollouts
    lengths_N = torch.randint(1, completion + 1, (PROMPTS * GROUP,), generator=torch.Generator().manual_seed(2))
    rollouts = replace(rollouts, mask_NT=torch.arange(completion) < lengths_N[:, None])
    weights = objective.weigh(rollouts, {})

    def gradient(loss: Any) -> Any:
        model.zero_grad()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    denominator = loss_denominator(weights.mask_NT)
    (loss,) = objective._losses(rollouts, weights, denominator, None, True, {})
    ours = gradient(loss)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl_trainer(model, vocabulary, prompts, completion, folder, options)
        trainer.current_gradient_accumulation_steps = 1
        batch = {
            "prompt_ids": rollouts.prompt_ids_PL[rollouts.group_ids_N],
            "prompt_mask": rollouts.prompt_mask_PL[rollouts.group_ids_N].long(),
            "completion_ids": rollouts.completion_ids_NT,
            "completion_mask": rollouts.mask_NT.long(),
            "advantages": weights.weights_NT[:, 0],
        }
        theirs = gradient(trainer._compute_loss(model, batch))
    return float((ours - theirs).norm() / theirs.norm())


def in_fresh_process(side: str, shape: tuple[int, int, int], options: argparse.Namespace) -> dict[str, float]:
    """`run_side` (or the gradient check) in a new interpreter."""
    command = [sys.executable, __file__, "--side", side, "--shape", *map(str, shape)]
    for name in ("threads", "steps", "micro_batches"):
        command += ["--" + name.replace("_", "-"), str(getattr(options, name))]
    command += ["--checkpointing" if options.checkpointing else "--no-checkpointing"]
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "OMP_WAIT_POLICY": "passive"}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="vocabulary 8192, 64 + 64 tokens alone; fewer repetitions")
    parser.add_argument("--steps", type=int, help="steps measured in each process (default 4; quick: 2)")
    parser.add_argument("--repetitions", type=int, help="processes a side and shape (default 3; quick: 2)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of both sides")
    parser.add_argument("--micro-batches", type=int, default=1, choices=(1, 2, 4, 8), help="a step, on both sides")
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True, help="in TRL")
    parser.add_argument("--check-gradients", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--side", choices=("trl", "trimtab", "gradients"), help=argparse.SUPPRESS)
    parser.add_argument("--shape", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.steps = options.steps or (2 if options.quick else 4)
    if options.side == "gradients":
        print(json.dumps({"difference": gradient_difference(tuple(options.shape), options)}))
        return
    if options.side:
        print(json.dumps(run_side(options.side, tuple(options.shape), options)))
        return

    if options.check_gradients:
        difference = in_fresh_process("gradients", (VOCABULARIES[0], *LENGTHS[0]), options)["difference"]
        print(f"gradients differ by {difference:.1e} of their norm")
        if not difference <= 1e-5:
            sys.exit("the two sides do not do the same work")
    shapes = [HEADLINE] if options.quick else [(v, p, c) for p, c in LENGTHS for v in VOCABULARIES]
    repetitions = options.repetitions or (2 if options.quick else 3)
    print(f"{'':25}CPU s a step            memory, MiB             peak resident, MiB")
    print(f"{'vocabulary  tokens':21}trimtab     TRL  ratio    trimtab    TRL  ratio    trimtab    TRL")
    headline = ""
    for shape in shapes:
        runs: dict[str, list[dict[str, float]]] = {"trimtab": [], "trl": []}
        for _ in range(repetitions):
            for side, results in runs.items():
                results.append(in_fresh_process(side, shape, options))
        ours, theirs = (
            {key: statistics.median(run[key] for run in results) for key in results[0]} for results in runs.values()
        )
        cpu, memory = ours["cpu"] / theirs["cpu"], ours["memory"] / theirs["memory"]
        print(
            f"{shape[0]:>10}  {shape[1]:>3}+{shape[2]:<3}{ours['cpu']:8.2f}{theirs['cpu']:8.2f}{cpu:7.2f}"
            f"{ours['memory']:11.0f}{theirs['memory']:7.0f}{memory:7.2f}{ours['peak']:11.0f}{theirs['peak']:7.0f}",
            flush=True,
        )
        if shape == HEADLINE:
            headline = f"ratio_cpu={cpu:.3f} ratio_memory={memory:.3f}"
    print(headline)


if __name__ == "__main__":
    main()
