"""Your own problem: functions named `package.module:function` that make the model and the clients' data.

A configuration only names them. They are imported when a run is built, never by a report.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import ConcatDataset

from fedlalr.common.named import hint
from fedlalr.config.errors import ConfigError, listed
from fedlalr.data import Population
from fedlalr.data.collating import Target
from fedlalr.data.holdout import hold_out
from fedlalr.data.partition import Partition
from fedlalr.data.population import Clients, DatasetClients, as_clients

EXAMPLE = "mypackage.data:clients"


def is_own(name: str) -> bool:
    """Whether a name in a configuration is that of a function."""
    return ":" in name


def check_name(name: str) -> None:
    """Reject what cannot be the name of a function in a module."""
    module, _, function = name.partition(":")
    if not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(f"write your own function as package.module:function, such as {EXAMPLE}")


def own_model(name: str, options: Mapping[str, Any], sizes: Mapping[str, Any], seed: int) -> nn.Module:
    """The model that a function makes. Parameters without a default get the sizes of the data of that name."""
    function = find(name, "model")
    wanted = inspect.signature(function).parameters
    derived = {size: value for size, value in sizes.items() if size in wanted and wanted[size].default is _REQUIRED}
    model = call(function, name, "model", {**derived, **options}, seed)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: {name} must return a torch.nn.Module; it returned {_shown(model)}")
    return model


def own_data(name: str, options: Mapping[str, Any], seed: int) -> tuple[object, object]:
    """The clients that a function makes, in a form that `fl.run` takes, and their test set, if it makes one."""
    found = call(find(name, "data"), name, "data", options, seed)
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list | Population | DatasetClients):
        return found
    return found, None


def own_clients(name: str, found: object, target: Target | None = None) -> Clients:
    """The clients that a function returned, in the form that a run reads."""
    try:
        return as_clients(found, target)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"data: {name} must return clients as fl.run takes them, a list of clients and a test set "
            f"(clients, (inputs, targets)), or a population; it returned {_shown(found)}: {error}"
        ) from error


def find(name: str, setting: str) -> Callable[..., Any]:
    """Import a function. Modules in the current directory are found, too."""
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"{setting}: {module} cannot be imported: {error}") from error
        raise ConfigError(
            f"{setting}: there is no module {error.name!r} in {here} or among the installed packages; run the command "
            f"in the folder that contains it, or add that folder to PYTHONPATH"
        ) from error
    except Exception as error:  # whatever the module's own code raises
        raise ConfigError(f"{setting}: {module} cannot be imported: {_raised(error)}") from error
    function = getattr(found, attribute, None)
    if function is None:
        names = [each for each, value in vars(found).items() if callable(value) and not each.startswith("_")]
        near = hint(attribute, names)
        raise ConfigError(f"{setting}: {found.__file__ or module} has no {attribute!r}; it has {listed(names)}.{near}")
    if not callable(function):
        raise ConfigError(f"{setting}: {name} is no function, but {_shown(function)}")
    return function  # type: ignore[no-any-return]


def call(function: Callable[..., Any], name: str, setting: str, given: Mapping[str, Any], seed: int) -> Any:
    """Call a function with its options, and with the run's `seed` if it takes one; torch is seeded with it, too."""
    wanted = inspect.signature(function).parameters
    arguments = {**({"seed": seed} if "seed" in wanted else {}), **given}
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in wanted.values())
    for option in arguments:
        if option not in wanted and not any_name:
            raise ConfigError(
                f"{setting}: {name} has no parameter {option!r}; it has {listed(wanted)}.{hint(option, wanted)}"
            )
    missing = [p for p, parameter in wanted.items() if parameter.default is _REQUIRED and p not in arguments]
    missing = [p for p in missing if wanted[p].kind in (wanted[p].POSITIONAL_OR_KEYWORD, wanted[p].KEYWORD_ONLY)]
    if missing:
        where = setting if setting == "model" else f"{setting}.options"
        raise ConfigError(f"{setting}: {name} needs {missing[0]!r}; set it with {where}.{missing[0]}=…")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return function(**arguments)
        except Exception as error:  # whatever the function's own code raises
            raise ConfigError(f"{setting}: {name} failed: {_raised(error)}") from error


def held_out(clients: Clients, share: float, seed: int) -> tuple[Clients, Clients]:
    """Clients without a share of the samples of each, and these samples together, as a test set."""
    own, held = hold_out(clients, share, seed)
    if not int(held.sizes.sum()):
        raise ConfigError("data.validation holds out a share of each client's samples, but every client has only one")
    if isinstance(held, Population):
        indices = held.partition.indices
        return own, Population(held.inputs, held.targets, Partition(indices, np.array([0, len(indices)])))
    assert isinstance(held, DatasetClients)  # `as_clients` makes no other
    together: ConcatDataset[Any] = ConcatDataset(held.datasets)
    return own, DatasetClients([together], target=held.target, collate_fn=held.collate_fn)


_REQUIRED = inspect.Parameter.empty


def _raised(error: Exception) -> str:
    """An exception of the user's code, with its place."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"


def _shown(value: object) -> str:
    text = repr(value)
    return f"a {type(value).__name__}, {text if len(text) <= 80 else f'{text[:80]}…'}"
