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
    with_alpha,
)
from fedlalr.paper.settings import Setting

AS_IT_IS = "fedlalr"
"""The key of FedLALR's run in the figure of six methods, which these figures reuse."""
VARIANTS = {
    "restart, mean": (("momentum", "restart"),),
    "average, max": (("second_moment", "max"),),
    "restart, max": (("momentum", "restart"), ("second_moment", "max")),
}
"""Changes of the variants relative to `average, mean`."""


def choices(request: Request) -> FigurePlan:
    """One panel for each choice: statistics and kind of normalisation, clipping, the unit of K_t, and weights."""
    # epochs of clients with many images would dominate the time
    settings, notes = request.settings(("cifar10",), small=("partition.clients=200", "rounds=12"))
    panels = [panel for setting in settings for panel in _panels(with_alpha(setting, 0.6))]
    return FigurePlan("choices", tuple(panels), (*request.scope, *described(settings, "local", "norm"), *notes))


def variants(request: Request) -> FigurePlan:
    """Momentum averaged or restarted, second moments by their mean or by their maximum."""
    settings, notes = request.settings(("cifar10",))
    panels = []
    for setting in (with_alpha(setting, 0.6) for setting in settings):
        others = [
            replace(Beside("fedlalr", changed).line(setting.config), label=label) for label, changed in VARIANTS.items()
        ]
        panels.append(
            panel_of(setting, "momentum, second moment", [_line(setting, AS_IT_IS, "average, mean"), *others])
        )
    return FigurePlan("variants", tuple(panels), (*request.scope, *described(settings), *notes))


def _panels(setting: Setting) -> list[Panel]:
    uneven = Setting(setting.data, setting.changed(partition={"scheme": "dirichlet-classes"}), setting.stands_for)
    normalisation = (
        [
            panel_of(
                setting,
                "BatchNorm statistics",
                [
                    _line(setting, AS_IT_IS, "averaged"),
                    _line(setting, "fedlalr-recalibrated", "recalibrated", buffers="recalibrate"),
                ],
            ),
            panel_of(
                setting,
                "kind of normalisation",
                [
                    _line(setting, AS_IT_IS, "BatchNorm"),
                    _line(setting, "fedlalr-group-norm", "GroupNorm", model={"norm": "group"}),
                ],
            ),
        ]
        if setting.config.model.name == "convmixer"
        else []
    )  # the digits use a perceptron
    return [
        *normalisation,
        panel_of(
            setting,
            "gradient clipping",
            [_line(setting, AS_IT_IS, "none"), _line(setting, "fedlalr-clipped", "norm 10", clip_norm=10.0)],
        ),
        panel_of(
            setting,
            f"{INTERVALS[1]}, counted in",
            [
                _line(setting, "log-3-4", "steps", local=LOCAL["steps"]["log-3-4"]),
                _line(setting, "log-3-4-epochs", "epochs", local=LOCAL["epochs"]["log-3-4-epochs"]),
            ],
        ),
        panel_of(
            uneven,
            "weights of unequal clients",
            [
                _line(uneven, AS_IT_IS, "uniform"),
                _line(uneven, "fedlalr-by-samples", "by samples", weighting="samples"),
            ],
        ),
    ]


def _line(setting: Setting, key: str, label: str, **changes: Any) -> FigureLine:
    return FigureLine(key, label, method_line(setting.changed(**changes), "fedlalr").config)
