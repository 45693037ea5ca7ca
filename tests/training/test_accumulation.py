"""Gradient accumulation equals one large batch, on every engine."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import fedlalr as fl
from closeness import difference
from conftest import make_clients, make_model
from fedlalr.data.population import Population
from fedlalr.data.transforms import FlipCrop
from fedlalr.federation.round import Rules, run_round
from fedlalr.federation.session import initial_state
from fedlalr.training import Epochs
from fedlalr.training.accumulation import has_single, terms_of, weighted_mean
from fedlalr.training.memory import peak_memory
from fedlalr.training.stacked.cuda_graphs import StaticSteps
from fedlalr.training.stacked.engine import StackedEngine
from training.jobs import assert_same_outcomes, federate, make_training
from training.tokens import token_clients, token_loss, token_model

RAGGED = (7, 12, 6, 10, 11, 23)
"""Against steps of 12 samples in micro-batches of 4: whole steps, short micro-batches, and clients without a second."""


class Pairs(Dataset):
    """Read batch by batch, unlike tensors."""

    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, i):
        return self.inputs[i], self.targets[i]


@pytest.mark.parametrize(
    ("engine", "model", "algorithm"),
    [
        ("reference", "groupnorm", "fedlalr"),
        ("reference", "perceptron", "mimelite"),
        ("stacked", "groupnorm", "fedlalr"),
        ("stacked", "perceptron", "mimelite"),
        ("stacked", "logistic", "fedavg"),
        ("workers", "perceptron", "fedlalr"),
        ("distributed:stacked", "perceptron", "fedavg"),
    ],
)
def test_micro_batches_equal_one_large_batch(engine, model, algorithm):
    parts = make_training(model, algorithm, sizes=RAGGED, batch_size=4, accumulate=3)
    whole = make_training(model, algorithm, sizes=RAGGED, batch_size=12)
    assert_same_outcomes(federate(engine, parts), federate("reference", whole))


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_a_pass_that_is_cut_short_equals_one_large_batch(engine):
    parts = make_training("logistic", sizes=RAGGED, batch_size=3, accumulate=2, drop_last=True)
    whole = make_training("logistic", sizes=RAGGED, batch_size=6, drop_last=True)
    assert_same_outcomes(federate(engine, parts), federate("reference", whole))


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_a_batch_that_holds_all_samples_is_not_cut(engine):
    parts = make_training("logistic", sizes=RAGGED, batch_size=23, accumulate=2)
    whole = make_training("logistic", sizes=RAGGED, batch_size=46)
    assert_same_outcomes(federate(engine, parts), federate("reference", whole))


@pytest.mark.parametrize(("engine", "as_data_sets"), [("reference", False), ("stacked", False), ("stacked", True)])
def test_a_mean_over_labels_that_count_equals_that_of_one_large_batch(engine, as_data_sets):
    """Some micro-batches have fewer labels than others, one has none."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(3, 8, 4).double(), torch.randint(0, 3, (3, 8))
    targets[0, :3] = targets[1, ::2] = targets[2, 1:7] = -100
    clients = [Pairs(*pair) if as_data_sets else pair for pair in zip(inputs, targets, strict=True)]
    options = {"rounds": 2, "local": fl.Epochs(2), "engine": engine, "device": "cpu"}
    parts = fl.run(make_model(), clients, fl.FedLALR(0.05), batch_size=2, accumulate=4, **options)
    whole = fl.run(make_model(), clients, fl.FedLALR(0.05), batch_size=8, **options)
    for name, right in whole.state["x"].items():
        torch.testing.assert_close(parts.state["x"][name], right, rtol=1e-12, atol=1e-14)
    assert parts.history[-1].train_loss == pytest.approx(whole.history[-1].train_loss, rel=1e-12)


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_a_step_without_labels_that_count_changes_nothing_as_with_one_large_batch(engine):
    torch.manual_seed(0)
    inputs, targets = torch.randn(3, 8, 4).double(), torch.randint(0, 3, (3, 8))
    targets[0] = -100
    options = {"rounds": 2, "engine": engine, "device": "cpu"}
    clients = list(zip(inputs, targets, strict=True))
    parts = fl.run(make_model(), clients, fl.FedLALR(0.05), batch_size=2, accumulate=2, **options)
    whole = fl.run(make_model(), clients, fl.FedLALR(0.05), batch_size=4, **options)
    assert not parts.history[-1].rejected
    for name, right in whole.state["x"].items():
        torch.testing.assert_close(parts.state["x"][name], right, rtol=1e-12, atol=1e-14)
    assert parts.history[-1].train_loss == pytest.approx(whole.history[-1].train_loss, rel=1e-12)


@pytest.mark.parametrize("model", ["batchnorm", "groupnorm"])
def test_steps_in_fixed_memory_give_the_references_result(model):
    training = make_training(model, sizes=(6, 8, 10, 12, 14, 16), local=Epochs(1), batch_size=2, accumulate=3)
    wanted = federate("reference", training, rounds=2, cohort=6)
    engine = StackedEngine(training)
    engine._static = StaticSteps(training, engine._gradient, engine._fused, capture=False)
    state, given = initial_state(training), []
    for t in (1, 2):
        given.append(run_round(state, torch.arange(6), 0.9**t * 0.05, engine, training, Rules()))
        state = given[-1].state
    assert_same_outcomes(given, wanted)


def test_augmentation_draws_the_same_for_micro_batches():
    torch.manual_seed(0)
    images, labels = torch.rand(24, 1, 6, 6).double(), torch.randint(0, 3, (24,))
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).double()
    thirds = fl.data.partition(labels, scheme="iid", clients=3, seed=0)
    population = Population(images, labels, thirds, transform=FlipCrop((0.5,), (0.25,), pad=1))
    options = {"rounds": 1, "local": fl.Epochs(1), "device": "cpu"}
    whole = fl.run(model, population, fl.FedAvg(0.1), batch_size=8, engine="reference", **options)
    for engine in ("reference", "stacked"):
        parts = fl.run(model, population, fl.FedAvg(0.1), batch_size=3, accumulate=3, engine=engine, **options)
        torch.testing.assert_close(parts.state["x"]["1.weight"], whole.state["x"]["1.weight"], rtol=1e-12, atol=1e-14)


def test_batch_norm_sees_micro_batches():
    """As in plain torch: its buffers change once for each of them, by their own statistics."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(6, 4).double(), torch.arange(6) % 3
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    options = {"rounds": 1, "local": fl.Steps(1), "batch_size": 2, "accumulate": 3, "device": "cpu", "seed": 3}
    ways = [
        fl.run(model, [(inputs, targets)] * 2, fl.FedAvg(0.1), engine=e, **options) for e in ("reference", "stacked")
    ]
    for result in ways:
        assert result.model[0].num_batches_tracked == 3
    torch.testing.assert_close(ways[0].model[0].running_mean, ways[1].model[0].running_mean, rtol=1e-12, atol=1e-14)


def test_batch_norm_rejects_a_client_whose_micro_batch_has_one_sample():
    clients = [(torch.randn(n, 4).double(), torch.arange(n) % 3) for n in (6, 5, 4)]
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    options = {"rounds": 1, "local": fl.Steps(1), "batch_size": 2, "accumulate": 3, "device": "cpu"}
    for engine in ("reference", "stacked"):
        with pytest.warns(fl.RepliesRejected):
            result = fl.run(model, clients, fl.FedAvg(0.1), engine=engine, **options)
        assert [rejected.client for rejected in result.history[0].rejected] == [1]
    assert has_single(torch.tensor([0, 1, 2, 3, 5]), 2).tolist() == [False, True, False, True, True]
    assert has_single(torch.tensor([0, 1, 2]), None).tolist() == [False, True, False]


def test_a_step_of_micro_batches_needs_less_memory():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 3)).double()
    clients = [(torch.randn(256, 4).double(), torch.randint(0, 3, (256,))) for _ in range(2)]

    def peak(**options):
        run = {"rounds": 1, "local": fl.Steps(1), "engine": "stacked", "device": "cpu"} | options
        return peak_memory(lambda: fl.run(model, clients, fl.FedAvg(0.1), **run), torch.device("cpu"))

    assert peak(batch_size=16, accumulate=16) < peak(batch_size=256) / 2


def test_the_weighted_mean_ignores_what_has_no_terms():
    nan = torch.tensor(torch.nan)
    parts = [(torch.tensor(2.0), torch.tensor([1.0]), torch.tensor(3)), (nan, nan[None].clone(), torch.tensor(0))]
    assert weighted_mean(parts) == (torch.tensor(2.0), torch.tensor([1.0]))
    loss, gradient = weighted_mean([(nan, nan[None].clone(), torch.tensor(0))] * 2)
    assert loss.isnan()
    assert not gradient.any()
    targets, mask = torch.tensor([[[1, -100], [2, 2]]]), torch.tensor([[True, False]])
    assert terms_of(nn.functional.cross_entropy, targets, mask).tolist() == [1]
    assert terms_of(nn.functional.mse_loss, targets, mask).tolist() == [1]
    assert terms_of(nn.functional.mse_loss, targets).tolist() == [2]


def test_there_is_nothing_to_accumulate_in_full_batches():
    with pytest.raises(ValueError, match=r"accumulate is 2, but with batch_size=None .* give the batch_size"):
        fl.run(make_model(), make_clients(), fl.FedAvg(), batch_size=None, accumulate=2)


def first_token(logits, labels):
    return nn.functional.cross_entropy(logits[:, 0], labels)


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_batches_that_are_dicts_equal_one_large_batch(engine):
    clients = [samples | {"labels": samples["labels"][:, 0]} for samples in token_clients((9, 4))]
    options = {"loss": first_token, "rounds": 2, "engine": engine, "device": "cpu"}
    small = fl.run(token_model(), clients, fl.FedLALR(lr=0.01), batch_size=2, accumulate=3, **options)
    large = fl.run(token_model(), clients, fl.FedLALR(lr=0.01), batch_size=6, **options)
    for name, value in large.state["x"].items():
        assert difference(small.state["x"][name], value) <= 1e-10, name


@pytest.mark.parametrize("loss", ["model", token_loss])
def test_a_loss_over_tokens_whose_terms_are_unknown_is_rejected(loss):
    with pytest.raises(ValueError, match="known for torch's cross_entropy only"):
        fl.run(token_model(), token_clients(), fl.FedLALR(), loss=loss, accumulate=2, rounds=1, device="cpu")
