"""The problems of the figures, at both scales, as far as their data is on this machine.

`paper` is the paper's setting, with our choices where it is silent: the presets unchanged. `smoke` is a small version
for two CPU cores: fewer clients and rounds, a few local steps, narrow networks; learning rates and other
hyper-parameters stay the paper's. If a data set is missing, `smoke` uses scikit-learn's digits with the rates of the
preset `quickstart`, and `paper` skips it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedlalr.config import Config, load
from fedlalr.config.loading import check
from fedlalr.config.overrides import merge, parse_overrides
from fedlalr.report.tables import DATA_NAMES

Scale = Literal["smoke", "paper"]

TITLES = {name: DATA_NAMES[name] for name in ("cifar10", "cifar100", "shakespeare", "digits")}
STAND_IN = "digits"

_PRESETS = {"digits": "quickstart"}
_SMALL_CIFAR = (
    "partition.clients=20",
    "clients_per_round=10",
    "rounds=25",
    "local.steps=5",
    "batch_size=20",
    "model={dim: 32, depth: 2, patch: 4}",
    "data.validation=0.02",  # a test set of 10,000 would take longer than the training
)
_SMOKE: Mapping[str, tuple[str, ...]] = {
    "cifar10": _SMALL_CIFAR,
    "cifar100": _SMALL_CIFAR,
    "shakespeare": (
        "partition.clients=20",
        "clients_per_round=4",
        "rounds=20",
        "local.epochs=1",
        "batch_size=10",
        "model={hidden: 64, layers: 1}",
        "data.options={train: 400, test: 40}",
    ),
    "digits": (
        "partition.clients=20",
        "clients_per_round=10",
        "rounds=25",
        "local.steps=5",
        "partition.alpha=0.3",
        "checkpoint_every=5",
    ),
}


@dataclass(frozen=True)
class Setting:
    """A problem with every setting except those that a figure varies."""

    data: str
    config: Config

    @property
    def title(self) -> str:
        return TITLES[self.data]

    def changed(self, **changes: Any) -> Setting:
        """The problem with some settings changed; tables are merged."""
        return Setting(self.data, check(merge(self.config.model_dump(), changes)))


def find_setting(
    data: str, scale: Scale, here: Collection[str], overrides: Sequence[str] = (), small: Sequence[str] = ()
) -> Setting | None:
    """The problem on a data set, on its stand-in if the scale is `smoke` and the data is missing, or None.

    `small` are a figure's own changes to the smoke scale; the user's `overrides` come last.
    """
    if data not in here and scale == "paper":
        return None
    name = data if data in here else STAND_IN
    tree = load(_PRESETS.get(name, name)).model_dump()
    if scale == "smoke":
        for changes in (_SMOKE[name], small):
            tree = merge(tree, parse_overrides(changes))
    return Setting(name, check(merge(tree, parse_overrides(overrides))))
