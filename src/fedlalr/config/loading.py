"""Loads and checks a configuration from a preset, a file or a run directory."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from fedlalr.algorithms import registry
from fedlalr.common.named import hint
from fedlalr.common.reading import read_file
from fedlalr.config import yaml_file
from fedlalr.config.errors import ConfigError, listed
from fedlalr.config.overrides import Tree, expand, has_own_data, merge, parse_overrides
from fedlalr.config.own import EXAMPLE, is_own
from fedlalr.config.schema import Config, Named

CONFIG_FILE = "config.yaml"
DEFAULT = "quickstart"
LARGEST_CONFIG = 1 << 20
"""Bytes."""


def presets() -> dict[str, str]:
    """The names and descriptions of the presets."""
    return {name: str(_read_preset(name).get("description", "")) for name in _preset_names()}


def load(source: str | Path | None, overrides: Iterable[str] = ()) -> Config:
    """The configuration of a preset, a YAML file or a run directory, with `key=value` overrides.

    Without a source it is `quickstart`, or the defaults if the overrides name a function that makes the clients. A
    function that makes the model needs data, too: `quickstart` was not tuned for it.
    """
    changes = parse_overrides(overrides)
    model = expand("model", changes.get("model"))
    if source is None and "data" not in changes and isinstance(model, Mapping) and is_own(str(model.get("name", ""))):
        raise ConfigError(
            f"model={model['name']} is your own model, but nothing names its data: add data=module:function, such as "
            f"data={EXAMPLE}, or start from a preset's data, such as quickstart model={model['name']}"
        )
    if source is None and has_own_data(changes):
        module = str(changes["data"]["name"]).partition(":")[0]
        return check(merge({"name": module.rpartition(".")[2], "algorithm": "fedlalr"}, changes))
    return check(merge(_read(source or DEFAULT), changes))


def check(tree: Mapping[str, Any]) -> Config:
    """A checked configuration from nested tables; settings of the method that are not given come from `methods`."""
    resolved = {section: expand(section, value) for section, value in tree.items()}
    algorithm, methods = resolved.get("algorithm"), resolved.get("methods", {})
    if isinstance(algorithm, Mapping) and isinstance(methods, Mapping):
        settings = methods.get(str(algorithm.get("name")), {})
        resolved["algorithm"] = {**(settings if isinstance(settings, Mapping) else {}), **algorithm}
    try:
        return Config.model_validate(resolved)
    except ValidationError as error:
        problems = error.errors()
        messages = [_explain(problem, resolved) for problem in problems]
        if any(problem["type"] == "missing" and len(problem["loc"]) == 1 for problem in problems):
            messages.append("Add it, or start from a preset with a line such as `preset: quickstart`.")
        raise ConfigError("\n".join(messages)) from error


def with_method(config: Config, method: str, **changes: Any) -> Config:
    """The same problem with another method and its settings for this problem, and further top-level changes.

    A method's name may be followed by a short form of compression: `fedlalr+balanced`.
    """
    method, plus, compression = method.partition("+")
    changes |= {"compression": compression} if plus else {}
    tree = {**config.model_dump(), **changes}
    if method != config.algorithm.name:
        tree["algorithm"] = {"name": method}
    return check(tree)


def dump(config: Config) -> str:
    """The complete configuration as YAML that `load` reads back."""
    return yaml_file.dump(config.model_dump())


def _read(source: str | Path) -> Tree:
    text, names = str(source), _preset_names()
    if text in names:
        return _read_preset(text)
    path = Path(text)
    if path.is_dir() and (path / CONFIG_FILE).is_file():
        path = path / CONFIG_FILE
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return _read_file(path)
    raise ConfigError(
        f"there is no preset {text!r}; choose one of {listed(names)}, or give a YAML file or a run directory."
        f"{_like(path) or hint(text, names)}"
    )


def _preset_names() -> list[str]:
    folder = resources.files("fedlalr.config") / "presets"
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def _read_preset(name: str) -> Tree:
    return copy.deepcopy(_parsed_preset(name))


@cache
def _parsed_preset(name: str) -> Tree:
    text = (resources.files("fedlalr.config") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
    return {"name": name, **yaml_file.parse(text)}


def _read_file(path: Path) -> Tree:
    try:
        tree = yaml_file.parse(read_file(path, LARGEST_CONFIG).decode())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text; save it in that encoding"
        raise ConfigError(f"the configuration {path} cannot be read: {reason}.{_like(path)}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # the latter two: huge numbers, deep nesting
        raise ConfigError(f"the configuration {path} is not valid YAML: {error}") from error
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError(f"the configuration {path} must be a table of settings, such as `rounds: 20`")
    base = tree.pop("preset", None)
    named = {"name": path.stem, **tree}
    if base is None:
        return named
    names = _preset_names()
    if not isinstance(base, str) or base not in names:
        near = hint(str(base), names)
        raise ConfigError(f"{path}: there is no preset {base!r}; choose one of {listed(names)}.{near}")
    return merge(_read_preset(base), named)


def _like(path: Path) -> str:
    """Suggest an existing file with the other suffix for YAML."""
    found = [other for suffix in (".yaml", ".yml") if (other := path.with_suffix(suffix)) != path and other.is_file()]
    return f" Did you mean {str(found[0])!r}?" if found else ""


def _explain(problem: Any, tree: Mapping[str, Any]) -> str:
    """The message for one validation error."""
    place = [str(part) for part in problem["loc"]]
    key, given = ".".join(place), problem["input"]
    if problem["type"] == "extra_forbidden":
        allowed = _keys_at(place[:-1])
        where = f"{'.'.join(place[:-1])} has" if place[:-1] else "Settings are"
        return f"There is no setting {key!r}.{hint(key, all_keys(tree))} {where} {listed(allowed)}."
    if problem["type"] == "missing":
        return f"The setting {key!r} is missing; it has no default."
    if problem["type"] == "literal_error":
        choices = problem["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        return f"{key} cannot be {given!r}; choose one of {listed(choices)}.{hint(str(given), choices)}"
    if problem["type"] in ("model_type", "model_attributes_type"):
        value = given if key == "local" and isinstance(given, int) else "…"
        options = " or ".join(f"{key}.{option}={value}" for option in _keys_at(place)[:2])
        return f"{key} cannot be {given!r}: it is a section of settings; write {options}"
    message = str(problem["msg"]).removeprefix("Value error, ").replace("Input should be", "it must be")
    message = message.replace("a valid dictionary", "a table, such as {name: value}")
    if problem["type"] == "value_error" and isinstance(given, Mapping):
        named = not key or message.startswith(f"{key}.")  # about several settings, or naming its key
        return message if named else f"{key}: {message}"
    return f"{key} cannot be {given!r}: {message}"


def all_keys(tree: Mapping[str, Any]) -> list[str]:
    """All dotted keys that can be set, including the options of the current algorithm."""
    keys: list[str] = []
    for name in Config.model_fields:
        inner = _keys_at([name])
        keys += [name, *(f"{name}.{option}" for option in inner)]
    algorithm = tree.get("algorithm")
    if isinstance(algorithm, Mapping) and str(algorithm.get("name")) in registry.ALGORITHMS:
        keys += [f"algorithm.{option}" for option in registry.options(str(algorithm["name"]))]
    return keys


def _keys_at(place: Sequence[str]) -> list[str]:
    """The keys of the section at a place."""
    section: Any = Config
    for part in place:
        field = section.model_fields.get(part) if _is_section(section) else None
        candidates = [] if field is None else [field.annotation, *get_args(field.annotation)]
        section = next((kind for kind in candidates if _is_section(kind)), None)
    return list(section.model_fields) if _is_section(section) else []


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel) and kind is not Named
