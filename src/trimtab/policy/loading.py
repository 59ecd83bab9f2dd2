"""From a name in a config to a model, a tokenizer and what sampling needs to know about them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trimtab.errors import InputError

if TYPE_CHECKING:
    from trimtab.config import LoadedModelSection

BUILTIN_PREFIX = "builtin:"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Lora:
    """Low-rank adaptation (arXiv 2106.09685) through peft.

    Attributes:
        rank: rank of the update.
        alpha: the update is scaled by alpha / rank.
        dropout: on the adapter's input.
        target_modules: module names, or `all-linear`.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: str | Sequence[str] = "all-linear"


@dataclass(frozen=True)
class Policy:
    """A causal language model with its tokenizer.

    Attributes:
        model: the transformers model, inside a peft wrapper when LoRA is used.
        tokenizer: its tokenizer.
        end_ids: tokens that end a completion.
        pad_id: fills batches; may equal any id, since masks decide what counts.
    """

    model: nn.Module
    tokenizer: Any
    end_ids: tuple[int, ...]
    pad_id: int

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.model.parameters()).device


def resolve_model(name: str, gguf_file: str | None = None) -> str:
    """The folder or hub id that a config's model name stands for, checked as far as that goes without loading.

    Raises:
        InputError: an unknown built-in model, a folder without weights or tokenizer, or a path that does not exist.
    """
    if name.startswith(BUILTIN_PREFIX):
        data = Path(str(resources.files("trimtab"))) / "data"
        there = sorted(path.parent.name for path in data.glob("*/config.json"))
        if name.removeprefix(BUILTIN_PREFIX) not in there:
            raise InputError(f"model.name: there is no built-in model {name!r}; there are {', '.join(there) or 'none'}")
        return str(data / name.removeprefix(BUILTIN_PREFIX))
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise InputError(
                f"model.name: there is no folder {name}; give a local folder or a Hugging Face id (owner/name)"
            )
        return name
    files = [p.name for p in folder.iterdir()]
    if gguf_file:
        if gguf_file not in files:
            raise InputError(
                f"model.gguf_file: {name} holds no file {gguf_file!r}; it holds {', '.join(sorted(files))}"
            )
        return str(folder)
    if (folder / "adapter_config.json").is_file():
        return str(folder)
    if not any(f.endswith(WEIGHT_SUFFIXES) for f in files):
        raise InputError(
            f"model.name: {name} holds no weights (no *.safetensors); "
            "save the model there with save_pretrained or correct the path"
        )
    if "config.json" not in files:
        hint = "; name the GGUF file in model.gguf_file" if any(f.endswith(".gguf") for f in files) else ""
        raise InputError(
            f"model.name: {name} holds no config.json{hint or '; save the model there with save_pretrained'}"
        )
    if not any(f in files for f in TOKENIZER_FILES):
        raise InputError(
            f"model.name: {name} holds no tokenizer (no tokenizer.json); save it there with tokenizer.save_pretrained"
        )
    return str(folder)


def load_tokenizer(
    name: str, *, revision: str | None = None, gguf_file: str | None = None, trust_remote_code: bool = False
) -> Any:
    """The tokenizer of a model, by the same names as `load_policy`.

    Raises:
        InputError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    options = {"gguf_file": gguf_file} if gguf_file else {}
    with _readable_errors(name, "tokenizer"):
        return AutoTokenizer.from_pretrained(
            resolve_model(name, gguf_file), revision=revision, trust_remote_code=trust_remote_code, **options
        )


def load_policy(
    name: str,
    *,
    tokenizer: Any = None,
    revision: str | None = None,
    gguf_file: str | None = None,
    dtype: str = "float32",
    lora: Lora | None = None,
    quantization: str = "none",
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    device: torch.device | str = "cpu",
    checkpoint: Path | None = None,
) -> Policy:
    """Load a model to be trained or sampled from.

    Args:
        name: a Hugging Face id, a local folder, or `builtin:NAME`; a folder of LoRA adapters stands for their base
            model with the adapters folded into its weights.
        tokenizer: when it is loaded already.
        revision: branch, tag or commit on the hub.
        gguf_file: file inside the folder; its weights are dequantised.
        dtype: float32, bfloat16 or float16.
        lora: train adapters instead of the weights.
        quantization: `none`, `8bit` or `4bit` (bitsandbytes; with LoRA only).
        gradient_checkpointing: recompute activations in the backward pass (scoring then takes the plain path).
        trust_remote_code: run code that comes with the model.
        device: where to put it.
        checkpoint: folder of this run whose weights (or adapters) replace the ones named.

    Raises:
        InputError: the model or its tokenizer cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    source: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if tokenizer is None:
        tokenizer = load_tokenizer(name, gguf_file=gguf_file, **source)
    place = resolve_model(name, gguf_file)
    options: dict[str, Any] = {"dtype": DTYPES[dtype], **source}
    if checkpoint is not None and lora is None:
        place = str(checkpoint)
    elif gguf_file:
        options["gguf_file"] = gguf_file
    if quantization != "none":
        if lora is None:
            raise InputError(
                "model.quantization: quantised weights cannot be trained; add model.lora or set it to none"
            )
        from transformers import BitsAndBytesConfig

        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=quantization == "4bit", load_in_8bit=quantization == "8bit"
        )
    with _readable_errors(name, "model"):
        if (Path(place) / "adapter_config.json").is_file() and "gguf_file" not in options:
            model: Any = _with_adapters_folded_in(place, options)
        else:
            model = AutoModelForCausalLM.from_pretrained(place, **options)
    if "gguf_file" in options:
        # What is loaded is plain floating point; the leftovers would make save_pretrained refuse.
        model.hf_quantizer = None
        model.is_quantized = False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if lora is not None:
        model = add_lora(model, lora, quantised=quantization != "none", checkpoint=checkpoint)
    if quantization == "none":
        model = model.to(device)
    return as_policy(model, tokenizer)


def load_configured(section: LoadedModelSection, **more: Any) -> Policy:
    """`load_policy` of a section of the configuration; `more` are its other arguments."""
    return load_policy(
        section.name,
        revision=section.revision,
        gguf_file=section.gguf_file,
        dtype=section.dtype,
        trust_remote_code=section.trust_remote_code,
        **more,
    )


def load_configured_tokenizer(section: LoadedModelSection) -> Any:
    """`load_tokenizer` of a section of the configuration."""
    return load_tokenizer(
        section.name,
        revision=section.revision,
        gguf_file=section.gguf_file,
        trust_remote_code=section.trust_remote_code,
    )


@contextmanager
def no_bars() -> Iterator[None]:
    """Without transformers' own progress bars."""
    from transformers.utils import logging as transformers_logging

    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            transformers_logging.enable_progress_bar()


def _with_adapters_folded_in(folder: str, options: dict[str, Any]) -> nn.Module:
    """The base model that a folder of adapters names, changed by them: all of it, or new adapters, can train."""
    from peft import PeftConfig, PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(PeftConfig.from_pretrained(folder).base_model_name_or_path, **options)
    model: nn.Module = PeftModel.from_pretrained(base, folder).merge_and_unload()  # type: ignore[operator]
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return model


@contextmanager
def _readable_errors(name: str, what: str) -> Iterator[None]:
    """transformers' errors as one sentence."""
    try:
        with no_bars():
            yield
    except InputError:
        raise
    except Exception as error:
        # safetensors and tokenizers raise kinds of their own, and plain Exception, for a file that is not theirs.
        reason = " ".join(str(error).split())[:300]
        is_local = name.startswith(BUILTIN_PREFIX) or Path(name).expanduser().is_dir()
        hint = "" if is_local else "; offline, name a local folder that holds both weights and tokenizer"
        raise InputError(f"model.name: the {what} of {name} cannot be loaded ({reason}){hint}") from error


def as_policy(model: nn.Module, tokenizer: Any) -> Policy:
    """Wrap a model and a tokenizer; end tokens come from the generation config and the tokenizer together.

    Raises:
        InputError: neither names an end-of-sequence token.
    """
    end_ids: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for value in (getattr(generation, "eos_token_id", None), tokenizer.eos_token_id):
        if value is not None:
            end_ids.update([value] if isinstance(value, int) else value)
    if not end_ids:
        raise InputError("model.name: neither the tokenizer nor the generation config names an end-of-sequence token")
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(end_ids)
    return Policy(model, tokenizer, tuple(sorted(end_ids)), int(pad_id))


def add_lora(model: nn.Module, lora: Lora, *, quantised: bool, checkpoint: Path | None = None) -> nn.Module:
    """Wrap the model in a peft model whose only trainable weights are low-rank updates, new or from a checkpoint."""
    from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training

    if quantised:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if checkpoint is not None:
        return PeftModel.from_pretrained(model, str(checkpoint), is_trainable=True)  # type: ignore[arg-type]
    targets = lora.target_modules
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)  # type: ignore[arg-type]


def uses_chat_template(tokenizer: Any, chat_template: str) -> bool:
    """Whether prompts are rendered as a chat: `auto` when the tokenizer brings a template, `off` never."""
    return chat_template != "off" and bool(tokenizer.chat_template)


def encode_prompt(tokenizer: Any, prompt: str | list[dict[str, str]], *, chat_template: str = "auto") -> list[int]:
    """Token ids of a prompt, ready to be continued, with exactly one BOS when the model wants one.

    A string becomes one user message when the tokenizer brings a chat template and `chat_template` is not `off`.
    A template that writes the BOS itself and a tokenizer that adds one do not add up to two.

    Raises:
        InputError: messages without a chat template, or a prompt of no tokens.
    """
    if uses_chat_template(tokenizer, chat_template):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs of their own and raise what they like
            raise InputError(f"prompt: the model's chat template refuses these messages ({error})") from error
    elif isinstance(prompt, str):
        text = prompt
    else:
        raise InputError("prompt: this model's tokenizer brings no chat template; give prompts as strings")
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    bos = tokenizer.bos_token_id
    if bos is not None and tokenizer("a").input_ids[:1] == [bos]:
        while ids[:1] == [bos]:
            ids = ids[1:]
        ids = [bos, *ids]
    if not ids:
        raise InputError("prompt: a prompt is empty; every prompt needs at least one token")
    return ids


def longest_sequence(name: str, gguf_file: str | None = None) -> int | None:
    """The model's position limit in tokens, read from its config.json when it is local; None when unknown."""
    path = Path(resolve_model(name, gguf_file)) / "config.json"
    if not path.is_file():
        return None
    limit = json.loads(path.read_text(encoding="utf-8")).get("max_position_embeddings")
    return limit if isinstance(limit, int) else None
