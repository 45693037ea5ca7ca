"""Everything that determines the result of a run, as plain facts that can be stored, compared and hashed.

Two runs with the same facts on the same machine give the same bits. A checkpoint contains the facts of its run, so
resuming it with different ones is rejected, with the names of those that differ. The second half turns values into
facts: numbers, arrays, functions, modules and objects.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedlalr.data.population import Clients, DatasetClients, Population, Samples
from fedlalr.training.interfaces import Training
from fedlalr.training.layout import Layout
from fedlalr.training.options import LocalOptions, options_in

Facts = dict[str, Any]
"""Name → JSON value; nested values are flattened to dotted names."""

SAMPLES = 4096
"""The most samples of all clients that are hashed, and the most inputs of the test set."""
SAMPLES_PER_CLIENT = 4
"""Evenly spaced from a client's first to its last. Fewer with many clients; with too many, one each of some of them."""
CLIENTS_READ_TWICE = 16
"""Data sets that are read twice, to see whether a sample is the same at every read."""


def facts_of(training: Training, population: Clients, test: Clients | None, options: Mapping[str, Any]) -> Facts:
    """Everything the result depends on: the method, the options, the module, the data and the seed."""
    facts: Facts = {
        "algorithm": plain(training.algorithm),
        "compute": plain(training.compute),
        "device": training.device.type,
        **_client_options(training),
        **{name: plain(value) for name, value in options.items()},
        "model": _model_facts(training),
        "data": data_facts(population),
        "test": None if test is None else _test_facts(test),
    }
    return flat(facts)


def contract(training: Training, compression: object = None, private: bool = False) -> str:
    """The digest of what client and server must agree on: method, options, codecs, the shape of the module."""
    facts = {
        "algorithm": plain(training.algorithm),
        "parameters": _shapes(training.layout),
        "dtype": str(training.layout.dtype),
        "compression": plain(compression),
        "private": private,
        **_client_options(training),
    }
    for own in ("loss", "collate_fn", "seed"):  # a node has its own functions, and the seed is sent every round
        del facts[own]
    return digest(facts)


def _client_options(training: Training) -> Facts:
    return {each.name: plain(getattr(training, each.name)) for each in options_in(LocalOptions, "client")}


def digest(facts: Mapping[str, Any]) -> str:
    """A hash of the facts, independent of their order.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe the facts that differ.

    >>> differences({"seed": 0, "lr": 0.1}, {"seed": 1, "lr": 0.1})
    ['seed was 0 and is now 1']
    >>> differences({"local": "fedlalr.Steps", "local.count": 2}, {"local": "fedlalr.Epochs", "local.count": 1})
    ['local was Steps(count=2) and is now Epochs(count=1)']
    """
    other = [name for name in dict.fromkeys([*before, *now]) if before.get(name, ...) != now.get(name, ...)]
    objects = [name for name in other if _is_object(before, name) and _is_object(now, name)]
    fields = tuple(f"{name}." for name in objects)  # fields of these objects are shown with them
    shown = [name for name in other if not name.startswith(fields)]
    return [f"{name} was {_shown(before, name)} and is now {_shown(now, name)}" for name in shown]


def flat(tree: Mapping[str, Any], prefix: str = "") -> Facts:
    """Nested dicts as one dict with dotted names; the key `kind` of a dict gets the name of the dict itself."""
    facts: Facts = {}
    for key, value in tree.items():
        name = prefix.rstrip(".") if key == "kind" and prefix else f"{prefix}{key}"
        if isinstance(value, Mapping):
            facts |= flat(value, f"{name}.")
        else:
            facts[name] = value
    return facts


def _shapes(layout: Layout) -> dict[str, list[int]]:
    return {name: list(shape) for name, shape in zip(layout.names, layout.shapes, strict=True)}


def _model_facts(training: Training) -> Facts:
    """The module's structure, its trained parameters, and the values of those that are frozen."""
    layout, model = training.layout, training.model
    frozen = {name: hash_tensor(p) for name, p in model.named_parameters() if not p.requires_grad}
    return {
        "kind": described(model),
        "parameters": f"{layout.size} in {len(layout.names)} tensors, {digest(_shapes(layout))[:16]}",
        "dtype": str(layout.dtype),
        "frozen": digest(frozen)[:16] if frozen else None,
    }


def data_facts(population: Clients) -> Facts:
    """The number of clients and samples, and hashes of some of them."""
    sizes = population.sizes
    facts: Facts = {"clients": len(population), "samples": int(sizes.sum()), "sizes": hash_tensor(sizes)}
    if isinstance(population, Population):
        rows = [population.partition[client][places] for client, places in _sampled(sizes)]
        facts["partition"] = hash_tensor(torch.from_numpy(population.partition.indices))
        facts |= _pool_facts(population, np.concatenate(rows))
        facts["transform"] = plain(population.transform)
    elif isinstance(population, DatasetClients):
        facts |= _dataset_facts(population)
    return facts


def _test_facts(test: Clients) -> Facts:
    if isinstance(test, DatasetClients):
        return {"samples": int(test.sizes[0]), **_dataset_facts(test)}
    assert isinstance(test, Population)
    return _pool_facts(test, _spread(int(test.sizes[0]), SAMPLES))


def _pool_facts(pool: Population, rows: NDArray[np.int64]) -> Facts:
    """Hashes of some inputs and of all targets."""
    inputs = _by_leaf(lambda leaf: _hash_rows(leaf, rows), pool.inputs)
    return {"inputs": inputs, "targets": _by_leaf(hash_tensor, pool.targets)}


def _by_leaf(hashed: Callable[[Any], str], tree: Any) -> Any:
    """The hash of a tensor, or of each part of a tuple or dict by its name."""
    if not isinstance(tree, dict | tuple):
        return hashed(tree)
    parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {str(name): _by_leaf(hashed, part) for name, part in parts}


def _sampled(sizes: Tensor) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The clients with the indices of their samples to hash: every client, unless there are too many."""
    each = min(SAMPLES_PER_CLIENT, max(1, SAMPLES // len(sizes)))
    for client in _spread(len(sizes), SAMPLES).tolist():
        yield client, _spread(int(sizes[client]), each)


def _spread(count: int, most: int) -> NDArray[np.int64]:
    """At most `most` of the indices `0 … count − 1`, evenly spaced, including the first and the last."""
    return np.linspace(0, count - 1, min(count, most)).astype(np.int64)


def _hash_rows(samples: Samples, rows: NDArray[np.int64]) -> str:
    """A hash of the number of samples and of some of them, read a few at a time, since samples may be large."""
    whole = hashlib.sha256()
    for start in range(0, len(rows), 64):
        some = torch.from_numpy(rows[start : start + 64]).to(samples.device)
        whole.update(hash_tensor(samples[some]).encode())
    return f"{len(samples)} samples, {whole.hexdigest()[:16]}"


def _dataset_facts(population: DatasetClients) -> Facts:
    """Hashes of sampled inputs and targets. Values that change from read to read, as with augmentation, do not count. A
    client that cannot be read, whose replies a run rejects, counts by the type of its error."""
    sampled = list(_sampled(population.sizes))
    few = _spread(len(sampled), CLIENTS_READ_TWICE)
    with torch.random.fork_rng(devices=[]):
        found = np.array([_hashed_batch(population, *one) for one in sampled])
        again = np.array([_hashed_batch(population, *sampled[place]) for place in few])
    same = (found[few] == again).all(axis=0)
    return {
        name: digest({"clients": found[:, part].tolist()})[:16] if same[part] else "different at every read"
        for part, name in enumerate(("inputs", "targets"))
    }


def _hashed_batch(population: DatasetClients, client: int, places: NDArray[np.int64]) -> tuple[str, str]:
    try:
        inputs, targets = population.batch(client, torch.from_numpy(places))
    except Exception as error:  # a data set is the user's code and may raise anything
        return type(error).__name__, type(error).__name__
    hashes = [_by_leaf(hash_tensor, part) for part in (inputs, targets)]
    first, second = (each if isinstance(each, str) else digest(each) for each in hashes)
    return first, second


def _is_object(facts: Mapping[str, Any], name: str) -> bool:
    """Whether a fact is the class of something with fields."""
    kind = facts.get(name)
    is_class = isinstance(kind, str) and all(part.isidentifier() for part in kind.split("."))
    return is_class and any(key.startswith(f"{name}.") for key in facts)


def _shown(facts: Mapping[str, Any], name: str) -> str:
    if _is_object(facts, name):
        fields = {key.removeprefix(f"{name}."): value for key, value in facts.items() if key.startswith(f"{name}.")}
        return f"{facts[name].rpartition('.')[2]}({', '.join(f'{key}={value!r}' for key, value in fields.items())})"
    value: object = facts.get(name, "not set")
    return repr(value) if isinstance(value, str | Sequence) else str(value)


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
    """The constants that a function captured, such as 0.9 in `pinball(0.9)`, its default arguments and, if it is a
    lambda, the names and constants in its code.

    Their values at the start or resumption of a run count. Lists, dicts and other objects may change during a run and
    are left out: a function that counts its calls should count in one of those.
    """
    if "<" not in function.__qualname__ or not depth:
        return {}
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
    around = {**dict(zip(names, defaults, strict=True)), **(function.__kwdefaults__ or {}), **_closure(function)}
    if function.__name__ == "<lambda>":  # its name says nothing of what it computes
        numbers = tuple(value for value in code.co_consts if isinstance(value, str | int | float))
        around |= {"<names>": code.co_names, "<constants>": numbers}
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
