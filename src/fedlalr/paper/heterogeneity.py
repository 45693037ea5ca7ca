"""The heterogeneity figure: the labels of the clients of a Dirichlet partition. Nothing is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure

from fedlalr.config import build_population
from fedlalr.data.heterogeneity import Counts, count_labels, summarise
from fedlalr.paper.figure_options import takes
from fedlalr.paper.plans import CIFAR, Request, key_of
from fedlalr.paper.style import WIDTH, add_notes, write_table

ALPHAS = (0.6, 0.3)


@dataclass(frozen=True)
class Dealt:
    """One partition: samples per client and class, `[N, K]`."""

    data: str
    alpha: float
    seed: int
    counts: Counts


def deal(request: Request, seeds: int) -> tuple[list[Dealt], list[str]]:
    """The partitions of 100 clients at both Dirichlet parameters, and notes on missing data."""
    settings, notes = request.settings(CIFAR, small=("partition.clients=100", "data.validation=0.0"))
    changed = [text for text in request.changed if takes("heterogeneity", key_of(text))]
    notes = [f"Changed: {', '.join(changed)}." for _ in changed[:1]] + notes
    dealt = []
    for setting in settings:
        for alpha in ALPHAS:
            for seed in range(seeds):
                config = setting.changed(partition={"alpha": alpha}, seed=setting.config.seed + seed).config
                population = build_population(config)
                counts = count_labels(population.targets.numpy(), population.partition, population.classes)
                dealt.append(Dealt(setting.title, alpha, config.seed, counts))
    return dealt, notes


def labels_by_alpha(dealt: Sequence[Dealt]) -> dict[str, dict[float, list[float]]]:
    """For each data set and Dirichlet parameter, the mean number of labels per client, per seed."""
    table: dict[str, dict[float, list[float]]] = {}
    for one in dealt:
        mean = summarise(one.counts).classes_per_client
        table.setdefault(one.data, {}).setdefault(one.alpha, []).append(mean)
    return table


def label_figure(dealt: Sequence[Dealt], notes: Sequence[str]) -> Figure:
    """Maps of clients by classes for the first seed, one row per data set; white means no sample."""
    first = [one for one in dealt if one.seed == min(each.seed for each in dealt)]
    names = list(dict.fromkeys(one.data for one in first))
    means = labels_by_alpha(dealt)
    colours = ListedColormap(colormaps["YlGnBu"](np.linspace(0.25, 1, 256)))  # a single sample is not white
    figure = Figure(figsize=(WIDTH, 1.6 * max(1, len(names)) + 0.5), layout="constrained")
    panels = figure.subplots(max(1, len(names)), len(ALPHAS), squeeze=False, sharey="row")
    for row, name in enumerate(names):
        top = max(int(one.counts.max()) for one in first if one.data == name)
        for axes, alpha in zip(panels[row], ALPHAS, strict=True):
            counts = next(one.counts for one in first if (one.data, one.alpha) == (name, alpha))
            shown = np.ma.masked_equal(counts.T, 0)
            image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap=colours, norm=LogNorm(1, top))
            axes.grid(visible=False)
            mean = float(np.mean(means[name][alpha]))
            axes.set_title(f"{name}, Dirichlet {alpha:g}:\n{mean:.1f} labels per client")
        panels[row, 0].set_ylabel("class")
        figure.colorbar(image, ax=panels[row], label="samples", pad=0.02).ax.tick_params(labelsize=6)
    for axes in panels[-1]:
        axes.set_xlabel("client")
    seeds = sorted({one.seed for one in dealt})
    means_of = "" if len(seeds) == 1 else f" Labels per client: mean of {len(seeds)} seeds."
    return add_notes(figure, [*notes, f"Maps of seed {seeds[0]}; white: no sample.{means_of}"])


def write_labels(dealt: Sequence[Dealt], path: Path) -> Path:
    """A row for every client and each of its classes."""
    rows = (
        (one.data, one.alpha, one.seed, client, label, int(one.counts[client, label]))
        for one in dealt
        for client, label in np.argwhere(one.counts > 0).tolist()
    )
    return write_table(path, ("data", "alpha", "seed", "client", "class", "samples"), rows)
