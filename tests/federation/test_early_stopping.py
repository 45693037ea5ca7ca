"""`fl.EarlyStopping` ends a run that no longer improves, and a resumed run at the same round."""

import math

import pytest
import torch

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr.federation import Record, RunInfo, Stop

INFO = RunInfo("FedAvg", "reference", "requested", "cpu", 100, 1, 5, 5, 5)


def record(round, loss=1.0, accuracy=None, **metrics):
    return Record(round, loss, accuracy, loss, 0.1, 0.1, 1, 1, 5, metrics=metrics)


def rounds_until_stop(stopping, losses, **fixed):
    """The round after which it stops; None if it does not."""
    stopping.on_start(INFO)
    for round, loss in enumerate(losses, 1):
        try:
            stopping.on_round(record(round, loss, **fixed))
        except Stop:
            return round
    return None


@pytest.mark.parametrize(
    ("options", "losses", "last"),
    [
        ({"patience": 2}, [3, 2, 1, 1, 1, 1], 5),
        ({"patience": 2}, [3, 4, 2, 3, 1, 2], None),
        ({"patience": 1}, [3, 2, math.nan, 1], 3),
        ({"patience": 3}, [math.nan] * 5, 3),
        ({"patience": 2, "min_delta": 0.5}, [3, 2.6, 2.4, 2.2, 2.0], 5),
        ({"patience": 2, "min_delta": 0.5}, [3, 2.6, 2.3, 1.9, 1.7], None),
        ({"patience": 2, "metric": "train_loss", "mode": "max"}, [3, 2, 1], 3),
    ],
)
def test_it_stops_after_rounds_without_an_improvement(options, losses, last):
    assert rounds_until_stop(fl.EarlyStopping(**options), losses) == last


def test_accuracy_and_own_metrics_are_watched():
    stopping = fl.EarlyStopping(2, "accuracy")
    stopping.on_start(INFO)
    for round, accuracy in enumerate((0.1, 0.3, 0.2), 1):
        stopping.on_round(record(round, accuracy=accuracy))
    assert (stopping.best, stopping.best_round, stopping.waited) == (0.3, 2, 1)
    with pytest.raises(Stop):
        stopping.on_round(record(4, accuracy=0.3))
    stopping = fl.EarlyStopping(1, "AUC", mode="max")
    stopping.on_round(record(1, AUC=0.5))
    with pytest.raises(Stop):
        stopping.on_round(record(2, AUC=0.5))


def test_a_resumed_run_stops_at_the_same_round_and_a_stopped_one_stays_stopped(tmp_path):
    def run(rounds, **options):
        stopping = fl.EarlyStopping(patience=3, min_delta=0.02)
        return fl.run(
            make_model(), make_clients(), fl.FedAvg(0.1), rounds=rounds, observers=[stopping], engine="reference",
            **options,
        )  # fmt: skip

    whole = run(200)
    last = len(whole.history)
    assert 6 < last < 200
    run(last - 2, run_dir=tmp_path)  # interrupted while it counts
    resumed = run(200, run_dir=tmp_path, resume=True)
    assert [each.loss for each in resumed.history] == [each.loss for each in whole.history]
    again = run(200, run_dir=tmp_path, resume=True)
    assert len(again.history) == last
    assert torch.equal(again.state["x"]["0.weight"], whole.state["x"]["0.weight"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patience": 0}, "patience must be a whole number of at least 1, not 0"),
        ({"min_delta": -1.0}, "min_delta must be a finite number of at least 0"),
        ({"metric": "AUC"}, "add mode='min' if smaller values are better"),
        ({"metric": "AUC", "mode": "large"}, "mode must be one of 'min', 'max', not 'large'"),
    ],
)
def test_wrong_arguments_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        fl.EarlyStopping(**options)


@pytest.mark.parametrize(("metric", "mode"), [("accuracy", None), ("AUC", "max")])
def test_a_metric_that_is_not_measured_is_an_error(metric, mode):
    with pytest.raises(ValueError, match=f"watches '{metric}', but round 1 has no such value; it has loss, train_loss"):
        fl.run(make_model(), make_clients(), fl.FedAvg(), rounds=2, observers=[fl.EarlyStopping(2, metric, mode=mode)])


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_without_a_test_set_it_counts_the_rounds_in_which_clients_are_evaluated(tmp_path, metric):
    stopping = fl.EarlyStopping(patience=2, metric=metric, min_delta=1.0)

    def run(rounds, **options):
        return fl.run(
            make_model(), make_clients((9, 14, 8)), fl.FedAvg(0.1), rounds=rounds, observers=[stopping], holdout=0.3,
            evaluate_every=3, personal=("2.*",), engine="reference", **options,
        )  # fmt: skip

    history = run(50).history
    assert len(history) == 9  # the best is round 3; rounds 6 and 9 are no better
    assert stopping.best == history[2].per_client[metric].mean
    run(7, run_dir=tmp_path)
    assert len(run(50, run_dir=tmp_path, resume=True).history) == 9
