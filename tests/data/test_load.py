import json
from pathlib import Path

import numpy as np
import pytest
import torch

import fedlalr as fl
from fedlalr.data import Population, load, partition


def test_the_digits_come_dealt_with_a_test_set_and_ready_for_a_model() -> None:
    population = load("digits", clients=20)
    assert isinstance(population, Population)
    assert (len(population), population.classes, int(population.sizes.sum())) == (20, 10, 1442)
    inputs, targets = population.batch(0, torch.arange(3))
    assert inputs.shape == (3, 1, 8, 8)
    assert inputs.dtype == torch.float32
    assert targets.shape == (3,)
    assert population.test is not None
    assert len(population.test[1]) == 355


def test_the_dealing_is_that_of_partition() -> None:
    population = load("digits", clients=15, scheme="dirichlet", alpha=0.1, seed=4)
    assert population.partition == partition(population.targets.numpy(), 15, "dirichlet", 0.1, 4)
    assert load("digits", 15, scheme="shards", classes_per_client=1).partition != population.partition


def test_held_out_samples_take_the_place_of_the_test_set_and_nobody_trains_on_them() -> None:
    population, whole = load("digits", validation=0.25, seed=1), load("digits", seed=1)
    assert population.test is not None
    held_out = population.test[1]
    assert len(held_out) == round(0.25 * 1442)
    dealt = np.sort(population.partition.indices)
    assert len(np.unique(dealt)) == 1442 - len(held_out)
    rest = np.setdiff1d(np.arange(1442), dealt)
    assert torch.equal(whole.targets[torch.from_numpy(rest)], held_out)
    assert torch.equal(whole.inputs[torch.from_numpy(rest)], population.test[0][torch.arange(len(held_out))])
    again, other = load("digits", validation=0.25, seed=1), load("digits", validation=0.25, seed=2)
    assert again.partition == population.partition
    assert not np.array_equal(np.sort(other.partition.indices), dealt)


def test_a_loaded_population_runs() -> None:
    result = fl.run(
        fl.models.Logistic(64, 10), load("digits", clients=5), fl.FedAvg(lr=0.1), rounds=2, local=fl.Steps(2)
    )
    assert result.history[-1].accuracy is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "digit"}, "no data set 'digit'"),
        ({"name": "digits", "scheme": "natural"}, "is no natural partition"),
        ({"name": "digits", "validation": 1.0}, "validation is the share"),
        ({"name": "digits", "validation": -0.1}, "validation is the share"),
        ({"name": "digits", "validation": 1e-4}, "holds out none of 1,442 training samples"),
        ({"name": "digits", "clients": 5000}, "cannot share"),
    ],
)
def test_what_cannot_be_loaded_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(**arguments)  # type: ignore[arg-type]


def test_an_option_that_the_data_set_does_not_have_is_refused() -> None:
    with pytest.raises(TypeError, match="has no option 'roles'"):
        load("digits", roles=3)


@pytest.fixture
def plays(tmp_path: Path) -> Path:
    """Three roles with 600, 700 and 800 windows, as LEAF writes them."""
    roles = {}
    for number, windows in enumerate((600, 700, 800)):
        text = "".join(chr(97 + (7 * i + number) % 26) for i in range(windows + 80))
        roles[f"role {number}"] = {
            "x": [text[i : i + 80] for i in range(windows)],
            "y": [text[i + 80] for i in range(windows)],
        }
    (tmp_path / "all.json").write_text(json.dumps({"users": list(roles), "user_data": roles}))
    return tmp_path


def test_roles_are_the_natural_clients_of_shakespeare(plays: Path) -> None:
    population = load("shakespeare", clients=2, scheme="natural", folder=plays, train=200, test=20)
    assert population.sizes.tolist() == [200, 200]
    inputs, targets = population.batch(1, torch.tensor([0, 1]))
    assert inputs.shape == (2, 80)
    assert torch.equal(inputs[0, 1:], inputs[1, :-1])  # consecutive windows of one role
    assert torch.equal(inputs[1, -1], targets[0])
    assert population.test is not None
    assert len(population.test[1]) == 40


def test_shakespeares_windows_can_be_dealt_evenly_or_by_the_next_character(plays: Path) -> None:
    for scheme in ("iid", "dirichlet"):
        population = load(
            "shakespeare", clients=3, scheme=scheme, folder=plays, train=200, test=20,
            **({} if scheme == "iid" else {"roles": 3}),
        )  # fmt: skip
        assert population.sizes.tolist() == [200] * 3
    held_out = load("shakespeare", clients=3, scheme="natural", folder=plays, train=200, test=20, validation=0.5)
    assert int(held_out.sizes.sum()) == 300


@pytest.mark.parametrize("scheme", ["natural", "iid"])
def test_sequences_of_shakespeare_are_dealt_like_its_windows(plays: Path, scheme: str) -> None:
    population = load("shakespeare", clients=2, scheme=scheme, folder=plays, train=200, test=20, sequence=True)
    assert population.sizes.tolist() == [3, 3]  # of 80 characters: 200 windows start within 200
    inputs, targets = population.batch(1, torch.tensor([0, 2]))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_inputs_and_targets_must_pair_up() -> None:
    with pytest.raises(ValueError, match="there are 3 inputs but 2 targets"):
        Population(torch.zeros(3, 1), torch.zeros(2), partition([0, 1], 2, "iid"))


@pytest.mark.parametrize(
    ("option", "meant"), [("shceme", "scheme"), ("client", "clients"), ("class_per_client", "classes_per_client")]
)
def test_a_misspelt_option_is_answered_with_the_right_one(option, meant):
    with pytest.raises(TypeError, match=f"there is no option '{option}'; did you mean '{meant}'"):
        load("digits", **{option: 2})
