"""Label heterogeneity of a partition: counts, a summary and a figure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedlalr.data.partition import Partition

Counts = NDArray[np.int64]

_MOST_BARS = 200
_MOST_COLOURS = 20


@dataclass(frozen=True)
class Heterogeneity:
    """Statistics of a partition, averaged over the clients that have samples."""

    clients: int
    classes: int
    """Classes with at least one sample."""
    samples: int
    smallest: int
    """Samples of the smallest client."""
    median: float
    largest: int
    classes_per_client: float
    """Mean number of classes per client."""
    fewest_classes: int
    most_classes: int
    entropy: float
    """Mean entropy of a client's label distribution, in bits."""
    global_entropy: float
    """The same over all samples: the value of an even partition."""
    total_variation: float
    """Mean total-variation distance of a client's label distribution from the global one: 0 is even, 1 is disjoint."""

    def lines(self) -> list[str]:
        """The summary as text, one fact per line."""
        return [
            f"{self.samples:,} samples, {self.classes} classes, {self.clients:,} clients",
            f"samples per client: {self.smallest} to {self.largest}, median {self.median:g}",
            f"classes per client: {self.fewest_classes} to {self.most_classes}, mean {self.classes_per_client:.2f}",
            f"label entropy of a client: mean {self.entropy:.2f} bits; of all samples {self.global_entropy:.2f}",
            f"distance from the global mix: mean {self.total_variation:.3f} (total variation; 0 even, 1 disjoint)",
        ]


def count_labels(labels: ArrayLike, partition: Partition, classes: int | None = None) -> Counts:
    """Samples per client and class, `[N, K]`; K is the largest label + 1 unless given.

    >>> count_labels([0, 0, 1], Partition.from_lists([[0, 1], [2]])).tolist()
    [[2, 0], [0, 1]]
    """
    array = np.asarray(labels)
    columns = classes if classes is not None else int(array.max(initial=-1)) + 1
    mine = array[partition.indices].astype(np.int64)
    if mine.size and not 0 <= mine.min() <= mine.max() < columns:
        raise ValueError(f"labels must lie in 0 to {columns - 1}, not {mine.min()} to {mine.max()}")
    owner = np.repeat(np.arange(len(partition)), partition.sizes)
    return np.bincount(owner * columns + mine, minlength=len(partition) * columns).reshape(len(partition), columns)


def summarise(counts: Counts) -> Heterogeneity:
    """The summary of a table of counts `[N, K]`."""
    sizes = counts.sum(axis=1)
    busy = counts[sizes > 0]
    mix = busy / busy.sum(axis=1, keepdims=True)
    overall = counts.sum(axis=0) / counts.sum()
    present = (busy > 0).sum(axis=1)
    return Heterogeneity(
        clients=len(counts),
        classes=int((overall > 0).sum()),
        samples=int(sizes.sum()),
        smallest=int(sizes.min()),
        median=float(np.median(sizes)),
        largest=int(sizes.max()),
        classes_per_client=float(present.mean()),
        fewest_classes=int(present.min()),
        most_classes=int(present.max()),
        entropy=float(_entropy(mix).mean()),
        global_entropy=float(_entropy(overall[None])[0]),
        total_variation=float(np.abs(mix - overall).sum(axis=1).mean() / 2),
    )


def draw(counts: Counts, path: Path, title: str) -> None:
    """Draw the label distribution of the clients into a file (png, svg or pdf, by its ending).

    Up to 20 classes are drawn as stacked bars, one colour per class; more as a map of clients by classes.
    If there are more than 200 clients, the first 200 are shown, and the axis says so.
    """
    from matplotlib.figure import Figure  # a slow import, needed only here

    shown = counts[:_MOST_BARS]
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    if shown.shape[1] <= _MOST_COLOURS:
        _bars(figure, axes, shown)
    else:
        image = axes.imshow(shown.T, aspect="auto", origin="lower", interpolation="nearest", cmap="magma_r")
        figure.colorbar(image, ax=axes, label="samples")
        axes.set_ylabel("class")
    axes.set_xlabel("client" if len(shown) == len(counts) else f"client (the first {len(shown)} of {len(counts):,})")
    axes.set_title(title)
    figure.savefig(path, dpi=150)


def _bars(figure: Any, axes: Any, shown: Counts) -> None:
    from matplotlib import colormaps

    colours = colormaps["tab10" if shown.shape[1] <= 10 else "tab20"]
    edges = np.arange(len(shown) + 1) - 0.5
    tops = np.cumsum(shown, axis=1).T
    # One outline per class; a rectangle for each client and class would take seconds.
    for label, (base, top) in enumerate(zip([np.zeros(len(shown)), *tops[:-1]], tops, strict=True)):
        axes.stairs(top, edges, baseline=base, fill=True, color=colours(label), label=str(label))
    axes.margins(x=0)
    axes.set_ylabel("samples")
    figure.legend(loc="outside right upper", title="class", fontsize="small", frameon=False)


def _entropy(mix: NDArray[np.float64]) -> NDArray[np.float64]:
    logs = np.log2(mix, where=mix > 0, out=np.zeros_like(mix))
    entropy: NDArray[np.float64] = -(mix * logs).sum(axis=1)
    return np.abs(entropy)  # no minus zero
