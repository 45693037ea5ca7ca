"""The page on reproducing the paper says what the code does."""

from pathlib import Path

import pytest

from fedlalr.paper.plans import FIGURES, Request
from fedlalr.paper.verdicts import CLAIMS, DEFINITIONS

PAGE = (Path(__file__).parents[2] / "docs" / "reproducing.md").read_text(encoding="utf-8")
EVERYTHING = frozenset({"digits", "cifar10", "cifar100", "shakespeare"})


def row(title):
    """The cells of the row of a table that begins with this title."""
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {title} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_every_figure_and_claim_is_there():
    assert all(f"| `{figure}` |" in PAGE for figure in FIGURES)
    assert all(f"\n| {number}. " in PAGE for number in CLAIMS)


def test_the_words_of_verdicts_are_explained_as_they_are_used():
    words = dict(definition.split(": ", 1) for definition in DEFINITIONS if ": " in definition)
    for word, meaning in words.items():
        assert row(word)[0].startswith(meaning)


@pytest.mark.parametrize(("data", "title"), [("cifar10", "CIFAR: clients"), ("shakespeare", "Shakespeare: roles")])
def test_sizes_of_both_scales_are_those_of_the_runs(data, title):
    sizes = []
    for scale in ("paper", "smoke"):
        (setting,), _ = Request(scale, EVERYTHING).settings([data])
        config = setting.config
        sizes.append(f"{config.partition.clients}, {config.clients_per_round}, {config.rounds}")
    assert row(f"{title}, cohort, rounds") == sizes
