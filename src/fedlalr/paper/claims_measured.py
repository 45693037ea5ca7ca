"""The claims about second moments, speed-up and partitions, and the rule that decides each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedlalr.federation.trajectory import V_HAT_SQUARED, TrajectoryPoint
from fedlalr.paper.curves import PanelCurves
from fedlalr.paper.speedup_results import Speedup
from fedlalr.paper.verdicts import Check, Claim

PACE = 0.05
"""Two rates of growth differ if their distance exceeds this share of the larger."""
SLOPE, TOLERANCE = -0.5, 0.05


def trajectory_claims(results: Sequence[PanelCurves]) -> list[Claim]:
    rises = "‖v̂‖² larger after the last local step than after the first, for every client, round and seed"
    paces = f"clients' paces of ‖v̂‖² differ by more than {PACE * 100:g} % of the larger (mean over rounds and seeds)"
    checks = []
    for result in results:
        for curves in result.lines.values():
            grown = [growth(points) for points in curves.trajectories if points]
            if not grown:
                continue
            rounds = sorted(set.intersection(*(set(one) for one in grown)))
            where = f"{result.panel.title}, rounds {', '.join(map(str, rounds))}"
            every = [last / first for one in grown for clients in one.values() for first, last, _ in clients.values()]
            apart = [float(np.mean([_apart(one[t]) for one in grown])) for t in rounds]
            checks += [
                Check(rises, where, f"grows {min(every):.3g} to {max(every):.3g} times", min(every) > 1, curves.seeds),
                Check(
                    paces,
                    where,
                    f"paces differ by {', '.join(f'{share * 100:.0f}' for share in apart)} %",
                    bool(apart) and float(np.mean(apart)) > PACE,
                    curves.seeds,
                ),
            ]
    nothing = tuple(Check(statement, "–", "no trajectory", None) for statement in (rises, paces))
    return [Claim(6, tuple(checks) or nothing)]


def growth(points: Sequence[TrajectoryPoint]) -> dict[int, dict[int, tuple[float, float, float]]]:
    """For every round and client: ‖v̂‖² after the first local step, after the last, and the growth per step."""
    rounds: dict[int, dict[int, tuple[float, float, float]]] = {}
    for t, client in dict.fromkeys((point.round, point.client) for point in points):
        mine = sorted((p.step, p.values[V_HAT_SQUARED]) for p in points if (p.round, p.client) == (t, client))
        (begin, first), (end, last) = mine[0], mine[-1]
        rounds.setdefault(t, {})[client] = (first, last, (last - first) / max(1, end - begin))
    return rounds


def _apart(clients: Mapping[int, tuple[float, float, float]]) -> float:
    """The distance between the slowest and the fastest client, as a share of the fastest."""
    paces = [pace for _, _, pace in clients.values()]
    return (max(paces) - min(paces)) / max(paces) if max(paces) > 0 else 0.0


def speedup_claims(result: Speedup) -> list[Claim]:
    """The theorem's rate in N·K·T, and at least a near-linear gain in N alone."""
    statement = (
        f"slope of the mean of ‖∇f‖² against N·K·T within {TOLERANCE:g} of −1/2, and against N at most "
        f"−{-(SLOPE + TOLERANCE):g}, in the regime KT ≥ 8N³"
    )
    checks = []
    for variant in result.variants:
        fits = {fit.against: fit for fit in result.fits if fit.variant == variant}
        rate, alone = fits.get("NKT"), fits.get("N, longest run")
        if rate is None or alone is None:
            checks.append(Check(statement, variant, "fewer than three points in the regime", None))
            continue
        holds = abs(rate.slope - SLOPE) <= TOLERANCE and alone.slope <= SLOPE + TOLERANCE
        measured = "; ".join(
            f"{fit.slope:.3f} [{fit.low:.3f}, {fit.high:.3f}] against {name}"
            for name, fit in (("N·K·T", rate), ("N", alone))
        )
        repeats = len(result.of(variant)[0].values)
        seeds = tuple(sorted({point.seed for point in result.of(variant)}))
        checks.append(Check(statement, f"{variant}, {repeats} repeats", measured.replace("-", "−"), holds, seeds))
    return [Claim(7, tuple(checks) or (Check(statement, "–", "no measurement", None),))]


def heterogeneity_claims(classes: Mapping[str, Mapping[float, Sequence[float]]], seeds: Sequence[int]) -> list[Claim]:
    """`classes` has, for each data set and Dirichlet parameter, the mean number of labels per client, per seed."""
    checks = []
    for data, by_alpha in classes.items():
        small, large = min(by_alpha), max(by_alpha)
        few, many = float(np.mean(by_alpha[small])), float(np.mean(by_alpha[large]))
        checks.append(
            Check(
                f"mean number of labels of a client smaller at {small:g} than at {large:g}",
                data,
                f"{few:.2f} at {small:g}, {many:.2f} at {large:g}",
                few < many,
                tuple(seeds),
            )
        )
    return [Claim(8, tuple(checks))]
