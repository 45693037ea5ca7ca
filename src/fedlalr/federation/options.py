"""The options of a run: `LocalOptions` and those of the server. See `training/options.py` for what is derived."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedlalr.algorithms.slots import Algorithm
from fedlalr.common.option_types import Count, Positive
from fedlalr.common.reading import at_home
from fedlalr.common.suggestions import hint
from fedlalr.data.population import Clients
from fedlalr.federation.metrics import Metrics
from fedlalr.federation.observers import Observer
from fedlalr.federation.replies.reductions import SlotReduction, as_reductions
from fedlalr.federation.replies.screening import MAX_NORM_RATIO
from fedlalr.federation.round import Rules
from fedlalr.training import Engine, Training
from fedlalr.training.engines.registry import check_engine
from fedlalr.training.layout import Layout
from fedlalr.training.machine import half_precision_fault
from fedlalr.training.options import LocalOptions, check_options, option
from fedlalr.training.ranks import own_gpu
from fedlalr.training.torch_state import undisturbed

LEAST_DECAY = 1e-30
"""Lower bound of the decay factor: too small to move a parameter, but not 0, as some methods divide by their rate."""
_DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}


def _check_engine(engine: object) -> None:
    if isinstance(engine, str):
        check_engine(engine)


def _check_run_dir(run_dir: object) -> None:
    if run_dir is not None and not str(run_dir).strip():
        raise ValueError("run_dir is empty; name a directory, or leave it out to write nothing")


def _check_dtype(dtype: object) -> None:
    if dtype is not None and dtype not in _DTYPES.values():
        raise ValueError(f"dtype must be one of {', '.join(map(repr, _DTYPES))} or None, not {dtype!r}")


@dataclass(frozen=True, kw_only=True)
class Options(LocalOptions):
    """Every option of `fl.run`."""

    rounds: Count = option(100, "Communication rounds.", scope="run")
    clients_per_round: Count | None = option(None, "Clients sampled in every round; None: all.", scope="server")
    lr_decay: Positive = option(1.0, "Multiply the rate by this every `lr_decay_every` rounds.", scope="server")
    lr_decay_every: Count = option(1, "Rounds between two decays of the rate.", scope="server")
    weighting: Literal["uniform", "samples"] = option(
        "uniform", "Weigh replies equally, or by their clients' number of samples.", scope="server"
    )
    buffers: Literal["average", "recalibrate"] = option(
        "average",
        "Normalisation statistics: the mean of the clients' own, or recalibrated with the new model.",
        scope="server",
    )
    reduce: Mapping[str, str | SlotReduction | Mapping[str, object]] | None = option(
        None, 'Slot to reduction, in place of the algorithm\'s own, such as `{"x": "median"}`.', scope="server"
    )
    max_norm_ratio: Positive | None = option(
        MAX_NORM_RATIO,
        "Clip a reply's change to this many times the scale of its slot; None: no such bound.",
        scope="server",
    )
    min_clients: Count = option(1, "A round with fewer usable replies fails.", scope="server")
    test: object = option(
        None,
        "Test set, in the form of a client's data such as `(inputs, targets)`, evaluated after every round.",
        scope="run",
        config=False,
    )
    metrics: Metrics | None = option(
        None,
        "Your own metrics: name to function of the test set's outputs and targets.",
        scope="run",
        config=False,
    )
    observers: Sequence[Observer] = option((), "Called as the run progresses.", scope="run", config=False)
    engine: str | Callable[[Training], Engine] = option(
        "auto",
        '`"auto"`, `"reference"`, `"stacked"`, `"workers"`, `"distributed"`, or a function from `Training` to an '
        "engine of your own.",
        scope="run",
        check=_check_engine,
    )
    device: str | torch.device = option("auto", '`"auto"`, `"cpu"`, `"cuda"` or `"cuda:0"`.', scope="run")
    dtype: str | torch.dtype | None = option(
        None,
        "`'float32'` or `'float64'` for the whole run; `'bfloat16'` or `'float16'` for the model's computation, while "
        "the state stays in float32; None: the model's own.",
        scope="run",
        check=_check_dtype,
    )
    run_dir: str | Path | None = option(
        None, "Directory for metrics and checkpoints.", scope="files", check=_check_run_dir, config=False
    )
    resume: bool = option(
        False,
        "Resume the interrupted run in `run_dir`, or start a new one.",
        scope="files",
        config=False,
    )
    checkpoint_every: Count = option(1, "Rounds between two checkpoints.", scope="files")
    debug: bool = option(
        False,
        "Train every rejected client again, alone on the reference engine, and print what is found.",
        scope="run",
        config=False,
    )

    def __post_init__(self) -> None:
        """Convert NumPy integers, such as those of `np.arange`, names of dtypes, and ~ in the run directory."""
        for each in fields(self):
            if isinstance(value := getattr(self, each.name), np.integer):
                object.__setattr__(self, each.name, int(value))
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", _DTYPES.get(self.dtype, self.dtype))
        if str(self.run_dir).startswith("~"):  # otherwise a folder named ~ would be created
            object.__setattr__(self, "run_dir", str(at_home(str(self.run_dir))))

    @classmethod
    def named(cls, given: Mapping[str, Any], allowed: Sequence[str] | None = None, where: str = "fl.run") -> Options:
        """The options in a dict; an unknown name is rejected with a suggestion."""
        names = allowed or [each.name for each in in_reading_order()]
        for name in given:
            if name not in names:
                raise TypeError(f"{where} has no option {name!r}; choose from {', '.join(names)}.{hint(name, names)}")
        return cls(**given)

    def check(self, model: nn.Module, algorithm: Algorithm) -> None:
        """Reject values that are not allowed."""
        check_model(model)
        check_algorithm(algorithm)
        check_options(self)
        if self.resume and self.run_dir is None:
            raise ValueError("resume=True needs run_dir, the directory of the run to resume")

    def training(self, model: nn.Module, algorithm: Algorithm, clients: Clients) -> Training:
        """How every client trains, for a private copy of the module."""
        assert not isinstance(self.dtype, str)  # `__post_init__` converted it
        where = choose_device(self.device)
        with undisturbed(where):
            private, compute = private_copy(model, where, self.dtype)
        fault = half_precision_fault(compute) if compute is not None and where.type == "cpu" else None
        if fault is not None:
            raise ValueError("; ".join(fault))
        local = {each.name: getattr(self, each.name) for each in fields(LocalOptions)}
        return Training(private, Layout.of(private), clients.to(where), algorithm, where, compute, **local)

    def rules(self, algorithm: Algorithm) -> Rules:
        """How the server treats the replies."""
        reductions = as_reductions(self.reduce, algorithm.slots)
        return Rules(self.weighting, self.buffers, self.min_clients, reductions, self.max_norm_ratio)

    def rate(self, algorithm: Algorithm, round: int) -> float:
        """The clients' rate in a round (from 1), at least `LEAST_DECAY` of the algorithm's."""
        return algorithm.lr * max(self.lr_decay ** ((round - 1) // self.lr_decay_every), LEAST_DECAY)


Function = TypeVar("Function", bound=Callable[..., Any])


def in_reading_order() -> list[Field[Any]]:
    """All options, starting with the two that almost every call sets."""
    first = ("rounds", "clients_per_round")
    return sorted(fields(Options), key=lambda each: first.index(each.name) if each.name in first else len(first))


def documented(function: Function) -> Function:
    """Add the options to the signature and documentation of a function of `**options`."""
    own = inspect.signature(function)
    given = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in in_reading_order()
    ]
    parameters = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
    function.__signature__ = own.replace(parameters=[*parameters, *given])  # type: ignore[attr-defined]
    lines = [f"    {each.name}: {each.metadata['doc']}" for each in in_reading_order()]
    function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), *lines])
    return function


def options_table() -> str:
    """The options as the table in `docs/api.md`."""
    rows = [f"| `{each.name}` | {_shown(each.default)} | {each.metadata['doc']} |" for each in in_reading_order()]
    return "\n".join(["| option | default | |", "|---|---|---|", *rows])


def _shown(default: object) -> str:
    return f"`{getattr(default, '__name__', repr(default))}`"


def check_model(model: object) -> None:
    """Reject anything but a module whose parameters are initialised."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {model!r}")
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(
            f"the model's {lazy[0]} has no shape before the first forward pass (a lazy module); pass a batch "
            f"through the model first, such as model(inputs[:2])"
        )


def check_algorithm(algorithm: object) -> None:
    """Reject anything but an instance with an algorithm's functions."""
    if isinstance(algorithm, type):
        raise TypeError(
            f"algorithm is the class {algorithm.__name__}; pass an instance, such as {algorithm.__name__}()"
        )
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            f"algorithm must be one of fedlalr's, such as fl.FedLALR(), or a class with the same functions "
            f"(slots, init, start, step, finish, update and lr), not {algorithm!r}"
        )


def choose_device(device: str | torch.device) -> torch.device:
    """`"auto"` is the current CUDA device if there is one (under torchrun, each process's own), else the CPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"there is no device {device!r}; use 'auto', 'cpu', 'cuda' or 'cuda:0'") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} is not supported; use 'auto', 'cpu', 'cuda' or 'cuda:0'")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device {device!r} was requested, but this machine has no usable CUDA device; use device='cpu'"
        )
    return own_gpu(chosen)


def private_copy(
    model: nn.Module, device: torch.device, dtype: torch.dtype | None
) -> tuple[nn.Module, torch.dtype | None]:
    """A copy of the module to train, and the dtype to compute in if it differs from that of the parameters."""
    try:
        private = copy.deepcopy(model).to(device)
    except RuntimeError as error:
        if "deepcopy" not in str(error):
            raise
        raise ValueError(
            "the model cannot be copied, because it keeps a tensor computed from its parameters, which training "
            "would not reach: compute it in forward, or set it to None if it is left over from a forward pass; instead "
            "of torch.nn.utils.weight_norm and spectral_norm use those of torch.nn.utils.parametrizations"
        ) from error
    if dtype in (torch.float32, torch.float64):
        # `to` would drop the imaginary part of complex buffers
        return private.double() if dtype == torch.float64 else private.float(), None
    return private, dtype
