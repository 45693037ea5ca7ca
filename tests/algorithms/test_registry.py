"""Algorithms by name: every one can be made, a wrong name or option is refused with what is allowed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import fedlalr.algorithms as algorithms
from fedlalr.algorithms import ALGORITHMS, Algorithm, FedAMS, FedLALR, create, options
from fedlalr.algorithms.slots import SlotTable

DOCS = Path(__file__).parents[2] / "docs" / "algorithms"
NAMES = [
    *("fedlalr", "fedavg", "fedadam", "fedamsv1", "fedamsv2", "lafedopt", "adaalter", "sharedamsgrad", "fedcm"),
    *("slowmo", "fedprox", "scaffold", "fednova", "fedadagrad", "fedyogi", "fedavgm", "fedlada", "localadam"),
    *("mimelite", "deltasgd", "alignedlalr", "fedadamw", "diloco", "fedmuon"),
]


def page(name: str) -> str:
    """The text of an algorithm's page; the two FedAMS share one."""
    return (DOCS / f"{'fedams' if name.startswith('fedams') else name}.md").read_text(encoding="utf-8")


def table(text: str, heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without header and rule, backticks removed."""
    section = re.split(r"^## ", text.split(f"## {heading}\n")[1], flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]


def test_the_registry_holds_every_method_under_its_command_line_name() -> None:
    assert list(ALGORITHMS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_name_makes_an_algorithm_with_its_defaults(name: str) -> None:
    algorithm = create(name)
    assert isinstance(algorithm, Algorithm)
    assert type(algorithm).__name__ in algorithms.__all__
    assert {option: getattr(algorithm, option) for option in options(name)} == options(name)
    assert create(name) == algorithm


@pytest.mark.parametrize("name", NAMES)
def test_the_server_state_holds_everything_that_goes_down(name: str) -> None:
    algorithm = create(name)
    params = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    state = algorithm.init(params)
    assert set(algorithm.slots.down) <= set(state)
    assert torch.equal(state.x, params)
    assert {(tensor.shape, tensor.dtype) for tensor in state.values()} == {(params.shape, params.dtype)}


def test_hyperparameters_reach_the_algorithm_and_lists_become_tuples() -> None:
    made = create("fedlalr", lr=0.5, betas=[0.8, 0.9], momentum="restart")
    assert made == FedLALR(lr=0.5, betas=(0.8, 0.9), momentum="restart")
    assert hash(made) == hash(FedLALR(lr=0.5, betas=(0.8, 0.9), momentum="restart"))


def test_the_two_fedams_are_one_class_with_the_option_fixed() -> None:
    assert create("fedamsv1") == FedAMS(option=1)
    assert create("fedamsv2", lr=0.3) == FedAMS(lr=0.3, option=2)
    assert "option" not in options("fedamsv1")
    with pytest.raises(ValueError, match="fedamsv1 has no option 'option'"):
        create("fedamsv1", option=2)


@pytest.mark.parametrize(
    ("given", "nearest"),
    [("fedlar", "fedlalr"), ("FedAvg", "fedavg"), ("fedamsv3", "fedamsv"), ("scafold", "scaffold")],
)
def test_an_unknown_name_is_refused_with_the_choices_and_the_nearest(given: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"there is no algorithm '{given}'") as refusal:
        create(given)
    assert ", ".join(NAMES) in str(refusal.value)
    assert f"Did you mean '{nearest}" in str(refusal.value)


def test_a_name_like_no_other_is_refused_without_a_guess() -> None:
    with pytest.raises(ValueError, match="there is no algorithm 'zzz'") as refusal:
        options("zzz")
    assert "Did you mean" not in str(refusal.value)


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has no option 'leaning_rate'") as refusal:
        create(name, leaning_rate=0.1)
    assert ", ".join(options(name)) in str(refusal.value)


def test_a_misspelt_option_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="Did you mean 'server_lr'"):
        create("fedadam", sever_lr=0.1)


def keeps(slots: SlotTable, slot: str) -> str:
    return "" if slot not in slots.kept else "yes, one number" if slot in slots.counts else "yes"


@pytest.mark.parametrize("name", NAMES)
def test_the_page_of_an_algorithm_states_its_slots(name: str) -> None:
    algorithm = create(name)
    slots, state = algorithm.slots, algorithm.init(torch.zeros(1))
    written = {
        slot: (server == "yes", down == "yes", up or None, kept)
        for slot, server, down, up, kept in table(page(name), "Slots")
    }
    assert written == {
        slot: (slot in state, slot in slots.down, slots.up.get(slot), keeps(slots, slot))
        for slot in {*state, *slots.down, *slots.up, *slots.kept}
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_page_of_an_algorithm_states_its_options_and_defaults(name: str) -> None:
    written = {option: default for option, default, *_ in table(page(name), "Options") if option != "option"}
    assert written == {
        option: f'"{default}"' if isinstance(default, str) else repr(default)
        for option, default in options(name).items()
    }


def test_the_index_lists_every_algorithm_with_its_vectors() -> None:
    rows = table((DOCS / "README.md").read_text(encoding="utf-8"), "Methods")
    written = {row[0]: [int(cell) for cell in row[-3:]] for row in rows}
    tables = {name: create(name).slots for name in NAMES}
    assert written == {
        name: [len({*slots} - {*table.blocks}) for slots in (table.down, table.up, table.kept)]
        for name, table in tables.items()
    }
    for row in rows:
        assert (DOCS / re.search(r"\((.+?\.md)\)", row[1]).group(1)).exists()  # type: ignore[union-attr]
