"""Invalid input: each case with its error message."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import fedlalr as fl
from fedlalr.federation.session import RepliesRejected

PAIR = (torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64))


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


class Triples(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, i):
        return torch.zeros(4), 0, "more"


class Worded(Triples):
    def __getitem__(self, i):
        return "words", 0


def run(model=None, clients=None, algorithm=None, **options):
    return fl.run(
        model or nn.Linear(4, 3), [PAIR, PAIR] if clients is None else clients, algorithm or fl.FedAvg(0.1), **options
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": []}, "there are no clients"),
        ({"clients": [PAIR, (torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))]}, "client 1 has no samples"),
        (
            {"clients": [PAIR, (torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64))]},
            "client 1 has 3 inputs but 2 targets",
        ),
        ({"clients": [PAIR, (torch.zeros(3, 5), PAIR[1])]}, r"client 1's inputs are \(5,\)"),
        ({"clients_per_round": 3}, "clients_per_round is 3 but there are only 2 clients"),
        ({"clients_per_round": 0}, "clients_per_round must be a whole number of at least 1"),
        ({"rounds": 0}, "rounds must be a whole number of at least 1, not 0"),
        ({"batch_size": 0}, "batch_size must be a whole number"),
        ({"batch_size": 10**20}, r"batch_size must be at most 2,147,483,647 or None, not 1000"),
        ({"local": fl.Epochs(10**7), "batch_size": 1}, "Epochs gives a client 30,000,000 local steps in a round"),
        ({"algorithm": fl.FedLALR(eps=1e30)}, r"eps is 1e\+30, and its square is too large .* at most 1.8e\+19"),
        ({"algorithm": fl.FedLALR(eps=1e200)}, "its square is too large"),
        ({"engine": "workers:1000000000"}, "the number of workers must be a whole number from 1 to 1024"),
        (
            {"schedule": lambda t: 1 - t, "rounds": 3},
            r"the schedule returned -1 in round 2, .* finite number of at least 0",
        ),
        ({"schedule": lambda t: float("nan")}, "the schedule returned nan in round 1"),
        ({"schedule": lambda t: 1e308, "algorithm": fl.FedAvg(100.0)}, r"the schedule returned 1e\+308 in round 1"),
        ({"schedule": lambda t: None}, "the schedule returned None in round 1"),
        (
            {"schedule": fl.schedules.Linear(warmup=5), "rounds": 5},
            "Linear's warmup takes 5 rounds, but the run has only 5",
        ),
        ({"weight_decay": -1.0}, "weight_decay must be a finite number of at least 0"),
        ({"clip_norm": 0.0}, "clip_norm must be a finite number above 0"),
        ({"weighting": "sizes"}, "weighting must be one of 'uniform', 'samples', not 'sizes'"),
        ({"buffers": "none"}, "buffers must be one of 'average', 'recalibrate', 'local'"),
        ({"engine": "turbo"}, "there is no engine 'turbo'; choose one of auto, reference"),
        ({"min_clients": 3}, "min_clients is 3 but only 2 clients take part"),
        ({"resume": True}, "resume=True needs run_dir"),
        ({"run_dir": ""}, "run_dir is empty"),
        (
            {"model": nn.Linear(4, 3, device="meta")},
            "the model's weight is on the meta device, .*; load the model's wei",
        ),
        ({"target": "nonsense"}, "target='nonsense' names a key of samples that are dicts, but the clients are pairs"),
        ({"clients": [(PAIR[0], torch.tensor([0, 1, 7]))]}, "client 0 has label 7, but the model has classes 0 to 2"),
        ({"test": (PAIR[0], torch.tensor([0, 1, -1]))}, "the test set has label -1"),
        (
            {"test": (PAIR[0], torch.tensor([0, 1, 9])), "loss": nn.CrossEntropyLoss(ignore_index=7)},
            "the test set has label 9",
        ),
        (
            {"test": (PAIR[0], PAIR[1].float())},
            r"the test set's targets are \(2,\) torch.float32, but cross-entropy needs",
        ),
        ({"device": "mps"}, "device 'mps' is not supported"),
        ({"test": (PAIR[0], PAIR[1][:2])}, "the test set has 3 inputs but 2 targets"),
        ({"test": (PAIR[0][:0], PAIR[1][:0])}, "the test set is empty"),
        ({"clients": [(PAIR[0], torch.zeros(3))]}, r"targets are \(2,\) torch.float32.*use targets.long\(\)"),
        (
            {"clients": [(PAIR[0], PAIR[1].unsqueeze(1))]},
            r"targets, \(2, 1\) torch.int64: .*; a label is one number per sample, so use targets.squeeze\(1\)",
        ),
        (
            {"model": nn.Linear(4, 3), "clients": [(torch.zeros(3, 5, 4), torch.zeros(3, 5).long())]},
            r"outputs, \(2, 5, 3\) .*needs the classes second, so let the model return outputs.movedim\(-1, 1\)",
        ),
        ({"model": nn.Linear(4, 1)}, r"the model has one output, \(2, 1\).*for each class"),
        (
            {"model": nn.Linear(4, 1), "clients": [(PAIR[0], torch.zeros(3))], "loss": nn.functional.mse_loss},
            r"outputs, \(2, 1\) torch.float32, and client 0's targets, \(2,\).*instead of pairing.*unsqueeze\(1\)",
        ),
        ({"loss": lambda outputs, targets: 1 / 0}, "the loss cannot be computed from .*: ZeroDivisionError"),
        ({"loss": lambda outputs, targets: outputs.sum(1)}, r"one number.*not \(2,\) torch.float32"),
        ({"device": "gpu"}, "there is no device 'gpu'; use 'auto', 'cpu'"),
        ({"clients": [(torch.zeros(3, 9), PAIR[1])]}, r"the model cannot run on client 0's inputs, \(3, 9\)|\(2, 9\)"),
    ],
)
def test_bad_values_are_rejected_with_a_message(options, message):
    with pytest.raises(ValueError, match=message):
        run(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": fl.FedLALR}, "pass an instance, such as FedLALR()"),
        ({"algorithm": "fedavg"}, "algorithm must be one of fedlalr's"),
        ({"model": "resnet"}, "model must be a torch.nn.Module, not str; the order is"),
        ({"seed": 1.5}, "seed must be a whole number from 0 to 2.63 - 1, not 1.5"),
        ({"test": PAIR[0]}, r"test must be a pair \(inputs, targets\), .* not Tensor"),
        ({"local": 5}, "local must be fl.Steps"),
        ({"local": fl.Epochs}, r"local is the class Epochs; pass an instance, such as local=fl.Steps\(10\)"),
        ({"run_dir": 3}, "run_dir must be the path of a directory, such as 'runs/mine', not 3"),
        (
            {"sampling": lambda round, count: [0]},
            r"sampling must be a function of \(round, population, count, generator\), but yours takes \(round, count\)",
        ),
        ({"test": DataLoader(TensorDataset(*PAIR))}, "pass its data set, test.dataset, with collate_fn="),
        ({"test": (PAIR[0].to_sparse(), PAIR[1])}, r"the test set's inputs are a sparse tensor; .*to_dense\(\)"),
        ({"clients": {1: PAIR}}, "clients must be a sequence"),
        ({"clients": [PAIR, "two"]}, "client 1 is a str"),
        ({"clients": [PAIR, (PAIR[0].numpy(), PAIR[1].numpy())]}, r"client 1 consists of NumPy.*torch.from_numpy"),
        ({"test": (PAIR[0].numpy(), PAIR[1])}, "the test set's samples are NumPy.*torch.from_numpy"),
        ({"drop_last": "no"}, "drop_last must be True or False, not 'no'"),
        ({"seed": 1 << 64}, "seed must be a whole number"),
        ({"test": ([[0.0] * 4] * 3, PAIR[1])}, "the test set's samples must be two tensors.*, not list and Tensor"),
        ({"seed": -1}, "seed must be a whole number from 0 to 2.63 - 1, not -1"),
        ({"observers": fl.Observer()}, r"observers must be a list, such as \[Observer\(…\)\]"),
        (
            {"observers": [fl.Observer]},
            "one of observers is the class Observer; pass an instance",
        ),
        ({"observers": [print]}, "must be an instance of a subclass of fl.Observer"),
        (
            {"clients": [PAIR, Triples()]},
            "some clients are pairs of tensors and others torch Datasets; .*Tensor",
        ),
        ({"clients": [PAIR, Endless()]}, "client 1 is a Endless; .* a torch Dataset with a length"),
    ],
)
def test_wrong_kinds_are_rejected_with_a_message(options, message):
    with pytest.raises(TypeError, match=message):
        run(**options)


def named(samples):
    inputs, targets = zip(*samples, strict=True)
    return {"x": torch.stack(inputs), "y": torch.stack(targets)}


@pytest.mark.parametrize(
    "options",
    [
        {"clients": [TensorDataset(*PAIR)] * 2, "collate_fn": named},
        {"test": dict(zip("xy", PAIR, strict=True))},
    ],
    ids=["made by collate_fn", "only the test set"],
)
def test_a_target_may_name_a_key_of_any_samples_that_are_dicts(options):
    class Named(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    run(**options, model=Named(4, 3), target="y", rounds=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test": (torch.zeros(5, 3), torch.zeros(5).long())}, r"cannot run on the test set's inputs, \(2, 3\)"),
        (
            {"test": (torch.zeros(5, 4).double(), torch.zeros(5).long())},
            r"the test set's .* so use inputs.to\(torch.float32\)",
        ),
        ({"dtype": torch.float64}, r"client 0's inputs.*the model is torch.float64, so use inputs.to\(torch.float64\)"),
        ({"dtype": torch.int32}, "dtype"),
        (
            {"clients": [Triples(), Triples()]},
            r"client 0's data set must return \(input, target\) or a dict for a sample, not 3 items",
        ),
        (
            {"clients": [Worded(), Worded()]},
            "client 0's samples have text as their input; convert words to numbers",
        ),
    ],
)
def test_what_cannot_be_computed_is_rejected_before_the_first_round(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(run_dir=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_test_set_may_be_a_data_set():
    class Read(Triples):
        def __getitem__(self, i):
            return PAIR[0][i], PAIR[1][i]

    model = nn.Linear(4, 3)
    records = [run(model, test=test, rounds=1).history[-1] for test in (PAIR, TensorDataset(*PAIR), Read())]
    assert len({(record.loss, record.accuracy) for record in records}) == 1


def test_the_class_of_a_loss_is_rejected():
    with pytest.raises(ValueError, match=r"loss is the class CrossEntropyLoss; pass an instance, CrossEntropyLoss\(\)"):
        run(loss=nn.CrossEntropyLoss)


def test_a_loss_with_parameters_is_rejected_until_they_are_fixed():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(3))

        def forward(self, outputs, targets):
            return nn.functional.cross_entropy(outputs + self.shift, targets)

    with pytest.raises(ValueError, match=r"parameters, such as shift, .* loss.requires_grad_\(False\)"):
        run(loss=Shifted())
    run(loss=Shifted().requires_grad_(False), rounds=1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
def test_narrow_labels_are_told_to_be_long(dtype):
    clients = [(torch.zeros(3, 4), torch.zeros(3, dtype=dtype))] * 2
    with pytest.raises(ValueError, match=r"so use targets.long\(\)"):
        run(nn.Linear(4, 2), clients)


def test_images_of_bytes_are_told_to_be_floats():
    clients = [(torch.zeros(3, 4, dtype=torch.uint8), torch.zeros(3).long())] * 2
    with pytest.raises(ValueError, match=r"if they are values, not indices, use inputs.to\(torch.float32\)"):
        run(nn.Linear(4, 2), clients)


def test_named_inputs_of_another_precision_are_told_to_be_converted():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, values, ids):
            return self.layer(values)

    clients = [({"values": torch.zeros(3, 4), "ids": torch.zeros(3).long()}, torch.zeros(3).long())] * 2
    with pytest.raises(ValueError, match=r"is torch.float64, so use inputs\['values'\].to\(torch.float64\)$"):
        run(Named(), clients, dtype="float64")


def test_labels_that_count_from_one_are_not_told_to_be_passed_over():
    clients = [(torch.zeros(3, 4), torch.tensor([1, 2, 3]))] * 2
    with pytest.raises(ValueError, match=r"has label 3, .* give the model more outputs$"):
        run(nn.Linear(4, 3), clients)


OWN_LOSSES = {
    "squared": (lambda outputs, targets: ((outputs - targets) ** 2).mean(), True),
    "absolute": (lambda outputs, targets: (outputs - targets).abs().mean(), True),
    "paired": (lambda outputs, targets: (outputs.flatten() - targets.flatten()).abs().mean(), False),
    "without targets": (lambda outputs, targets: outputs.square().mean(), False),
}


@pytest.mark.parametrize(("loss", "broadcasts"), OWN_LOSSES.values(), ids=OWN_LOSSES)
@pytest.mark.parametrize("column", ["outputs", "targets"])
def test_an_own_loss_that_would_pair_every_output_with_every_target_is_rejected(loss, broadcasts, column):
    model = nn.Linear(4, 1) if column == "outputs" else nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    clients = [(torch.zeros(3, 4), torch.ones(3) if column == "outputs" else torch.ones(3, 1))] * 2
    how = "unsqueeze" if column == "outputs" else "squeeze"
    with pytest.raises(ValueError, match=rf"would broadcast .* targets\.{how}\(") if broadcasts else nullcontext():
        run(model, clients, loss=loss, rounds=1)


def test_targets_with_an_extra_dimension_are_rejected_with_the_fix():
    clients = [(torch.zeros(3, 4), torch.zeros(3, 2, 1))] * 2
    with pytest.raises(ValueError, match=r"would broadcast .* for example with targets.squeeze\(-1\)"):
        run(nn.Linear(4, 2), clients, loss=nn.functional.l1_loss)


@pytest.mark.parametrize("where", ["client 1", "the test set"])
def test_the_label_of_a_pixel_that_is_no_class_is_named_with_the_way_to_pass_it_over(where):
    clean = torch.rand(4, 1, 3, 3), torch.ones(4, 3, 3).long()
    border = clean[0], clean[1].clone()
    border[1][2, 1, 1] = 255
    clients, test = ([clean, border], clean) if where == "client 1" else ([clean, clean], border)
    model = nn.Conv2d(1, 3, 1)
    with pytest.raises(ValueError, match=rf"{where} has label 255, .*CrossEntropyLoss\(ignore_index=255\)"):
        run(model, clients, test=test)
    run(model, clients, test=test, rounds=1, loss=nn.CrossEntropyLoss(ignore_index=255))


def test_test_targets_that_would_be_paired_with_every_output_are_rejected():
    clients = [(torch.zeros(3, 4), torch.zeros(3, 1))] * 2
    with pytest.raises(ValueError, match=r"would broadcast .* the test set's targets, \(2,\)"):
        run(nn.Linear(4, 1), clients, loss=nn.functional.mse_loss, test=(torch.zeros(5, 4), torch.zeros(5)))


@pytest.mark.parametrize("engine", ["reference", "stacked", "workers"])
@pytest.mark.parametrize("test", [None, PAIR])
def test_numbers_of_no_dimension_are_trained_and_what_a_module_remembers_is_of_its_training_alone(engine, test):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.0))
            self.register_buffer("divisor", torch.tensor(2.0))
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, inputs):
            self.calls += 1
            return self.scale * self.linear(inputs) / self.divisor

    result = run(Scaled(), rounds=2, local=fl.Steps(3), engine=engine, test=test, device="cpu")
    assert result.history[-1].rejected == ()
    assert int(result.model.calls) == 6
    assert result.model.scale.shape == ()
    assert float(result.model.divisor) == 2.0


def test_a_population_rejects_what_does_not_fit():
    inputs, targets = torch.zeros(50, 4), torch.zeros(50).long()
    sixty = fl.data.partition(np.arange(60) % 3, clients=6, scheme="iid")
    with pytest.raises(ValueError, match="indices from 0 to 59, but there are 50 samples, 0 to 49"):
        fl.data.Population(inputs, targets, sixty)
    with pytest.raises(TypeError, match="partition must be a result of fl"):
        fl.data.Population(inputs, targets, [[0, 1], [2, 3]])
    with pytest.raises(TypeError, match="NumPy arrays; convert them with"):
        fl.data.Population(inputs.numpy(), targets, sixty)
    fifty = fl.data.partition(np.arange(50) % 3, clients=5, scheme="iid")
    with pytest.raises(TypeError, match="transform must have draws, train and test"):
        fl.data.Population(inputs, targets, fifty, transform=lambda batch: batch)


def test_a_model_with_nothing_to_train_is_rejected():
    model = nn.Linear(4, 3).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter with requires_grad=True"):
        run(model=model)


def test_initial_weights_that_are_not_finite_are_rejected():
    model = nn.Linear(4, 3)
    nn.init.constant_(model.bias, float("nan"))
    with pytest.raises(ValueError, match="the model's initial bias has NaN or infinite numbers"):
        run(model, [PAIR] * 2)


def test_a_lazy_module_is_rejected_until_it_has_seen_a_batch():
    model = nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.Linear(5, 3))
    with pytest.raises(ValueError, match=r"the model's 0.weight has no shape .* pass a batch through the model first"):
        run(model=model)
    model(torch.zeros(2, 4))
    assert len(run(model=model).history) > 0


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(reduction="sum"), partial(nn.functional.cross_entropy, reduction="sum")]
)
def test_a_loss_that_sums_is_rejected(loss):
    with pytest.raises(ValueError, match="the loss sums over a batch"):
        run(loss=loss)


def test_mixed_devices_are_rejected():
    elsewhere = (torch.zeros(3, 4, device="meta"), torch.zeros(3, dtype=torch.int64, device="meta"))
    with pytest.raises(ValueError, match="client 1's inputs are on meta but client 0's on cpu"):
        run(clients=[PAIR, elsewhere])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there_is_rejected():
    with pytest.raises(ValueError, match="no usable CUDA device"):
        run(device="cuda")


def test_a_client_that_raises_is_named_and_the_others_continue():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, inputs):
            if (inputs == 99).any():
                raise ArithmeticError("cannot stand 99")
            return self.layer(inputs)

    bad = (torch.full((3, 4), 99.0), PAIR[1])
    with pytest.warns(RepliesRejected, match="client 1"):
        result = run(model=Picky(), clients=[PAIR, bad, PAIR], engine="reference", rounds=1)
    assert result.history[0].rejected == (fl.Rejection(1, "ArithmeticError: cannot stand 99"),)
    assert result.history[0].clients == 2
