"""The claims about second moments, speed-up and partitions, and the rule that decides each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedlalr.federation.trajectory import V_HAT_SQUARED, TrajectoryPoint
from fedlalr.paper.curve_measures import Gap
from fedlalr.paper.curves import PanelCurves
from fedlalr.paper.speedup_results import CONTROLS, REGIME, Fit, Speedup
from fedlalr.paper.verdicts import CONTROL, Check, Claim, Outcome, conjunction

PACE = 0.05
"""Two rates of growth differ if their distance exceeds this share of the larger."""
SLOPE, TOLERANCE = -0.5, 0.05


def trajectory_claims(results: Sequence[PanelCurves]) -> list[Claim]:
    """658: v̂ of the clients "increase with a different speed". That they increase is true by construction."""
    statement = f"clients' paces of ‖v̂‖² differ by more than {PACE * 100:g} % of the larger (mean over rounds)"
    checks = []
    for result in results:
        for curves in result.lines.values():
            grown = [growth(points) for points in curves.trajectories if points]
            if not grown:
                continue
            rounds = sorted(set.intersection(*(set(one) for one in grown)))
            where = f"{result.panel.title}, rounds {', '.join(map(str, rounds))}"
            apart = np.array([[_apart(one[t]) for t in rounds] for one in grown])
            measured = f"paces differ by {', '.join(f'{share * 100:.0f}' for share in apart.mean(axis=0))} %"
            shares = apart.mean(axis=1)
            outcome = Gap(shares, np.full_like(shares, PACE), curves.seeds).between(0.0)
            checks.append(Check(statement, where, measured, outcome, curves.seeds))
    return [Claim("6", tuple(checks) or (Check(statement, "–", "no trajectory", "not measured"),))]


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
    """207, 442, 454, 461: the theorem's rate in N·K·T, and at least a near-linear gain in N alone.

    The problem is synthetic and the step sizes are the corollary's. Local SGD is a control.
    """
    statement = (
        f"slope of the mean of ‖∇f‖² against N·K·T within {TOLERANCE:g} of −1/2, and against N at most "
        f"−{-(SLOPE + TOLERANCE):g}, in the regime KT ≥ {REGIME}N³"
    )
    checks = []
    for variant in result.variants:
        reading = CONTROL if variant in CONTROLS else ""
        fits = {fit.against: fit for fit in result.fits if fit.variant == variant}
        rate, alone = fits.get("NKT"), fits.get("N, longest run")
        if rate is None or alone is None:
            few = "fewer than three points in the regime"
            checks.append(Check(statement, variant, few, "not measured", reading=reading))
            continue
        outcome = conjunction([_slope(rate, SLOPE - TOLERANCE), _slope(alone, -np.inf)])
        measured = "; ".join(
            f"{fit.slope:.3f} [{fit.low:.3f}, {fit.high:.3f}] against {name}"
            for name, fit in (("N·K·T", rate), ("N", alone))
        ).replace("-", "−")
        repeats = len(result.of(variant)[0].values)
        number = f"slope {rate.slope:.3f} [{rate.low:.3f}, {rate.high:.3f}] in N·K·T".replace("-", "−")
        where = f"synthetic, {variant}, {repeats} repeats"
        checks.append(Check(statement, where, measured, outcome, reading=reading, number=number))
    return [Claim("7", tuple(checks) or (Check(statement, "–", "no measurement", "not measured"),))]


def _slope(fit: Fit, lowest: float) -> Outcome:
    """Whether a slope lies between `lowest` and the largest allowed: undecided if its interval contains one of them."""
    if lowest < fit.low and fit.high < SLOPE + TOLERANCE:
        return "holds"
    return "does not hold" if fit.high <= lowest or fit.low >= SLOPE + TOLERANCE else "undecided"


def heterogeneity_claims(classes: Mapping[str, Mapping[float, Sequence[float]]], seeds: Sequence[int]) -> list[Claim]:
    """616: a lower parameter gives "fewer labels".

    `classes` has, for each data set and Dirichlet parameter, the mean number of labels per client, per seed.
    """
    checks = []
    for data, by_alpha in classes.items():
        small, large = min(by_alpha), max(by_alpha)
        one = Gap(np.array(by_alpha[small]), np.array(by_alpha[large]), tuple(seeds))
        statement = f"mean number of labels of a client smaller at {small:g} than at {large:g}"
        measured = f"{one.first.mean():.2f} at {small:g}, {one.second.mean():.2f} at {large:g}"
        checks.append(Check(statement, data, measured, one.between(high=0.0), one.seeds))
    return [Claim("8", tuple(checks))]
