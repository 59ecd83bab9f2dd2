"""Reading a configuration: YAML as people write it, overrides from the command line, and complaints in one sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from trimtab.config import DataSection, RunConfig
from trimtab.config_method import wrong_value
from trimtab.errors import InputError

_BOOL = "tag:yaml.org,2002:bool"

ConfigT = TypeVar("ConfigT", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 5e-6 as text and off as false; people mean a number and the word.

    Duplicate keys are refused: one of them would be ignored.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [pair for pair in pairs if pair[0] != _BOOL]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a word", problem_mark=key_node.start_mark)
            if key_node.value in seen:
                problem = f"the key {key_node.value!r} stands twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def read_yaml(text: str, where: str) -> Any:
    """Parse YAML.

    Raises:
        InputError: malformed, with file and line.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputError(f"{where}{line}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise InputError(f"{where}: not valid YAML: {str(error).splitlines()[0]}") from error


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a training run's YAML configuration, apply `key.subkey=value` overrides and check it.

    Raises:
        InputError: in one sentence that names the file and the key.
    """
    return load_config_as(RunConfig, path, overrides)


def load_config_as(kind: type[ConfigT], path: str | Path, overrides: list[str] | None = None) -> ConfigT:
    """The same for any kind of configuration.

    Raises:
        InputError: in one sentence that names the file and the key.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: there is no such configuration file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: invalid UTF-8 at byte {error.start + 1}; save the file as UTF-8") from error
    except OSError as error:
        raise InputError(f"{path}: the file cannot be read ({error.strerror})") from error
    values = read_yaml(text, str(path))
    if not isinstance(values, dict):
        raise InputError(f"{path}: a configuration is a mapping of keys to values")
    for override in overrides or []:
        values = apply_override(values, override)
    return parse_config_as(kind, values, where=str(path))


def apply_override(values: dict[str, Any], override: str) -> dict[str, Any]:
    """Set one dotted key; the value is read as YAML.

    Raises:
        InputError: not of the form key=value, or the key leads through something that is not a mapping.
    """
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise InputError(f"{override!r}: an override has the form key=value, e.g. optimizer.learning_rate=1e-6")
    *parents, last = key.strip().split(".")
    result = target = dict(values)
    for parent in parents:
        below = target.get(parent) or {}
        if parent == "method" and isinstance(below, str):
            below = {"name": below}
        if not isinstance(below, dict):
            raise InputError(f"{key}: {parent} is not a mapping, so nothing below it can be set")
        target[parent] = target = dict(below)
    target[last] = read_yaml(text, override)
    return result


def parse_config(values: Mapping[str, Any], *, where: str = "configuration") -> RunConfig:
    """Check a training run's mapping of keys to values.

    Raises:
        InputError: all that is wrong, in one sentence.
    """
    return parse_config_as(RunConfig, values, where=where)


def parse_config_as(kind: type[ConfigT], values: Mapping[str, Any], *, where: str = "configuration") -> ConfigT:
    """The same for any kind of configuration."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        # A list that fails as a list need not hear that it is no string either.
        errors = [e for e in error.errors() if not (e["loc"][-1:] == ("str",) and isinstance(e["input"], list))]
        complaints = dict.fromkeys(_complaint(error, kind) for error in errors)
        raise InputError(f"{where}: {'; '.join(complaints)}") from None


def _complaint(error: Any, kind: type[BaseModel]) -> str:
    """One pydantic error as a person would say it."""
    location = [part for part in error["loc"] if part not in ("str", "list[str]", "list[RewardSection]")]
    key = ".".join(map(str, location))
    if error["type"] == "extra_forbidden":
        from trimtab.objectives.registry import nearest

        return f"{key} is not a key{nearest(str(location[-1]), _known_keys(location[:-1], kind))}"
    if error["type"] == "missing":
        return f"{key} is missing"
    if error["type"] == "value_error":
        message = error["msg"].removeprefix("Value error, ")
        return f"{key}: {message}" if key else message
    return wrong_value(key, error)


def _known_keys(location: list[Any], section: type[BaseModel]) -> list[str]:
    """Keys that the section at this place knows."""
    for part in location:
        if not isinstance(part, int):
            section = section_below(section.model_fields[part].annotation)[0] or section
    return list(section.model_fields)


def section_below(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The section that a field holds, if any, and whether the field is a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    for argument in get_args(annotation):
        section, _ = section_below(argument)
        if section is not None:
            return section, get_origin(annotation) is list or section_below(argument)[1]
    return None, False


def describe_keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> list[tuple[str, str, str]]:
    """(key, default, description) of every key, for help and documentation; `[]` stands for a list's entries."""
    rows: list[tuple[str, str, str]] = []
    for name, info in section.model_fields.items():
        below, is_list = section_below(info.annotation)
        if below is None or is_list or (prefix and below is DataSection):
            if info.is_required():
                default = "required"
            else:
                value = info.get_default(call_default_factory=True)
                default = "" if value is None else str(value)
            rows.append((f"{prefix}{name}", default, info.description or ""))
        if below is not None and not (prefix and below is DataSection):
            rows += describe_keys(below, f"{prefix}{name}{'[]' if is_list else ''}.")
    return rows


def describe_methods() -> list[tuple[str, str, str]]:
    """(name, arXiv id, settings with defaults) of every method."""
    from trimtab.objectives import METHODS

    rows = []
    for method in METHODS.values():
        settings = ", ".join(f"{name}={p.default}" for name, p in method.settings().items())
        rows.append((method.name, method.source, f"{method.summary}. {settings}"))
    return rows
