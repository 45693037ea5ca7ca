"""Builds data, model, method and options from a configuration, and runs it."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from fedlalr import data
from fedlalr.algorithms import registry
from fedlalr.algorithms.slots import Algorithm
from fedlalr.common.reading import at_home
from fedlalr.config.errors import ConfigError, as_config_errors
from fedlalr.config.own import EXAMPLE, find, held_out, is_own, own_clients, own_data, own_model
from fedlalr.config.run_dir import RunDirectory, summarise
from fedlalr.config.schema import MODELS, OPTIONS, Config, LocalConfig, ModelConfig
from fedlalr.data import Population
from fedlalr.data.population import Clients, Samples
from fedlalr.federation import Observer, Rejection, RepliesRejected, Result, RoundFailed, RunInfo, run, schedules
from fedlalr.federation.options import Options
from fedlalr.federation.storage.journal import RunDirectoryError
from fedlalr.federation.trajectory import TRAJECTORY_FILE, Trajectory
from fedlalr.training import Epochs, Interval, LogInterval, Steps
from fedlalr.training.calling import target_of
from fedlalr.training.memory import is_out_of_memory
from fedlalr.training.options import Loss

FAILURES = (ValueError, TypeError, RoundFailed)
"""Errors that make a started run a failed one. Others, such as a full disk, interrupt it: it can be resumed."""


def build_population(config: Config) -> Population:
    """The clients' data."""
    partition = config.partition.model_dump(exclude={"seed"}, exclude_none=True)
    population = data.load(
        config.data.name,
        **({"clients": None} | partition),
        seed=config.partition_seed,
        augment=config.data.augment,
        folder=config.data.folder,
        validation=config.data.validation,
        **config.data.options,
    )
    return _in_float64(population) if config.dtype == "float64" else population


def build_problem(config: Config, loss: Loss | Literal["model"]) -> tuple[nn.Module, Clients, object]:
    """The model, the clients' data, and a test set that is not part of it."""
    name, options, share = config.data.name, config.data.options, config.data.validation
    if not is_own(name):
        population = build_population(config)
        return build_model(config.model, population, config.seed), population, None
    found, test = own_data(name, options, config.seed)
    clients = own_clients(name, found)
    model = build_model(config.model, clients, config.seed)
    target = target_of(model, loss, None)
    if target is not None:  # the labels of a causal language model are moved
        clients = own_clients(name, found, target)
    if share:
        clients, test = held_out(clients, share, config.seed)
    return model, clients, None if config.is_personal else test  # as a population's own, which is not used either


def build_model(config: ModelConfig, clients: Clients, seed: int) -> nn.Module:
    """The model. Sizes that are not given come from the data; the seed determines the weights."""
    sizes = _sizes(clients)
    if is_own(config.name):
        return own_model(config.name, config.options, sizes, seed)
    factory = MODELS[config.name]
    wanted = inspect.signature(factory).parameters
    derived = {name: size for name, size in sizes.items() if name in wanted}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return factory(**{**derived, **config.options})
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise ConfigError(f"model: a {config.name} of this size does not fit into memory") from error


def _sizes(clients: Clients) -> dict[str, Any]:
    """Sizes of a model that follow from the data, as far as they are known."""
    known = getattr(clients, "classes", None)
    sizes = {"classes": known or _counted_classes(clients), "vocabulary": known}
    inputs, _ = clients.batch(0, torch.arange(1))
    sample = tuple(inputs.shape[1:]) if isinstance(inputs, Tensor) else None
    if sample is not None:
        sizes["inputs"] = math.prod(sample)
        if len(sample) == 3:
            sizes |= {"channels": sample[0], "size": sample[1]}
        if len(sample) == 1:
            sizes["length"] = sample[0]
    return {name: size for name, size in sizes.items() if size is not None}


def _counted_classes(clients: Clients) -> int | None:
    """The number of classes in one whole number per sample; None for other targets and for data sets, read later."""
    targets = getattr(clients, "targets", None)
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.ndim != 1:
        return None
    return int(targets.max()) + 1


def _in_float64(population: Population) -> Population:
    """The same population with images as float64 in [0, 1]: transforms keep this type, and a float64 model needs it."""

    def convert(samples: Samples) -> Samples:
        return samples.double() / 255 if isinstance(samples, Tensor) and samples.dtype == torch.uint8 else samples

    test = population.test
    return population.replaced(
        inputs=convert(population.inputs), test=None if test is None else (convert(test[0]), test[1])
    )


def build_algorithm(config: Config) -> Algorithm:
    return registry.create(config.algorithm.name, **config.algorithm.options)


def build_interval(local: LocalConfig) -> Interval:
    if local.epochs is not None:
        return Epochs(local.epochs)
    if local.steps is not None:
        return Steps(local.steps)
    # the schema requires both
    return LogInterval(cast(int, local.start), cast(float, local.base), local.unit or "steps")


def build_options(config: Config) -> dict[str, Any]:
    """The options of `fl.run` in a configuration."""
    built: dict[str, Any] = {
        "local": build_interval(config.local),
        "schedule": schedules.create(config.schedule.name, **config.schedule.options),
    }
    if config.loss is not None:
        built["loss"] = find(config.loss, "loss") if is_own(config.loss) else config.loss
    return {name: getattr(config, name) for name in OPTIONS} | built


def execute(
    config: Config,
    run_dir: str | Path | None = None,
    observers: Sequence[Observer] = (),
    resume: bool = False,
    *,
    overwrite: bool = False,
    debug: bool = False,
) -> Result:
    """Run a configuration. With a run directory, its files are written during the run, and `resume` resumes it.

    A configuration that cannot run raises `ConfigError` before the first round and writes no file. A run that fails or
    is interrupted leaves its records and a summary that says so.
    """
    directory = None if run_dir is None else RunDirectory(at_home(run_dir))
    path = None if directory is None else directory.path
    prepared = _prepare(config)
    if directory is not None and not resume:
        with as_config_errors(RunDirectoryError):  # another process uses the directory
            if overwrite:
                directory.clear()
        directory.check_free()
    files = _RunFiles(config, directory)
    try:
        watching = [files, *observers]
        if (wanted := config.trajectory) is not None:
            file = None if path is None else path / TRAJECTORY_FILE
            watching.insert(1, Trajectory(wanted.clients, wanted.rounds, file))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RepliesRejected)  # records, progress and summary count them
            result = run(**prepared, observers=watching, progress=False, run_dir=path, resume=resume, debug=debug)
    except BaseException as error:
        if files.info is None and isinstance(error, ValueError | TypeError | ImportError | RunDirectoryError):
            # before the first round: incompatible settings, missing extras
            raise ConfigError(f"{error}{_whose_data(config, error)}") from error
        with suppress(RunDirectoryError):  # a disk error may also prevent writing the summary
            rejected = error.rejected if isinstance(error, RoundFailed) else ()
            files.end(str(error) if isinstance(error, FAILURES) else None, rejected)
        raise
    files.end()
    return result


def _whose_data(config: Config, error: Exception) -> str:
    """The end of the error if a model of your own fails on a data set of the library: `data` may be forgotten."""
    if error.__cause__ is None or not is_own(config.model.name) or is_own(config.data.name):
        return ""
    return f"; data is {config.data.name}, from {config.name}; for your own, add data={EXAMPLE}"


def _prepare(config: Config) -> dict[str, Any]:
    """The arguments of `fl.run`."""
    with as_config_errors(ValueError, TypeError):
        options = build_options(config)
        model, clients, test = build_problem(config, options.get("loss", Options.loss))
        algorithm = build_algorithm(config)
    if config.trajectory is not None and max(config.trajectory.clients) >= len(clients):
        raise ConfigError(f"trajectory.clients must be numbers from 0 to {len(clients) - 1}")
    return {
        "model": model,
        "clients": clients,
        "algorithm": algorithm,
        "test": test,
        **options,
    }


class _RunFiles(Observer):
    """Writes the configuration when the run starts, and its summary at the end."""

    def __init__(self, config: Config, directory: RunDirectory | None) -> None:
        self.config, self.directory = config, directory
        self.info: RunInfo | None = None

    def on_start(self, info: RunInfo) -> None:
        self.info = info
        if self.directory is not None:
            self.directory.write_config(self.config)

    def end(self, failure: str | None = None, rejected: Sequence[Rejection] = ()) -> None:
        """Write the summary of a run that has started."""
        if self.directory is not None and self.info is not None:
            records = self.directory.records()
            self.directory.write_summary(summarise(self.config, self.info, records, failure, rejected))
