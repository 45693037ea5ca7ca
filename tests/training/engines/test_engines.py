"""The contract of the engines: every algorithm on every engine gives the reference engine's result.

Float64 on the CPU, unequal clients, partial participation, clipping and both weight decays; compared are the server's
slots, the buffers, what every client keeps, and the losses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot

import fedlalr as fl
from fedlalr.data.population import DatasetClients
from fedlalr.federation.round import RoundOutcome, Rules, run_round
from fedlalr.federation.session import initial_state
from fedlalr.training import LogInterval, Steps
from fedlalr.training.engines.registry import ENGINES
from fedlalr.training.layout import Layout
from training.jobs import MODELS, TOLERANCE, assert_same_outcomes, federate, make_training, started
from variants import VARIANTS

pytestmark = pytest.mark.filterwarnings("error")

OTHERS = [name for name in ENGINES if name not in ("reference", "distributed")]
KINDS_OF_SLOTS = (
    "fedlalr",
    "fedlalr restart max",
    "scaffold",
    "sharedamsgrad",
    "mimelite",
    "deltasgd",
    "fedadamw",
    "fedmuon",
)
"""Kept state, four slots, other gradients, block means, shapes: what an engine that only moves slots can get wrong."""
PAIRS = [(name, engine) for name in VARIANTS for engine in OTHERS if engine == "stacked" or name in KINDS_OF_SLOTS]
PAIRS += [(name, "distributed:stacked") for name in KINDS_OF_SLOTS]
KINDS_OF_MODELS = [
    (model, algorithm, engine)
    for model in MODELS
    for algorithm in ("fedlalr", "fedlalr bias correction", "fedavg", "localadam", "scaffold", "alignedlalr")
    for engine in [*OTHERS, "distributed:stacked"]
    if model != "batchnorm" and (engine == "stacked" or algorithm == "fedlalr")
]
EVERY = [*OTHERS, "distributed:stacked"]
engines = pytest.mark.parametrize("engine", EVERY)
"""With one rank, `distributed` alone would be the reference engine itself."""


@cache
def reference(model: str, algorithm: str) -> list[RoundOutcome]:
    return federate("reference", make_training(model, algorithm))


@pytest.mark.parametrize(("algorithm", "engine"), PAIRS)
def test_every_algorithm_gives_the_references_result(engine, algorithm):
    assert_same_outcomes(federate(engine, make_training("batchnorm", algorithm)), reference("batchnorm", algorithm))


@pytest.mark.parametrize("engine", ["reference", *OTHERS, "distributed:stacked"])
@pytest.mark.parametrize(
    ("model", "aligned", "restarted"),
    [
        ("perceptron", "alignedlalr unaligned", "fedlalr restart max"),
        ("batchnorm", "alignedlalr unaligned mean", "fedlalr restart"),
    ],
)
def test_without_alignment_alignedlalr_is_fedlalr_with_restarted_momentum_to_the_bit(engine, model, aligned, restarted):
    """On the perceptron the stacked engine takes its fused steps layer by layer."""
    mine, right = (
        federate(engine, make_training(model, name), rounds=2)[-1].state.slots for name in (aligned, restarted)
    )
    assert set(mine) == set(right)
    assert all(torch.equal(mine[name].view(torch.int64), right[name].view(torch.int64)) for name in right)


@pytest.mark.parametrize(("model", "algorithm", "engine"), KINDS_OF_MODELS)
def test_every_kind_of_model_gives_the_references_result(model, algorithm, engine):
    assert_same_outcomes(federate(engine, make_training(model, algorithm)), reference(model, algorithm))


KINDS_OF_JOBS = {
    "equal": {"sizes": (8,) * 5},
    "equal-uneven": {"sizes": (10,) * 5},
    "drop-last": {"drop_last": True},
    "epochs": {"local": fl.Epochs(2)},
    "steps": {"local": Steps(5)},
    "log-interval": {"local": LogInterval(1, 2.0)},
    "full-batch": {"batch_size": None},
    "wide-batch": {"batch_size": 100},
    "bare": {"clip_norm": None, "weight_decay": 0.0, "decoupled_weight_decay": 0.0},
    "accumulate": {"accumulate": 2},
    "weighted-loss": {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))},
    "smooth-loss": {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
    "own-loss": {"loss": lambda outputs, targets: (outputs.softmax(1) - one_hot(targets, 3)).square().mean()},
}
MOVED = {"workers": ("drop-last", "epochs", "log-interval", "full-batch", "accumulate", "weighted-loss", "own-loss")}
MOVED["distributed:stacked"] = tuple(KINDS_OF_JOBS.keys() - MOVED["workers"])
"""Every kind on the stacked engine, and on one of those that move what other engines compute."""
JOBS = [(engine, kind) for kind in KINDS_OF_JOBS for engine in ("stacked", *(e for e in MOVED if kind in MOVED[e]))]


@cache
def reference_of_a_job(kind: str) -> list[RoundOutcome]:
    return federate("reference", make_training("batchnorm", "fedlalr", **KINDS_OF_JOBS[kind]))


@pytest.mark.parametrize(("engine", "kind"), JOBS)
def test_every_kind_of_job_gives_the_references_result(engine, kind):
    training = make_training("batchnorm", "fedlalr", **KINDS_OF_JOBS[kind])
    assert_same_outcomes(federate(engine, training), reference_of_a_job(kind))


@pytest.mark.parametrize(("buffers", "rules"), [("average", {"weighting": "samples"}), ("recalibrate", {})])
def test_every_server_rule_gives_the_references_result(buffers, rules):
    training = make_training(buffers=buffers)
    right = federate("reference", training, **rules)
    for engine in EVERY:
        assert_same_outcomes(federate(engine, training, **rules), right)


@engines
@pytest.mark.parametrize(("sizes", "batch_size"), [((3,), 2), ((9, 9, 9), 4), ((5, 5), 1)])
def test_batches_of_one_image_give_the_references_result(engine, sizes, batch_size):
    torch.manual_seed(0)
    model = fl.models.ConvMixer(classes=4, dim=6, depth=2, kernel=3, patch=2).double()
    clients = [(torch.randn(n, 3, 8, 8).double(), torch.arange(n) % 4) for n in sizes]

    def trained(engine: str) -> torch.Tensor:
        options = {"rounds": 2, "batch_size": batch_size, "local": fl.Epochs(1), "device": "cpu"}
        result = fl.run(model, clients, fl.FedAvg(lr=0.1), engine=engine, **options)
        return torch.cat([value.flatten() for value in result.state["x"].values()])

    assert torch.allclose(trained(engine), trained("reference"), rtol=0, atol=1e-12)


@engines
@pytest.mark.parametrize("sizes", [(8, 5), (5, 5)])
def test_a_last_sample_alone_is_left_out_of_recalibrated_statistics(engine, sizes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()
    clients = [(torch.randn(n, 6).double(), torch.arange(n) % 3) for n in sizes]

    def buffers(engine: str, clients: list) -> dict:
        options = {"rounds": 1, "batch_size": 4, "local": fl.Steps(1), "buffers": "recalibrate"}
        result = fl.run(model, clients, fl.FedAvg(lr=0.0 + 1e-300), engine=engine, device="cpu", **options)
        assert result.history[0].rejected == ()
        return dict(result.model.named_buffers())

    mine = buffers(engine, clients)
    right = buffers(
        "reference",
        [(inputs[: n - n % 4], targets[: n - n % 4]) for n, (inputs, targets) in zip(sizes, clients, strict=True)],
    )
    assert all(torch.allclose(mine[name], right[name], atol=1e-12) for name in right)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_norm_that_the_caller_froze_is_neither_trained_nor_recalibrated(engine):
    for buffers in ("average", "recalibrate"):
        training = make_training(buffers=buffers)
        training.model[1].eval()
        start = training.model[1].running_mean
        for outcome in federate(engine, training):
            assert torch.equal(outcome.state.buffers["1.running_mean"], start)
            assert not torch.equal(outcome.state.buffers["5.running_mean"], torch.zeros(5, dtype=torch.float64))


@engines
def test_a_frozen_norm_gives_the_references_result_with_recalibrated_statistics(engine):
    training = make_training(buffers="recalibrate")
    training.model[1].eval()
    assert_same_outcomes(federate(engine, training), federate("reference", training))


@engines
def test_a_norm_that_a_module_calls_twice_gives_the_references_result_with_recalibrated_statistics(engine):
    shared = nn.BatchNorm2d(4)
    first, second = nn.Conv2d(1, 4, 3, bias=False), nn.Conv2d(4, 4, 3, bias=False)
    torch.manual_seed(1)
    model = nn.Sequential(first, shared, nn.Tanh(), second, shared, nn.Flatten(), nn.Linear(16, 3)).double()
    training = replace(make_training(buffers="recalibrate"), model=model, layout=Layout.of(model))
    assert_same_outcomes(federate(engine, training), federate("reference", training))


@engines
def test_clients_that_are_data_sets_give_the_references_result(engine):
    training = make_training()
    pool = training.clients
    datasets = [torch.utils.data.TensorDataset(pool.inputs[rows], pool.targets[rows]) for rows in pool.partition]
    training = replace(training, clients=DatasetClients(datasets))
    assert_same_outcomes(federate(engine, training), federate("reference", training))


@engines
def test_a_client_with_a_nan_is_rejected_and_disturbs_no_other(engine):
    training = make_training()
    training.clients.inputs[training.clients.partition[2][0]] = float("nan")
    given, wanted = federate(engine, training, cohort=6), federate("reference", training, cohort=6)
    assert [rejection.client for rejection in wanted[0].rejected] == [2]
    assert_same_outcomes(given, wanted)


@engines
def test_a_client_that_raises_is_named_and_the_others_continue(engine):
    training = make_training("batchnorm", sizes=(7, 12, 6, 1, 10, 23))  # one sample: BatchNorm rejects it
    given, wanted = federate(engine, training, cohort=6), federate("reference", training, cohort=6)
    assert [rejection.client for rejection in wanted[0].rejected] == [3]
    assert_same_outcomes(given, wanted)


class Norms:
    """A probe that measures every slot of two clients."""

    def __init__(self) -> None:
        self.clients = frozenset({1, 4})

    def measure(self, state, context):
        return {name: float(value.norm()) for name, value in state.items()} | {
            "step": float(context.step),
            "steps": float(context.steps),
            "dimensions": float(state.x.dim()),
        }


@engines
def test_probes_see_what_they_see_on_the_reference(engine):
    training = make_training(local=fl.Epochs(2))
    traces = {}
    for name in (engine, "reference"):
        with started(name, training) as (chosen, private):
            state = initial_state(private)
            outcome = run_round(state, torch.arange(6), 0.1, chosen, private, Rules(), Norms())
        traces[name] = outcome.traces
    assert [trace[:2] for trace in traces[engine]] == [trace[:2] for trace in traces["reference"]]
    assert len(traces["reference"]) == 2 * 3 + 2 * 3
    for mine, right in zip(traces[engine], traces["reference"], strict=True):
        assert mine.values == pytest.approx(right.values, rel=TOLERANCE)


class Heavy(fl.FedAvg):
    """Broadcasts momentum and returns all slots from `finish`, although the table only names x."""

    @property
    def slots(self):
        return fl.SlotTable(down=("x", "m"), up={"x": "mean"})

    def init(self, params):
        return fl.Slots(x=params, m=torch.ones_like(params))

    def start(self, broadcast, kept):
        return fl.Slots(x=broadcast.x, m=broadcast.m)

    def step(self, client, gradient, broadcast, context):
        return client.replace(x=client.x - context.lr * (gradient + 0.1 * client.m))

    def finish(self, client, broadcast, context):
        return client, client

    def update(self, server, reduced, context):
        return server.replace(x=reduced.x)


class Forgetful(Heavy):
    def finish(self, client, broadcast, context):
        return fl.Slots(m=client.m), fl.Slots()


@pytest.mark.parametrize("engine", ["reference", "stacked", "workers"])
def test_of_what_an_algorithm_ends_with_the_table_says_what_goes_up(engine):
    torch.manual_seed(0)
    model, clients = nn.Linear(4, 3), [(torch.randn(6, 4), torch.arange(6) % 3) for _ in range(3)]
    options = {"rounds": 2, "local": fl.Steps(2), "batch_size": 3, "device": "cpu"}
    mine = fl.run(model, clients, Heavy(lr=0.1), engine=engine, **options)
    right = fl.run(model, clients, Heavy(lr=0.1), engine="reference", **options)
    assert torch.allclose(mine.state["x"]["weight"], right.state["x"]["weight"], atol=1e-6)
    assert mine.history[0].bytes_up * 2 == mine.history[0].bytes_down
    with pytest.raises(fl.RoundFailed, match=r"a client of Forgetful sends x, but its finish returns no x there"):
        fl.run(model, clients, Forgetful(lr=0.1), engine=engine, **options)


@dataclass(frozen=True)
class Overwriting(fl.FedAvg):
    where: str = "step"

    def start(self, broadcast, kept):
        return broadcast.replace(x=broadcast.x.mul_(2)) if self.where == "start" else super().start(broadcast, kept)

    def step(self, client, gradient, broadcast, context):
        step = context.lr * gradient
        return fl.Slots(x=client.x.sub_(step) if self.where == "step" else client.x - step)


@pytest.mark.parametrize("engine", ["reference", "stacked", "workers:2"])
@pytest.mark.filterwarnings("ignore:.*smaller stacks")
@pytest.mark.parametrize("where", ["start", "step"])
def test_a_method_that_writes_into_the_broadcast_is_rejected(where, engine):
    clients = [(torch.randn(6, 4), torch.arange(6) % 3) for _ in range(3)]
    with pytest.raises((ValueError, fl.RoundFailed), match="Overwriting writes into"):
        fl.run(nn.Linear(4, 3), clients, Overwriting(where=where), rounds=1, local=fl.Steps(2), engine=engine)


@pytest.mark.parametrize("engine", ["reference", "stacked", "auto"])
def test_a_run_inside_no_grad_is_the_same_run(engine):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(9, 3))
    clients = [(torch.randn(6, 2, 4), torch.arange(6) % 3) for _ in range(3)]
    options = {"rounds": 2, "local": fl.Steps(2), "batch_size": 3, "device": "cpu", "engine": engine}
    right = fl.run(model, clients, fl.FedLALR(), **options)
    with torch.no_grad():
        mine = fl.run(model, clients, fl.FedLALR(), **options)
    assert all(torch.equal(value, right.state["x"][name]) for name, value in mine.state["x"].items())
