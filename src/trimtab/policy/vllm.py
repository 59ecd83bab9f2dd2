"""Completions from vLLM in this process, token ids in and out; the only file that imports vllm."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab.errors import InputError, RunError
from trimtab.policy.completions import Completion, OnDone, Prompt, prompt_ids
from trimtab.policy.loading import load_tokenizer, resolve_model
from trimtab.policy.sampler import SamplingParams
from trimtab.seeds import derive_seed


class VllmCompleter:
    """Completes with a model that vLLM has loaded.

    Attributes:
        tokenizer: the model's.
    """

    def __init__(
        self,
        name: str,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        trust_remote_code: bool = False,
        max_model_len: int | None = None,
        gpu_memory_utilization: float = 0.9,
        rows_at_once: int = 4096,
        **options: Any,
    ) -> None:
        """Load the model.

        Args:
            name: a Hugging Face id, a local folder with whole weights, or `builtin:NAME`.
            revision: branch, tag or commit on the hub.
            dtype: float32, bfloat16, float16, or what the model's own configuration says (auto).
            trust_remote_code: run code that comes with the model.
            max_model_len: longest prompt and completion together, tokens; None is the model's own limit.
            gpu_memory_utilization: share of the device's memory that vLLM takes.
            rows_at_once: completions that are handed to vLLM at once; what is done after that many is safe.
            options: passed to `vllm.LLM` as they are.

        Raises:
            InputError: vLLM is not installed, or the model is not one it can load.
        """
        folder = resolve_model(name)
        if (Path(folder) / "adapter_config.json").is_file():
            raise InputError(
                f"model.name: {name} holds LoRA adapters, which the vllm backend does not load; "
                "use the local backend, or fold them into the weights first"
            )
        source: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        llm_class, self._sampling_params, self._tokens_prompt = _import_vllm()
        try:
            self.llm = llm_class(
                model=folder,
                dtype=dtype,
                max_model_len=max_model_len,
                gpu_memory_utilization=gpu_memory_utilization,
                # After the temperature, as everywhere here; also after top-k and top-p, so `complete` leaves those out.
                logprobs_mode="processed_logprobs",
                **source,
                **options,
            )
        except (ValueError, RuntimeError, OSError) as error:
            raise InputError(f"model.name: vLLM cannot load {name} ({' '.join(str(error).split())[:500]})") from error
        self.tokenizer = load_tokenizer(name, **source)
        self.max_model_len: int = self.llm.llm_engine.model_config.max_model_len
        self.rows_at_once = rows_at_once

    def complete(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        seed: int,
        *,
        first_row: int = 0,
        on_done: OnDone | None = None,
    ) -> list[list[Completion]]:
        """See `Completer`.

        Each completion is a request of its own, seeded by its row; the prefix cache runs a prompt once all the same.
        Log-probabilities are left out where top-k or top-p act, since vLLM gives them after these; so are entropies.
        """
        ids = prompt_ids(prompts)
        for place, row in enumerate(ids):
            if len(row) >= self.max_model_len:
                raise InputError(
                    f"prompt {place + 1} of {len(ids)} has {len(row)} tokens, and the model takes "
                    f"{self.max_model_len} for prompt and completion together; leave it out or raise the limit"
                )
        result: list[list[Completion]] = []
        at_once = max(1, self.rows_at_once // n)
        for start in range(0, len(ids), at_once):
            chunk = ids[start : start + at_once]
            requests = [self._tokens_prompt(prompt_token_ids=row) for row in chunk for _ in range(n)]
            rows = range(first_row + start * n, first_row + start * n + len(requests))
            settings = [self._settings(params, derive_seed(seed, row)) for row in rows]
            outputs = [output.outputs[0] for output in self.llm.generate(requests, settings, use_tqdm=False)]
            completions = self._completions(outputs)
            for place in range(len(chunk)):
                result.append(completions[place * n : (place + 1) * n])
                if on_done:
                    on_done(start + place, result[-1])
        return result

    def close(self) -> None:
        """Give the device's memory back."""
        del self.llm
        gc.collect()

    def _settings(self, params: SamplingParams, seed: int) -> Any:
        """vLLM's own parameters, which write "off" as -1 for top-k."""
        greedy = params.temperature == 0
        truncated = not greedy and (params.top_p < 1 or params.top_k > 0)
        return self._sampling_params(
            n=1,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k or -1,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            seed=seed,
            logprobs=None if truncated else 0,
            # Decoded below, by the function that decodes everywhere else.
            detokenize=False,
        )

    def _completions(self, outputs: Sequence[Any]) -> list[Completion]:
        rows = [list(output.token_ids) for output in outputs]
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        completions = []
        for output, row, text in zip(outputs, rows, texts, strict=True):
            if output.finish_reason not in ("stop", "length"):
                raise RunError(f"vLLM ended a completion by {output.finish_reason!r} instead of finishing it")
            logps = None
            if output.logprobs is not None:
                logps = [told[token].logprob for told, token in zip(output.logprobs, row, strict=True)]
            completions.append(Completion(text, output.finish_reason == "length", len(row), row, logps))
        return completions


def _import_vllm() -> tuple[Any, Any, Any]:
    """(LLM, SamplingParams, TokensPrompt).

    Raises:
        InputError: vLLM is not installed.
    """
    try:
        from vllm import LLM
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.inputs import TokensPrompt
    except ImportError as error:
        raise InputError(
            f"backend: vLLM cannot be imported ({error}); install it with pip install trimtab[vllm]"
        ) from error
    return LLM, VllmSamplingParams, TokensPrompt
