"""How a request is put to vLLM and its answer read, on a stand-in; where vLLM is installed, the real one too."""

import importlib.util
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trimtab.errors import InputError, RunError
from trimtab.policy.completions import Completion, Prompt
from trimtab.policy.sampler import SamplingParams
from trimtab.policy.vllm import VllmCompleter
from trimtab.seeds import derive_seed

PROMPTS = [Prompt("never encoded", [0, 70, 71]), Prompt("never encoded", [0, 72]), Prompt("never encoded", [0, 73])]


@dataclass
class StandIn:
    """Takes what `vllm.LLM` takes; a completion is the prompt's last token over and over, then the end token."""

    options: dict[str, Any]
    calls: list[list[tuple[list[int], SimpleNamespace]]] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def llm_engine(self) -> Any:
        """Where vLLM keeps the length that it settled on."""
        return SimpleNamespace(model_config=SimpleNamespace(max_model_len=self.options["max_model_len"] or 96))

    def generate(self, requests: list[dict[str, Any]], settings: list[SimpleNamespace], *, use_tqdm: bool) -> Any:
        """One output a request."""
        assert use_tqdm is False
        rows = [request["prompt_token_ids"] for request in requests]
        self.calls.append(list(zip(rows, settings, strict=True)))
        return [self._output(row, settings) for row, settings in self.calls[-1]]

    def _output(self, prompt: list[int], settings: SimpleNamespace) -> SimpleNamespace:
        ended = settings.max_tokens > 3
        token_ids = (prompt[-1],) * 3 + ((1,) if ended else ())
        logprobs = None
        if settings.logprobs is not None:
            # vLLM puts the likeliest token beside the sampled one.
            logprobs = [
                {token: SimpleNamespace(logprob=-0.1 * i), 99: SimpleNamespace(logprob=0.0)}
                for i, token in enumerate(token_ids)
            ]
        reason = self.finish_reason or ("stop" if ended else "length")
        output = SimpleNamespace(token_ids=token_ids, logprobs=logprobs, finish_reason=reason)
        return SimpleNamespace(outputs=[output])


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """A module `vllm` whose models are put on this list."""
    made: list[StandIn] = []

    def load(**options: Any) -> StandIn:
        made.append(StandIn(options))
        return made[-1]

    module, inputs = ModuleType("vllm"), ModuleType("vllm.inputs")
    module.__dict__.update(LLM=load, SamplingParams=SimpleNamespace)
    inputs.__dict__.update(TokensPrompt=dict)
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.inputs", inputs)
    return made


def test_the_model_is_loaded_with_the_settings_given(stand_in: list[StandIn], tiny_model: Path) -> None:
    VllmCompleter(
        str(tiny_model), dtype="bfloat16", max_model_len=64, gpu_memory_utilization=0.5, tensor_parallel_size=2
    )
    assert stand_in[0].options == {
        "model": str(tiny_model),
        "revision": None,
        "trust_remote_code": False,
        "dtype": "bfloat16",
        "max_model_len": 64,
        "gpu_memory_utilization": 0.5,
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel_size": 2,
    }


def test_token_ids_go_in_and_come_out_and_each_row_has_its_own_seed(stand_in: list[StandIn], tiny_model: Path) -> None:
    completer = VllmCompleter(str(tiny_model), rows_at_once=5)
    saved: dict[int, list[Completion]] = {}
    params = SamplingParams(temperature=0.6, max_tokens=8, min_tokens=1)
    found = completer.complete(PROMPTS, 2, params, 7, first_row=20, on_done=saved.__setitem__)
    (model,) = stand_in
    assert [len(call) for call in model.calls] == [4, 2], "five rows at once hold two prompts of two"
    requests = [request for call in model.calls for request in call]
    assert [row for row, _ in requests] == [prompt.token_ids for prompt in PROMPTS for _ in range(2)]
    assert [settings.seed for _, settings in requests] == [derive_seed(7, row) for row in range(20, 26)]
    assert vars(requests[0][1]) == {
        "n": 1,
        "temperature": 0.6,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": 8,
        "min_tokens": 1,
        "seed": derive_seed(7, 20),
        "logprobs": 0,
        "detokenize": False,
    }
    text = completer.tokenizer.decode([71] * 3)
    one = Completion(text, False, 4, [71, 71, 71, 1], [0.0, -0.1, -0.2, pytest.approx(-0.3)])
    assert found[0] == [one, one] and [saved[place] for place in range(3)] == found


def test_a_completion_that_the_limit_ended_is_truncated(stand_in: list[StandIn], tiny_model: Path) -> None:
    ((found,),) = VllmCompleter(str(tiny_model)).complete(PROMPTS[:1], 1, SamplingParams(max_tokens=3), 7)
    assert found.truncated and found.token_ids == [71] * 3


@pytest.mark.parametrize(
    ("params", "top_k", "logprobs"),
    [
        (SamplingParams(top_k=40), 40, None),
        (SamplingParams(top_p=0.9), -1, None),
        # Greedy decoding draws nothing, so nothing is cut off.
        (SamplingParams(temperature=0, top_p=0.9, top_k=40), 40, 0),
    ],
)
def test_log_probabilities_are_left_out_where_they_would_be_those_of_a_truncated_distribution(
    params: SamplingParams, top_k: int, logprobs: int | None, stand_in: list[StandIn], tiny_model: Path
) -> None:
    ((found,),) = VllmCompleter(str(tiny_model)).complete(PROMPTS[:1], 1, params, 7)
    ((_, settings),) = stand_in[0].calls[0]
    assert (settings.top_k, settings.logprobs) == (top_k, logprobs)
    assert (found.logps is None) == (logprobs is None)


def test_a_prompt_that_leaves_no_room_is_refused_before_anything_is_sampled(
    stand_in: list[StandIn], tiny_model: Path
) -> None:
    completer = VllmCompleter(str(tiny_model), max_model_len=3)
    with pytest.raises(InputError, match="prompt 1 of 3 has 3 tokens, and the model takes 3"):
        completer.complete(PROMPTS, 1, SamplingParams(), 7)
    assert not stand_in[0].calls


def test_a_completion_that_was_broken_off_is_an_error(stand_in: list[StandIn], tiny_model: Path) -> None:
    completer = VllmCompleter(str(tiny_model))
    stand_in[0].finish_reason = "abort"
    with pytest.raises(RunError, match="'abort'"):
        completer.complete(PROMPTS, 1, SamplingParams(), 7)


def test_a_folder_of_adapters_is_refused(stand_in: list[StandIn], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="LoRA adapters"):
        VllmCompleter(str(tmp_path))
    assert not stand_in


def test_a_model_that_vllm_refuses_is_told_in_one_sentence(
    stand_in: list[StandIn], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(**options: Any) -> None:
        raise ValueError("no such\n  architecture")

    monkeypatch.setattr(sys.modules["vllm"], "LLM", refuses)
    with pytest.raises(InputError, match=r"vLLM cannot load .*tiny \(no such architecture\)"):
        VllmCompleter(str(tiny_model))


def test_without_vllm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(InputError, match=r"pip install trimtab\[vllm\]"):
        VllmCompleter(str(tiny_model))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_real_vllm_agrees_with_the_local_sampler_and_the_scorer() -> None:
    script = Path(__file__).parents[2] / "scripts" / "prove_vllm.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
