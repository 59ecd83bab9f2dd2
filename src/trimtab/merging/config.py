"""The file that describes a merge, in the form that mergekit made common: models or slices, a method, parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from trimtab.config_file import read_yaml
from trimtab.errors import InputError, did_you_mean
from trimtab.merging._settings import SETTINGS
from trimtab.merging.methods import METHODS, find_method
from trimtab.merging.parameters import Parameters, check_setting

KEYS = (
    *("merge_method", "models", "slices", "base_model", "parameters", "dtype", "out_dtype"),
    *("tokenizer_source", "tokenizer", "chat_template"),
)
# Keys that other tools know, and why they are refused here.
UNSUPPORTED = {
    "modules": "models with several modules are merged with models:",
    "residual_weight": "a scale for some tensors is scale: with a filter",
    "tokens": "the rows of tokens that a model lacks come from the base model, else from those that have the token",
    "override_architecture": "the tensors' names decide what is merged with what",
}
# Parameters that change nothing here: masks of a byte are no saving where no mask is kept, and `normalize` is written
# under methods that have no weights to normalize.
IGNORED = ("int8_mask", "normalize")
ALIASES = {"dare": "dare_linear", "model_soup": "linear", "della_ties": "della"}
DTYPES = {
    **{name: name for name in ("float64", "float32", "float16", "bfloat16")},
    **{"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"},
}


@dataclass(frozen=True)
class ModelName:
    """A model as a merge file names it: `folder`, `owner/name`, `owner/name@revision`, and `+adapter` behind them.

    Attributes:
        path: local folder or hub id.
        revision: of the hub's repository.
        adapter: a LoRA that is merged into the model as it is read.
        adapter_revision: of its repository.
    """

    path: str
    revision: str | None = None
    adapter: str | None = None
    adapter_revision: str | None = None

    def __str__(self) -> str:
        name = self.path + (f"@{self.revision}" if self.revision else "")
        if self.adapter is None:
            return name
        return f"{name}+{self.adapter}" + (f"@{self.adapter_revision}" if self.adapter_revision else "")

    def without_adapter(self) -> ModelName:
        """The model alone."""
        return ModelName(self.path, self.revision)


@dataclass(frozen=True)
class Source:
    """One input of a slice: a model, layers `start` to `stop` (exclusive; None: all), and its own parameters."""

    model: ModelName
    layers: tuple[int, int] | None
    parameters: Parameters


@dataclass(frozen=True)
class Slice:
    """Successive layers of the output, and what they are merged from."""

    sources: tuple[Source, ...]
    base: ModelName | None
    parameters: Parameters


@dataclass(frozen=True)
class MergeConfig:
    """A merge.

    Attributes:
        method: a name of `METHODS`.
        slices: what the output consists of; `models:` is one slice of all layers.
        base: the base model, or None.
        parameters: those of the whole merge.
        dtype: of the result's floating-point tensors; None: as in the base or first model.
        tokenizer_source: `union`, `base`, a model whose tokenizer is taken, or None: no vocabulary is changed.
        pad_to_multiple_of: the rows of the united embedding are a multiple of it.
        chat_template: `auto`, `chatml`, a Jinja text or a file that holds one; None: the tokenizer's own.
        text: the file's content.
        ignored: what had no effect, for a warning.
    """

    method: str
    slices: tuple[Slice, ...]
    base: ModelName | None
    parameters: Parameters
    dtype: str | None = None
    tokenizer_source: Literal["union", "base"] | ModelName | None = None
    pad_to_multiple_of: int | None = None
    chat_template: str | None = None
    text: str = ""
    ignored: tuple[str, ...] = field(default=())

    def models(self) -> list[ModelName]:
        """All models, the base first when there is one, each once."""
        bases = [self.base, *(one.base for one in self.slices)]
        sources = [source.model for one in self.slices for source in one.sources]
        return list(dict.fromkeys(model for model in [*bases, *sources] if model is not None))


def load_merge_config(path: str | Path) -> MergeConfig:
    """Read a merge file.

    Raises:
        InputError: in one sentence that names the file and the key.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such merge file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: the merge file cannot be read ({error}).") from error
    return parse_merge_config(read_yaml(text, str(path)), where=str(path), text=text)


def parse_merge_config(values: Any, *, where: str = "merge", text: str = "") -> MergeConfig:
    """Check what a merge file holds.

    Raises:
        InputError: a key that is unknown or not supported, a value of the wrong kind, a parameter that no method has.
    """
    ignored: list[str] = []
    values = _mapping(values, where)
    _check_keys(values, KEYS, where)
    if "merge_method" not in values:
        raise InputError(f"{where}: merge_method is missing; one of {', '.join(METHODS)}.")
    method = str(values["merge_method"]).strip().lower().replace("-", "_").replace(" ", "_")
    method = find_method(ALIASES.get(method, method)).name

    def parameters(given: Any, place: str, *, of_model: bool = False) -> Parameters:
        return _parameters(given, f"{where}: {place}", method, ignored, of_model=of_model)

    base = _model(values.get("base_model"), f"{where}: base_model")
    given = [key for key in ("models", "slices") if values.get(key)]
    if len(given) != 1:
        raise InputError(f"{where}: give either models or slices, and at least one entry.")
    if given == ["models"]:
        sources = tuple(
            _source(entry, f"models[{place}]", where, parameters, layered=False)
            for place, entry in enumerate(_list(values["models"], f"{where}: models"))
        )
        slices = [Slice(sources, None, {})]
    else:
        slices = []
        for place, entry in enumerate(_list(values["slices"], f"{where}: slices")):
            key = f"slices[{place}]"
            entry = _mapping(entry, f"{where}: {key}")
            _check_keys(entry, ("sources", "base_model", "parameters"), f"{where}: {key}")
            sources = tuple(
                _source(source, f"{key}.sources[{number}]", where, parameters, layered=True)
                for number, source in enumerate(_list(entry.get("sources"), f"{where}: {key}.sources"))
            )
            own_base = _model(entry.get("base_model"), f"{where}: {key}.base_model")
            slices.append(Slice(sources, own_base, parameters(entry.get("parameters"), f"{key}.parameters")))
    tokenizer_source, pad = _tokenizer(values, where)
    dtype = next((values[key] for key in ("out_dtype", "dtype") if values.get(key)), None)
    for key in ("dtype", "out_dtype"):
        if values.get(key) and str(values[key]) not in DTYPES:
            raise InputError(f"{where}: {key} is {values[key]!r}; it must be one of {', '.join(DTYPES)}.")
    template = values.get("chat_template")
    if template is not None and not isinstance(template, str):
        raise InputError(f"{where}: chat_template must be a text; auto takes the one most of the models have.")
    return MergeConfig(
        method=method,
        slices=tuple(slices),
        base=base,
        parameters=parameters(values.get("parameters"), "parameters"),
        dtype=DTYPES[str(dtype)] if dtype else None,
        tokenizer_source=tokenizer_source,
        pad_to_multiple_of=pad,
        chat_template=template or None,
        text=text or yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True),
        ignored=tuple(dict.fromkeys(ignored)),
    )


def parse_model_name(text: str, where: str = "model") -> ModelName:
    """A model's name with its revision and its adapter taken apart.

    Raises:
        InputError: more than one `+`, or nothing on one side of it.
    """
    # A folder may well have + or @ in its name.
    if Path(text).expanduser().exists():
        return ModelName(text)
    parts = [part.strip() for part in text.split("+")]
    if len(parts) > 2 or not all(parts):
        raise InputError(f"{where}: {text!r} is not a model; write MODEL or MODEL+LORA.")
    path, revision = _revision(parts[0])
    adapter, adapter_revision = _revision(parts[1]) if len(parts) == 2 else (None, None)
    return ModelName(path, revision, adapter, adapter_revision)


def _revision(text: str) -> tuple[str, str | None]:
    if Path(text).expanduser().exists() or "@" not in text:
        return text, None
    path, revision = text.rsplit("@", 1)
    return path, revision


def _model(value: Any, where: str) -> ModelName | None:
    if value is None:
        return None
    if isinstance(value, Mapping):
        _check_keys(value, ("model", "lora"), where)
        parts = []
        for part in (value.get("model"), value.get("lora")):
            if isinstance(part, Mapping):
                _check_keys(part, ("path", "revision"), where)
                part = f"{part.get('path')}@{part['revision']}" if part.get("revision") else part.get("path")
            parts.append(part)
        value = "+".join(str(part) for part in parts if part is not None)
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{where} is {value!r}; it must name a folder or a Hugging Face id.")
    return parse_model_name(value.strip(), where)


def _source(entry: Any, key: str, where: str, parameters: Any, *, layered: bool) -> Source:
    entry = {"model": entry} if isinstance(entry, str) and not layered else _mapping(entry, f"{where}: {key}")
    _check_keys(
        entry, ("model", "layer_range", "parameters") if layered else ("model", "parameters"), f"{where}: {key}"
    )
    model = _model(entry.get("model"), f"{where}: {key}.model")
    if model is None:
        raise InputError(f"{where}: {key}.model is missing.")
    layers = None
    if layered:
        given = entry.get("layer_range")
        whole = isinstance(given, list) and len(given) == 2 and all(type(number) is int for number in given)
        if not whole or not 0 <= given[0] < given[1]:
            raise InputError(f"{where}: {key}.layer_range is {given!r}; it must be [first, one after the last].")
        layers = (given[0], given[1])
    return Source(model, layers, parameters(entry.get("parameters"), f"{key}.parameters", of_model=True))


def _parameters(given: Any, where: str, method: str, ignored: list[str], *, of_model: bool) -> Parameters:
    known = METHODS[method].parameters
    every = {setting.key: setting for setting in SETTINGS.values()}
    result: dict[str, Any] = {}
    for key, value in _mapping({} if given is None else given, where).items():
        if key in known:
            keyword, _ = known[key]
            if of_model and not SETTINGS[keyword].per_tensor and METHODS[method].most != 1:
                raise InputError(f"{where}.{key} is of the merge as a whole; move it to the parameters at the end.")
            check_setting(value, f"{where}.{key}")
            result[key] = value
        elif key in every or key in IGNORED:
            if key not in IGNORED:
                ignored.append(f"{where}.{key} has no effect: {method} has no {key}")
        else:
            raise InputError(f"{where}.{key} is not a parameter of {method}{did_you_mean(str(key), known)}")
    return result


def _tokenizer(values: Mapping[str, Any], where: str) -> tuple[Any, int | None]:
    source, pad = values.get("tokenizer_source"), None
    if values.get("tokenizer") is not None:
        if source is not None:
            raise InputError(f"{where}: give tokenizer_source or tokenizer, not both.")
        section = _mapping(values["tokenizer"], f"{where}: tokenizer")
        _check_keys(section, ("source", "pad_to_multiple_of"), f"{where}: tokenizer")
        source, pad = section.get("source", "union"), section.get("pad_to_multiple_of")
        if pad is not None and (type(pad) is not int or pad < 1):
            raise InputError(f"{where}: tokenizer.pad_to_multiple_of is {pad!r}; it must be a whole number above 0.")
    if source in ("union", "base", None):
        return source, pad
    if isinstance(source, str) and source.startswith("model:"):
        source = source.removeprefix("model:")
    return _model(source, f"{where}: tokenizer_source"), pad


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: expected a mapping of keys to values, not {value!r}.")
    return value


def _list(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, list) or not value:
        raise InputError(f"{where}: expected a list with at least one entry, not {value!r}.")
    return value


def _check_keys(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in values:
        if key in UNSUPPORTED and key not in known:
            raise InputError(f"{where}: {key} is not supported; {UNSUPPORTED[key]}.")
        if key not in known:
            raise InputError(f"{where}: {key} is not a key{did_you_mean(str(key), known)}")
