"""What a run returns, and a result in one file: `result.save(path)` and `fl.load(path, model)`.

The file is a safetensors file: by name the model's parameters and buffers, the server's slots, and what is personal,
stacked over the clients that have it. Its metadata is a JSON description with the history, `info`, those clients and a
hash of every tensor. Reading executes nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from fedlalr.common.colours import COLOURS
from fedlalr.common.files import write_whole
from fedlalr.common.reading import at_home, open_file, read_file
from fedlalr.federation.observers import RunInfo
from fedlalr.federation.record import Record, judged_losses, judged_on, loss_name, over_clients, spent
from fedlalr.federation.round import ServerState
from fedlalr.federation.storage.checkpoint import LARGEST_DESCRIPTION, CheckpointError, sealed
from fedlalr.federation.storage.fingerprint import hash_tensor
from fedlalr.federation.storage.tensor_files import storable, take
from fedlalr.training import Training
from fedlalr.training.interfaces import named
from fedlalr.training.layout import flat_dtype
from fedlalr.training.personal import BUFFER, SLOT
from fedlalr.training.torch_state import copied, set_buffers, undisturbed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

State = dict[str, dict[str, Tensor]]


@dataclass(frozen=True, eq=False)
class Result:
    """The outcome of a run. Compared by identity, as modules and tensors are."""

    history: list[Record]
    """One record per round."""
    state: State
    """The server's slots by name, each a dict from parameter name to tensor."""
    model: nn.Module
    """The trained module, a copy of the one passed in."""
    info: RunInfo
    personal: Mapping[int, Mapping[str, Tensor]] | None = field(default_factory=dict)
    """The personal parameters and local buffers of each client that took part, by name; None if they are on the
    clients' own machines."""

    def client_model(self, client: int) -> nn.Module:
        """A client's model: the server's, with its own personal parameters and local buffers if it took part."""
        if client not in range(self.info.population):
            raise ValueError(f"there is no client {client!r}; the clients are numbered 0 to {self.info.population - 1}")
        if self.personal is None:
            raise RuntimeError("the clients' models are on their own machines; the server has only what they share")
        model = copied(self.model)
        own = self.personal.get(client, {})
        with torch.no_grad():
            for name, value in (*model.named_parameters(), *model.named_buffers()):
                if name in own:
                    value.copy_(own[name])
        return model

    @property
    def bytes_up(self) -> int:
        """Bytes that the clients sent over the whole run."""
        return sum(record.bytes_up for record in self.history)

    @property
    def bytes_down(self) -> int:
        """Bytes that the server sent over the whole run."""
        return sum(record.bytes_down for record in self.history)

    def to_frame(self) -> DataFrame:
        """The history as a pandas DataFrame, one row per round. It needs pandas.

        A metric is under its own name, or under `metrics/` and its name if a record has a number of that name.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("to_frame needs pandas, which is not installed: pip install pandas") from error
        rounds = pd.Index([record.round for record in self.history], name="round")
        frame = pd.DataFrame([record.numbers() for record in self.history], rounds)
        frame = frame.drop(columns="round", errors="ignore")
        short = {name: name.removeprefix("metrics/") for name in frame.columns}
        return frame.rename(columns={name: own for name, own in short.items() if own not in frame.columns})

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the loss, and the accuracy if there is one, by round. Returns the axes of the loss.

        Without a test set it is the mean loss over the clients' held-out samples or, without these, the training loss.

        ax: Axes to draw in; None: those of a new figure.
        """
        import matplotlib.pyplot as plt
        from matplotlib.ticker import MaxNLocator

        axes = plt.subplots(layout="constrained")[1] if ax is None else ax
        self._draw(axes, f"{judged_on(self.history)} loss", judged_losses(self.history), COLOURS[1])
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        accuracies = [record.accuracy for record in self.history]
        if any(accuracy is not None for accuracy in accuracies):
            self._draw(axes.twinx(), "accuracy", accuracies, COLOURS[0])
        return axes

    def _draw(self, axes: Axes, name: str, values: Sequence[float | None], colour: str) -> None:
        """A line over the rounds that have a value, and its name in its colour at its own scale."""
        rounds = [record.round for record in self.history]
        points = [(round, value) for round, value in zip(rounds, values, strict=True) if value is not None]
        axes.plot(*zip(*points, strict=True), color=colour, label=name)
        axes.set_ylabel(name, color=colour)
        axes.tick_params(axis="y", labelcolor=colour)

    def save(self, path: str | Path) -> None:
        """Write history, state, model and `info` to one file, without pickle; `fl.load(path, model)` reads it."""
        save_result(self, path)

    def __repr__(self) -> str:
        """One line for a notebook."""
        if not self.history:
            return f"Result({self.info.algorithm}, no rounds)"
        last = self.history[-1]
        accuracy = "" if last.accuracy is None else f"accuracy {last.accuracy:.1%}, "
        metrics = "".join(f"{name} {value:.4g}, " for name, value in last.metrics.items())
        metrics += over_clients(last.per_client) + spent(last)
        return (
            f"Result({self.info.algorithm}, {last.round} {'round' if last.round == 1 else 'rounds'}: "
            f"{accuracy}{loss_name(last)} {last.loss:.4g}, {metrics}"
            f"{self.bytes_up / 1e6:.3g} MB up, {self.bytes_down / 1e6:.3g} MB down)"
        )


def named_state(state: ServerState, training: Training) -> State:
    """The server's slots under the names of the module's parameters."""
    return {
        slot: {name: view.clone() for name, view in training.layout.views(flat).items()}
        for slot, flat in state.slots.items()
    }


def personal_states(state: ServerState, training: Training, *, here: bool) -> dict[int, dict[str, Tensor]] | None:
    """The personal parameters and local buffers of each client that took part; None if they are not held `here`."""
    if not training.is_personal:
        return {}
    if not here:
        return None
    layout = training.division.personal
    return {
        client: {**(layout.views(kept[f"{SLOT}x"]) if training.personal else {}), **named(kept, BUFFER)}
        for client, kept in state.kept.items()
    }


def trained_model(model: nn.Module, state: ServerState, training: Training) -> nn.Module:
    """A copy of the caller's module with the server's parameters and buffers, in the caller's training mode."""
    trained = copied(training.model)
    training.layout.load(trained, state.slots.x)
    set_buffers(trained, state.buffers)
    for mine, theirs in zip(trained.modules(), model.modules(), strict=True):
        mine.training = theirs.training
    for own, given in zip(trained.parameters(), model.parameters(), strict=True):
        own.requires_grad_(given.requires_grad)  # `trainable` froze some of them
    return trained


FORMAT = 1
_KEY = "fedlalr"
_CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "float32": nn.Module.float,
    "float64": nn.Module.double,
    "bfloat16": nn.Module.bfloat16,
    "float16": nn.Module.half,
}


def save_result(result: Result, path: str | Path) -> None:
    """Write a result to a file, and the folder for it if there is none; a file that is already there is replaced."""
    tensors = {name: storable(tensor).to("cpu", copy=True).contiguous() for name, tensor in _tensors(result).items()}
    content = {
        "format": FORMAT,
        "dtype": _dtype_of(result.model),
        "info": {each.name: getattr(result.info, each.name) for each in _info_fields()},
        "history": [record.as_dict() for record in result.history],
        "personal": None if result.personal is None else list(result.personal),
        "tensors": {name: hash_tensor(tensor) for name, tensor in tensors.items()},
    }
    place = at_home(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    write_whole(place, save_tensors(tensors, metadata={_KEY: json.dumps(sealed(content))}))


def load(path: str | Path, model: nn.Module) -> Result:
    """The result in a file that `result.save` wrote.

    path: The file.
    model: A module of the same structure; it is not changed, and its weights do not matter.

    Raises `CheckpointError` if the file is damaged, was written by something else, or belongs to another model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module of the structure that was trained, not {type(model).__name__}"
        )
    place = at_home(path)
    try:
        length, header, content = _read_header(place)
        history = [Record.from_json(json.dumps(record)) for record in content["history"]]
        if [record.round for record in history] != list(range(1, len(history) + 1)):
            raise ValueError("its history does not hold the rounds from 1 on, in order")
        info = _info(content["info"])
        with undisturbed(torch.device("cpu")):
            trained = _converted(model, content["dtype"])
            clients = content["personal"] or []
            stated = {name: header[name] for name in content["tensors"]}  # in the order of the run
            like = _expected(stated, trained, len(clients))
            tensors = load_tensors(read_file(place, length + sum(tensor.nbytes for tensor in like.values())))
            if {name: hash_tensor(tensor) for name, tensor in tensors.items()} != content["tensors"]:
                raise ValueError("it is damaged: its tensors do not match the hashes taken when they were written")
            found = {name: take(tensors, name, tensor) for name, tensor in like.items()}
            with torch.no_grad():
                for name, tensor in _weights(trained).items():
                    tensor.copy_(found[f"model/{name}"])
        own = named(found, "personal/")
        by_client = {client: {name: each[row] for name, each in own.items()} for row, client in enumerate(clients)}
        return Result(history, _state(found), trained, info, None if content["personal"] is None else by_client)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"the result in {place} cannot be loaded: {error.strerror}") from error
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"the result in {place} cannot be loaded: {error}") from error


def _tensors(result: Result) -> dict[str, Tensor]:
    slots = {f"slot/{slot}/{name}": part for slot, parts in result.state.items() for name, part in parts.items()}
    each = list((result.personal or {}).values())
    own = {f"personal/{name}": torch.stack([one[name] for one in each]) for name in (each[0] if each else ())}
    return {f"model/{name}": tensor for name, tensor in _weights(result.model).items()} | slots | own


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, tied ones once, and buffers."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _dtype_of(model: nn.Module) -> str | None:
    """The precision of a model that has one; `dtype=` may have changed it for the run."""
    kinds = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()}
    return kinds.pop() if len(kinds) == 1 else None


def _read_header(place: Path) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """The length of a safetensors file up to its numbers, its table of tensors, and the verified description."""
    if place.is_dir():
        raise ValueError(
            "it is a directory; the result of a run directory is what the same call of fl.run returns with resume=True"
        )
    with open_file(place) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, LARGEST_DESCRIPTION):
            raise ValueError("it is not a file that result.save wrote")
        header = json.loads(file.read(length))
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not isinstance(metadata.get(_KEY), str):
        raise ValueError("it is not a file that result.save wrote; for weights alone use safetensors.torch.load_file")
    whole = json.loads(metadata[_KEY])
    content = whole["content"]
    if sealed(content)["sha256"] != whole["sha256"]:
        raise ValueError("it is damaged: its description does not match its own hash")
    if content["format"] != FORMAT:
        raise ValueError(f"it has format {content['format']!r}, and this version of fedlalr reads format {FORMAT}")
    content.setdefault("personal", [])  # a file of an older version
    for name, fits in _FITS.items():
        if not fits(content[name]):
            raise ValueError(f"its {name} is invalid")
    return 8 + length, header, content


_FITS: dict[str, Callable[[Any], bool]] = {
    "dtype": lambda value: value is None or value in _CONVERSIONS,
    "info": lambda value: isinstance(value, dict),
    "history": lambda value: isinstance(value, list) and all(isinstance(record, dict) for record in value),
    "tensors": lambda value: isinstance(value, dict),
    "personal": lambda value: (
        value is None or (isinstance(value, list) and all(type(client) is int for client in value))
    ),
}
"""Checks of each part of a description: a manipulated file may have a correct hash."""


def _info_fields() -> list[dataclasses.Field[Any]]:
    return [each for each in dataclasses.fields(RunInfo) if each.name != "history"]  # a resumed run's, not the result's


def _info(given: Mapping[str, Any]) -> RunInfo:
    """A `RunInfo` whose values have the types of its fields."""
    kinds, values = get_type_hints(RunInfo, {"Record": Record}), dict(given)
    values["slots"] = tuple(values["slots"])
    for each in (each for each in _info_fields() if each.name in values):  # an older version has fewer
        kind = tuple if each.name == "slots" else kinds[each.name]
        whole = values[each.name]
        if not isinstance(whole, kind) or isinstance(whole, bool):
            raise ValueError(f"its info is invalid: {each.name} is {whole!r}")
    return RunInfo(**values)


def _converted(model: nn.Module, dtype: str | None) -> nn.Module:
    """A copy of the model on the CPU, in the precision of the saved one."""
    trained = copied(model).to("cpu")
    return trained if dtype is None or _dtype_of(trained) in (None, dtype) else _CONVERSIONS[dtype](trained)


def _expected(header: Mapping[str, Any], model: nn.Module, clients: int) -> dict[str, Tensor]:
    """For each tensor in a file one of the shape and type that it must have; personal ones are stacks over clients."""
    weights, parameters = _weights(model), dict(model.named_parameters())
    missing = [name for name in weights if f"model/{name}" not in header]
    if missing:
        raise ValueError(f"it has no {missing[0]}, which this model has")
    trained = {key.split("/", 2)[-1] for key in header if key.startswith("slot/")}
    flat = flat_dtype(parameters[name] for name in trained & parameters.keys())
    like = {}
    for key, stated in header.items():
        kind, _, rest = key.partition("/")
        owner, name = (parameters, rest.partition("/")[2]) if kind == "slot" else (weights, rest)
        if kind not in ("model", "slot", "personal") or name not in owner:
            raise ValueError(f"it holds {key}, which this model does not have")
        one = owner[name].to(flat) if kind != "model" and name in parameters else owner[name]
        like[key] = one.expand(clients, *one.shape) if kind == "personal" else one
        shape = tuple(stated["shape"])
        if shape not in (like[key].shape, (*like[key].shape, 2)):  # the latter for complex numbers
            raise ValueError(f"its {key} is {shape}, but this model's is {tuple(like[key].shape)}")
    return like


def _state(tensors: Mapping[str, Tensor]) -> State:
    """The slots among the tensors of a file."""
    state: State = {}
    for key, tensor in named(tensors, "slot/").items():
        slot, _, name = key.partition("/")
        state.setdefault(slot, {})[name] = tensor
    return state
