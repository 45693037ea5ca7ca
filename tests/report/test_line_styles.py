import json
import re
from importlib import resources
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from fedlalr import config
from fedlalr.algorithms.registry import PAPER_METHODS
from fedlalr.report.figures import accuracy_figure
from fedlalr.report.html import LINE_WIDTH, page
from fedlalr.report.line_styles import COLOURS, DASHES, MOST_LOOKS, Look, dash_arrays, look_of, looks_of
from fedlalr.report.runs import ReportedRun
from fedlalr.report.tables import NAMES, name_of
from report.curves import curve

STYLE = (resources.files("fedlalr.report") / "assets" / "page.css").read_text(encoding="utf-8")
methods = st.lists(st.sampled_from([*NAMES.values(), "mine", "yours"]), min_size=1, max_size=MOST_LOOKS)


@settings(deadline=None, max_examples=100)
@given(methods)
def test_no_two_lines_look_alike(lines: list[str]) -> None:
    assert len(set(looks_of(lines))) == len(lines)


@settings(deadline=None, max_examples=50)
@given(st.permutations(list(NAMES.values())), st.integers(1, len(NAMES)))
def test_the_order_of_the_methods_does_not_matter(order: list[str], count: int) -> None:
    some = order[:count]
    assert dict(zip(some, looks_of(some), strict=True)) == dict(zip(sorted(some), looks_of(sorted(some)), strict=True))


def test_the_methods_that_are_compared_most_have_ten_colours_and_the_others_share_them() -> None:
    most = [NAMES[name] for name in (*PAPER_METHODS, "alignedlalr", "fedadamw", "fedavgm", "diloco")]
    assert [look_of(method) for method in most] == [Look(i, i % len(DASHES)) for i in range(10)]
    assert len({look_of(method) for method in NAMES.values()}) == len(NAMES)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from(list(NAMES.values())), min_size=1, max_size=9, unique=True))
def test_a_method_has_the_same_look_whatever_it_is_compared_with(some: list[str]) -> None:
    assert looks_of(some) == [look_of(method) for method in some]


def test_variations_of_a_method_keep_its_colour_beside_other_methods() -> None:
    looks = looks_of(["FedLALR"] * 3 + ["FedAvg"] * 3)
    assert [look.colour for look in looks] == [0, 0, 0, 1, 1, 1]
    assert looks[0] == looks_of(["FedAvg", "FedLALR"])[1]


def test_more_lines_than_looks_are_drawn_all_the_same() -> None:
    assert len(looks_of(["FedLALR"] * (MOST_LOOKS + 3))) == MOST_LOOKS + 3


def test_the_page_has_the_colours_and_the_width_of_the_figure() -> None:
    light = STYLE[: STYLE.index("@media")]
    assert tuple(re.findall(r"--c\d: (#[0-9a-f]{6})", light)) == COLOURS
    assert f"stroke-width: {LINE_WIDTH};" in STYLE
    assert dash_arrays(2)[:2] == ["", "7 3"]


def test_a_method_looks_the_same_in_the_figure_and_on_the_page(tmp_path: Path) -> None:
    names = list(NAMES)[:12]
    records = curve([0.2, 0.5, 0.8])
    svg = accuracy_figure({name: [records] for name in names}, tmp_path / "a", "title")[1].read_text(encoding="utf-8")
    drawn = re.findall(r"<path [^>]*style=\"fill: none;([^\"]*stroke-width: 1.8[^\"]*)\"", svg)
    in_figure = {
        (re.findall(r"stroke: (#\w+)", style)[0], len("".join(re.findall(r"array: ([\d.,]+)", style)).split(",")))
        for style in drawn
    }
    runs = [
        ReportedRun(Path(name), records.records, config.load("quickstart", [f"algorithm={name}"]))
        for name in sorted(names)
    ]
    found = re.search(r'id="data">(.*?)</script>', page(runs), flags=re.S)
    assert found is not None
    curves = json.loads(found[1])["curves"]
    on_page = {(COLOURS[c["look"][0]], max(1, len(DASHES[c["look"][1]]))) for c in curves}
    assert in_figure == on_page
    assert {c["label"]: Look(*c["look"]) for c in curves} == dict(
        zip(map(name_of, names), looks_of([name_of(name) for name in names]), strict=True)
    )
