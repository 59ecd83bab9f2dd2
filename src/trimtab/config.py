"""The run configuration: one pydantic model a section, its documentation beside each field.

Unknown keys, wrong types and values out of range fail here, before any model loads, in one sentence that names the key.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, field_validator, model_validator

if TYPE_CHECKING:
    from trimtab.objectives import Method

SFT = "sft"


class Section(BaseModel):
    """A part of the configuration: unknown keys and silent type conversions are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=(), allow_inf_nan=False)


class LoraSection(Section):
    """Low-rank adaptation through peft (arXiv 2106.09685)."""

    rank: int = Field(16, ge=1, description="rank of the update")
    alpha: float = Field(32.0, gt=0, description="the update is scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the adapters' input")
    target_modules: str | list[str] = Field("all-linear", description="module names, or all-linear")


class ModelSection(Section):
    """The policy."""

    name: str = Field(description="Hugging Face id, local folder, or builtin:arithmetic-varied")
    revision: str | None = Field(None, description="branch, tag or commit on the hub")
    gguf_file: str | None = Field(None, description="GGUF file inside the folder (needs the gguf extra)")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="dtype of the weights")
    lora: LoraSection | None = Field(None, description="train low-rank adapters instead of the weights")
    quantization: Literal["none", "8bit", "4bit"] = Field("none", description="bitsandbytes; with lora only")
    gradient_checkpointing: bool = Field(False, description="recompute activations: less memory, slower scoring")
    trust_remote_code: bool = Field(False, description="run code that comes with the model")


class ArithmeticSection(Section):
    """The built-in task; harder settings than in training make an out-of-distribution test."""

    mode: Literal["varied", "terse"] = Field("varied", description="styles of the solutions")
    operations: list[int] = Field([1, 3], description="least and most operations of a problem")
    max_operand: int = Field(20, ge=2, description="largest operand")
    max_result: int = Field(99, ge=2, description="largest intermediate result")
    rows: int = Field(2000, ge=1, description="rows to make")
    seed: int = Field(0, description="seed of the rows")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.operations) != 2 or not 1 <= self.operations[0] <= self.operations[1]:
            raise ValueError(f"operations must be [least, most] with 1 <= least <= most, not {self.operations}")
        return self


class DataSection(Section):
    """Rows to train or evaluate on."""

    source: str = Field(
        description="JSONL or Parquet file, builtin:arithmetic, gsm8k, math, math500, aime24, aime25, amc23 or a hub id"
    )
    split: str = Field("train", description="split of the data set")
    columns: dict[str, str] = Field(
        default_factory=dict, description="our name: the file's name, e.g. {prompt: question}"
    )
    limit: int | None = Field(None, ge=1, description="use the first rows only")
    max_prompt_tokens: int | None = Field(None, ge=1, description="longer prompts are left out and counted")
    arithmetic: ArithmeticSection = Field(
        default_factory=lambda: ArithmeticSection(), description="builtin:arithmetic only"
    )


class ExampleSection(Section):
    """A worked example that every prompt begins with."""

    prompt: str = Field(description="what the user says")
    completion: str = Field(description="what the assistant answers")


class PromptSection(Section):
    """How a row becomes a prompt."""

    template: str | None = Field(None, description="text with {column} fields; default: the prompt column as it is")
    system: str | None = Field(None, description="system message")
    examples: list[ExampleSection] = Field(
        default_factory=list, description="few-shot turns: a list of {prompt, completion}"
    )
    chat_template: Literal["auto", "off"] = Field("auto", description="auto: used when the tokenizer brings one")


class RewardSection(Section):
    """One reward function with TRL's signature."""

    function: str = Field(description="module:function, or verl:module:function for verl's compute_score")
    weight: float = Field(1.0, description="factor in the sum")
    name: str | None = Field(None, description="name in the log; default: the function's")


class SamplingSection(Section):
    """How completions are sampled."""

    group_size: int = Field(8, description="completions a prompt")
    temperature: float = Field(1.0, gt=0, description="logits are divided by it, in sampling and in scoring")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus; 1 is off")
    top_k: int = Field(0, ge=0, description="likeliest tokens; 0 is off")
    max_completion_tokens: int = Field(256, ge=1, description="tokens, the end token included")
    entropy_temperature: float | None = Field(
        None, gt=0, description="temperature of the entropies; default: sampling's"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.group_size < 2:
            raise ValueError(f"group_size must be at least 2, not {self.group_size}: a group is compared with itself")
        return self


class OptimizerSection(Section):
    """AdamW and its schedule."""

    name: Literal["adamw", "sgd"] = Field("adamw", description="optimizer")
    learning_rate: float = Field(1e-6, ge=0, description="peak learning rate")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW")
    beta2: float = Field(0.999, ge=0, lt=1, description="AdamW")
    epsilon: float = Field(1e-8, gt=0, description="AdamW")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after the warm-up, down to 0")
    warmup_ratio: float = Field(0.0, ge=0, le=1, description="share of the steps that the rate rises linearly")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are scaled down to this norm")


class TrainingSection(Section):
    """How long, how much at once."""

    steps: int | None = Field(None, ge=1, description="steps; default: what the epochs hold")
    epochs: float = Field(1.0, gt=0, description="passes over the rows, when steps is not set")
    batch_size: int = Field(64, ge=1, description="completions (RL) or rows (SFT) a step, over all processes")
    updates_per_rollout: int = Field(1, ge=1, description="optimizer steps on the same completions")
    micro_batch_tokens: int = Field(16384, ge=1, description="padded prompt + completion tokens that run at once")
    mixed_precision: Literal["no", "bf16"] = Field("no", description="autocast of the forward passes")
    max_excluded_rows: float = Field(0.5, ge=0, le=1, description="share of rows without a reward that stops the run")
    threads: int | None = Field(None, ge=1, description="torch threads; default: torch's own choice")


class EvaluationSection(Section):
    """Sampling on held-out rows during training."""

    data: DataSection | None = Field(None, description="held-out rows; none: no evaluation")
    every: int = Field(50, ge=1, description="steps between evaluations; the first is before training")
    samples: int = Field(4, ge=1, description="completions a problem")
    rows_at_once: int = Field(512, ge=1, description="completions that are sampled at once")
    k: list[Annotated[int, Field(ge=1)]] = Field([1, 4], description="pass@k is reported for these")
    temperature: float = Field(1.0, ge=0, description="0: greedy")


class CheckpointSection(Section):
    """What is kept on disk."""

    every: int = Field(50, ge=1, description="steps between checkpoints; the last step always has one")
    keep: int = Field(2, ge=1, description="how many of the newest are kept")


class LogSection(Section):
    """What is written down."""

    samples: int = Field(4, ge=0, description="completions of each logged step, rounded up to whole groups")
    samples_every: int = Field(10, ge=1, description="steps between them")
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = Field(
        default_factory=list, description="experiment trackers, through accelerate"
    )
    project: str = Field("trimtab", description="project name in the trackers")


class RunConfig(Section):
    """A training run."""

    method: dict[str, Any] = Field(
        description="gtpo, grpo, dr_grpo, dapo, gspo, rloo, reinforce, sft; or {name: .., settings}"
    )
    model: ModelSection
    data: DataSection
    prompt: PromptSection = PromptSection()
    rewards: str | list[RewardSection] = Field("paper", description="preset (paper, binary) or a list of functions")
    sampling: SamplingSection = SamplingSection()
    optimizer: OptimizerSection = OptimizerSection()
    training: TrainingSection = TrainingSection()
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
    output: str = Field(description="folder of the run")
    seed: int = Field(0, ge=0, description="seed of everything random")

    @model_validator(mode="before")
    @classmethod
    def _plain_method(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("method"), str):
            values = {**values, "method": {"name": values["method"]}}
        return values

    @field_validator("rewards", mode="before")
    @classmethod
    def _preset_or_list(cls, value: Any) -> Any:
        if not isinstance(value, str | list):
            raise ValueError(f"give the name of a preset or a list of functions, not {value!r}")
        return value

    @model_validator(mode="after")
    def _check_dtype(self) -> Self:
        if self.model.dtype == "float16" and self.model.lora is None:
            raise ValueError(
                "model.dtype: float16 weights underflow in training; use float32 or bfloat16, or add model.lora"
            )
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        name = self.method.get("name")
        if not isinstance(name, str):
            raise ValueError("method needs a name, e.g. method: gtpo")
        if name == SFT:
            if len(self.method) > 1:
                raise ValueError(f"method sft has no setting {next(k for k in self.method if k != 'name')!r}")
            return self
        group, batch = self.sampling.group_size, self.training.batch_size
        if batch % group:
            below, above = batch // group * group, (batch // group + 1) * group
            choice = f"{below} or {above}" if below else str(above)
            raise ValueError(
                f"training.batch_size: {batch} completions do not divide into groups of {group}; use {choice}"
            )
        check_method(self.method, max_length=self.sampling.max_completion_tokens)
        return self

    @property
    def method_settings(self) -> dict[str, Any]:
        """The method's settings, without its name."""
        return settings_of(self.method)

    @property
    def prompts_per_step(self) -> int:
        """Groups a step."""
        return self.training.batch_size // self.sampling.group_size


def settings_of(method: Mapping[str, Any]) -> dict[str, Any]:
    """A method section's settings, without the name."""
    return {key: value for key, value in method.items() if key != "name"}


def check_method(method: Mapping[str, Any], *, max_length: int) -> None:
    """Check a method's settings: names and types by its functions' signatures, values by calling them on a tiny batch.

    Raises:
        ValueError: in one sentence.
    """
    from trimtab.objectives import METHODS, find_method
    from trimtab.objectives.registry import unknown_method

    name = method["name"]
    if name not in METHODS and ":" not in name:
        raise ValueError(unknown_method(name, [*METHODS, SFT]))
    found = find_method(name)
    settings = settings_of(method)
    found.split(settings)
    hints: dict[str, Any] = {}
    for function in (found.weights, found.loss):
        hints |= inspect.get_annotations(function, eval_str=True)
    fields: dict[str, Any] = {key: (hints.get(key, Any), ...) for key in settings}
    checker = create_model("Settings", __config__=ConfigDict(strict=True, allow_inf_nan=False), **fields)
    try:
        checker(**settings)
    except ValidationError as error:
        wrong = (wrong_value(".".join(map(str, ("method", *e["loc"]))), e) for e in error.errors())
        raise ValueError("; ".join(wrong)) from None
    try:
        _try_out(found, settings, max_length)
    except ValueError as error:
        raise ValueError(f"method: {error}") from None
    except Exception as error:  # a method of the user's own may fail in any way
        raise ValueError(f"method: {name} fails on a batch of two tokens ({type(error).__name__}: {error})") from error


def wrong_value(key: str, error: Any) -> str:
    """A pydantic error about a value of the wrong kind, as a person would say it."""
    message = error["msg"]
    return f"{key}: {message[0].lower()}{message[1:]}, not {error['input']!r}"


def _try_out(found: Method, settings: Mapping[str, Any], max_length: int) -> None:
    """Call both functions of a method on two completions of one token."""
    import torch

    from trimtab.objectives import loss_denominator

    weights_settings, loss_settings = found.split(settings)
    ids_NT, mask_NT = torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1, dtype=torch.bool)
    zeros_NT = torch.zeros(2, 1)
    supplied = {"truncated_N": torch.zeros(2, dtype=torch.bool), "initial_entropy": 0.0}
    takes = inspect.signature(found.weights).parameters
    weights = found.weights(
        ids_NT,
        mask_NT,
        torch.tensor([0.0, 1.0]),
        torch.zeros(2, dtype=torch.long),
        zeros_NT,
        **{key: value for key, value in supplied.items() if key in takes},
        **weights_settings,
    )
    loss_denominator(mask_NT, normaliser=loss_settings.get("normaliser", "rows"), max_length=max_length)
    found.loss(
        zeros_NT,
        None,
        weights.weights_NT,
        weights.mask_NT,
        denominator=1.0,
        reference_logps_NT=zeros_NT,
        entropies_NT=zeros_NT,
        **loss_settings,
    )
