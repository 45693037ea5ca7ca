"""The figure of the linear speed-up, sized for one column of a paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D

from fedlalr.common.colours import shades
from fedlalr.paper.line_drawing import METHOD_LOOKS, empty_figure, pairs, two_parts
from fedlalr.paper.speedup_results import CONTROLS, REGIME, Speedup, SpeedupPoint
from fedlalr.paper.style import add_notes

FEDLALR, FEDAVG = (METHOD_LOOKS[method]["color"] for method in ("fedlalr", "fedavg"))
"""Local SGD is FedAvg with all clients."""
MARKERS = ("o", "s", "^", "D", "v")
CLAIM: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 0.9}


def speedup_figure(result: Speedup) -> Figure:
    """Small panels with the rate of each variant, above two with the speed-up of all, as it is and divided by N."""
    figure = empty_figure(7.4)
    above, below = two_parts(figure, -(-len(result.variants) // 2) * 1.1, 2.5)
    panels = pairs(above, len(result.variants), sharex=True, sharey=True)
    for axes, variant in zip(panels.flat, result.variants, strict=False):
        _rate(axes, result, variant)
    top = max(point.mean for point in result.points if not point.cap_binds)
    panels.flat[0].set_ylim(top=top * 9)  # room for the slopes; the panels share the axis
    above.supxlabel("N·K·T", fontsize=7.5)
    above.supylabel("mean of ‖∇f(x̄)‖² over all local steps", fontsize=7.5)
    _legend(above, result)
    gain, share = below.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _gain(gain, share, result)
    return add_notes(figure, notes(result))


def notes(result: Speedup) -> list[str]:
    """Notes for the reader: the problem, the meaning of the numbers in the panels, and the number of repeats."""
    repeats = min(len(point.values) for point in result.points)
    spread = f"Means of {repeats} repeats, bars from the lowest to the highest." if repeats > 1 else "One repeat."
    return [
        "Synthetic: a noisy non-convex problem in 8 dimensions with known constants; not the paper's data.",
        f"In the panels: the slope over points with KT ≥ {REGIME}N³, with its 95 % interval; the claim is −1/2.",
        "Restart: momentum is zero at the start of every round; max: v̂ is the clients' maximum, not their mean; local "
        "SGD is FedAvg with all clients.",
        "The step size is the corollary's; points where its cap binds are omitted above.",
        spread,
    ]


def _rate(axes: Axes, result: Speedup, variant: str) -> None:
    """One variant: every run in its own colour, hollow outside the regime, with the claimed slope."""
    points = [point for point in result.of(variant) if not point.cap_binds]
    for steps, style in _styles(result, variant).items():
        for point in points:
            if point.steps == steps:
                _mark(axes, point, point.N * point.steps, point.mean, point.values, *style)
    size = np.array([point.N * point.steps for point in points])
    ends = np.array([size.min(), size.max()])
    height = min(point.mean * np.sqrt(point.N * point.steps) for point in points) * 0.75
    axes.plot(ends, height / np.sqrt(ends), **CLAIM)
    axes.set(xscale="log", yscale="log")
    fits = [fit for fit in result.fits if (fit.variant, fit.against) == (variant, "NKT")]
    slope = "".join(f"\n{fit.slope:.3f} [{fit.low:.3f}, {fit.high:.3f}]" for fit in fits).replace("-", "−")
    name = variant if variant in CONTROLS else f"FedLALR, {variant}"
    axes.text(0.97, 0.96, name + slope, transform=axes.transAxes, ha="right", va="top", fontsize=7)


def _legend(figure: SubFigure, result: Speedup) -> None:
    handles = [
        Line2D([], [], linestyle="none", marker=marker, markersize=3.5, color=colour, label=_thousands(steps))
        for steps, (colour, marker) in _styles(result, result.variants[0]).items()
    ]
    handles.append(Line2D([], [], label="slope −1/2", **CLAIM))
    title = f"local steps KT of a run (hollow: KT < {REGIME} N³)"
    legend = figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False, title=title)
    legend.get_title().set_fontsize(7)


def _gain(axes: Axes, share: Axes, result: Speedup) -> None:
    """By what factor N clients need fewer local steps, by the rate 1/√(KT): the squared ratio to one client.

    The lines nearly coincide; divided by N, they differ visibly.
    """
    mine = [variant for variant in result.variants if variant not in CONTROLS]
    colours = dict(zip(mine, shades(FEDLALR, len(mine)), strict=True))
    outside = {point.N for variant in result.variants for point in result.longest(variant) if not point.in_regime}
    most = max((point.N for point in result.points if point.N not in outside), default=1)
    last: dict[str, float] = {}
    sizes: set[int] = set()
    for variant, marker in zip(result.variants, MARKERS, strict=False):
        colour = colours.get(variant, FEDAVG)
        points = result.longest(variant)
        alone = next(point for point in points if point.N == 1)
        sizes |= {point.N for point in points}
        gains = {point.N: (alone.mean / point.mean) ** 2 for point in points}
        last[variant] = gains.get(most, 0.0)
        axes.plot([], [], color=colour, linewidth=0.8, marker=marker, markersize=3.5, label=variant)
        for panel, divided in ((axes, False), (share, True)):
            unit = {N: N if divided else 1 for N in gains}
            panel.plot(list(gains), [gain / unit[N] for N, gain in gains.items()], color=colour, linewidth=0.8)
            for point in points:
                each = [
                    (one / other) ** 2 / unit[point.N] for one, other in zip(alone.values, point.values, strict=True)
                ]
                _mark(panel, point, point.N, gains[point.N] / unit[point.N], each, colour, marker)
    ticks = sorted(sizes)
    axes.plot(ticks, ticks, label="linear", **CLAIM)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylabel("speed-up over\none client")
    axes.set_ylim(top=4 * ticks[-1])  # room for the legend
    title = "longest run; all but local SGD are FedLALR"
    axes.legend(loc="upper left", ncols=2, frameon=False, title=title, alignment="left", title_fontsize=7)
    share.axhline(1, **CLAIM)
    share.set(xlabel="clients N", ylabel="speed-up / N")
    share.margins(y=0.12)
    best = max(last, key=lambda variant: last[variant])
    if most > 1:
        share.set_title(f"largest speed-up with {most} clients: {best}, {last[best]:.1f}", fontsize=6.5)


def _styles(result: Speedup, variant: str) -> dict[int, tuple[str, str]]:
    """A colour and a marker for each length of run."""
    lengths: Sequence[int] = sorted({point.steps for point in result.of(variant)})
    colours = shades(FEDAVG if variant in CONTROLS else FEDLALR, len(lengths))
    return dict(zip(lengths, zip(colours, MARKERS, strict=False), strict=False))


def _mark(
    axes: Axes, point: SpeedupPoint, x: float, y: float, repeats: Sequence[float], colour: str, marker: str
) -> None:
    face = colour if point.in_regime else "white"
    axes.vlines(x, min(repeats), max(repeats), color=colour, linewidth=0.7)
    axes.plot(x, y, marker=marker, markersize=3.5, markeredgewidth=0.7, color=colour, markerfacecolor=face)


def _thousands(number: int) -> str:
    return f"{number:,}".replace(",", " ")
