"""`fedlalr theory`: the bounds of the paper's theorems for given numbers of clients, steps and rounds."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from fedlalr.cli.files import check_figure, writing
from fedlalr.cli.options import Json
from fedlalr.cli.progress import print_json, standard_output, table
from fedlalr.config.errors import ConfigError, as_config_errors
from fedlalr.theory import (
    Bound,
    Communication,
    Problem,
    communication,
    corollary1,
    corollary2,
    dominance,
    log_intervals,
    plot_dominance,
    rounds_to_speedup,
    theorem1,
    theorem2,
)

FORMS = {"statement": "as stated", "proof": "as the proof ends", "constants": "with the uncapped step size substituted"}


def theory(
    clients: Annotated[
        int, typer.Option("--clients", "-N", help="N, the number of clients; all take part in every round.")
    ] = 50,
    steps: Annotated[int, typer.Option("--steps", "-K", help="K, the local steps per round.")] = 50,
    rounds: Annotated[int, typer.Option("--rounds", "-T", help="T, the number of rounds.")] = 100,
    start: Annotated[
        int | None, typer.Option(help="With --base: K_t = start + ⌊log_base t⌋ instead of K, for Theorem 2.")
    ] = None,
    base: Annotated[float | None, typer.Option(help="See --start.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Step size α.", show_default="that of the corollaries")] = None,
    eps: Annotated[float, typer.Option(help="ε; second moments start at ε².")] = 1e-8,
    beta1: Annotated[float, typer.Option(help="β1.")] = 0.9,
    L: Annotated[float, typer.Option("--L", help="Smoothness: every client's gradient is L-Lipschitz.")] = 1.0,
    sigma: Annotated[float, typer.Option(help="σ: σ² bounds the variance of a stochastic gradient.")] = 1.0,
    G_inf: Annotated[float, typer.Option("--G", help="G∞: bounds every coordinate of every gradient.")] = 1.0,
    gap: Annotated[float, typer.Option(help="f(x_0) − f*.")] = math.log(10),
    params: Annotated[int, typer.Option("--params", "-d", help="Number of parameters.")] = 594_186,
    delta: Annotated[
        float, typer.Option(help="Target for the mean squared gradient norm, used for rounds and bytes.")
    ] = 0.01,
    plot: Annotated[
        Path | None, typer.Option(help="Figure of the dominating term over N and T (.png, .svg, .pdf).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Evaluate the paper's theorems as printed, term by term.

    Prints the step size, the bounds, and the rounds and bytes to a target. The
    defaults are the paper's setting for CIFAR-10 with our ConvMixer, and 1 for the
    unknown L, σ and G∞. The bounds are not guarantees: the remarks point out vacuous bounds
    and violated assumptions, and docs/theory.md lists the errors in the theorems.

    [bold]Examples[/]

    fedlalr theory --alpha 2e-3

    fedlalr theory -N 16 -K 8 -T 4096 --eps 0.5 --G 1.6 --sigma 1.6 -d 8 --gap 2.8

    fedlalr theory -N 16 --start 3 --base 4 -T 1000 --eps 0.5 -d 8 --plot terms.png
    """
    if (start is None) != (base is None):
        raise ConfigError("--start and --base must be given together: K_t = start + ⌊log_base t⌋")
    check_figure(plot, "--plot")
    with as_config_errors(ValueError):
        problem = Problem(L=L, sigma=sigma, G_inf=G_inf, d=params, gap=gap, eps=eps, beta1=beta1)
        growing = None if start is None or base is None else (start, base)
        adaptive = None if growing is None else log_intervals(rounds, start=growing[0], base=growing[1])
        bounds = evaluate(problem, clients, steps, rounds, adaptive, alpha)
        steps = steps if adaptive is None else int(adaptive[-1])
        costs = communicate(delta, clients, steps, params, growing)
        if plot is not None:
            with writing(plot, "--plot"):
                draw(problem, clients, steps, rounds, plot)
    if as_json:
        print_json(as_plain(problem, bounds, costs, clients, steps))
    else:
        show(problem, bounds, costs, clients, steps, plot)


def evaluate(
    problem: Problem, N: int, K: int, T: int, intervals: NDArray[np.int64] | None, alpha: float | None
) -> list[Bound]:
    """All bounds that apply to the given arguments."""
    if intervals is not None:
        bounds = [theorem2(problem, N=N, intervals=intervals, alpha=alpha)]
        return [*bounds, theorem2(problem, N=N, intervals=intervals, form="constants")] if alpha is None else bounds
    bounds = [
        theorem1(problem, N=N, K=K, T=T, alpha=alpha),
        theorem1(problem, N=N, K=K, T=T, alpha=alpha, form="proof"),
        corollary2(problem, N=N, K=K, T=T, alpha=alpha),
    ]
    return [*bounds, corollary1(problem, N=N, K=K, T=T)] if alpha is None else bounds


def communicate(
    delta: float, N: int, K: int, params: int, growing: tuple[int, float] | None
) -> dict[str, Communication]:
    """Rounds and bytes to reach δ, from the leading term with constant 1, as in the paper."""
    if growing is None:
        costs = {
            f"K = {K}": communication(delta, N=N, K=K, params=params),
            f"K = {K}, restarted momentum": communication(delta, N=N, K=K, params=params, momentum="restart"),
        }
    else:
        start, base = growing
        costs = {f"K_t = {start} + ⌊log_{base:g} t⌋": communication(delta, N=N, growing=growing, params=params)}
    return costs | {"K_t = ln t": communication(delta, N=N, params=params)}


def draw(problem: Problem, N: int, K: int, T: int, path: Path) -> None:
    """Draw the dominating terms from one client and round to sixteen times the given numbers."""

    def reach(top: int) -> list[int]:
        return np.unique(np.geomspace(1, 16 * top, 60).astype(int)).tolist()  # type: ignore[no-any-return]

    plot_dominance(dominance(problem, N=reach(N), T=reach(T), K=K)).savefig(path, dpi=200)


def show(
    problem: Problem, bounds: list[Bound], costs: dict[str, Communication], N: int, K: int, plot: Path | None
) -> None:
    console = standard_output()
    step = bounds[0].step
    binds = "the cap binds" if step.cap_binds else "the cap does not bind"
    root = "√(N/ΣK)" if bounds[0].source == "Theorem 2" else "√(N/(KT))"
    console.print(
        f"step size min({root} = {step.uncapped:.3g}, 3ε/(20L) = {step.cap:.3g}): {binds}; "
        f"evaluated at α = {step.alpha:.3g}"
    )
    for bound in bounds:
        rows = []
        for term in bound.terms:
            mark = " ←" if term is bound.dominant else ""
            rows.append((term.name, f"{term.coefficient:.3g}", f"{term.factor:.3g}", f"{term.value:.3g}{mark}"))
        rows.append(("sum (vacuous)" if bound.is_vacuous else "sum", "", "", f"{bound.total:.3g}"))
        title = f"{bound.source}, {FORMS[bound.form]}"
        console.print(table(("term", "constant", "factor", "value"), rows, title))
    for remark in dict.fromkeys(remark for bound in bounds for remark in bound.remarks):
        console.print(f"• {remark}")
    console.print(f"• {_regime(problem, N, K)}")
    title = f"to a mean squared gradient norm of {next(iter(costs.values())).delta:g}, from the leading term only"
    cells = []
    for name, cost in costs.items():
        whole = math.ceil(cost.rounds)
        sizes = _size(cost.bytes_down), _size(cost.bytes_up)
        cells.append((name, f"{whole:.6g}", f"{whole * cost.clients:.6g}", *sizes))
    console.print(table(("local steps", "rounds", "rounds × clients", "down", "up"), cells, title))
    if plot is not None:
        console.print(f"Largest terms over N and T: {plot}")


def as_plain(problem: Problem, bounds: list[Bound], costs: dict[str, Communication], N: int, K: int) -> dict[str, Any]:
    return {
        "problem": asdict(problem),
        "step_size": asdict(bounds[0].step) | {"cap_binds": bounds[0].step.cap_binds},
        "bounds": [
            {
                "source": bound.source,
                "form": bound.form,
                "terms": {term.name: term.value for term in bound.terms},
                "total": bound.total,
                "vacuous": bound.is_vacuous,
                "dominant": bound.dominant.name,
                "remarks": bound.remarks,
            }
            for bound in bounds
        ],
        "regime": _regime(problem, N, K),
        "communication": {name: asdict(cost) | {"complexity": cost.complexity} for name, cost in costs.items()},
    }


def _regime(problem: Problem, N: int, K: int) -> str:
    try:
        rounds = rounds_to_speedup(problem, N=N, K=K)
    except ValueError as error:
        return str(error)
    return f"By the printed constants, 1/√(NKT) is the largest term of Corollary 1 for K = {K} if T ≥ {rounds:.3g}."


def _size(count: int) -> str:
    """
    >>> _size(121_344), _size(2_850_000_000), _size(96)
    ('121 kB', '2.85 GB', '96 bytes')
    """
    for unit, bytes_of_it in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= bytes_of_it:
            return f"{count / bytes_of_it:.3g} {unit}"
    return f"{count} bytes"
