"""Parameters chosen by patterns: which are decayed, which are trained, and which are left alone."""

import pytest
import torch
from torch import nn

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr.federation.options import Options
from fedlalr.federation.storage.fingerprint import contract
from fedlalr.training.parameter_groups import trainable_parameters
from training.jobs import assert_same_outcomes, federate, make_training

ENGINES = pytest.mark.parametrize("engine", ["reference", "stacked", "workers", "distributed:stacked"])
SETTINGS = {"rounds": 2, "local": fl.Steps(2), "batch_size": 4, "device": "cpu"}


class Tied(nn.Module):
    """Input and output share one matrix, as in language models."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


TOKENS = [(torch.arange(6).roll(i) % 5, torch.arange(6).roll(i + 1) % 5) for i in range(3)]


def changes(model, clients, algorithm, **options):
    """The factor of every parameter's last round without a gradient: what decay alone did to it."""
    zero = lambda outputs, targets: 0 * outputs.sum()  # noqa: E731
    result = fl.run(model, clients, algorithm, **{**SETTINGS, "loss": zero, "engine": "reference", **options})
    before = dict(model.named_parameters())
    after = dict(result.model.named_parameters())
    return {name: float((after[name] / before[name]).detach().nanmean()) for name in before}


# Decoupled weight decay


def test_decoupled_decay_leaves_biases_and_norms_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).double()
    model[1].bias.data.fill_(1.0)
    shrunk = (1 - 0.5 * 0.1) ** 4  # two rounds of two steps
    wanted = {"0.weight": shrunk, "0.bias": 1, "1.weight": 1, "1.bias": 1, "3.weight": shrunk, "3.bias": 1}
    given = changes(model, make_clients(), fl.FedAvg(0.5), decoupled_weight_decay=0.1)
    assert given == pytest.approx(wanted, rel=1e-12)
    coupled = changes(model, make_clients(), fl.FedAvg(0.5), weight_decay=0.1)
    assert coupled == pytest.approx(dict.fromkeys(wanted, shrunk), rel=1e-12)


@pytest.mark.parametrize(
    ("patterns", "chosen"),
    [("*", {"embed.weight", "norm.weight"}), (["norm.weight"], {"norm.weight"}), (("head.*",), {"embed.weight"})],
)
def test_patterns_choose_what_is_decayed(patterns, chosen):
    """Tied parameters are chosen by any of their names."""
    options = {"decoupled_weight_decay": 0.1, "decayed": patterns}
    given = changes(Tied(), TOKENS, fl.FedAvg(0.5), **options)
    assert {name for name, factor in given.items() if factor < 0.99} == chosen


@pytest.mark.parametrize(
    ("engine", "model", "algorithm", "decayed"),
    [
        ("stacked", "batchnorm", "fedlalr", None),
        ("stacked", "perceptron", "fedlalr", ("*.bias",)),
        ("stacked", "perceptron", "fedavg", None),
        ("stacked", "perceptron", "fedprox", ("*",)),
        ("stacked", "logistic", "localadam", ("1.weight",)),
        ("workers", "perceptron", "fedlalr", None),
        ("distributed:stacked", "perceptron", "fedavg", ("*.bias",)),
    ],
)
def test_every_engine_decays_the_same_parameters(engine, model, algorithm, decayed):
    options = {"decoupled_weight_decay": 0.5, "decayed": decayed}
    training = make_training(model, algorithm, **options)
    outcomes = federate("reference", training)
    assert_same_outcomes(federate(engine, training), outcomes)
    other = make_training(model, algorithm, decoupled_weight_decay=0.5, decayed=None if decayed == ("*",) else ("*",))
    assert not torch.equal(federate("reference", other)[-1].state.slots.x, outcomes[-1].state.slots.x)


def test_the_mask_is_built_only_if_it_is_needed():
    assert make_training("batchnorm", decoupled_weight_decay=0.0).regularisation.decayed is None
    assert make_training("batchnorm", decayed="*").regularisation.decayed is None
    training = make_training("logistic")
    assert training.regularisation.decayed.tolist() == [1.0] * 108 + [0.0] * 3
    assert training.regularisation is training.regularisation


# Freezing parameters


@ENGINES
def test_only_matching_parameters_are_trained_and_sent(engine):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).double()
    result = fl.run(model, make_clients(), fl.FedAvg(0.1), trainable="3.*", engine=engine, **SETTINGS)
    assert set(result.state["x"]) == {"3.weight", "3.bias"}
    before, after = dict(model.named_parameters()), dict(result.model.named_parameters())
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"3.weight", "3.bias"}
    assert all(parameter.requires_grad for parameter in (*before.values(), *after.values()))
    assert result.bytes_up == result.bytes_down == 2 * len(make_clients()) * 21 * 8  # rounds, clients, numbers, bytes

    frozen = nn.Sequential(*(layer.requires_grad_(number == 3) for number, layer in enumerate(model)))
    same = fl.run(frozen, make_clients(), fl.FedAvg(0.1), engine="reference", **SETTINGS)
    for name, right in same.state["x"].items():
        torch.testing.assert_close(result.state["x"][name], right, rtol=1e-11, atol=1e-13)


def test_patterns_add_to_requires_grad():
    model = make_model()
    model[0].requires_grad_(False)
    result = fl.run(model, make_clients(), fl.FedAvg(0.1), trainable=("*.bias",), **SETTINGS)
    assert set(result.state["x"]) == {"2.bias"}
    assert not result.model[0].weight.requires_grad
    assert result.model[2].weight.requires_grad


@pytest.mark.parametrize("engine", ["reference", "stacked"])
@pytest.mark.parametrize("pattern", ["head.*", "embed.*"])
def test_tied_parameters_stay_whole(engine, pattern):
    assert trainable_parameters(Tied())["embed.weight"] == ("embed.weight", "head.weight")
    result = fl.run(Tied(), TOKENS, fl.FedAvg(0.1), trainable=pattern, engine=engine, **SETTINGS)
    assert set(result.state["x"]) == {"embed.weight"}
    assert result.model.head.weight is result.model.embed.weight


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"trainable": "heads.*"},
            ValueError,
            r"trainable has the pattern 'heads\.\*', .* close names are head\.weight",
        ),
        ({"trainable": ("head.*", "zzz")}, ValueError, r"'zzz', .*; trainable parameters are embed\.weight, "),
        ({"trainable": ()}, TypeError, r"trainable must be patterns of parameter names, .* not \(\)"),
        ({"trainable": [1]}, TypeError, "trainable must be patterns"),
        ({"decayed": 0.1}, TypeError, r"decayed must be patterns of parameter names, .* not 0\.1"),
        ({"decayed": "bias", "decoupled_weight_decay": 1.0}, ValueError, "decayed has the pattern 'bias'"),
        ({"decayed": "*", "weight_decay": 1.0}, ValueError, "decoupled_weight_decay is 0; set that too"),
        (
            {"trainable": "head.*", "decayed": "norm.*", "decoupled_weight_decay": 1.0},
            ValueError,
            r"decayed has the pattern 'norm\.\*', which matches no trainable parameter",
        ),
    ],
)
def test_patterns_that_choose_nothing_are_rejected(options, error, message):
    with pytest.raises(error, match=message):
        fl.run(Tied(), TOKENS, fl.FedAvg(0.1), **SETTINGS, **options)


def test_a_run_is_not_resumed_with_other_groups(tmp_path):
    options = {"decoupled_weight_decay": 0.1, "decayed": "*.weight", "trainable": ("2.*",), "accumulate": 2}
    run = {**SETTINGS, **options, "run_dir": tmp_path}
    whole = fl.run(make_model(), make_clients(), fl.FedLALR(0.1), **run)
    again = fl.run(make_model(), make_clients(), fl.FedLALR(0.1), **run, resume=True)
    assert torch.equal(again.state["x"]["2.weight"], whole.state["x"]["2.weight"])
    for change, said in (
        ({"decayed": ("*.bias",)}, r"decayed was \['\*\.weight'\] and is now \['\*\.bias'\]"),
        ({"accumulate": 1}, "accumulate was 2 and is now 1"),
        ({"trainable": ("2.*", "0.*")}, r"trainable was \['2\.\*'\]"),
    ):
        with pytest.raises(fl.RunDirectoryError, match=said):
            fl.run(make_model(), make_clients(), fl.FedLALR(0.1), **{**run, **change}, resume=True)


def test_nodes_must_agree_on_the_groups():
    def agreed(**options):
        clients = fl.data.population.as_clients(make_clients())
        return contract(Options(**options).training(make_model(), fl.FedAvg(), clients))

    plain = agreed()
    assert agreed(trainable=None) == plain
    for options in ({"trainable": "0.*"}, {"decayed": "*"}, {"accumulate": 2}):
        assert agreed(**options) != plain
