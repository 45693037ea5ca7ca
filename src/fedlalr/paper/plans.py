"""The figures that are drawn from training runs, as grids of runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from fedlalr.algorithms.registry import PAPER_METHODS
from fedlalr.common.files import as_file_name
from fedlalr.config import Config, ConfigError, with_method
from fedlalr.config.jobs import Job
from fedlalr.config.loading import check
from fedlalr.paper.settings import STAND_IN, TITLES, Scale, Setting, find_setting
from fedlalr.report.tables import name_of

FigureName = Literal[
    "heterogeneity", "cifar", "shakespeare", "interval", "trajectory", "scalability", "choices", "variants", "speedup"
]
"""In the order in which `all` draws them."""
FIGURES: tuple[FigureName, ...] = get_args(FigureName)
CIFAR = ("cifar10", "cifar100")
HOW_RUN = ("device", "engine", "checkpoint_every")
"""Where a run is computed and how often it is saved; not part of its identity."""
INTERVALS = ("K = 10", "3 + ⌊log₄ t⌋", "4 + ⌊log₂ t⌋")
"""The intervals that the paper compares, as labels. It does not say whether they count epochs or steps; as settings:"""
LOCAL: dict[str, dict[str, dict[str, Any]]] = {
    "epochs": {
        "epochs-10": {"epochs": 10},
        "log-3-4-epochs": {"start": 3, "base": 4.0, "unit": "epochs"},
        "log-4-2-epochs": {"start": 4, "base": 2.0, "unit": "epochs"},
    },
    "steps": {"steps-10": {"steps": 10}, "log-3-4": {"start": 3, "base": 4.0}, "log-4-2": {"start": 4, "base": 2.0}},
}


@dataclass(frozen=True)
class FigureLine:
    """A curve: one configuration, run for every seed."""

    key: str
    label: str
    config: Config

    def job(self, folder: Path, seed: int) -> Job:
        """The run of one seed, counted from the configuration's seed."""
        number = self.config.seed + seed
        return Job(
            check({**self.config.model_dump(), "seed": number}), folder / as_file_name(self.key) / f"seed-{number}"
        )


@dataclass(frozen=True)
class Panel:
    """Curves that are compared with each other: same data, partition and cohort."""

    key: str
    title: str
    lines: tuple[FigureLine, ...]
    group: str
    """Panels of one group show the same data."""
    short: str = ""
    """The title within its group."""

    @property
    def compares(self) -> bool:
        """Whether it shows all methods, not only FedLALR."""
        return set(PAPER_METHODS) <= {line.key for line in self.lines}

    @property
    def cohort(self) -> int:
        """The number of clients per round."""
        return max((line.config.clients_per_round or 0 for line in self.lines), default=0)


@dataclass(frozen=True)
class Beside:
    """A method with settings that differ from the paper's, shown beside the method as printed."""

    method: str
    settings: tuple[tuple[str, Any], ...]

    @property
    def key(self) -> str:
        return f"{self.method}+{','.join(f'{name}={value}' for name, value in self.settings)}".replace(" ", "")

    @property
    def label(self) -> str:
        return f"{name_of(self.method)}, {', '.join(f'{name} {value}' for name, value in self.settings)}"

    def line(self, config: Config) -> FigureLine:
        """Its curve on a problem."""
        tree = with_method(config, self.method).model_dump()
        tree["algorithm"] |= dict(self.settings)
        return FigureLine(self.key, self.label, check(tree))


@dataclass(frozen=True)
class FigurePlan:
    """All runs of a figure, and notes for the reader."""

    figure: str
    panels: tuple[Panel, ...]
    notes: tuple[str, ...] = ()

    def jobs(self, folder: Path, seeds: int, methods: Collection[str] = PAPER_METHODS) -> list[Job]:
        """Every run once, seed by seed, so that an interrupted grid has complete seeds."""
        every = (
            line.job(folder / panel.key, seed)
            for seed in range(seeds)
            for panel in self.panels
            for line in panel.lines
            if line.config.algorithm.name in methods
        )
        return list({job.folder: job for job in every}.values())


@dataclass(frozen=True)
class Request:
    """What to reproduce, and on which data."""

    scale: Scale
    here: frozenset[str]
    overrides: tuple[str, ...] = ()
    beside: tuple[Beside, ...] = ()

    @property
    def scope(self) -> list[str]:
        """Notes that apply to all runs, as sentences."""
        changed = f" with {', '.join(self.changed)}" if self.changed else ""
        if self.scale == "paper":
            return [f"The paper's setting{changed}; where it is silent, our choices."]
        return [f"Small runs{changed}, not the paper's setting."]

    @property
    def verdict_scope(self) -> list[str]:
        """The same for verdicts."""
        if self.scale == "paper":
            return self.scope
        absent = [title for name, title in TITLES.items() if name not in self.here and name != STAND_IN]
        stand_in = [f"{TITLES[STAND_IN]} stand in for {' and '.join(absent)}, not on this machine."] if absent else []
        return [*self.scope, *stand_in, "Verdicts on small runs say little about the paper's setting."]

    @property
    def changed(self) -> list[str]:
        """Settings that differ from the scale's own, except those of how a run is computed."""
        return [text for text in self.overrides if key_of(text) not in HOW_RUN]

    def settings(
        self, names: Iterable[str], small: Sequence[str] = (), **changes: Any
    ) -> tuple[list[Setting], list[str]]:
        """The problems on several data sets, each once, with the figure's changes, and notes on those that are not on
        this machine."""
        found: dict[str, Setting] = {}
        notes = []
        for name in names:
            setting = find_setting(name, self.scale, self.here, self.overrides, small)
            if setting is None:
                notes.append(f"{TITLES[name]} is not on this machine and was left out.")
                continue
            found.setdefault(setting.data, setting.changed(**changes))
            if setting.data != name:
                notes.append(f"{setting.title} stand in for {TITLES[name]}, which is not on this machine.")
        return list(found.values()), notes


def cifar(request: Request) -> FigurePlan:
    """Six methods at two degrees of heterogeneity."""
    settings, notes = request.settings(CIFAR)
    panels = [
        _six(request, setting.changed(partition={"alpha": alpha}), f"Dirichlet {alpha:g}")
        for setting in settings
        for alpha in (0.6, 0.3)
    ]
    return FigurePlan("cifar", tuple(panels), (*request.scope, *described(settings), *notes))


def shakespeare(request: Request) -> FigurePlan:
    """Six methods on speaking roles, and on the same windows pooled and split evenly."""
    settings, notes = request.settings(["shakespeare"])
    panels = []
    for setting in settings:
        pooled = setting.changed(partition={"scheme": "iid"})
        panels += [_six(request, setting, "non-IID"), _six(request, pooled, "IID")]
    return FigurePlan("shakespeare", tuple(panels), (*request.scope, *described(settings), *notes))


def scalability(request: Request) -> FigurePlan:
    """Six methods with half and with one and a half times the usual cohort; FedLALR also with the usual one."""
    settings, notes = request.settings(CIFAR, partition={"alpha": 0.6})
    panels = []
    for setting in settings:
        usual = setting.config.clients_per_round or _population(setting.config)
        for share, longer in ((0.5, 2.0), (1.5, 0.8)):
            cohort, rounds = max(1, round(usual * share)), max(1, round(setting.config.rounds * longer))
            changed = setting.changed(clients_per_round=cohort, rounds=rounds)
            panels.append(_six(request, changed, f"{cohort} clients"))
        panels.append(panel_of(setting, f"{usual} clients", [method_line(setting.config, "fedlalr")]))
    passes = "The paper's rounds: the largest cohort passes 1.2 times as often over the data as the others."
    sizes = described(settings, "cohort", "rounds")
    return FigurePlan("scalability", tuple(panels), (*request.scope, *sizes, passes, *notes))


def interval(request: Request) -> FigurePlan:
    """FedLALR with a fixed and with two growing intervals, counted in epochs and in steps.

    Ten epochs take too long for the small scale, which counts steps alone.
    """
    settings, notes = request.settings(CIFAR, partition={"alpha": 0.6})
    panels = []
    for setting in settings:
        for unit in LOCAL if request.scale == "paper" else ("steps",):
            lines = [
                FigureLine(key, label, setting.changed(local=local).config)
                for label, (key, local) in zip(INTERVALS, LOCAL[unit].items(), strict=True)
            ]
            panels.append(panel_of(setting, f"in {unit}", lines))
    return FigurePlan("interval", tuple(panels), (*request.scope, *described(settings, "local"), *notes))


def trajectory(request: Request) -> FigurePlan:
    """FedLALR with two clients recorded in four rounds."""
    small = ("clients_per_round=4", "local.steps=20")
    settings, notes = request.settings(CIFAR[:1], small, partition={"alpha": 0.6})
    panels = []
    for setting in settings:
        rounds = sorted({1 + 3 * part * setting.config.rounds // 10 for part in range(4)})
        config = setting.changed(trajectory={"clients": [0, 1], "rounds": rounds}).config
        panels.append(panel_of(setting, "Dirichlet 0.6", [FigureLine("fedlalr-trajectory", "FedLALR", config)]))
    return FigurePlan("trajectory", tuple(panels), (*request.scope, *described(settings, "test"), *notes))


def key_of(override: str) -> str:
    """The setting that a text such as `rounds=3` changes."""
    return override.partition("=")[0].strip()


def _six(request: Request, setting: Setting, short: str) -> Panel:
    """All methods as printed, and those shown beside them."""
    lines = [method_line(setting.config, method) for method in PAPER_METHODS]
    return panel_of(setting, short, [*lines, *(one.line(setting.config) for one in request.beside)])


def method_line(config: Config, method: str) -> FigureLine:
    return FigureLine(method, name_of(method), with_method(config, method))


def panel_of(setting: Setting, short: str, lines: Sequence[FigureLine]) -> Panel:
    partition, cohort = setting.config.partition, setting.config.clients_per_round
    alpha = f"{partition.alpha:g}" if partition.scheme.startswith("dirichlet") else ""
    population = _population(setting.config)
    key = f"{setting.data}-{partition.scheme}{alpha}-{cohort or population}of{population}"
    return Panel(key, f"{setting.title}, {short}", tuple(lines), setting.title, short)


def _population(config: Config) -> int:
    if config.partition.clients is None:
        raise ConfigError("partition.clients: a figure needs to know how many clients there are; give a number")
    return config.partition.clients


def described(settings: Sequence[Setting], *left_out: str) -> list[str]:
    """The size of each problem as a sentence, without what the figure varies or does not show."""
    sentences = []
    for setting in settings:
        config = setting.config
        batch = config.batch_size and config.batch_size * config.accumulate
        facts = {
            "cohort": f"{config.clients_per_round or _population(config)} of {_population(config)} clients per round",
            "rounds": f"{config.rounds} {_counted('rounds', config.rounds)}",
            "local": _length(config),
            "batch": f"batches of {batch}" if batch else "all samples in one batch",
        }
        held_out = f"; tested on {config.data.validation * 100:g} % of the training images, held out"
        norm = f"; BatchNorm statistics {'averaged' if config.buffers == 'average' else 'recalibrated'}"
        batch_norm = config.model.name == "convmixer" and config.model.options.get("norm", "batch") == "batch"
        sentences.append(
            f"{setting.title}: {', '.join(fact for name, fact in facts.items() if name not in left_out)}"
            f"{norm if batch_norm and 'norm' not in left_out else ''}"
            f"{held_out if config.data.validation and 'test' not in left_out else ''}."
        )
    return sentences


def _length(config: Config) -> str:
    """How long a client trains in a round."""
    given = {name: value for name, value in config.local if value is not None}
    if "start" in given:
        return f"{given['start']} + ⌊log_{given['base']:g} t⌋ local {given.get('unit', 'steps')}"
    return next(f"{value} local {_counted(name, value)}" for name, value in given.items())


def _counted(name: str, value: object) -> str:
    return name.removesuffix("s") if value == 1 else name
