"""The options of a run: `LocalOptions` and those of the server. See `training/options.py` for what is derived."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from fedlalr.algorithms.slots import Algorithm
from fedlalr.common.named import check_options, made
from fedlalr.common.option_types import Count, Positive, check_fields
from fedlalr.common.reading import at_home
from fedlalr.data.population import Clients
from fedlalr.federation.asynchronous.settings import Async
from fedlalr.federation.compression.compression import Compression, compression_for
from fedlalr.federation.evaluation import Metrics
from fedlalr.federation.observers import Observer
from fedlalr.federation.privacy.privacy import Privacy, Withholding
from fedlalr.federation.replies.reductions import SlotReduction, as_reductions
from fedlalr.federation.replies.screening import MAX_NORM_RATIO
from fedlalr.federation.round import Rules
from fedlalr.federation.sampling import Kind, Sampler, check_sampling
from fedlalr.federation.schedules import Constant, Schedule, check_rates, check_schedule
from fedlalr.federation.stragglers import Speeds, Stragglers, check_speeds
from fedlalr.federation.validation import check_algorithm, check_model
from fedlalr.training import Engine, Training
from fedlalr.training.engines.registry import check_engine
from fedlalr.training.layout import Layout
from fedlalr.training.machine import choose_device, half_precision_fault
from fedlalr.training.options import LocalOptions, option
from fedlalr.training.parameter_groups import freeze_others, matching, trainable_parameters
from fedlalr.training.torch_state import private_copy, undisturbed

_DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}


def _check_engine(engine: object) -> None:
    if isinstance(engine, str):
        check_engine(engine)


def _check_run_dir(run_dir: object) -> None:
    if run_dir is not None and not isinstance(run_dir, str | PathLike):
        raise TypeError(f"run_dir must be the path of a directory, such as 'runs/mine', not {run_dir!r}")
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
    sampling: Kind | Sampler = option(
        "uniform",
        'How they are sampled: `"uniform"`, `"size"` (in proportion to their samples), `"round-robin"` (in turn, in an '
        "order drawn from the seed), or a function of (round, population, count, generator) that returns them.",
        scope="server",
        check=check_sampling,
    )
    schedule: Schedule = option(
        Constant(),
        "Multiplier of the algorithm's `lr` in each round: one of `fl.schedules`, such as "
        "`fl.schedules.Cosine(warmup=5)`, or a function of the round.",
        scope="server",
        check=check_schedule,
    )
    weighting: Literal["uniform", "samples"] = option(
        "uniform", "Weight replies equally, or by their clients' numbers of samples.", scope="server"
    )
    reduce: Mapping[str, str | SlotReduction | Mapping[str, object]] | None = option(
        None, 'Reductions by slot that replace the algorithm\'s own, such as `{"x": "median"}`.', scope="server"
    )
    max_norm_ratio: Positive | None = option(
        MAX_NORM_RATIO,
        "Clip a reply's change to this many times the scale of its slot; None: no bound.",
        scope="server",
    )
    compression: str | Compression | Mapping[str, Any] | None = option(
        None,
        'Send slots in fewer bytes: `"balanced"`, `"smallest"` or `fl.Compression(up, down, every)`; None: no '
        "compression.",
        scope="server",
    )
    privacy: Privacy | Mapping[str, Any] | None = option(
        None,
        "Client-level differential privacy: `fl.Privacy(clip, noise_multiplier or epsilon, delta)`; clients are then "
        "sampled independently, and `max_norm_ratio` and `min_clients` do not apply; None: no noise.",
        scope="server",
    )
    min_clients: Count = option(1, "A round with fewer usable replies fails.", scope="server")
    asynchronous: Async | Mapping[str, Any] | None = option(
        None,
        "`fl.Async(buffer, concurrency)`: update the model whenever `buffer` replies have arrived; `rounds` counts the "
        "updates; None: synchronous rounds.",
        scope="server",
    )
    stragglers: Stragglers | Mapping[str, Any] | None = option(
        None,
        "`fl.Stragglers(oversample, deadline)`: rounds that do not wait for the slowest clients; None: wait for all.",
        scope="server",
    )
    speeds: Speeds | None = option(
        None,
        "The clients' local steps per virtual second: the sigma of a log-normal distribution with median 1, a list "
        "with one number per client, or a text file with one number per line; None: all 1.",
        scope="server",
        check=check_speeds,
    )
    test: object = option(
        None,
        "Test set, in any form that a client's data may have, such as `(inputs, targets)`; evaluated after every "
        "round.",
        scope="run",
        config=False,
    )
    metrics: Metrics | None = option(
        None, "Your own metrics, by name: functions of the test set's outputs and targets.", scope="run", config=False
    )
    client_tests: Sequence[object] | None = option(
        None,
        "One test set per client, in the order and the forms of `clients`, instead of `holdout`.",
        scope="run",
        config=False,
    )
    evaluate_every: Count = option(
        10,
        "Rounds between two evaluations of all clients, with `holdout` or `client_tests`; also after the last round.",
        scope="run",
    )
    observers: Sequence[Observer] = option((), "Called as the run progresses.", scope="run", config=False)
    progress: bool | None = option(
        None,
        "Show the progress: on a terminal or in a notebook as a line that is updated, elsewhere as one line per round; "
        "None: only on a terminal and in a notebook.",
        scope="run",
        config=False,
    )
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
        False, "Resume the run in `run_dir`, or start a new one if there is none.", scope="files", config=False
    )
    checkpoint_every: Count = option(1, "Rounds between two checkpoints.", scope="files")
    debug: bool = option(
        False,
        "Train every rejected client again, alone on the reference engine, and print what went wrong.",
        scope="run",
        config=False,
    )

    def __post_init__(self) -> None:
        """Convert NumPy integers, such as those of `np.arange`, names of dtypes, single patterns, dicts of arguments,
        and ~ in the run directory."""
        for each in fields(self):
            if isinstance(value := getattr(self, each.name), np.integer):
                object.__setattr__(self, each.name, int(value))
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", _DTYPES.get(self.dtype, self.dtype))
        for name in ("decayed", "trainable", "personal"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, (value,))
        for name, kind in (("privacy", Privacy), ("asynchronous", Async), ("stragglers", Stragglers)):
            object.__setattr__(self, name, made(getattr(self, name), kind, name))
        if str(self.run_dir).startswith("~"):  # otherwise a folder named ~ would be created
            object.__setattr__(self, "run_dir", str(at_home(str(self.run_dir))))

    @classmethod
    def named(cls, given: Mapping[str, Any], allowed: Sequence[str] | None = None, where: str = "fl.run") -> Options:
        """The options in a dict; an unknown name is rejected with a suggestion."""
        check_options(where, given, allowed or [each.name for each in in_reading_order()])
        return cls(**given)

    def check(self, model: nn.Module, algorithm: Algorithm) -> None:
        """Reject values that are not allowed."""
        check_model(model)
        check_algorithm(algorithm)
        check_fields(self)
        if isinstance(self.local, type):
            name = self.local.__name__
            raise TypeError(f"local is the class {name}; pass an instance, such as local=fl.Steps(10) or fl.Epochs(1)")
        check_rates(self.schedule, algorithm.lr, self.rounds)
        if self.accumulate > 1 and self.batch_size is None:
            raise ValueError(
                f"accumulate is {self.accumulate}, but with batch_size=None a local step already has all of a client's "
                f"samples; give the batch_size that fits into memory"
            )
        self._check_groups(model)
        if self.resume and self.run_dir is None:
            raise ValueError("resume=True needs run_dir, the directory of the run to resume")
        if self.buffers == "local" and "buffers" in (self.reduce or {}):
            raise ValueError("reduce names 'buffers', but with buffers='local' they are not sent; leave it out")
        if self.holdout is not None and self.client_tests is not None:
            raise ValueError("holdout and client_tests both say what clients are evaluated on; give one of them")

    def _check_groups(self, model: nn.Module) -> None:
        """Reject patterns of parameters that match nothing, or have no effect."""
        named = trainable_parameters(model)
        if self.trainable is not None:
            named = matching("trainable", self.trainable, named)
        if self.decayed is None:
            return
        matching("decayed", self.decayed, named)
        if not self.decoupled_weight_decay:
            raise ValueError(
                "decayed chooses the parameters with decoupled weight decay, but decoupled_weight_decay is 0; set that "
                "too (weight_decay, the L2 penalty, applies to all parameters)"
            )

    def training(self, model: nn.Module, algorithm: Algorithm, clients: Clients) -> Training:
        """How every client trains, for a private copy of the module."""
        assert not isinstance(self.dtype, str)  # `__post_init__` converted it
        where = choose_device(self.device)
        with undisturbed(where):
            private, compute = private_copy(model, where, self.dtype)
            if self.trainable is not None:
                freeze_others(private, self.trainable)
        fault = half_precision_fault(compute) if compute is not None and where.type == "cpu" else None
        if fault is not None:
            raise ValueError("; ".join(fault))
        local = {each.name: getattr(self, each.name) for each in fields(LocalOptions)}
        training = Training(private, Layout.of(private), clients.to(where), algorithm, where, compute, **local)
        _ = training.division  # rejects patterns that do not fit the module
        return training

    def rules(self, algorithm: Algorithm) -> Rules:
        """How the server treats the replies."""
        reductions = as_reductions(self.reduce, algorithm.slots)
        compression = compression_for(self.compression, algorithm)
        if isinstance(self.privacy, Privacy) and self.privacy.withheld:
            compression = Withholding(compression.up, compression.down, compression.every, self.privacy.withheld)
        return Rules(self.weighting, self.min_clients, reductions, self.max_norm_ratio, compression)


def in_reading_order() -> list[Field[Any]]:
    """All options, starting with those that almost every call sets."""
    first = ("rounds", "clients_per_round", "sampling")
    return sorted(fields(Options), key=lambda each: first.index(each.name) if each.name in first else len(first))


def documented(function: Any) -> Any:
    """Add the options to the signature and documentation of a function of `**options`."""
    own = inspect.signature(function)
    given = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in in_reading_order()
    ]
    parameters = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
    function.__signature__ = own.replace(parameters=[*parameters, *given])
    lines = [f"    {each.name}: {each.metadata['doc']}" for each in in_reading_order()]
    function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), *lines])
    return function
