"""A subject made ready to answer: its model loaded here or in vLLM, or its server asked."""

from __future__ import annotations

from typing import Any

from trimtab.config import DataSection, PromptSection
from trimtab.errors import InputError
from trimtab.evaluation.config import EvaluateConfig
from trimtab.evaluation.subjects import Subject
from trimtab.policy.completions import Completer, Prompt
from trimtab.tasks.problems import encode_rows, prompt_limit
from trimtab.tasks.prompts import render_prompt


class Backend:
    """A subject that is ready to answer."""

    def __init__(self, subject: Subject, config: EvaluateConfig) -> None:
        self.subject, self.config = subject, config
        self.tokenizer: Any = None
        self.vllm: Any = None
        self.completer: Completer
        if subject.endpoint is not None:
            from trimtab.policy.openai import Endpoint, EndpointCompleter

            self.completer = EndpointCompleter(Endpoint(**subject.endpoint.model_dump()))
            return
        assert subject.model is not None
        self.completer = self._vllm() if config.backend == "vllm" else self._local()

    def _local(self) -> Completer:
        import torch

        from trimtab.policy.completions import LocalCompleter
        from trimtab.policy.loading import load_configured

        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        model = self.subject.model
        assert model is not None
        policy = load_configured(model, device="cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = policy.tokenizer
        return LocalCompleter(policy, rows_at_once=self.config.rows_at_once)

    def _vllm(self) -> Completer:
        from trimtab.policy.vllm import VllmCompleter

        model = self.subject.model
        assert model is not None
        if model.gguf_file is not None:
            raise InputError("backend: vllm takes no gguf_file; use backend: local, or a folder of safetensors")
        self.vllm = VllmCompleter(
            model.name, revision=model.revision, dtype=model.dtype, trust_remote_code=model.trust_remote_code
        )
        self.tokenizer = self.vllm.tokenizer
        return self.vllm

    def prompts(
        self, rows: list[dict[str, Any]], data: DataSection, prompt: PromptSection
    ) -> tuple[list[Prompt], list[int]]:
        """The prompts of a data set and each one's row; those that the model has no room for are left out, counted."""
        if self.tokenizer is None:
            examples = [(example.prompt, example.completion) for example in prompt.examples]
            contents = [
                render_prompt(row, template=prompt.template, system=prompt.system, examples=examples) for row in rows
            ]
            return [Prompt(content) for content in contents], list(range(len(contents)))
        from trimtab.policy.loading import longest_sequence

        model = self.subject.model
        assert model is not None
        positions = longest_sequence(model.name, model.gguf_file)
        kept = encode_rows(
            rows,
            self.tokenizer,
            prompt,
            source=data.source,
            limit=prompt_limit(data, positions, self.config.sampling.max_completion_tokens),
        )
        prompts = [Prompt(content, ids) for content, ids in zip(kept.prompts, kept.ids, strict=True)]
        return prompts, [number - 1 for number in kept.numbers]

    def close(self) -> None:
        """Let go of the model before the next one loads."""
        if self.vllm is not None:
            self.vllm.close()
        del self.completer
