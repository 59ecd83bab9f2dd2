"""What many tests share: a tiny model, a configuration that trains it, and the command line in this process."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before torch is imported: one thread, and nothing is looked for on the network.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).parent / "support"))

import json
import signal

import pytest
import torch
import yaml

torch.set_num_threads(1)

ROWS = [
    {"prompt": f"{a} + {b} =", "answer": str(a + b), "completion": f" {a + b}"}
    for a, b in [(1, 2), (30, 4), (5, 6), (70, 80), (9, 9)]
]

Configure = Callable[..., Path]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium; `support/browser.py` opens pages in it."""
    from browser import started_browser

    with started_browser() as chromium:
        yield chromium


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a random Llama (hidden 32, 2 layers) and a byte-level tokenizer; encodings start with one BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    specials = ["<s>", "</s>", "<pad>"]
    pieces = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=96
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(pieces),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=96,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
            tie_word_embeddings=True,
        )
    )
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def configure(tiny_model: Path, tmp_path: Path) -> Configure:
    """Writes a configuration of a run of a second; `configure({"training.steps": 3}, name="other")`.

    None removes a key. The run's folder is called like the configuration.
    """
    data = write_rows(tmp_path / "rows.jsonl", ROWS)

    def write(changes: dict[str, Any] | None = None, *, name: str = "run") -> Path:
        values: dict[str, Any] = {
            "method": "gtpo",
            "model": {"name": str(tiny_model)},
            "data": {"source": str(data)},
            "rewards": [{"function": "toy_rewards:low_bytes", "name": "low"}],
            "sampling": {"group_size": 4, "max_completion_tokens": 8},
            "optimizer": {"learning_rate": 0.01},
            "training": {"steps": 6, "batch_size": 8},
            "checkpoint": {"every": 2},
            "log": {"samples": 2, "samples_every": 2},
            "output": str(tmp_path / name),
        }
        for dotted, value in (changes or {}).items():
            *parents, last = dotted.split(".")
            section = values
            for parent in parents:
                section = section.setdefault(parent, {})
            if value is None:
                section.pop(last, None)
            else:
                section[last] = value
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
        return path

    return write


@dataclass(frozen=True)
class Outcome:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs the command line in this process: `command("train", path)`."""
    from trimtab.cli import main

    def run(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["trimtab", *map(str, arguments)])
        capsys.readouterr()
        handler = signal.getsignal(signal.SIGINT)
        try:
            main()
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(bool(leaving.code))
        finally:
            signal.signal(signal.SIGINT, handler)
        return Outcome(code, *capsys.readouterr())

    return run
