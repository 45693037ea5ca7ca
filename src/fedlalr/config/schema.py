"""The schema of a run: every setting, its type and its limits.

A `Config` is complete: written to a file and loaded again, it gives the same run. Sections whose options depend on a
name (`algorithm`, `model`) take them from the class of that name, so that nothing is defined twice.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from types import ModuleType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model, model_serializer, model_validator
from torch import nn

from fedlalr.algorithms import registry
from fedlalr.common.named import check_known, check_options, options_of
from fedlalr.common.option_types import Count, NotNegative, Positive, Seed
from fedlalr.config.overrides import has_own_data
from fedlalr.config.own import EXAMPLE, check_name, is_own
from fedlalr.data.partition import Scheme
from fedlalr.data.sources import SOURCES
from fedlalr.data.sources.source import whereabouts
from fedlalr.federation import schedules
from fedlalr.federation.options import Options, in_reading_order
from fedlalr.federation.sampling import Kind
from fedlalr.federation.validation import check_cohort
from fedlalr.models import CNN, GPT, MLP, CharLSTM, ConvMixer, DenseCNN, Logistic, ViT
from fedlalr.training.calling import MODEL_LOSS
from fedlalr.training.engines.registry import check_engine
from fedlalr.training.intervals import LEAST_BASE, MOST_STEPS

MODELS: dict[str, Callable[..., nn.Module]] = {
    kind.__name__.lower(): kind for kind in (ConvMixer, CharLSTM, GPT, ViT, CNN, DenseCNN, MLP, Logistic)
}
"""Models by their names in configurations."""


def _with_limits(kind: Any) -> Any:
    """The type of an option as Pydantic reads it."""
    if get_origin(kind) is Annotated:
        base, bounds, *_ = get_args(kind)
        limits: dict[str, Any] = {name: value for name, value in bounds._asdict().items() if value is not None}
        if base is float:
            limits["allow_inf_nan"] = False
        return Annotated[base, Field(**limits)]
    if get_origin(kind) in (Union, UnionType):
        return functools.reduce(operator.or_, map(_with_limits, get_args(kind)))
    return kind


if not TYPE_CHECKING:
    Count, NotNegative, Positive, Seed = map(_with_limits, (Count, NotNegative, Positive, Seed))
LocalCount = Annotated[int, Field(ge=1, le=MOST_STEPS)]


def _checked(check: Callable[[Any], object]) -> AfterValidator:
    """A check of a setting's value by a function, which raises an error if the value is invalid."""

    def validate(value: Any) -> Any:
        check(value)
        return value

    return AfterValidator(validate)


def _check_data(name: str) -> None:
    if is_own(name):
        check_name(name)
    else:
        check_known("there is no data set", name, SOURCES, f", or name a function of yours, such as {EXAMPLE}")


def _check_loss(name: str) -> None:
    if name != MODEL_LOSS:
        check_name(name)


def _check_methods(table: dict[str, Any]) -> None:
    for method, settings in table.items():
        check_method(method, settings)


def _check_grid(grid: dict[str, dict[str, list[float]]]) -> None:
    for method, axes in grid.items():
        for option, values in axes.items():
            _check_axis(method, option, values)


Settings = dict[str, Any]


class Section(BaseModel):
    """A section of a configuration: immutable, no unknown keys, no silent conversion of text to numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DataConfig(Section):
    """The data set and its location, or a function of yours that makes the clients."""

    name: Annotated[str, _checked(_check_data)]
    folder: str | None = None
    """A folder with the data set in its original format; None: the cache, then a download."""
    augment: bool = True
    """Flip and crop training images, if the data set defines an augmentation."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the training samples held out and evaluated instead of the test set, for tuning."""
    options: Settings = {}
    """Options specific to the data set, such as `train_fraction` of Shakespeare, or those of your function."""

    @model_validator(mode="after")
    def _of_the_library(self) -> DataConfig:
        if is_own(self.name) and (self.folder is not None or not self.augment):
            raise ValueError(
                f"folder and augment are for the library's data sets; pass options to {self.name} with "
                f"data.options.NAME=…"
            )
        for section, fields in (("partition", PartitionConfig.model_fields), ("data", DataConfig.model_fields)):
            if not is_own(self.name) and (known := sorted(self.options.keys() & fields.keys())):
                raise ValueError(f"options.{known[0]} is no option of {self.name}; write {section}.{known[0]}=…")
        return self

    @property
    def is_missing(self) -> bool:
        """Whether it is a data set of the library that is not on this machine."""
        return self.folder is None and not is_own(self.name) and whereabouts(SOURCES[self.name]) is None


class PartitionConfig(Section):
    """How the samples are partitioned over clients."""

    scheme: Scheme = "dirichlet"
    clients: Count | None = 100
    """None with `natural`, where the data defines the clients."""
    alpha: Positive = 0.3
    seed: Seed | None = None
    """None: the run's seed."""
    min_size: int | None = None
    classes_per_client: Count | None = None
    sigma: NotNegative | None = None


class LocalConfig(Section):
    """How long a client trains in a round: `epochs`, or `steps`, or `start` and `base` (K_t = start + ⌊log_base t⌋)."""

    epochs: LocalCount | None = None
    steps: LocalCount | None = None
    start: LocalCount | None = None
    base: Annotated[float, Field(ge=LEAST_BASE, allow_inf_nan=False)] | None = None
    unit: Literal["steps", "epochs"] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> LocalConfig:
        kinds = [self.epochs is not None, self.steps is not None, self.start is not None or self.base is not None]
        if sum(kinds) != 1:
            raise ValueError("give one of epochs, steps, or start with base")
        if kinds[2] and (self.start is None or self.base is None):
            raise ValueError("start and base must be given together")
        if self.unit is not None and not kinds[2]:
            raise ValueError("unit is allowed only with start and base")
        return self


class TrajectoryConfig(Section):
    """The clients and rounds whose second moments and learning rates are recorded, in `trajectory.jsonl`."""

    clients: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    """They replace sampled clients in the cohorts of the recorded rounds."""
    rounds: Annotated[list[Count], Field(min_length=1)] | None = None
    """None: every round."""


class Named(Section):
    """A name and the options of that model or method."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: str

    @property
    def options(self) -> Settings:
        """Everything but the name."""
        return dict(self.model_extra or {})


class ModelConfig(Named):
    """The model, or a function of yours that makes it. Sizes that the data determines (`classes`, …) may be omitted."""

    @model_validator(mode="after")
    def _known(self) -> ModelConfig:
        if is_own(self.name):
            check_name(self.name)
            return self
        check_known(
            "there is no model", self.name, MODELS, ", or name a function of yours, such as mypackage.model:make"
        )
        check_options(self.name, self.options, options_of(MODELS[self.name]))
        return self


def _completed(makers: ModuleType, name: str, settings: Settings) -> Settings:
    """Settings completed by the defaults of what a module creates by name; raises an error if they are invalid."""
    makers.create(name, **settings)
    complete = {**makers.options(name), **settings}
    return {option: list(v) if isinstance(v, tuple) else v for option, v in complete.items()}


class Completed(Named):
    """A name and all options, those that are not given at their defaults."""

    makers: ClassVar[ModuleType]
    """The module that creates objects by name."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        name = given.get("name", cls.model_fields["name"].default) if isinstance(given, dict) else None
        if not isinstance(name, str):
            return given
        settings = {option: value for option, value in given.items() if option != "name"}
        return {"name": name, **_completed(cls.makers, name, settings)}


class AlgorithmConfig(Completed):
    """The method, with all its hyper-parameters."""

    makers: ClassVar[ModuleType] = registry


class ScheduleConfig(Completed):
    """The learning-rate schedule, with all its options."""

    name: str = "constant"

    makers: ClassVar[ModuleType] = schedules


class ProblemConfig(Section):
    """The data, the model and the method."""

    name: str = "run"
    description: str = ""
    data: DataConfig
    partition: PartitionConfig = PartitionConfig()
    model: ModelConfig
    algorithm: AlgorithmConfig


OPTIONS = tuple(each.name for each in in_reading_order() if each.metadata["config"])
"""The options of `fl.run` that are also settings, with the same names."""

if TYPE_CHECKING:

    class OptionsConfig(ProblemConfig):
        """The class below, for type checkers."""

        def __getattr__(self, name: str) -> Any: ...

else:
    _KINDS = get_type_hints(Options, include_extras=True)
    _TEXTUAL = {
        "sampling": Kind,
        "local": Any,
        "schedule": Any,
        "reduce": dict[str, str | Settings] | None,
        "compression": str | Settings | None,
        "privacy": Settings | None,
        "asynchronous": Settings | None,
        "stragglers": Settings | None,
        "speeds": float | str | list[float] | None,
        "engine": Annotated[str, _checked(check_engine)],
        "device": str,
        "dtype": Any,
        "decayed": str | list[str] | None,
        "trainable": str | list[str] | None,
        "personal": str | list[str] | None,
    }
    OptionsConfig = create_model(
        "OptionsConfig",
        __base__=ProblemConfig,
        **{
            each.name: (_TEXTUAL.get(each.name, _with_limits(_KINDS[each.name])), each.default)
            for each in in_reading_order()
            if each.name in OPTIONS
        },
    )


class Config(OptionsConfig):
    """A run, or several that differ in method and seed."""

    local: LocalConfig = LocalConfig(epochs=1)
    schedule: ScheduleConfig = ScheduleConfig()
    dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = None
    loss: Annotated[str, _checked(_check_loss)] | None = None
    """A function of yours, of (outputs, targets), or the loss that the model computes; None: cross-entropy."""
    trajectory: TrajectoryConfig | None = None
    target: Annotated[float, Field(gt=0, le=1)] | None = None
    """The target accuracy of a comparison, for rounds and megabytes."""
    methods: Annotated[dict[str, Settings], _checked(_check_methods)] = Field(default_factory=dict)
    """Hyper-parameters of each method on this problem, used if `algorithm` names it."""
    grid: Annotated[dict[str, dict[str, list[float]]], _checked(_check_grid)] = Field(default_factory=dict)
    """Learning rates to try for each method when tuning."""

    @model_validator(mode="before")
    @classmethod
    def _partition_of_the_library(cls, given: Any) -> Any:
        if isinstance(given, dict) and has_own_data(given) and given.get("partition") is not None:
            raise ValueError(
                f"partition is for the library's data sets; {given['data']['name']} makes the clients itself: pass "
                f"options to it with data.options.NAME=…"
            )
        return given

    @model_serializer(mode="wrap")
    def _only_given(self, as_usual: Callable[[Any], Settings]) -> Settings:
        """Everything, but of `local` only what is given, and no partition of data that has its own clients."""
        tree = as_usual(self)
        tree["local"] = {name: value for name, value in tree["local"].items() if value is not None}
        if is_own(self.data.name):
            tree.pop("partition", None)
        return tree

    @model_validator(mode="after")
    def _check_trajectory(self) -> Config:
        wanted, method = self.trajectory, self.algorithm
        if wanted is None:
            return self
        if "v_hat" not in registry.create(method.name, **method.options).slots.up:
            raise ValueError(
                f"a trajectory records the clients' v̂, which {method.name} does not have; "
                f"use fedlalr, or trajectory=null"
            )
        if max(wanted.rounds or [1]) > self.rounds:
            raise ValueError(f"trajectory.rounds contains {max(wanted.rounds or [1])}, but rounds is {self.rounds}")
        if self.clients_per_round is not None and len(set(wanted.clients)) > self.clients_per_round:
            raise ValueError(
                f"trajectory.clients has {len(set(wanted.clients))} clients, but clients_per_round is "
                f"{self.clients_per_round}, and all of them must take part in the recorded rounds"
            )
        return self

    @model_validator(mode="after")
    def _check_schedule_and_cohort(self) -> Config:
        """Reject what `fl.run` would reject only after loading the data, and a comparison after its first runs."""
        schedules.rates(schedules.create(self.schedule.name, **self.schedule.options), 1.0, self.rounds)(1)
        if self.partition.clients is not None and self.asynchronous is None and not is_own(self.data.name):
            check_cohort(self.clients_per_round, self.partition.clients, self.min_clients)
        return self

    @property
    def is_personal(self) -> bool:
        """Whether clients keep a part of the model, so that the server's cannot be evaluated on a test set."""
        return self.personal is not None or self.buffers == "local"

    @property
    def partition_seed(self) -> int:
        seed: int = self.seed if self.partition.seed is None else self.partition.seed
        return seed

    def problem(self) -> Settings:
        """The settings that affect the outcome: everything but names, targets and the tables of other methods."""
        return self.model_dump(exclude={"name", "description", "checkpoint_every", "target", "methods", "grid"})


def check_method(method: str, settings: Settings) -> Settings:
    """A method's settings completed by its defaults; raises an error if they are invalid."""
    return _completed(registry, method, settings)


def _check_axis(method: str, option: str, values: list[float]) -> None:
    """Reject a list of values to try if one of them is invalid."""
    key = f"grid.{method}.{option}"
    if not values:
        raise ValueError(f"{key} is empty; give the values to try, such as [0.01, 0.1]")
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{key} contains {value:g} twice; give every value once")
        try:
            _check_value(method, option, value)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{key} cannot be {value:g}: {error}") from error


@functools.cache
def _check_value(method: str, option: str, value: float) -> None:
    """Presets have hundreds of values to try, and a comparison checks its configuration for every run."""
    check_method(method, {option: value})
