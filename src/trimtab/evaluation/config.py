"""The configuration of `trimtab evaluate`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from trimtab.config import DataSection, LoadedModelSection, PromptSection, Section
from trimtab.tasks.named import NAMED_DATA

Count = Annotated[int, Field(ge=1)]


def short_name(source: str) -> str:
    """A file's, a model's or a data set's name without folder, owner and ending."""
    return (
        source.removeprefix("builtin:").rstrip("/").rsplit("/", 1)[-1].removesuffix(".jsonl").removesuffix(".parquet")
    )


class EndpointSection(Section):
    """A server with OpenAI's interface."""

    url: str = Field(description="address of the server, with or without /v1")
    model: str = Field(description="the server's name of the model")
    api: Literal["chat", "completions"] = Field("chat", description="which of its two interfaces is asked")
    key_variable: str = Field("OPENAI_API_KEY", description="environment variable that holds the key")
    concurrency: int = Field(8, ge=1, description="requests at a time")
    timeout: float = Field(300.0, gt=0, description="seconds a request may take")
    retries: int = Field(5, ge=0, description="tries after a first one that failed for a passing reason")


class SubjectSection(Section):
    """What is evaluated: exactly one of model, run and endpoint."""

    model: LoadedModelSection | None = Field(None, description="a model: its name, or a section")
    run: str | None = Field(None, description="folder of a training run; runs/gtpo-seed* stands for several")
    checkpoint: int | Literal["final", "best", "all"] = Field(
        "final", description="of the run: a step, final, best (by accuracy on its held-out rows) or all that are kept"
    )
    endpoint: EndpointSection | None = Field(None, description="a server with OpenAI's interface")
    label: str | None = Field(None, description="name in tables; default: the model's or the run's")
    method: str | None = Field(None, description="column of the tables; default: the run's method, else none")
    training: str | None = Field(None, description="column of the tables; default: the run's data, else none")

    @model_validator(mode="before")
    @classmethod
    def _plain_model(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("model"), str):
            values = {**values, "model": {"name": values["model"]}}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in ("model", "run", "endpoint") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of model, run and endpoint, not {' and '.join(given) or 'none'}")
        if self.checkpoint != "final" and self.run is None:
            raise ValueError("checkpoint belongs to a run; name the model's folder itself instead")
        return self


class EvaluationData(DataSection):
    """Problems; each row needs an `answer`."""

    split: str = Field("test", description="split of the data set")
    label: str | None = Field(None, description="name in tables; default: the source's")

    @property
    def title(self) -> str:
        """Name in tables."""
        named = NAMED_DATA.get(self.source)
        return self.label or (
            named.title if named else self.source.removeprefix("builtin:").rsplit("/", 1)[-1].split(".")[0]
        )


class DecodingSection(Section):
    """How completions are sampled."""

    temperature: float = Field(1.0, ge=0, description="0: greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus; 1 is off")
    top_k: int = Field(0, ge=0, description="likeliest tokens; 0 is off")
    max_completion_tokens: int = Field(1024, ge=1, description="tokens, the end token included")


class EvaluateConfig(Section):
    """An evaluation: every model on every data set."""

    models: list[SubjectSection] = Field(min_length=1, description="what is evaluated")
    data: list[EvaluationData] = Field(min_length=1, description="on what")
    prompt: PromptSection | None = Field(None, description="how a row becomes a prompt; default: as the run trained")
    samples: int = Field(8, ge=1, description="completions a problem")
    k: list[Count] = Field([1, 8], description="pass@k and first-k are reported for these")
    majority_k: list[Count] = Field([8], description="maj@k is reported for these")
    sampling: DecodingSection = DecodingSection()
    backend: Literal["local", "vllm"] = Field("local", description="what samples from models and runs")
    rows_at_once: int = Field(512, ge=1, description="completions that are sampled at once")
    baseline: str | None = Field(None, description="label that the others are compared with; default: the first")
    level: float = Field(0.95, gt=0, lt=1, description="of the intervals")
    threads: int | None = Field(None, ge=1, description="torch threads; default: torch's own choice")
    output: str = Field(description="folder of the evaluation")
    seed: int = Field(0, ge=0, description="seed of the draws")

    @model_validator(mode="after")
    def _check(self) -> Self:
        titles = [section.title for section in self.data]
        for title in titles:
            if titles.count(title) > 1:
                raise ValueError(f"data: two data sets are called {title!r}; give one of them a label")
        return self
