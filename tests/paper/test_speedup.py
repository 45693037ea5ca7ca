import json
import math
import os
from dataclasses import replace

import numpy as np
import pytest

from fedlalr import FedLALR, LogInterval
from fedlalr.config import ConfigError
from fedlalr.paper.figures import Drawn, write_provenance
from fedlalr.paper.speedup import SCALES, VARIANTS, Scale, Variant, mean_squared_gradients, measure
from fedlalr.paper.speedup_results import Speedup, SpeedupPoint, fit
from fedlalr.paper.synthetic import Synthetic

TINY = Scale(steps=(64, 2048), clients=(1, 2, 4), repeats=2)


def point(N, steps, values=(1.0,), **changes):
    given = {"variant": "a", "rounds": 1, "last_interval": 1, "alpha": 0.1, "cap_binds": False, "seed": 0}
    return SpeedupPoint(N=N, steps=steps, values=values, **{**given, **changes})


@pytest.mark.parametrize("momentum", ["average", "restart"])
@pytest.mark.parametrize("second_moment", ["mean", "max"])
def test_federations_side_by_side_equal_the_algorithm_written_out_for_each_client(momentum, second_moment):
    problem, clients, alphas, intervals = Synthetic(d=3), (1, 2, 4), (0.3, 0.2, 0.1), np.array([2, 3, 3])
    beta1, beta2, eps = 0.8, 0.9, 0.4
    algorithm = FedLALR(betas=(beta1, beta2), eps=eps, momentum=momentum, second_moment=second_moment)
    measured = mean_squared_gradients(
        algorithm, clients, alphas, intervals, 1, np.random.default_rng(7), problem=problem
    )

    generator = np.random.default_rng(7)
    shifts = np.concatenate([problem.shifts(N, 1, generator).numpy()[0] for N in clients])
    noises = [problem.noises((K, 1, 7, 3), generator).numpy()[:, 0] for K in intervals]
    first = 0
    for column, (N, alpha) in enumerate(zip(clients, alphas, strict=True)):
        x, m, v_hat, squares = np.full(3, problem.start), np.zeros(3), np.full(3, eps**2), []
        for noise in noises:
            states = [[x, m if momentum == "average" else np.zeros(3), v_hat, v_hat] for _ in range(N)]
            for k in range(len(noise)):
                average = sum(state[0] for state in states) / N
                squares.append(((average / (1 + average**2) ** 2) ** 2).sum())
                for i, (xi, mi, vi, vi_hat) in enumerate(states):
                    g = xi / (1 + xi**2) ** 2 + shifts[first + i] + noise[k, first + i]
                    mi = beta1 * mi + (1 - beta1) * g
                    vi = beta2 * vi + (1 - beta2) * g**2
                    vi_hat = np.maximum(vi_hat, vi)
                    states[i] = [xi - alpha * mi / np.sqrt(vi_hat), mi, vi, vi_hat]
            x, m = (np.mean([state[slot] for state in states], axis=0) for slot in (0, 1))
            tops = np.stack([state[3] for state in states])
            v_hat = tops.max(0) if second_moment == "max" else tops.mean(0)
        assert measured[0, column].item() == pytest.approx(np.mean(squares), rel=1e-12)
        first += N


def test_the_control_is_local_sgd_written_out_for_each_client():
    problem, N, alpha, intervals = Synthetic(d=3), 4, 0.2, np.array([2, 3])
    measured = mean_squared_gradients(
        VARIANTS[-1].algorithm, (N,), (alpha,), intervals, 1, np.random.default_rng(7), problem=problem
    )
    generator = np.random.default_rng(7)
    shifts = problem.shifts(N, 1, generator).numpy()[0]
    x, squares = np.full(3, problem.start), []
    for K in intervals:
        noise = problem.noises((K, 1, N, 3), generator).numpy()[:, 0]
        clients = np.tile(x, (N, 1))
        for k in range(K):
            average = clients.mean(axis=0)
            squares.append(((average / (1 + average**2) ** 2) ** 2).sum())
            clients = clients - alpha * (clients / (1 + clients**2) ** 2 + shifts + noise[k])
        x = clients.mean(axis=0)
    assert VARIANTS[-1].name == "local SGD"
    assert measured[0, 0].item() == pytest.approx(np.mean(squares), rel=1e-12)


def test_measured_slope_is_near_one_half_for_every_variant():
    result = measure(replace(TINY, steps=(2048,)))
    slopes = {fit.variant: fit.slope for fit in result.fits if fit.against == "N, longest run"}
    assert list(slopes) == [variant.name for variant in VARIANTS]
    assert list(slopes.values()) == pytest.approx([-0.5] * 5, abs=0.1)


def test_step_sizes_are_those_of_the_corollary_and_capped_ones_are_marked():
    result = measure(replace(TINY, clients=(1, 64), repeats=1), variants=VARIANTS[:1])
    long, short = ([point for point in result.points if point.steps == steps] for steps in (2048, 64))
    assert long[0].alpha == pytest.approx(math.sqrt(1 / 2048))
    assert not long[0].cap_binds
    assert short[1].alpha == pytest.approx(3 * 0.5 / 20)
    assert short[1].cap_binds
    assert not short[1].in_regime


def test_adaptive_interval_makes_the_steps_asked_for_and_no_round_more():
    intervals = Variant("grows", interval="adaptive").intervals(1000, 8)
    schedule = LogInterval(start=3, base=4.0)
    assert intervals.tolist() == [schedule.length(t) for t in range(1, len(intervals) + 1)]
    assert intervals.sum() >= 1000 > intervals[:-1].sum()


def test_fixed_interval_makes_the_steps_asked_for():
    assert Variant("fixed").intervals(1000, 8).tolist() == [8] * 125


def test_both_scales_reach_the_regime_they_state():
    assert max(N for N in SCALES["smoke"].clients if point(N, max(SCALES["smoke"].steps)).in_regime) == 16
    assert max(N for N in SCALES["paper"].clients if point(N, max(SCALES["paper"].steps)).in_regime) == 64


def test_progress_adds_up_to_the_work_announced():
    made = []
    scale = replace(TINY, steps=(64,), repeats=1)
    measure(scale, advance=made.append)
    assert sum(made) == scale.work


def test_a_power_law_is_fitted_exactly():
    points = [point(N, steps, (3 * (N * steps) ** -0.5,) * 2) for N in (1, 2, 4) for steps in (100, 1000)]
    line = fit(points, "NKT")
    assert line.slope == pytest.approx(-0.5)
    assert line.high - line.low == pytest.approx(0, abs=1e-9)
    assert (line.points, line.spread) == (6, pytest.approx(0, abs=1e-12))


def test_confidence_interval_covers_the_true_slope_about_as_often_as_it_says():
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        points = [point(N, 100, (N**-0.5 * math.exp(0.1 * generator.standard_normal()),)) for N in (1, 2, 4, 8, 16)]
        line = fit(points, "N")
        covered += line.low <= -0.5 <= line.high
    assert 0.92 < covered / 400 < 0.98


def test_a_slope_through_two_points_is_left_out():
    assert Speedup((point(1, 100), point(2, 100))).fits == ()


def test_only_points_in_the_regime_enter_its_slope():
    inside = [point(N, 8 * 4**3, (N**-0.5,)) for N in (1, 2, 4)]
    outside = [point(8, 8 * 4**3, (100.0,)), point(1, 8, (100.0,), cap_binds=True)]
    lines = {line.against: line for line in Speedup((*inside, *outside)).fits}
    assert lines["NKT"].slope == pytest.approx(-0.5)
    assert lines["N, longest run"].points == 3
    assert lines["NKT, also outside the regime"].points == 4


def test_results_come_back_from_their_file_exactly(tmp_path):
    result = measure(replace(TINY, steps=(64,)), variants=VARIANTS[:2])
    assert [path.name for path in result.write(tmp_path)] == ["speedup.csv", "speedup-fits.csv"]
    assert Speedup.read(tmp_path) == result
    assert Speedup.read(tmp_path / "nothing") == Speedup(())


def test_a_file_that_is_cut_short_is_refused_with_what_to_do(tmp_path):
    points, _ = measure(replace(TINY, steps=(64,)), variants=VARIANTS[:1]).write(tmp_path)
    points.write_text(points.read_text().rstrip().rpartition(",")[0])
    with pytest.raises(ConfigError, match=r"speedup.csv is damaged .*; move it away, and it will be measured again"):
        Speedup.read(tmp_path)


def test_results_that_cannot_be_written_leave_the_old_file_whole(tmp_path, monkeypatch):
    first = Speedup((point(1, 8),))
    first.write(tmp_path)
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        Speedup((point(1, 8), point(2, 8))).write(tmp_path)
    assert Speedup.read(tmp_path) == first


def full_disk(_: int) -> None:
    raise OSError("no space")


def test_finished_runs_are_not_run_again(tmp_path):
    short = replace(TINY, steps=(64,))
    first = measure(short, variants=VARIANTS[:1], folder=tmp_path)
    text = (tmp_path / "speedup.csv").read_text().replace(repr(first.points[0].values[0]), "123.0")
    (tmp_path / "speedup.csv").write_text(text)
    again = measure(replace(TINY, steps=(64, 128)), variants=VARIANTS[:1], folder=tmp_path)
    assert again.points[0].values[0] == 123  # kept, not measured
    assert len(again.points) == 6
    assert Speedup.read(tmp_path) == again


@pytest.mark.parametrize("change", [{"seed": 1}, {"scale": replace(TINY, steps=(64,), repeats=3)}])
def test_runs_with_other_noise_are_run_anew(tmp_path, change):
    short = replace(TINY, steps=(64,))
    first = measure(short, variants=VARIANTS[:1], folder=tmp_path)
    other = measure(change.get("scale", short), variants=VARIANTS[:1], folder=tmp_path, seed=change.get("seed", 0))
    assert other.points[0].values != first.points[0].values


def test_what_a_measurement_took_is_written_down(tmp_path):
    drawn = Drawn("speedup", (), (), (), seconds=2.5)
    for _ in range(2):  # interrupted and resumed
        path = write_provenance(drawn, tmp_path, "smoke", "fedlalr reproduce speedup", draw_only=False)
    assert json.loads(path.read_text())["run_seconds"] == 5.0
    write_provenance(drawn, tmp_path, "smoke", "fedlalr reproduce speedup --draw-only", draw_only=True)
    assert json.loads(path.read_text())["run_seconds"] == 5.0
