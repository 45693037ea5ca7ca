from dataclasses import replace

import pytest

from fedlalr.paper.speedup import SCALES, VARIANTS, measure
from fedlalr.paper.speedup_figure import speedup_figure
from fedlalr.paper.speedup_results import Speedup
from fedlalr.paper.style import save


@pytest.fixture(scope="module")
def result():
    return measure(replace(SCALES["smoke"], steps=(64, 2048), clients=(1, 2, 4, 8), repeats=2))


def test_figure_is_written_as_image_and_as_vectors(result, tmp_path):
    paths = save(lambda: speedup_figure(result), tmp_path / "figures" / "speedup")
    assert [path.name for path in paths] == ["speedup.png", "speedup.svg", "speedup.pdf"]
    starts = [path.read_bytes()[:5] for path in paths]
    assert starts == [b"\x89PNG\r", b"<?xml", b"%PDF-"]


def test_every_variant_has_a_panel_with_its_slope(result):
    figure = speedup_figure(result)
    texts = [axes.texts[0].get_text() for axes in figure.get_axes()[: len(VARIANTS)]]
    for variant, text in zip(VARIANTS, texts, strict=True):
        line = next(fit for fit in result.fits if (fit.variant, fit.against) == (variant.name, "NKT"))
        assert text.splitlines()[0] in (variant.name, f"FedLALR, {variant.name}")
        assert text.startswith("FedLALR") == (variant.name != "local SGD")
        assert f"{line.slope:.3f}".replace("-", "−") in text


def test_points_outside_the_regime_are_hollow(result):
    axes = speedup_figure(result).get_axes()[-1]
    marks = [line for line in axes.get_lines() if line.get_marker() != "None" and len(line.get_xdata())]
    hollow = {int(line.get_xdata()[0]) for line in marks if line.get_markerfacecolor() == "white"}
    filled = {int(line.get_xdata()[0]) for line in marks if line.get_markerfacecolor() != "white"}
    assert (filled, hollow) == ({1, 2, 4}, {8})


def test_the_reader_is_told_that_the_problem_is_synthetic_and_how_often_it_was_repeated(result):
    foot = " ".join(speedup_figure(result).get_supxlabel().split())
    assert "Synthetic" in foot
    assert "Means of 2 repeats, bars from the lowest to the highest." in foot


def test_bars_go_from_the_lowest_repeat_to_the_highest(result):
    axes = speedup_figure(result).get_axes()[0]
    point = next(point for point in result.of("Algorithm 1") if not point.cap_binds)
    ends = [tuple(bar.get_segments()[0][:, 1]) for bar in axes.collections]
    assert any(pair == pytest.approx((min(point.values), max(point.values))) for pair in ends)


def test_the_speed_up_divided_by_the_clients_is_told_apart_and_its_best_is_named_within_the_regime(result):
    gain, share = speedup_figure(result).get_axes()[-2:]

    def ends(axes):
        return sorted(line.get_ydata()[2] for line in axes.get_lines() if len(line.get_xdata()) == 4)

    assert ends(share)[-1] == pytest.approx(max(y for y in ends(gain) if y != 4) / 4)
    speed = {}
    for variant in result.variants:
        longest = {point.N: point.mean for point in result.longest(variant)}
        speed[variant] = (longest[1] / longest[4]) ** 2
    best = max(speed, key=lambda variant: speed[variant])
    assert share.get_title() == f"largest speed-up with 4 clients: {best}, {speed[best]:.1f}"


def test_runs_too_short_for_the_regime_are_drawn_without_a_best():
    short = measure(replace(SCALES["smoke"], steps=(256,), clients=(1, 2, 4, 8), repeats=1))
    longest = [point for variant in short.variants for point in short.longest(variant)]
    outside = Speedup(tuple(replace(point, steps=min(point.steps, 7)) for point in longest))
    assert speedup_figure(outside).get_axes()[-1].get_title() == ""
