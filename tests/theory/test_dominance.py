import io

import numpy as np
import pytest

from fedlalr.theory import Problem, dominance, plot_dominance, theorem1

PROBLEM = Problem(L=1, sigma=1, G_inf=1.5, d=8, gap=3, eps=0.5)
N, T = (1, 4, 16, 64), (1, 10**3, 10**6, 10**9, 10**14)


@pytest.mark.parametrize("form", ["statement", "proof"])
def test_grid_holds_the_largest_term_and_the_sum_of_theorem_1(form):
    grid = dominance(PROBLEM, N=N, T=T, K=8, form=form)
    for row, rounds in enumerate(T):
        for column, clients in enumerate(N):
            bound = theorem1(PROBLEM, N=clients, K=8, T=rounds, form=form)
            assert grid.name(clients, rounds) == bound.dominant.name
            assert grid.total[row, column] == pytest.approx(bound.total)
            assert grid.cap_binds[row, column] == bound.step.cap_binds


def test_noise_or_gap_win_for_many_rounds_and_never_for_few():
    grid = dominance(PROBLEM, N=N, T=T, K=8)
    leading = {grid.names.index("initial gap"), grid.names.index("α/N")}
    assert set(grid.largest[-1]) <= leading
    assert not set(grid.largest[0]) & leading


def test_map_shows_the_terms_that_occur_and_the_binding_cap():
    grid = dominance(PROBLEM, N=N, T=T, K=8)
    figure = plot_dominance(grid)
    axes = figure.axes[0]
    shown = {text.get_text() for text in axes.get_legend().get_texts()}
    assert shown == {grid.names[index] for index in np.unique(grid.largest)} | {"cap binds below"}
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    image = io.BytesIO()
    figure.savefig(image, format="png")
    assert image.getvalue().startswith(b"\x89PNG")


def test_map_draws_on_axes_it_is_given():
    from matplotlib.figure import Figure

    figure = Figure()
    assert plot_dominance(dominance(PROBLEM, N=(1,), T=(10**9,), K=1), axes=figure.add_subplot()) is figure


def test_an_empty_grid_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        dominance(PROBLEM, N=(), T=(1,), K=1)
