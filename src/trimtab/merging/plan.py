"""What is merged with what: every tensor of the output, its inputs and settings, checked before anything is written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.errors import InputError
from trimtab.merging._model_config import merged_config
from trimtab.merging._settings import SETTINGS
from trimtab.merging._tensor_plan import Input, TensorPlan
from trimtab.merging.config import MergeConfig, ModelName, Slice, Source
from trimtab.merging.methods import METHODS, merge_tensors
from trimtab.merging.models import EMBEDDINGS, HEADS, OpenModel, is_before_layers, split_layer
from trimtab.merging.parameters import find
from trimtab.merging.tokenizers import Vocabulary, unite_vocabularies


@dataclass(frozen=True)
class MergePlan:
    """A merge, checked.

    Attributes:
        config: the merge file.
        models: all models, the one whose configuration and tokenizer the output takes over first.
        tensors: in the order of the output.
        vocabulary: the united one, or None.
        model_config: the output's config.json.
    """

    config: MergeConfig
    models: dict[ModelName, OpenModel]
    tensors: list[TensorPlan]
    vocabulary: Vocabulary | None
    model_config: dict[str, Any]

    @property
    def donor(self) -> OpenModel:
        """The model whose configuration and tokenizer the output takes over."""
        return next(iter(self.models.values()))


@dataclass(frozen=True)
class _Group:
    """Tensors that are merged: their names in the output, the sources and the base, and how deep they lie, 0 to 1."""

    name: str
    slice: Slice
    in_sources: tuple[str, ...]
    in_base: str
    depth: float


def plan_merge(config: MergeConfig) -> MergePlan:
    """Find all tensors and check that they fit; no tensor is read.

    Raises:
        InputError: files missing or not whole, models of different architecture, a tensor missing, shapes or
            vocabularies that differ (with both shapes and what resolves it), settings that the method refuses.
    """
    models = {name: OpenModel(name) for name in config.models()}
    kinds = {str(name): model.config.get("model_type") for name, model in models.items()}
    if len(set(kinds.values())) > 1:
        raise InputError(f"Only models of one architecture can be merged; these are {_listed(kinds)}.")
    vocabulary = unite_vocabularies(config, models)
    untied = any(not model.tied for model in models.values())
    if config.slices[0].sources[0].layers is None:
        groups = list(_whole(config, models, untied))
    else:
        groups = list(_stacked(config, models, untied))
    checked: set[str] = set()
    tensors = [_tensor(config, models, group, vocabulary, checked) for group in groups]
    donor = next(iter(models.values()))
    return MergePlan(config, models, tensors, vocabulary, merged_config(config, donor, tensors, vocabulary, untied))


def _whole(config: MergeConfig, models: dict[ModelName, OpenModel], untied: bool) -> Iterator[_Group]:
    """Whole models: tensors of one name belong together, and every model must have all of them."""
    (one,) = config.slices
    bases = [config.base] if config.base and _uses_base(config, one) else []
    used = list(dict.fromkeys([*bases, *(source.model for source in one.sources)]))
    names = _with_head(models[used[0]], models.values(), untied)
    for other in used[1:]:
        extra = [name for name in _with_head(models[other], models.values(), untied) if not models[used[0]].has(name)]
        if extra:
            raise InputError(_lacks(models[used[0]], extra[0], models[other]))
    for name in names:
        for other in used[1:]:
            if not models[other].has(name):
                raise InputError(_lacks(models[other], name, models[used[0]]))
        layer = split_layer(name)
        depth = _depth(layer[1], models[used[0]].layers[layer[0]]) if layer else 0.0
        yield _Group(name, one, (name,) * len(one.sources), name, depth)


def _stacked(config: MergeConfig, models: dict[ModelName, OpenModel], untied: bool) -> Iterator[_Group]:
    """Slices: layers are numbered anew; what comes before them is merged like the first slice, what comes after like
    the last.
    """
    for one in config.slices:
        lengths = {str(source.layers): _length(source) for source in one.sources}
        if len(set(lengths.values())) > 1:
            raise InputError(f"The layer ranges of one slice must be equally long; these are {', '.join(lengths)}.")
        for source in one.sources:
            model = models[source.model]
            if len(model.layers) != 1:
                raise InputError(f"{model.name} has layers of several kinds ({_listed(model.layers)}); use models.")
            (count,) = model.layers.values()
            assert source.layers is not None
            if source.layers[1] > count:
                raise InputError(f"{model.name} has {count} layers; layer_range {list(source.layers)} leaves them.")
    first, last = config.slices[0], config.slices[-1]
    donor = models[first.sources[0].model]
    outside = [name for name in _with_head(donor, models.values(), untied) if split_layer(name) is None]
    for name in filter(is_before_layers, outside):
        yield _group_of(config, models, first, name, [name] * len(first.sources), name, 0.0)
    done = 0
    for one in config.slices:
        for place in range(_length(one.sources[0])):
            yield from _layer(config, models, one, place, done)
            done += 1
    for name in outside:
        if not is_before_layers(name):
            yield _group_of(config, models, last, name, [name] * len(last.sources), name, 0.0)


def _layer(
    config: MergeConfig, models: dict[ModelName, OpenModel], one: Slice, place: int, number: int
) -> Iterator[_Group]:
    numbers = [source.layers[0] + place for source in one.sources if source.layers is not None]
    donor = models[one.sources[0].model]
    base = one.base or config.base
    named = [own for own, source in zip(numbers, one.sources, strict=True) if source.model == base]
    if base is not None and not named and len(set(numbers)) > 1 and _uses_base(config, one):
        raise InputError(f"Name the base model {base} with its layer_range among the sources of each slice.")
    for name in donor.names:
        layer = split_layer(name)
        if layer is None or layer[1] != numbers[0]:
            continue
        prefix, _, rest = layer
        in_sources = [
            f"{next(iter(models[source.model].layers))}.{own}.{rest}"
            for own, source in zip(numbers, one.sources, strict=True)
        ]
        in_base = f"{prefix}.{(named or numbers)[0]}.{rest}"
        depth = _depth(place, _length(one.sources[0]))
        yield _group_of(config, models, one, f"{prefix}.{number}.{rest}", in_sources, in_base, depth)


def _group_of(
    config: MergeConfig,
    models: dict[ModelName, OpenModel],
    one: Slice,
    name: str,
    in_sources: list[str],
    in_base: str,
    depth: float,
) -> _Group:
    wanted = [(source.model, own) for source, own in zip(one.sources, in_sources, strict=True)]
    base = one.base or config.base
    if base is not None and _uses_base(config, one):
        wanted.append((base, in_base))
    for model, own in wanted:
        if not models[model].has(own):
            raise InputError(_lacks(models[model], own, models[one.sources[0].model]))
    return _Group(name, one, tuple(in_sources), in_base, depth)


def _tensor(
    config: MergeConfig,
    models: dict[ModelName, OpenModel],
    group: _Group,
    vocabulary: Vocabulary | None,
    checked: set[str],
) -> TensorPlan:
    method = METHODS[config.method]
    base_name = group.slice.base or config.base
    pairs = list(zip(group.slice.sources, group.in_sources, strict=True))
    base = None
    if method.base != "none":
        pairs = [(source, own) for source, own in pairs if source.model != base_name]
        if base_name is not None:
            base = Input(models[base_name], group.in_base)
    elif method.name == "slerp" and base_name is not None:
        pairs = _with_base_at_zero(pairs, base_name, group.in_base)
    settings: dict[str, Any] = {}
    shared = [group.slice.parameters, config.parameters]
    if method.most == 1:
        # What is said of the only model is said of the merge.
        shared = [group.slice.sources[0].parameters, *shared]
    for key, (keyword, default) in method.parameters.items():
        if SETTINGS[keyword].per_tensor:
            found = [find(key, [source.parameters, *shared], own, group.depth) for source, own in pairs]
            settings[keyword] = [default if value is None else value for value in found]
        else:
            settings[keyword] = find(key, shared, group.name, group.depth)
    _check_settings(method.name, len(pairs), base is not None, settings, checked)
    inputs = tuple(Input(models[source.model], own) for source, own in pairs)
    every = [*inputs, *([base] if base else [])]
    in_vocabulary = (
        vocabulary is not None
        and vocabulary.rows is not None
        and (group.name.endswith((*EMBEDDINGS, *HEADS)) or group.name.endswith("lm_head.bias"))
    )
    shapes = [one.model.shape(one.tensor) for one in every]
    for one, shape in zip(every, shapes, strict=True):
        if (shape[1:] if in_vocabulary else shape) != (shapes[0][1:] if in_vocabulary else shapes[0]):
            raise InputError(_shapes_differ(group.name, every[0], shapes[0], one, shape))
    stored = (base or inputs[0]).model.stored((base or inputs[0]).tensor).dtype
    dtype = getattr(torch, config.dtype) if config.dtype and stored.is_floating_point else stored
    assert vocabulary is not None or not in_vocabulary
    shape = (vocabulary.size, *shapes[0][1:]) if vocabulary is not None and in_vocabulary else shapes[0]
    return TensorPlan(group.name, inputs, base, settings, shape, dtype, in_vocabulary)


def _with_base_at_zero(pairs: list[tuple[Source, str]], base: ModelName, in_base: str) -> list[tuple[Source, str]]:
    """The two ends of an arc, the base first, as t counts from it."""
    at_zero = [pair for pair in pairs if pair[0].model == base]
    if not at_zero and len(pairs) == 1:
        at_zero = [(Source(base, None, {}), in_base)]
    if not at_zero:
        raise InputError(f"slerp goes from base_model to the other model; {base} is none of the two models.")
    return at_zero[:1] + [pair for pair in pairs if pair is not at_zero[0]]


def _check_settings(method: str, count: int, has_base: bool, settings: dict[str, Any], checked: set[str]) -> None:
    """Let the method judge the settings on a few numbers, once for each combination."""
    key = json.dumps([count, has_base, settings], default=str)
    if key not in checked:
        checked.add(key)
        merge_tensors(method, [torch.ones(4)] * count, base=torch.ones(4) if has_base else None, **settings)


def _uses_base(config: MergeConfig, one: Slice) -> bool:
    """Whether the base is merged, and not only named as the one whose configuration and tokenizer are taken."""
    return METHODS[config.method].base != "none" or (config.method == "slerp" and len(one.sources) == 1)


def _with_head(model: OpenModel, models: Any, untied: bool) -> list[str]:
    """A model's tensors, with the head of another model where this one ties its own and the output cannot."""
    heads = [other.head for other in models if not other.tied and other.head is not None]
    return [*model.names, *([heads[0]] if untied and heads and heads[0] not in model.names else [])]


def _depth(place: int, count: int) -> float:
    return place / (count - 1) if count > 1 else 1.0


def _length(source: Source) -> int:
    assert source.layers is not None
    return source.layers[1] - source.layers[0]


def _lacks(model: OpenModel, name: str, other: OpenModel) -> str:
    layer, hint = split_layer(name), ""
    if layer and layer[1] >= model.layers.get(layer[0], 0):
        hint = f"; it has {model.layers.get(layer[0], 0)} layers, give layer ranges under slices"
    return f"{model.name} has no tensor {name}, which {other.name} has{hint}."


def _shapes_differ(
    name: str, first: Input, first_shape: tuple[int, ...], other: Input, other_shape: tuple[int, ...]
) -> str:
    both = f"{name}: {first.model.name} has shape {list(first_shape)}, {other.model.name} has {list(other_shape)}"
    if name.endswith((*EMBEDDINGS, *HEADS)) and first_shape[1:] == other_shape[1:]:
        return f"{both}; their vocabularies differ, set tokenizer_source: union (or base) to unite them."
    return f"{both}; only models of one size can be merged, so name others."


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in values.items())
