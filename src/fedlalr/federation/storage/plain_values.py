"""Values as plain facts that can be stored, compared and hashed: numbers, arrays, functions, modules and objects."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_NO_CONSTANT = object()

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def plain(value: object) -> Any:
    """A value as JSON: numbers and texts as they are, arrays as hashes, objects by kind and fields."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if np.isfinite(value) else repr(value)
        case np.generic():
            return repr(value) if isinstance(value.item(), np.generic) else plain(value.item())
        case complex():
            return repr(value)
        case np.ndarray():
            return hash_tensor(torch.tensor(value)) if value.dtype.kind in "biufc" else plain(value.tolist())
        case Tensor():
            return hash_tensor(value)
        case torch.dtype() | torch.device():
            return str(value)
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case functools.partial():
            return {"args": plain(value.args), **plain(value.keywords), "kind": plain(value.func)}
        case nn.Module():
            return {"kind": described(value), **{k: hash_tensor(v) for k, v in value.state_dict().items()}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"kind": _name(type(value)), **fields}
    if isinstance(value, FunctionType) and (taken := _captured_constants(value)):
        return {**taken, "kind": _name(value)}
    if callable(value) and hasattr(value, "__qualname__"):
        return _name(value)
    return {"kind": _name(type(value)), **{k: plain(v) for k, v in getattr(value, "__dict__", {}).items()}}


def _captured_constants(function: FunctionType, depth: int = 3) -> dict[str, Any]:
    """The constants that a function captured, such as 0.9 in `pinball(0.9)`, and its default arguments.

    Their values at the start or resumption of a run count. Lists, dicts and other objects may change during a run and
    are left out: a function that counts its calls should count in one of those.
    """
    if "<" not in function.__qualname__ or not depth:
        return {}
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
    around = {**dict(zip(names, defaults, strict=True)), **(function.__kwdefaults__ or {}), **_closure(function)}
    taken = {name: _constant(value, depth) for name, value in around.items()}
    return {name: value for name, value in taken.items() if value is not _NO_CONSTANT}


def _closure(function: FunctionType) -> dict[str, object]:
    """The captured variables of a function that have a value."""
    found: dict[str, object] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a cell is empty if its variable was never set
            found[name] = cell.cell_contents
    return found


def _constant(value: object, depth: int) -> Any:
    """A value as JSON, if it is of a type that does not change during a run."""
    match value:
        case FunctionType():
            return {**_captured_constants(value, depth - 1), "kind": _name(value)}
        case nn.Module():
            return described(value)  # without its weights, which may be trained
        case tuple():
            items = [_constant(item, depth) for item in value]
            return _NO_CONSTANT if _NO_CONSTANT in items else items
        case functools.partial():
            return _constant((value.func, *value.args, *value.keywords.items()), depth)
        case type() | BuiltinFunctionType():
            return _name(value)
        case None | bool() | int() | float() | complex() | str() | np.generic() | torch.dtype():
            return plain(value)
        case np.ndarray() if value.dtype.kind in "biufc":
            return plain(value)
        case Tensor() if value.layout == torch.strided and not value.is_meta:
            return plain(value)
    return _NO_CONSTANT


def hash_tensor(tensor: Tensor) -> str:
    """A hash of a tensor's shape, dtype and bits."""
    array = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    whole = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    whole.update(array.data)
    return whole.hexdigest()[:16]


def described(module: nn.Module) -> str:
    """A hash of the module's printed structure, without memory addresses, and of its layers' settings."""
    structure = _ADDRESS.sub("", repr(module)) + repr([_settings_of(layer) for layer in module.modules()])
    return f"{type(module).__name__} {hashlib.sha256(structure.encode()).hexdigest()[:16]}"


def _settings_of(layer: nn.Module) -> list[tuple[str, object]]:
    """Numbers and texts that a layer was created with; not every layer prints all of them."""
    return sorted(
        (name, value)
        for name, value in vars(layer).items()
        if isinstance(value, bool | int | float | str) and name != "training" and not name.startswith("_")
    )


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '?')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"
