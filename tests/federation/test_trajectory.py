import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr.algorithms import Context, Slots
from fedlalr.federation.storage.journal import RunDirectoryError
from fedlalr.federation.trajectory import (
    QUANTILES,
    V_HAT_SQUARED,
    MomentProbe,
    Trajectory,
    rate_name,
    read_trajectory,
)

CONTEXT = Context(round=1, lr=0.3, steps=4, step=1)


def train(observer, **options):
    settings = {"rounds": 4, "clients_per_round": 2, "local": fl.Steps(3), "engine": "reference", **options}
    return fl.run(make_model(), make_clients(), fl.FedLALR(lr=0.01), observers=[observer], **settings)


def test_norm_and_quantiles_are_those_of_the_definition():
    v_hat = torch.rand(1001, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1
    measured = MomentProbe(frozenset({0})).measure(Slots(x=v_hat, v_hat=v_hat), CONTEXT)
    assert measured[V_HAT_SQUARED] == pytest.approx(float((v_hat**2).sum()))
    rates = 0.3 / v_hat.sqrt()
    for quantile in QUANTILES:
        assert measured[rate_name(quantile)] == pytest.approx(float(rates.quantile(quantile)), rel=1e-12)


def test_tiny_moments_in_single_precision_do_not_vanish():
    v_hat = torch.full((1000,), 1e-25)
    measured = MomentProbe(frozenset({0})).measure(Slots(x=v_hat, v_hat=v_hat), CONTEXT)
    assert measured[V_HAT_SQUARED] == pytest.approx(1e-47, rel=1e-5)


def test_chosen_clients_are_recorded_in_chosen_rounds_alone(tmp_path):
    observer = Trajectory([4, 1], rounds=[1, 3], path=tmp_path / "trajectory.jsonl")
    train(observer)
    places = [(point.round, point.client, point.step) for point in observer.points]
    assert places == [(t, client, k) for t in (1, 3) for client in (1, 4) for k in (1, 2, 3)]
    lines = [json.loads(line) for line in (tmp_path / "trajectory.jsonl").read_text().splitlines()]
    assert [tuple(line) for line in lines] == [("round", "client", "step", "values")] * 12
    assert read_trajectory(tmp_path / "trajectory.jsonl") == observer.points


def test_squared_norm_of_v_hat_rises_within_a_round():
    observer = Trajectory([0], rounds=[1])
    train(observer)
    norms = [point.values[V_HAT_SQUARED] for point in observer.points]
    assert norms == sorted(norms)
    assert norms[0] < norms[-1]


def test_other_rounds_are_not_probed_and_their_cohorts_are_as_sampled():
    observer = Trajectory([0], rounds=[2])
    assert observer.probe(1) is None
    assert observer.include(1) == ()
    assert observer.include(2) == [0]


def test_a_resumed_run_continues_its_trajectory(tmp_path):
    whole = Trajectory([0, 1])
    train(whole)
    path = tmp_path / "trajectory.jsonl"
    train(Trajectory([0, 1], path=path), rounds=2, run_dir=tmp_path)
    with path.open("a") as file:  # a round after the checkpoint, and an incomplete line
        file.write('{"round": 3, "client": 0, "step": 1, "values": {}}\n{"round": 3, "cl')
    resumed = Trajectory([0, 1], path=path)
    train(resumed, run_dir=tmp_path, resume=True)
    assert resumed.points == whole.points
    assert read_trajectory(path) == whole.points


class Dies(Trajectory):
    """Ends the process, as far as it can, when the traces of a round come."""

    def on_traces(self, round, lr, traces):
        if round == 2:
            raise KeyboardInterrupt
        super().on_traces(round, lr, traces)


def test_no_round_is_missing_from_the_trajectory_wherever_a_run_was_interrupted(tmp_path):
    whole, path = Trajectory([0, 1]), tmp_path / "trajectory.jsonl"
    train(whole)
    with pytest.raises(KeyboardInterrupt):
        train(Dies([0, 1], path=path), run_dir=tmp_path)
    train(Trajectory([0, 1], path=path), run_dir=tmp_path, resume=True)
    assert read_trajectory(path) == whole.points


def test_a_trajectory_cut_off_within_a_character_resumes_and_one_with_other_damage_is_named(tmp_path):
    whole, path = Trajectory([0, 1]), tmp_path / "trajectory.jsonl"
    train(whole)
    train(Trajectory([0, 1], path=path), rounds=2, run_dir=tmp_path)
    line = path.read_bytes().splitlines()[0]
    path.write_bytes(path.read_bytes() + line[: line.index("‖".encode()) + 1])
    train(Trajectory([0, 1], path=path), rounds=3, run_dir=tmp_path, resume=True)
    assert read_trajectory(path) == [point for point in whole.points if point.round <= 3]
    path.write_bytes(b"\xff\n" + path.read_bytes())
    with pytest.raises(RunDirectoryError, match=r"trajectory.jsonl is damaged: .*; restore it, or move it away"):
        train(Trajectory([0, 1], path=path), run_dir=tmp_path, resume=True)


def test_a_trajectory_that_cannot_be_written_is_told_like_any_file_of_the_run(tmp_path):
    path = tmp_path / "trajectory.jsonl"
    path.mkdir()
    with pytest.raises(RunDirectoryError, match=r"trajectory.jsonl cannot be written: Is a directory"):
        train(Trajectory([0], path=path), rounds=1, run_dir=tmp_path)


def test_a_new_run_forgets_the_trajectory_of_another(tmp_path):
    path = tmp_path / "trajectory.jsonl"
    path.write_text('{"round": 1, "client": 7, "step": 1, "values": {}}\n')
    train(Trajectory([0], path=path), rounds=1)
    assert {point.client for point in read_trajectory(path)} == {0}


def test_a_method_without_second_moments_is_named():
    with pytest.raises(TypeError, match="records v̂, but the clients of FedAvg have only x"):
        fl.run(
            make_model(),
            make_clients(),
            fl.FedAvg(lr=0.1),
            rounds=1,
            clients_per_round=1,
            engine="reference",
            observers=[Trajectory([0])],
        )


def test_a_round_that_never_comes_is_rejected():
    with pytest.raises(ValueError, match="requested for round 5, but the run has 2 rounds"):
        fl.run(make_model(), make_clients(), fl.FedLALR(), rounds=2, observers=[Trajectory([0], [5])])


@pytest.mark.parametrize(("clients", "rounds"), [([], None), ([-1], None), ([0], []), ([0], [0])])
def test_impossible_clients_and_rounds_are_rejected(clients, rounds):
    with pytest.raises(ValueError, match="numbered from"):
        Trajectory(clients, rounds)


@pytest.mark.parametrize("engine", ["stacked", "workers"])
def test_every_engine_records_what_the_reference_does(engine):
    given, wanted = Trajectory([0, 3], rounds=[1, 2]), Trajectory([0, 3], rounds=[1, 2])
    train(given, rounds=2, engine=engine)
    train(wanted, rounds=2)
    assert [point[:3] for point in given.points] == [point[:3] for point in wanted.points]
    for mine, right in zip(given.points, wanted.points, strict=True):
        assert mine.values == pytest.approx(right.values, rel=1e-9)


def test_half_precision_computation_still_gives_finite_rates():
    observer = Trajectory([0], rounds=[1])
    model = nn.Linear(4, 3)
    clients = [(inputs.float(), targets) for inputs, targets in make_clients()]
    fl.run(
        model,
        clients,
        fl.FedLALR(),
        rounds=1,
        dtype=torch.bfloat16,
        local=fl.Steps(1),
        engine="reference",
        observers=[observer],
    )
    assert all(math.isfinite(value) for point in observer.points for value in point.values.values())


def test_clients_and_rounds_may_be_arrays_and_the_file_may_lie_in_a_folder_to_be_made(tmp_path):
    path = tmp_path / "new" / "trajectory.jsonl"
    train(Trajectory(np.array([4, 1]), rounds=np.array([1, 3]), path=path))
    assert {(point.round, point.client) for point in read_trajectory(path)} == {(1, 1), (1, 4), (3, 1), (3, 4)}
