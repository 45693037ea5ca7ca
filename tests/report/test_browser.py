"""The page in a real browser, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fedlalr import config
from fedlalr.report.groups import MOST_POINTS
from fedlalr.report.html import page, write_report
from fedlalr.report.runs import ReportedRun
from fedlalr.report.tables import NAMES
from report.browser import Browser, chromium
from report.curves import curve

pytestmark = pytest.mark.browser

LINES = "return [...document.querySelectorAll('#{}-chart > svg > .line')].map(line => line.getAttribute('d'))"
SETTLED = "return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
TEXTS = "return [...document.querySelectorAll('#{}-chart > svg > text')].map(text => text.textContent)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as browser:
        browser.offline()
        yield browser


@pytest.fixture(scope="module")
def written(comparison_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report([comparison_folder], tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture
def opened(browser: Browser, written: Path) -> Browser:
    browser.resize(1200, 900)
    browser.scheme("light")
    browser.complaints()
    browser.open(written)
    browser.run(SETTLED)
    return browser


def test_it_opens_offline_without_a_complaint(opened: Browser) -> None:
    assert opened.run("return document.querySelector('h1').textContent") == "quickstart"
    assert opened.run("return performance.getEntriesByType('resource').length") == 0
    assert len(opened.run(LINES.format("curves"))) == 2
    assert opened.complaints() == []


def test_fifty_long_curves_over_seeds_are_drawn(opened: Browser, tmp_path: Path) -> None:
    records = curve([0.5] * MOST_POINTS).records
    runs = [
        ReportedRun(
            Path(f"{i}-{seed}"), records, config.load("quickstart", [f"algorithm.lr={i / 100}", f"seed={seed}"])
        )
        for i in range(1, 51)
        for seed in (0, 1)
    ]
    file = tmp_path / "fifty.html"
    file.write_text(page(runs), encoding="utf-8")
    opened.open(file)
    assert len(opened.run(LINES.format("curves"))) == 50
    assert opened.complaints() == []


def test_ten_methods_are_ten_looks_of_lines(opened: Browser, tmp_path: Path) -> None:
    runs = [
        ReportedRun(Path(name), curve([0.1 * i, 0.2]).records, config.load("quickstart", [f"algorithm={name}"]))
        for i, name in enumerate(list(NAMES)[:10])
    ]
    file = tmp_path / "ten.html"
    file.write_text(page(runs), encoding="utf-8")
    opened.open(file)
    opened.run(SETTLED)
    look = "line.getAttribute('stroke') + ' ' + line.getAttribute('stroke-dasharray')"
    for lines in ("#curves-chart > svg > .line", "#curves-chart .legend .line"):
        looks = opened.run(f"return [...document.querySelectorAll('{lines}')].map(line => {look})")
        assert len(set(looks)) == 10
    assert opened.complaints() == []


def test_the_axis_switches_between_rounds_megabytes_and_time(opened: Browser) -> None:
    drawn = {"rounds": opened.run(LINES.format("curves"))}
    assert "round" in opened.run(TEXTS.format("curves"))
    for value, label in (("megabytes", "megabytes sent, up and down"), ("seconds", "seconds"), ("round", "round")):
        opened.click(f"#curves-x input[value={value}]")
        assert label in opened.run(TEXTS.format("curves"))
        drawn[value] = opened.run(LINES.format("curves"))
    assert drawn["megabytes"] != drawn["rounds"]
    assert drawn["seconds"] not in (drawn["rounds"], drawn["megabytes"])
    assert drawn["round"] == drawn["rounds"]
    assert opened.complaints() == []


def test_virtual_time_is_an_axis_if_runs_have_a_virtual_clock(opened: Browser, tmp_path: Path) -> None:
    axes = "return [...document.querySelectorAll('#curves-x input')].map(input => input.value)"
    assert "virtual" not in opened.run(axes)
    records = [replace(record, virtual_seconds=3.0) for record in curve([0.1, 0.5, 0.6]).records]
    file = tmp_path / "virtual.html"
    file.write_text(page([ReportedRun(Path("timed"), records, config.load("quickstart"))]), encoding="utf-8")
    opened.open(file)
    assert "virtual" in opened.run(axes)
    opened.click("#curves-x input[value=virtual]")
    assert "virtual seconds" in opened.run(TEXTS.format("curves"))
    assert len(opened.run(LINES.format("curves"))) == 1
    assert opened.complaints() == []


def test_every_quantity_can_be_shown(opened: Browser) -> None:
    values = opened.run("return [...document.querySelectorAll('#curves-y input')].map(input => input.value)")
    assert values == ["accuracy", "loss", "train_loss", "lr"]
    for value in values:
        opened.click(f"#curves-y input[value={value}]")
        assert len(opened.run(LINES.format("curves"))) == 2
    assert "client rate, mean and range over seeds" in opened.run(TEXTS.format("curves"))[-1]


def test_a_line_can_be_hidden_and_comes_back(opened: Browser) -> None:
    button = "#curves-chart .legend li:first-child button"
    opened.click(button)
    assert len(opened.run(LINES.format("curves"))) == 1
    assert opened.run(f"return document.querySelector('{button}').getAttribute('aria-pressed')") == "false"
    opened.click(button)
    assert len(opened.run(LINES.format("curves"))) == 2


def test_arrow_keys_read_the_curves(opened: Browser) -> None:
    where = "return document.querySelector('#curves-chart .where').textContent"
    right, escape = "\ue014", "\ue00c"
    opened.press("#curves-chart > svg", right + right)
    assert opened.run(where) == "At round 2:"
    opened.press("#curves-chart > svg", escape)
    assert opened.run(where).startswith("Values after the last round")


def test_trajectories_show_each_client_and_both_quantities(opened: Browser) -> None:
    legend = "return [...document.querySelectorAll('#trajectories-chart .legend span')].map(name => name.textContent)"
    assert opened.run(legend) == ["client 3", "client 5"]
    assert {"round 1", "round 3"} <= set(opened.run(TEXTS.format("trajectories")))
    assert opened.run("return document.querySelectorAll('#trajectories-chart .band').length") == 0
    opened.click("#trajectories-y label:last-of-type input")
    assert opened.run("return document.querySelectorAll('#trajectories-chart .band').length") == 4
    assert opened.complaints() == []


def test_a_page_of_several_runs_says_whose_the_only_trajectory_is(
    opened: Browser, comparison_folder: Path, tmp_path: Path
) -> None:
    told = "const note = document.getElementById('trajectories-of'); return note.hidden ? null : note.textContent"
    assert opened.run(told) is None
    followed, plain = comparison_folder / "fedlalr" / "seed-1", comparison_folder / "fedavg" / "seed-0"
    opened.open(write_report([followed], tmp_path / "one.html"))
    assert opened.run(told) is None
    opened.open(write_report([plain, followed], tmp_path / "two.html"))
    assert opened.run(told) == "Recorded by FedLALR, seed 1; the other runs have none."


def test_another_run_and_another_partition_can_be_chosen(opened: Browser) -> None:
    cells = "return [...document.querySelectorAll('#partition-chart .cell')].map(cell => cell.getAttribute('d')).join()"
    before = opened.run(cells), opened.run(LINES.format("trajectories"))
    for choice in ("partition-choice", "trajectories-run"):
        opened.run(
            f"const list = document.getElementById('{choice}'); list.value = '1'; "
            "list.dispatchEvent(new Event('change'))"
        )
    after = opened.run(cells), opened.run(LINES.format("trajectories"))
    assert before[0] != after[0]
    assert before[1] != after[1]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_on_a_phone(opened: Browser, written: Path, tmp_path: Path, scheme: str) -> None:
    opened.scheme(scheme)
    opened.resize(360, 740, phone=True)
    opened.open(written)
    opened.run(SETTLED)
    assert opened.run("return document.documentElement.scrollWidth") == 360
    smallest = (
        "return Math.min(...[...document.querySelectorAll('p, td, th, a, label, button, .chart text')]"
        ".filter(node => node.getClientRects().length).map(node => parseFloat(getComputedStyle(node).fontSize)))"
    )
    assert opened.run(smallest) >= 12
    outside = (
        "return [...document.querySelectorAll('.chart > svg')].flatMap(svg => [...svg.querySelectorAll('text')].filter("
        "text => { const mine = text.getBoundingClientRect(), page = svg.getBoundingClientRect();"
        " return mine.left < page.left - 1 || mine.right > page.right + 1; }).map(text => text.textContent))"
    )
    assert opened.run(outside) == []
    assert contrast(opened, "td", "body") >= 4.5
    assert contrast(opened, ".where", "body") >= 4.5
    assert opened.screenshot(tmp_path / "phone.png").stat().st_size > 10_000
    assert opened.complaints() == []


def contrast(browser: Browser, text: str, background: str) -> float:
    """The ratio of luminances, as accessibility guidelines define it."""
    colours = (
        browser.run(f"return getComputedStyle(document.querySelector('{selector}')).{what}")
        for selector, what in ((text, "color"), (background, "backgroundColor"))
    )
    lighter, darker = sorted((_luminance(colour) for colour in colours), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(", ")]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
