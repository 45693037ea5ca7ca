"""Choices that the paper leaves open, and the variants it names, each with FedLALR on CIFAR-10 at 0.6."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedlalr.paper.plans import (
    INTERVALS,
    LOCAL,
    Beside,
    FigureLine,
    FigurePlan,
    Panel,
    Request,
    described,
    method_line,
    panel_of,
)
from fedlalr.paper.settings import Setting

AS_IT_IS = "fedlalr"
"""The key of FedLALR's run in the figure of six methods, which these figures reuse."""
Changes = dict[str, Any]
CHOICES: dict[str, dict[str, tuple[str, Changes]]] = {
    "BatchNorm statistics": {
        "averaged": (AS_IT_IS, {}),
        "recalibrated": ("fedlalr-recalibrated", {"buffers": "recalibrate"}),
    },
    "kind of normalisation": {
        "BatchNorm": (AS_IT_IS, {}),
        "GroupNorm": ("fedlalr-group-norm", {"model": {"norm": "group"}}),
    },
    "gradient clipping": {"none": (AS_IT_IS, {}), "norm 10": ("fedlalr-clipped", {"clip_norm": 10.0})},
    f"{INTERVALS[1]}, counted in": {
        "steps": ("log-3-4", {"local": LOCAL["steps"]["log-3-4"]}),
        "epochs": ("log-3-4-epochs", {"local": LOCAL["epochs"]["log-3-4-epochs"]}),
    },
    "weights of unequal clients": {
        "uniform": (AS_IT_IS, {}),
        "by samples": ("fedlalr-by-samples", {"weighting": "samples"}),
    },
}
"""The title of a panel → the label of each line → its key, and its changes of FedLALR's settings."""
NORMS, UNEQUAL = ("BatchNorm statistics", "kind of normalisation"), "weights of unequal clients"
VARIANTS = {
    "restart, mean": (("momentum", "restart"),),
    "average, max": (("second_moment", "max"),),
    "restart, max": (("momentum", "restart"), ("second_moment", "max")),
}
"""Changes of the variants relative to `average, mean`."""


def choices(request: Request) -> FigurePlan:
    """One panel for each choice: statistics and kind of normalisation, clipping, the unit of K_t, and weights."""
    # epochs of clients with many images would dominate the time
    small = ("partition.clients=200", "rounds=12")
    settings, notes = request.settings(("cifar10",), small, partition={"alpha": 0.6})
    panels = [panel for setting in settings for panel in _panels(setting)]
    return FigurePlan("choices", tuple(panels), (*request.scope, *described(settings, "local", "norm"), *notes))


def variants(request: Request) -> FigurePlan:
    """Momentum averaged or restarted, second moments by their mean or by their maximum."""
    settings, notes = request.settings(("cifar10",), partition={"alpha": 0.6})
    panels = []
    for setting in settings:
        others = [
            replace(Beside("fedlalr", changed).line(setting.config), label=label) for label, changed in VARIANTS.items()
        ]
        panels.append(
            panel_of(setting, "momentum, second moment", [_line(setting, AS_IT_IS, "average, mean"), *others])
        )
    return FigurePlan("variants", tuple(panels), (*request.scope, *described(settings), *notes))


def _panels(setting: Setting) -> list[Panel]:
    uneven = setting.changed(partition={"scheme": "dirichlet-classes"})
    panels = []
    for title, lines in CHOICES.items():
        if title in NORMS and setting.config.model.name != "convmixer":
            continue  # the digits use a perceptron
        own = uneven if title == UNEQUAL else setting
        panels.append(panel_of(own, title, [_line(own, key, label, **new) for label, (key, new) in lines.items()]))
    return panels


def _line(setting: Setting, key: str, label: str, **changes: Any) -> FigureLine:
    return FigureLine(key, label, method_line(setting.changed(**changes).config, "fedlalr").config)
