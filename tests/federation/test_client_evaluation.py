"""Every client's model on its own samples: mean, spread and the worst clients."""

from __future__ import annotations

import json
import math
import re
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr.data.holdout import hold_out
from fedlalr.data.population import as_clients
from fedlalr.federation.evaluation import Score, distributions

OPTIONS = {"rounds": 3, "local": fl.Steps(2), "batch_size": 4, "device": "cpu", "engine": "reference"}
SIZES = (9, 14, 8, 12, 10, 11)


def norm_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()


def measured(result: fl.Result, tests: list) -> dict[str, list[float]]:
    """Loss and accuracy of every client's model, in plain torch."""
    found: dict[str, list[float]] = {"loss": [], "accuracy": []}
    for client, (inputs, targets) in enumerate(tests):
        outputs = result.client_model(client).eval()(inputs).detach()
        found["loss"].append(float(nn.functional.cross_entropy(outputs, targets)))
        found["accuracy"].append(float((outputs.argmax(1) == targets).double().mean()))
    return found


def assert_distribution(record: fl.Record, wanted: dict[str, list[float]]) -> None:
    for name, values in wanted.items():
        found, each = record.per_client[name], torch.tensor(values, dtype=torch.float64)
        assert found.mean == pytest.approx(float(each.mean()))
        assert found.spread == pytest.approx(float(each.std(correction=0)))
        assert found.worst == pytest.approx(float(each.max() if name == "loss" else each.min()))
        assert found.clients == len(values)


@pytest.mark.parametrize(
    "options", [{}, {"personal": ("1.*", "3.*"), "buffers": "local"}, {"personal": ("3.*",)}, {"engine": "stacked"}]
)
def test_records_have_the_quality_of_every_clients_own_model(options):
    clients = make_clients(SIZES)
    tests = make_clients((5, 7, 6, 8, 9, 4), seed=3)
    options = OPTIONS | {"clients_per_round": 3} | options
    result = fl.run(norm_model(), clients, fl.FedLALR(), client_tests=tests, **options)
    assert_distribution(result.history[-1], measured(result, tests))
    assert "over clients accuracy" in repr(result)


def test_clients_train_on_what_they_do_not_hold_out():
    clients = make_clients(SIZES)
    trained, tested = hold_out(as_clients(clients), 0.25, seed=7)
    apart, tests = ([part.batch(c, torch.arange(int(part.sizes[c]))) for c in range(6)] for part in (trained, tested))
    options = OPTIONS | {"seed": 7, "personal": ("2.*",)}
    held = fl.run(make_model(), clients, fl.FedAvg(lr=0.1), holdout=0.25, **options)
    given = fl.run(make_model(), apart, fl.FedAvg(lr=0.1), client_tests=tests, **options)
    assert held.history[-1].per_client == given.history[-1].per_client
    assert_distribution(held.history[-1], measured(held, tests))


def test_all_clients_are_evaluated_every_few_rounds_and_after_the_last():
    result = fl.run(
        make_model(), make_clients(SIZES), fl.FedAvg(), holdout=0.2, evaluate_every=2, **OPTIONS | {"rounds": 5}
    )
    assert [record.round for record in result.history if record.per_client] == [2, 4, 5]
    vector = 6 * 8 * (4 * 6 + 6 + 6 * 3 + 3)
    assert [record.bytes_down // vector for record in result.history] == [1, 2, 1, 2, 2]  # x is sent once more
    assert {record.bytes_up for record in result.history} == {vector}


def test_the_worst_tenth_is_rounded_up_and_knows_the_direction():
    scores = {client: Score(float(client), client / 20) for client in range(11)}
    found = distributions(scores)
    assert (found["loss"].worst, found["accuracy"].worst) == (9.5, 0.025)
    assert distributions({}) == {}
    assert list(distributions({0: Score(1.0, None)})) == ["loss"]
    diverged = distributions({client: Score([1.0, float("nan")][client == 3], None) for client in range(10)})
    assert diverged["loss"].worst != diverged["loss"].worst


def test_a_record_with_distributions_is_written_and_read_again(tmp_path):
    fl.run(make_model(), make_clients(SIZES), fl.FedAvg(), holdout=0.2, run_dir=tmp_path, **OPTIONS)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = fl.Record.from_json(lines[-1])
    assert record.per_client["accuracy"].clients == 6
    assert record.to_json() == lines[-1]
    broken = json.loads(lines[-1])
    broken["per_client"]["loss"]["worst"] = "high"
    with pytest.raises(ValueError, match="per_client/loss/worst is 'high', not a number"):
        fl.Record.from_json(json.dumps(broken))
    broken["per_client"]["loss"]["worst"] = None
    assert fl.Record.from_json(json.dumps(broken)).per_client["loss"].worst != 0


def test_a_resumed_run_evaluates_the_same(tmp_path):
    options = OPTIONS | {"holdout": 0.2, "personal": ("2.*",), "clients_per_round": 2, "evaluate_every": 1}
    whole = fl.run(make_model(), make_clients(SIZES), fl.FedLALR(), **options | {"rounds": 4})
    fl.run(make_model(), make_clients(SIZES), fl.FedLALR(), run_dir=tmp_path, **options | {"rounds": 2})
    rest = fl.run(
        make_model(), make_clients(SIZES), fl.FedLALR(), run_dir=tmp_path, resume=True, **options | {"rounds": 4}
    )
    assert [record.per_client for record in rest.history] == [record.per_client for record in whole.history]


def test_a_run_with_other_test_sets_is_not_resumed(tmp_path):
    tests = make_clients(SIZES, seed=1)
    fl.run(make_model(), make_clients(SIZES), fl.FedAvg(), client_tests=tests, run_dir=tmp_path, **OPTIONS)
    options = OPTIONS | {"client_tests": make_clients(SIZES, seed=2), "run_dir": tmp_path, "resume": True}
    with pytest.raises(RuntimeError, match=r"client_tests.inputs was"):
        fl.run(make_model(), make_clients(SIZES), fl.FedAvg(), **options)


def test_a_client_with_one_sample_trains_on_it_and_is_not_evaluated():
    clients = [(inputs, inputs[:, :1]) for inputs, _ in make_clients((9, 1, 8))]
    model, options = nn.Linear(4, 1).double(), OPTIONS | {"loss": nn.functional.mse_loss}
    result = fl.run(model, clients, fl.FedAvg(), holdout=0.2, **options)
    assert [record.clients for record in result.history] == [3, 3, 3]
    assert result.history[-1].per_client["loss"].clients == 2
    assert re.search(r"over clients loss [\d.]+ ± [\d.]+ \(worst 10 %: [\d.]+\), ", repr(result))


@pytest.mark.parametrize(
    ("owner", "part", "number"),
    [
        ("the test set", "inputs", math.nan),
        ("the test set", "targets", math.inf),
        ("the held-out data of client 2", "inputs", math.inf),
        ("the held-out data of client 2", "targets", math.nan),
    ],
)
def test_samples_that_are_not_finite_are_named_once(owner, part, number):
    clients = [(inputs, inputs[:, :1].clone()) for inputs, _ in make_clients((8, 8, 8))]
    broken = [(inputs.clone(), targets.clone()) for inputs, targets in clients]
    broken[2][part == "targets"][5, 0] = number
    evaluated = {"test": broken[2]} if owner == "the test set" else {"client_tests": broken, "evaluate_every": 1}
    told = f"{owner} has NaN or infinite {part}, first in its sample 5, so the loss on it is (nan|inf); remove such"
    with pytest.warns(UserWarning, match=told) as warned:
        fl.run(nn.Linear(4, 1).double(), clients, fl.FedAvg(), **OPTIONS | {"loss": nn.functional.mse_loss} | evaluated)
    assert len(warned) == 1


def test_a_model_may_handle_missing_inputs():
    class Filled(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs.nan_to_num())

    clients = make_clients((8, 8, 8))
    clients[0][0][5, 0] = math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = fl.run(Filled(4, 3).double(), clients, fl.FedAvg(), test=clients[0], **OPTIONS)
    assert math.isfinite(result.history[-1].loss)


class Shifted(TensorDataset):
    def __getitem__(self, place):
        inputs, target = super().__getitem__(place)
        return inputs + 1, target


def test_data_sets_are_held_out_and_evaluated_too():
    clients = [Shifted(*pair) for pair in make_clients(SIZES)]
    result = fl.run(make_model(), clients, fl.FedAvg(), holdout=0.2, **OPTIONS)
    shifted = [(inputs + 1, targets) for inputs, targets in make_clients(SIZES)]
    pooled = fl.run(make_model(), shifted, fl.FedAvg(), holdout=0.2, **OPTIONS)
    assert result.history[-1].per_client == pooled.history[-1].per_client
    given = fl.run(make_model(), clients, fl.FedAvg(), client_tests=clients, **OPTIONS)
    assert given.history[-1].per_client["loss"].clients == 6


def test_samples_that_are_dicts_are_evaluated_in_batches_as_in_training():
    """The logits of a language model for all samples of a client may not fit into memory."""
    seen = []

    class Named(nn.Linear):
        def forward(self, features: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            if not self.training:
                seen.append(len(features))
            return super().forward(features)

    pairs = make_clients(SIZES)
    dicts = [{"features": inputs, "labels": targets} for inputs, targets in pairs]
    result = fl.run(Named(4, 3).double(), dicts, fl.FedLALR(), client_tests=dicts, **OPTIONS | {"rounds": 1})
    assert max(seen) == OPTIONS["batch_size"]
    assert_distribution(result.history[-1], measured(result, pairs))


def test_test_sets_get_the_transform_of_the_clients():
    class Doubled:
        draws = 0

        def train(self, inputs, random):
            return 2 * inputs

        def test(self, inputs):
            return 2 * inputs

    plain = as_clients(make_clients(SIZES))
    clients = fl.data.Population(plain.inputs, plain.targets, plain.partition, transform=Doubled())
    tests = make_clients((5,) * 6, seed=3)
    result = fl.run(make_model(), clients, fl.FedAvg(), client_tests=tests, **OPTIONS)
    assert_distribution(result.history[-1], measured(result, [(2 * inputs, targets) for inputs, targets in tests]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"holdout": 1.0}, "holdout must lie between 0 and 1, such as 0.2, not 1.0"),
        ({"holdout": 0}, "holdout must be"),
        ({"holdout": 0.2, "client_tests": make_clients(SIZES)}, "give one of them"),
        ({"client_tests": make_clients((3, 4))}, "client_tests has 2 test sets, but there are 6 clients"),
        ({"client_tests": make_clients((3, 0, 4, 5, 6, 7))}, "client_tests: client 1 has no samples"),
        ({"client_tests": 3}, "client_tests: "),
        ({"client_tests": [(x[:, :3], y) for x, y in make_clients(SIZES)]}, "cannot run on client 0's test inputs"),
        ({"client_tests": [(x, y + 1) for x, y in make_clients(SIZES)]}, "test set of client 0 has label 3"),
    ],
)
def test_options_that_cannot_work_are_rejected(options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        fl.run(make_model(), make_clients(SIZES), fl.FedAvg(), **options)


def test_a_client_that_cannot_be_evaluated_is_named():
    class Broken(TensorDataset):
        def __getitem__(self, place):
            raise OSError("the disk is gone")

    tests = [TensorDataset(*pair) for pair in make_clients(SIZES)]
    tests[4] = Broken(*make_clients((5,))[0])
    tests[0] = Shifted(*make_clients((5,))[0])
    with pytest.raises(ValueError, match="client 4 cannot be evaluated on its test samples: OSError: the disk is gone"):
        fl.run(make_model(), make_clients(SIZES), fl.FedAvg(), client_tests=tests, **OPTIONS)


def test_without_a_test_set_the_accuracy_is_the_mean_over_the_clients():
    options = OPTIONS | {"rounds": 5, "holdout": 0.3, "evaluate_every": 2, "personal": ("3.*",)}
    result = fl.run(norm_model(), make_clients(SIZES), fl.FedLALR(), **options)
    means = [record.per_client["accuracy"].mean if record.per_client else None for record in result.history]
    assert [record.accuracy for record in result.history] == means
    assert [mean is None for mean in means] == [True, False, True, False, False]
    axes = result.plot()
    (line,) = axes.figure.axes[1].lines
    assert list(line.get_xdata()) == [2, 4, 5]


def test_a_test_set_gives_the_accuracy_even_if_clients_are_evaluated():
    clients = make_clients(SIZES)
    options = OPTIONS | {"client_tests": clients, "evaluate_every": 1}
    record = fl.run(make_model(), clients, fl.FedLALR(), test=clients[0], **options).history[-1]
    assert (9 * record.accuracy) == pytest.approx(round(9 * record.accuracy))  # a share of nine samples
    assert record.accuracy != record.per_client["accuracy"].mean
