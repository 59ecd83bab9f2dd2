"""The fused head against the plain formula: values, gradients, memory."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab.policy import head as head_module
from trimtab.policy.head import chunk_rows, entropy, token_logps

TEMPERATURES = [(1.0, None), (1.0, 1.0), (0.7, None), (0.7, 0.7), (0.7, 1.3), (1.0, 0.5)]


def setup(
    tokens: int = 11, vocabulary: int = 23, hidden: int = 7, bias: bool = True, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, nn.Linear, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(hidden, vocabulary, bias=bias, dtype=dtype)
    nn.init.normal_(head.weight)
    hidden_MH = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    return hidden_MH, head, torch.randint(vocabulary, (tokens,))


def formula(
    hidden_MH: Tensor, head: nn.Linear, token_ids_M: Tensor, temperature: float, entropy_temperature: float | None
) -> tuple[Tensor, Tensor]:
    """The definition, on the full logits."""
    logits_MV = head(hidden_MH)
    logps_M = torch.log_softmax(logits_MV / temperature, dim=1)[torch.arange(len(token_ids_M)), token_ids_M]
    if entropy_temperature is None:
        return logps_M, torch.zeros_like(logps_M)
    return logps_M, torch.distributions.Categorical(logits=logits_MV / entropy_temperature).entropy()


def gradients(outputs: tuple[Tensor, Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Of a sum with different weights everywhere."""
    rising_M = torch.linspace(-1, 2, len(outputs[0]), dtype=outputs[0].dtype)
    loss = (rising_M * outputs[0]).sum() + (rising_M.flip(0) * outputs[1]).sum()
    return list(torch.autograd.grad(loss, inputs))


@pytest.mark.parametrize("temperatures", TEMPERATURES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_values_and_gradients_equal_those_of_the_full_logits(
    temperatures: tuple[float, float | None], bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    hidden_MH, head, ids_M = setup(bias=bias, dtype=dtype)
    found = token_logps(hidden_MH, head, ids_M, temperature=temperatures[0], entropy_temperature=temperatures[1])
    expected = formula(hidden_MH, head, ids_M, *temperatures)
    inputs = [hidden_MH, *head.parameters()]
    for values_M, expected_M in zip(found, expected, strict=True):
        assert values_M.dtype == dtype
        torch.testing.assert_close(values_M, expected_M, rtol=tolerance, atol=tolerance)
    for gradient, wanted in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        assert (gradient - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize("temperatures", [(0.7, 1.3), (0.7, None)])
def test_gradcheck_agrees_with_the_backward_pass(temperatures: tuple[float, float | None]) -> None:
    hidden_MH, head, ids_M = setup(tokens=4, vocabulary=5, hidden=3)

    def call(hidden_MH: Tensor, weight_VH: Tensor, bias_V: Tensor) -> tuple[Tensor, ...]:
        outputs = head_module._FusedHead.apply(hidden_MH, weight_VH, bias_V, ids_M, *temperatures)
        return outputs if temperatures[1] is not None else outputs[:1]  # type: ignore[no-any-return]

    assert torch.autograd.gradcheck(call, (hidden_MH, head.weight, head.bias))


@pytest.mark.parametrize("size", [1, 3, 11, 40])
def test_chunks_of_any_size_give_the_same_values_and_gradients(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_MH, head, ids_M = setup()
    inputs = [hidden_MH, *head.parameters()]
    whole = token_logps(hidden_MH, head, ids_M, temperature=0.7, entropy_temperature=1.3)
    whole_gradients = gradients(whole, inputs)
    monkeypatch.setitem(head_module.CHUNK_ELEMENTS, "cpu", size * 23)
    assert chunk_rows(23, torch.device("cpu")) == size
    parts = token_logps(hidden_MH, head, ids_M, temperature=0.7, entropy_temperature=1.3)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(parts, inputs), whole_gradients, rtol=1e-12, atol=1e-12)


def test_a_chunk_holds_at_least_one_token_however_large_the_vocabulary() -> None:
    assert chunk_rows(10**9, torch.device("cpu")) == 1


def test_without_an_entropy_temperature_the_entropies_are_zero_and_carry_no_gradient() -> None:
    hidden_MH, head, ids_M = setup()
    _, entropies_M = token_logps(hidden_MH, head, ids_M)
    assert entropies_M.tolist() == [0.0] * 11
    (gradient_MH,) = torch.autograd.grad(entropies_M.sum(), [hidden_MH])
    assert not gradient_MH.any()


def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_still_do() -> None:
    hidden_MH, head, ids_M = setup()
    (expected_MH,) = torch.autograd.grad(token_logps(hidden_MH, head, ids_M)[0].sum(), [hidden_MH])
    head.requires_grad_(False)
    token_logps(hidden_MH, head, ids_M)[0].sum().backward()
    assert head.weight.grad is None and head.bias.grad is None
    assert torch.equal(hidden_MH.grad, expected_MH)  # type: ignore[arg-type]


def test_frozen_hidden_states_leave_the_gradient_of_the_head_alone() -> None:
    hidden_MH, head, ids_M = setup()
    (expected_VH,) = torch.autograd.grad(token_logps(hidden_MH, head, ids_M)[0].sum(), [head.weight])
    token_logps(hidden_MH.detach(), head, ids_M)[0].sum().backward()
    assert torch.equal(head.weight.grad, expected_VH)  # type: ignore[arg-type]


def test_without_gradient_nothing_is_recorded() -> None:
    hidden_MH, head, ids_M = setup()
    with torch.no_grad():
        logps_M, _ = token_logps(hidden_MH, head, ids_M)
    assert not logps_M.requires_grad


def test_no_tokens_give_no_values_and_a_zero_gradient() -> None:
    hidden_MH, head, _ = setup(tokens=0)
    logps_M, entropies_M = token_logps(hidden_MH, head, torch.zeros(0, dtype=torch.long), entropy_temperature=1.0)
    assert logps_M.shape == entropies_M.shape == (0,)
    logps_M.sum().backward()
    assert head.weight.grad is not None and not head.weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_give_float32_results_that_are_close(dtype: torch.dtype) -> None:
    hidden_MH, head, ids_M = setup(dtype=torch.float32)
    expected = token_logps(hidden_MH, head, ids_M, entropy_temperature=1.0)
    half_MH = hidden_MH.detach().to(dtype).requires_grad_()
    found = token_logps(half_MH, head.to(dtype), ids_M, entropy_temperature=1.0)
    for values_M, expected_M in zip(found, expected, strict=True):
        assert values_M.dtype == torch.float32
        torch.testing.assert_close(values_M, expected_M, rtol=0.05, atol=0.1)
    found[0].sum().backward()
    assert half_MH.grad is not None and half_MH.grad.dtype == dtype
    assert head.weight.grad is not None and head.weight.grad.dtype == dtype


def test_under_bfloat16_autocast_values_and_gradients_are_close_and_the_gradients_are_float32() -> None:
    hidden_MH, head, ids_M = setup(dtype=torch.float32)
    inputs = [hidden_MH, *head.parameters()]
    expected = formula(hidden_MH, head, ids_M, 0.7, 1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = token_logps(hidden_MH, head, ids_M, temperature=0.7, entropy_temperature=1.0)
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.1)
    assert not torch.equal(found[0], expected[0]), "the matrix product ran in float32"
    for gradient, wanted in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient - wanted).norm() <= 0.05 * wanted.norm()


def test_entropy_keeps_float32_under_autocast() -> None:
    logp_NV = torch.log_softmax(torch.randn(5, 300, generator=torch.Generator().manual_seed(0)), dim=1)
    expected_N = entropy(logp_NV)
    torch.testing.assert_close(expected_N, torch.distributions.Categorical(logits=logp_NV).entropy())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found_N = entropy(logp_NV)
    assert found_N.dtype == torch.float32 and torch.equal(found_N, expected_N)


class Largest(TorchDispatchMode):
    """Records the most elements any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("entropy_temperature", [None, 1.3])
def test_nothing_larger_than_a_chunk_is_ever_made_in_either_pass(
    entropy_temperature: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, vocabulary, hidden, rows = 300, 200, 4, 10
    hidden_MH, head, ids_M = setup(tokens, vocabulary, hidden, dtype=torch.float32)
    monkeypatch.setitem(head_module.CHUNK_ELEMENTS, "cpu", rows * vocabulary)
    with Largest() as largest:
        logps_M, entropies_M = token_logps(
            hidden_MH, head, ids_M, temperature=0.7, entropy_temperature=entropy_temperature
        )
        (logps_M.sum() + entropies_M.square().sum()).backward()
    # Weights (200 x 4) and hidden states (300 x 4) are smaller than a chunk; all logits at once are 30 times a chunk.
    assert largest.elements == rows * vocabulary


def test_the_recorder_sees_the_full_logits_where_they_are_made() -> None:
    hidden_MH, head, ids_M = setup(300, 200, 4, dtype=torch.float32)
    with Largest() as largest:
        formula(hidden_MH, head, ids_M, 1.0, None)[0].sum().backward()
    assert largest.elements == 300 * 200
