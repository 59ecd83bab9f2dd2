"""Wall time and peak memory of whole merges: `trimtab merge` against mergekit's command line and its Python API.

    python benchmarks/merge_vs_mergekit.py            # about half an hour of two cores; needs trimtab[oracle]
    python benchmarks/merge_vs_mergekit.py --methods ties --repeats 1

Two random models of 158 million parameters in bfloat16 and their base, all in the file cache. The contenders take
turns; what is shown are medians. Each merge is a process of its own, start-up and imports included. Processor time says
more than wall time where the machine has other work.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

WIDTH, INNER, LAYERS, VOCABULARY = 768, 2608, 13, 32000
API = (
    "import sys, yaml\n"
    "from mergekit.config import MergeConfiguration\n"
    "from mergekit.merge import run_merge\n"
    "from mergekit.options import MergeOptions\n"
    "config = MergeConfiguration.model_validate(yaml.safe_load(open(sys.argv[1])))\n"
    "run_merge(config, sys.argv[2], MergeOptions(quiet=True))\n"
)
METHODS: dict[str, dict[str, Any]] = {
    "ties": {"weight": 0.5, "density": 0.5},
    "dare_ties": {"weight": 0.5, "density": 0.5},
    "task_arithmetic": {"weight": 0.5},
    "slerp": {},
}


def write_model(folder: Path, seed: int, base: Any = None) -> Any:
    """A random Llama, or the base with noise on it; returns its tensors."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, WIDTH),
        "lm_head.weight": (VOCABULARY, WIDTH),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{part}_proj.weight": (WIDTH, WIDTH) for part in "qkvo"}
        shapes |= {f"{prefix}.mlp.{part}_proj.weight": (INNER, WIDTH) for part in ("gate", "up")}
        shapes[f"{prefix}.mlp.down_proj.weight"] = (WIDTH, INNER)
        shapes |= {f"{prefix}.{part}_layernorm.weight": (WIDTH,) for part in ("input", "post_attention")}
    shapes["model.norm.weight"] = (WIDTH,)
    scale = 0.02 if base is None else 0.002
    tensors = {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if base is not None:
        tensors = {name: base[name].float() + tensor for name, tensor in tensors.items()}
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def merge_file(method: str, folder: Path) -> Path:
    """The merge file of one method."""
    base, first, second = (str(folder / name) for name in ("base", "first", "second"))
    config: dict[str, Any] = {"merge_method": method, "dtype": "bfloat16"}
    if method == "slerp":
        config |= {"models": [{"model": first}, {"model": second}], "base_model": first, "parameters": {"t": 0.4}}
    else:
        own = METHODS[method]
        config |= {"models": [{"model": name, "parameters": own} for name in (first, second)], "base_model": base}
    path = folder / f"{method}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def commands(config: Path, output: Path) -> dict[str, list[str]]:
    """What each contender is started with."""
    scripts = Path(sys.executable).parent
    given = [str(config), str(output)]
    return {
        "trimtab": [sys.executable, "-m", "trimtab", "merge", given[0], "-o", given[1], "--quiet"],
        "mergekit-yaml": [str(scripts / "mergekit-yaml"), *given, "--quiet"],
        "mergekit API": [sys.executable, "-c", API, *given],
    }


def measure(command: list[str]) -> tuple[float, float, float]:
    """Wall seconds, processor seconds and peak resident MiB of a process.

    Raises:
        RuntimeError: it failed.
    """
    with tempfile.TemporaryFile() as said:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=said, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise RuntimeError(f"{command}: {said.read().decode(errors='replace')[-2000:]}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="write the models there and leave")
    arguments = parser.parse_args()
    if arguments.prepare is not None:
        base = write_model(arguments.prepare / "base", 0)
        for seed, model in enumerate(("first", "second"), 1):
            write_model(arguments.prepare / model, seed, base)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # In a process of its own: what this one has held at most counts in the peak of those it starts.
        subprocess.run([sys.executable, __file__, "--prepare", str(folder)], check=True)
        print(f"{os.cpu_count()} cores, medians of {arguments.repeats}")
        print(
            "| method | contender | wall s | over trimtab | processor s | over trimtab | peak MiB | of mergekit-yaml |"
        )
        print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
        for method in arguments.methods:
            config, output = merge_file(method, folder), folder / "output"
            measured: dict[str, list[tuple[float, float, float]]] = {}
            for _ in range(arguments.repeats):
                for contender, command in commands(config, output).items():
                    shutil.rmtree(output, ignore_errors=True)
                    measured.setdefault(contender, []).append(measure(command))
            medians = {
                contender: [statistics.median(column) for column in zip(*values, strict=True)]
                for contender, values in measured.items()
            }
            for contender, (wall, processor, peak) in medians.items():
                times = [value / own for value, own in zip((wall, processor), medians["trimtab"][:2], strict=True)]
                share = peak / medians["mergekit-yaml"][2]
                numbers = f"{wall:.1f} | {times[0]:.1f} | {processor:.1f} | {times[1]:.1f} | {peak:.0f} | {share:.2f}"
                print(f"| {method} | {contender} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
