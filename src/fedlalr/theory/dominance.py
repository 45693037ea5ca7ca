"""Which term of Theorem 1 is the largest, over a grid of clients and rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from fedlalr.common.colours import COLOURS
from fedlalr.theory.bounds import theorem1
from fedlalr.theory.problem import Problem

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Dominance:
    """For every N (columns) and T (rows): the index in `names` of the largest term, and the sum of all terms."""

    N: tuple[int, ...]
    T: tuple[int, ...]
    K: int
    names: tuple[str, ...]
    largest: NDArray[np.int64]
    total: NDArray[np.float64]
    cap: float
    cap_binds: NDArray[np.bool_]

    def name(self, N: int, T: int) -> str:
        """The name of the largest term at a point of the grid."""
        return self.names[int(self.largest[self.T.index(T), self.N.index(N)])]


def dominance(
    problem: Problem, *, N: Sequence[int], T: Sequence[int], K: int, form: Literal["statement", "proof"] = "statement"
) -> Dominance:
    """Evaluate Theorem 1 at the step size of Corollary 1 over the grid N × T."""
    if not len(N) or not len(T):
        raise ValueError("the grid needs at least one N and one T")
    bounds = [[theorem1(problem, N=clients, K=K, T=rounds, form=form) for clients in N] for rounds in T]
    values = np.array([[[term.value for term in bound.terms] for bound in row] for row in bounds])
    return Dominance(
        N=tuple(N),
        T=tuple(T),
        K=K,
        names=tuple(term.name for term in bounds[0][0].terms),
        largest=values.argmax(axis=-1),
        total=values.sum(axis=-1),
        cap=bounds[0][0].step.cap,
        cap_binds=np.array([[bound.step.cap_binds for bound in row] for row in bounds]),
    )


def plot_dominance(grid: Dominance, *, axes: Axes | None = None) -> Figure:
    """Draw the map on logarithmic axes, with a line below which the cap on α binds. Save it with `.savefig`."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    if axes is None:
        axes = Figure(figsize=(3.5, 3.4), layout="constrained").add_subplot()
    axes.pcolormesh(
        _edges(grid.N),
        _edges(grid.T),
        grid.largest,
        cmap=ListedColormap(COLOURS[:5]),
        vmin=-0.5,
        vmax=4.5,
        rasterized=True,
    )
    shown = [index for index in range(len(grid.names)) if (grid.largest == index).any()]
    axes.set(xscale="log", yscale="log", xlabel="clients N", ylabel="rounds T", title=f"largest term, K = {grid.K}")
    handles: list[Artist] = [Patch(facecolor=COLOURS[index], label=grid.names[index]) for index in shown]
    if grid.cap_binds.any():
        bounds = axes.get_xlim(), axes.get_ylim()
        binding = [clients / (grid.K * grid.cap**2) for clients in bounds[0]]
        handles += axes.plot(bounds[0], binding, "k--", linewidth=1, label="cap binds below")
        axes.set(xlim=bounds[0], ylim=bounds[1])
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, -0.2), ncols=2, frameon=False, fontsize="small")
    figure = axes.get_figure()
    assert isinstance(figure, Figure)  # axes without a figure cannot be drawn on
    return figure


def _edges(values: Sequence[int]) -> NDArray[np.float64]:
    """Cell borders around the values, halfway between neighbours on a logarithmic axis."""
    logs = np.log(np.asarray(values, dtype=float))
    if len(logs) == 1:
        borders = np.array([logs[0] - 0.5, logs[0] + 0.5])
    else:
        middles = (logs[1:] + logs[:-1]) / 2
        borders = np.concatenate([[2 * logs[0] - middles[0]], middles, [2 * logs[-1] - middles[-1]]])
    edges: NDArray[np.float64] = np.exp(borders)
    return edges
