"""The online merging optimizer: every step is merged with what instruction tuning had added (arXiv 2405.17931).

τ = θ_SFT − θ_base is fixed. With Δ the base optimizer's own step (Adam's update, weight decay included), F a sparsifier
and ⊕ a consensus, a step is

    θ ← θ + F(Δ) ⊕ F(τ)                        form "update", Eq. 2 of the paper
    θ ← θ_base + F(θ + Δ − θ_base) ⊕ F(τ)      form "full", Eq. 1, which the paper finds unstable
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from trimtab.errors import InputError
from trimtab.merging._online_reference import (
    Weights,
    as_mapping,
    check_choice,
    check_weights,
    load_weights,
    names_of,
    some,
)
from trimtab.merging._online_rules import Election, Method, Rescale, Rule, merge
from trimtab.merging._streams import all_finite
from trimtab.seeds import derive_seed

Form = Literal["update", "full"]

__all__ = ["OnlineMerging", "load_weights"]

_PREFIX = "merge_"
_HALF = (torch.bfloat16, torch.float16)
# They treat each parameter by itself and keep nothing in a group that a step changes.
_ELEMENTWISE = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
# Elements that are stepped and merged at once.
_BATCH_PROCESSOR = 1 << 18
_BATCH_DEVICE = 1 << 26


class OnlineMerging(torch.optim.Optimizer):
    """Wraps an optimizer; itself an optimizer with the same parameter groups, for schedulers and trainers.

    With α = 0, keep = 1 it is the wrapped optimizer bit for bit. Otherwise parameters that require a gradient move at
    every step, those without one by τ alone (Δ = 0). 16-bit parameters are trained through float32 masters, and what
    rounding keeps out of float32 is carried to the next step, so that the smallest α τ adds up.

    Args:
        optimizer: any torch optimizer that changes parameters in `step`.
        named_parameters: as `model.named_parameters()` gives them, with names. None: the optimizer was made
            from named parameters.
        reference: weights of the model before instruction tuning, θ_base, by parameter name, or where to load them.
        tuned: those of the model after it, θ_SFT. None: the parameters as they are now, which is wrong for a run that
            is resumed from other weights (and refused when its state is loaded).
        method: `dare` (OnDARE: random masks, weighted sum), `ties` (OnTIES: largest elements, elected sign), `topk`
            (largest elements, weighted sum) or `linear` (all elements, weighted sum).
        keep: share of the elements that F keeps. Random masks keep with the nearest multiple of 2^-16.
        alpha: weight of τ; Δ has 1 − α.
        steps: K: K − 1 plain steps, then one that goes back and merges the sum of all K.
        form: `update` or `full`.
        rescale: `inverse`: dare multiplies what it keeps by 1 / keep; `none`: it does not.
        election: `weighted`: ties elects the sign of (1 − α) F(Δ) + α F(τ); `raw`: that of F(Δ) + F(τ).
        frozen: dare draws the mask of τ once, not at every step.
        alpha_follows_lr: α is multiplied by the learning rate over its peak (`initial_lr`, else the present one).
        seed: of the masks, which depend on it, the parameter's name and the step alone.
        tau_dtype: what τ is stored in; bfloat16 halves its memory.
        tau_device: where τ is stored; None: with its parameter.

    Raises:
        InputError: a setting is out of range, or the weights do not fit the parameters (all of those are named).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
        *,
        reference: Weights,
        tuned: Weights | None = None,
        method: Method = "dare",
        keep: float = 0.5,
        alpha: float = 1e-7,
        steps: int = 1,
        form: Form = "update",
        rescale: Rescale = "inverse",
        election: Election = "weighted",
        frozen: bool = False,
        alpha_follows_lr: bool = False,
        seed: int = 0,
        tau_dtype: torch.dtype = torch.float32,
        tau_device: torch.device | str | None = None,
    ) -> None:
        check_choice("method", method, get_args(Method))
        check_choice("form", form, get_args(Form))
        check_choice("rescale", rescale, get_args(Rescale))
        check_choice("election", election, get_args(Election))
        if not 0 < keep <= 1 or not 0 <= alpha <= 1 or steps < 1:
            raise InputError(
                f"Online merging needs 0 < keep <= 1, 0 <= alpha <= 1 and steps >= 1, not keep {keep}, alpha {alpha}, "
                f"steps {steps}."
            )
        if method == "linear" and keep < 1:
            raise InputError(f"Online merging with method linear keeps every element; set keep to 1, not {keep}.")
        self.optimizer = optimizer
        super().__init__(list(optimizer.param_groups), optimizer.defaults)
        # One list of groups and one state for both, so that a scheduler may change either.
        optimizer.param_groups = self.param_groups
        self.state = optimizer.state
        self.rule = Rule(method, keep, rescale, election, frozen, seed)
        self.alpha, self.every, self.form = alpha, steps, form
        self._names = names_of(optimizer, named_parameters)
        self._peaks = _peaks(self.param_groups) if alpha_follows_lr else {}
        self._plain = alpha == 0 and keep == 1
        self._steps = 0
        self._own: dict[nn.Parameter, dict[str, Tensor]] = {parameter: {} for parameter in self._names}
        self._moves_with_parameter = tau_device is None
        self._tau: dict[nn.Parameter, Tensor] = {}
        self._base: dict[nn.Parameter, Tensor] = {}
        self._hashes: dict[nn.Parameter, int] = {}
        self._buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._read_reference(as_mapping(reference), as_mapping(tuned), tau_dtype, tau_device)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only the constructor may: a parameter needs its reference.

        Raises:
            InputError: always, afterwards.
        """
        if hasattr(self, "_tau"):
            raise InputError(
                "Online merging cannot take a parameter group later; make it anew with all groups in place."
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of the wrapped optimizer, and at every K-th the merge.

        Args:
            closure: reevaluates the model and returns the loss, which is returned; called once, before the step, as
                Adam does. (An optimizer that must call it itself, like LBFGS, cannot be merged.)
        """
        self._steps += 1
        if self._plain:
            return self.optimizer.step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        try:
            for number, batch in self._batches():
                with self._masters(batch):
                    anchors = self._anchors([parameter for parameter in batch if parameter.requires_grad])
                    if number is not None:
                        self.optimizer.param_groups = [{**groups[number], "params": batch}]
                    self.optimizer.step()
                    if self._steps % self.every == 0:
                        self._merge(anchors)
        finally:
            self.optimizer.param_groups = groups
            self._buffers.clear()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and in every parameter's own: the step, the carry, a hash of τ; never τ."""
        stored = self.optimizer.state_dict()
        if self._plain:
            return stored
        state = {index: dict(values) for index, values in stored["state"].items()}
        for index, parameter in enumerate(self._in_order()):
            own = {"step": torch.tensor(self._steps), "reference": torch.tensor(self._hash(parameter))}
            for key, value in {**own, **self._own[parameter]}.items():
                state.setdefault(index, {})[_PREFIX + key] = value
        return {**stored, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put a state back. One of the wrapped optimizer alone is taken as well: merging then begins at step 0.

        Raises:
            InputError: the state was saved with another τ (or another `keep`, or for frozen masks another seed).
        """
        state: dict[Any, dict[str, Any]] = {}
        own: dict[nn.Parameter, dict[str, Tensor]] = {parameter: {} for parameter in self._names}
        steps, changed = 0, []
        parameters = self._in_order()
        for index, values in state_dict["state"].items():
            kept = {key: value for key, value in values.items() if not str(key).startswith(_PREFIX)}
            if kept:
                state[index] = kept
            ours = {str(key).removeprefix(_PREFIX): value for key, value in values.items() if key not in kept}
            if not ours or self._plain:
                continue
            parameter = parameters[index]
            steps = int(ours.pop("step"))
            if int(ours.pop("reference")) != self._hash(parameter):
                changed.append(self._names[parameter])
            own[parameter] = {key: value.to(parameter.device, copy=True) for key, value in ours.items()}
        if changed:
            raise InputError(
                f"The saved optimizer state belongs to another reference task vector of {some(changed)}; give the "
                "same reference, tuned weights (those training began with) and keep as when it was saved."
            )
        self._steps, self._own = steps, own
        # While the masters are in place, the wrapped optimizer keeps its state in their precision.
        with self._masters([] if self._plain else self._names):
            self.optimizer.load_state_dict({**state_dict, "state": state})
        self.state, self.param_groups = self.optimizer.state, self.optimizer.param_groups

    def extra_tensors(self) -> Iterator[Tensor]:
        """What is held between steps beside the wrapped optimizer's state: τ, carries, masters, anchors, the base."""
        yield from (*self._tau.values(), *self._base.values())
        for own in self._own.values():
            yield from own.values()

    def _batches(self) -> Iterator[tuple[int | None, list[nn.Parameter]]]:
        """What is stepped and merged at once: the number of a group and some of its parameters, or all of all groups.

        Stepping in batches keeps what was just written in the cache and the copies of parameters small. Only an
        optimizer that treats each parameter by itself allows it.
        """
        if type(self.optimizer) not in _ELEMENTWISE:
            yield None, list(self._names)
            return
        for number, group in enumerate(self.param_groups):
            batch: list[nn.Parameter] = []
            elements = 0
            for parameter in group["params"]:
                batch.append(parameter)
                elements += parameter.numel()
                if elements >= (_BATCH_PROCESSOR if parameter.device.type == "cpu" else _BATCH_DEVICE):
                    yield number, batch
                    batch, elements = [], 0
            if batch:
                yield number, batch

    def _merge(self, anchors: dict[nn.Parameter, Tensor]) -> None:
        """Merge parameters that the wrapped optimizer has just stepped with their τ."""
        for parameter, anchor in anchors.items():
            if not parameter.numel():
                continue
            own, carry = self._own[parameter], None
            if self.form == "update":
                if "carry" not in own:
                    own["carry"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
                carry = own["carry"].view(-1)
            flat = parameter.detach().reshape(-1)
            merge(
                flat,
                anchor,
                self._near(self._tau, parameter).reshape(-1),
                carry,
                self.rule,
                self._alpha_of(parameter),
                derive_seed(self.rule.seed, "online merging", self._names[parameter], self._steps),
            )
            if not parameter.is_contiguous():
                parameter.copy_(flat.view(parameter.shape))
            own.pop("anchor", None)

    def _alpha_of(self, parameter: nn.Parameter) -> float:
        """α at this step."""
        if not self._peaks:
            return self.alpha
        group, peak = self._peaks[parameter]
        return self.alpha * float(self.param_groups[group]["lr"]) / peak

    def _anchors(self, parameters: list[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """What the merged change is added to, flat: the parameters before the K steps, or the base's."""
        if self.form == "full":
            return {parameter: self._near(self._base, parameter).view(-1) for parameter in parameters}
        if self.every == 1:
            return dict(zip(parameters, self._copies(parameters), strict=True))
        for parameter in parameters:
            if "anchor" not in self._own[parameter]:
                self._own[parameter]["anchor"] = parameter.detach().clone(memory_format=torch.contiguous_format)
        return {parameter: self._own[parameter]["anchor"].view(-1) for parameter in parameters}

    def _copies(self, parameters: list[nn.Parameter]) -> list[Tensor]:
        """Flat copies in buffers that serve all batches of a step: fresh memory for each would double the cost."""
        spans, ends = [], dict.fromkeys(((p.device, p.dtype) for p in parameters), 0)
        for parameter in parameters:
            kind = parameter.device, parameter.dtype
            spans.append((kind, slice(ends[kind], ends[kind] + parameter.numel())))
            ends[kind] += parameter.numel()
        for kind, size in ends.items():
            if kind not in self._buffers or len(self._buffers[kind]) < size:
                self._buffers[kind] = torch.empty(size, device=kind[0], dtype=kind[1])
        copies = [self._buffers[kind][span] for kind, span in spans]
        for copy, parameter in zip(copies, parameters, strict=True):
            copy.view(parameter.shape).copy_(parameter.detach())
        return copies

    @contextmanager
    def _masters(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Within, 16-bit parameters and their gradients are float32; afterwards the parameters are rounded again."""
        swapped = []
        try:
            for parameter in parameters:
                if parameter.dtype not in _HALF:
                    continue
                own = self._own[parameter]
                if "master" not in own:
                    own["master"] = parameter.detach().float()
                gradient = parameter.grad
                swapped.append((parameter, parameter.data, gradient))
                parameter.grad = None
                parameter.data = own["master"]
                if gradient is not None:
                    parameter.grad = gradient.float()
            yield
        finally:
            for parameter, half, gradient in swapped:
                half.copy_(parameter.data)
                parameter.grad = None
                parameter.data = half
                parameter.grad = gradient

    def _near(self, tensors: dict[nn.Parameter, Tensor], parameter: nn.Parameter) -> Tensor:
        """A parameter's τ or base; it follows its parameter to another device unless it was told where to be."""
        tensor = tensors[parameter]
        if self._moves_with_parameter and tensor.device != parameter.device:
            tensor = tensors[parameter] = tensor.to(parameter.device)
        return tensor

    def _in_order(self) -> list[nn.Parameter]:
        """The parameters in the order of the groups, which is that of a state's numbers."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _hash(self, parameter: nn.Parameter) -> int:
        """63 bits of a hash of F(τ) as it is stored."""
        if parameter not in self._hashes:
            raw = self._tau[parameter].cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            self._hashes[parameter] = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big") >> 1
        return self._hashes[parameter]

    @torch.no_grad()
    def _read_reference(
        self,
        base: Mapping[str, Tensor] | None,
        tuned: Mapping[str, Tensor] | None,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        """Fill τ (trimmed as far as it can be once and for all) and, for the full form, the base."""
        assert base is not None
        check_weights(self._names, {"reference": base} if tuned is None else {"reference": base, "tuned": tuned})
        broken = []
        for parameter, name in self._names.items():
            place = parameter.device if device is None else torch.device(device)
            precision = torch.float32 if parameter.dtype in _HALF else parameter.dtype
            start = base[name].detach().to(place, precision, copy=True)
            end = (parameter if tuned is None else tuned[name]).detach().to(place, precision)
            tau = end - start
            if not all_finite(tau.reshape(-1)):
                broken.append(name)
                continue
            self._tau[parameter] = self.rule.trim_reference(tau.contiguous(), name).to(dtype)
            if self.form == "full":
                self._base[parameter] = start.contiguous()
        if broken:
            raise InputError(f"The reference task vector of {some(broken)} holds NaN or infinity; mend those weights.")


def _peaks(groups: list[dict[str, Any]]) -> dict[nn.Parameter, tuple[int, float]]:
    """Of each parameter the number of its group and the group's peak learning rate."""
    found = {}
    for number, group in enumerate(groups):
        peak = float(group.get("initial_lr", group["lr"]))
        if peak <= 0:
            raise InputError("Online merging with alpha_follows_lr needs a learning rate above 0 when it is made.")
        found.update({parameter: (number, peak) for parameter in group["params"]})
    return found
