"""The run configuration: one pydantic model a section, its documentation beside each field.

Unknown keys, wrong types and values out of range fail here, before any model loads, in one sentence that names the key.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from trimtab.config_method import SFT, check_method, settings_of


class Section(BaseModel):
    """A part of the configuration: unknown keys and silent type conversions are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=(), allow_inf_nan=False)


class LoraSection(Section):
    """Low-rank adaptation through peft (arXiv 2106.09685)."""

    rank: int = Field(16, ge=1, description="rank of the update")
    alpha: float = Field(32.0, gt=0, description="the update is scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the adapters' input")
    target_modules: str | list[str] = Field("all-linear", description="module names, or all-linear")


class LoadedModelSection(Section):
    """A model to sample from."""

    name: str = Field(description="Hugging Face id, local folder, or builtin:arithmetic-varied")
    revision: str | None = Field(None, description="branch, tag or commit on the hub")
    gguf_file: str | None = Field(None, description="GGUF file inside the folder (needs the gguf extra)")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="dtype of the weights")
    trust_remote_code: bool = Field(False, description="run code that comes with the model")


class ModelSection(LoadedModelSection):
    """The policy, a model to train."""

    lora: LoraSection | None = Field(None, description="train low-rank adapters instead of the weights")
    quantization: Literal["none", "8bit", "4bit"] = Field("none", description="bitsandbytes; with lora only")
    gradient_checkpointing: bool = Field(False, description="recompute activations: less memory, slower scoring")


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


class ProcessSection(Section):
    """Where the steps of a completion end and what each is worth; for method grpo_process."""

    scorer: str = Field(description="arithmetic, module:function, or the folder of a token-classification model")
    delimiter: str = Field("\n\n", min_length=1, description="separates two steps of a completion")
    separator: str = Field("\n", description="separates two steps in what a token-classification model reads")


class OffPolicySection(Section):
    """Completions that were not just sampled, in every group; for methods without importance ratios."""

    share: float = Field(
        gt=0, le=1, description="share of a group's completions, rounded to whole ones; 1: none is sampled"
    )
    data: DataSection | None = Field(
        None, description="rows of prompt, completion, and if at hand reward, truncated, source"
    )
    replay: int = Field(0, ge=0, description="own completions kept for each prompt, to be used again when it returns")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.data is None and not self.replay:
            raise ValueError("name a file under off_policy.data, or keep own completions with off_policy.replay")
        if self.data is None and self.share == 1:
            raise ValueError("off_policy.share: with 1 nothing is sampled, so off_policy.data is needed")
        return self


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


class MonitorSection(Section):
    """The collapse monitor."""

    on_collapse: Literal["warn", "stop", "rollback", "off"] = Field(
        "warn", description="stop: with exit code 1; rollback: to the last good checkpoint; off: no monitor at all"
    )
    false_alarms: float = Field(0.05, gt=0, lt=1, description="probability of any finding in a healthy run")
    rate_factor: float = Field(0.5, gt=0, le=1, description="rollback: the learning rate is multiplied by it each time")
    max_rollbacks: int = Field(3, ge=1, description="a run that collapses once more is stopped")


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
        description="gtpo, grpo, grpo_process, dr_grpo, dapo, gspo, gvpo, distill, rloo, reinforce, sft; or a mapping"
    )
    model: ModelSection
    data: DataSection
    prompt: PromptSection = PromptSection()
    rewards: str | list[RewardSection] = Field("paper", description="paper, binary, none, or a list of functions")
    process: ProcessSection | None = Field(None, description="method grpo_process: the step scorer")
    teachers: list[LoadedModelSection] = Field(
        default_factory=list, description="method distill: one for each of method.lambdas"
    )
    off_policy: OffPolicySection | None = Field(None, description="stored completions beside fresh ones; none: off")
    sampling: SamplingSection = SamplingSection()
    optimizer: OptimizerSection = OptimizerSection()
    training: TrainingSection = TrainingSection()
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    monitor: MonitorSection = MonitorSection()
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
        if self.off_policy is not None and self.fresh_per_group == 1:
            raise ValueError(
                f"off_policy.share: {self.off_policy.share:g} leaves 1 fresh completion of {group}; "
                "leave at least 2, or none"
            )
        if self.off_policy is not None and self.fresh_per_group == group:
            raise ValueError(
                f"off_policy.share: {self.off_policy.share:g} of a group of {group} is not even one completion"
            )
        return self

    @property
    def method_settings(self) -> dict[str, Any]:
        """The method's settings, without its name."""
        return settings_of(self.method)

    @property
    def fresh_per_group(self) -> int:
        """Completions of a group that are sampled."""
        stored = self.off_policy.share if self.off_policy else 0.0
        return self.sampling.group_size - round(stored * self.sampling.group_size)

    @property
    def prompts_per_step(self) -> int:
        """Groups a step."""
        return self.training.batch_size // self.sampling.group_size
