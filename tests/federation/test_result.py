"""What a result offers: a table, a plot."""

import sys

import matplotlib as mpl
import pytest

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr.common.colours import COLOURS

mpl.use("Agg")


def run(**options):
    return fl.run(make_model(), make_clients(), fl.FedAvg(0.1), rounds=3, engine="reference", **options)


def test_the_history_is_a_table():
    pytest.importorskip("pandas", reason="pandas is optional")
    metrics = {"AUC": lambda outputs, targets: 0.75, "lr": lambda outputs, targets: 3.0}
    result = run(test=make_clients()[0], metrics=metrics)
    frame = result.to_frame()
    assert list(frame.index) == [1, 2, 3]
    assert frame.index.name == "round"
    assert frame["loss"].tolist() == [record.loss for record in result.history]
    assert frame["accuracy"].tolist() == [record.accuracy for record in result.history]
    assert frame["AUC"].tolist() == [0.75] * 3
    assert frame["metrics/lr"].tolist() == [3.0] * 3  # the record's own rate keeps its name
    assert frame["rejected"].tolist() == [0, 0, 0]
    assert frame["timing/train"].min() > 0
    assert frame["bytes_up"].sum() == result.bytes_up


def test_a_run_that_ended_before_its_first_round_is_an_empty_table():
    pytest.importorskip("pandas", reason="pandas is optional")

    class Never(fl.Observer):
        def on_start(self, info):
            raise fl.Stop

    result = run(observers=[Never()])
    assert result.history == []
    assert len(result.to_frame()) == 0


def test_without_pandas_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="to_frame needs pandas, which is not installed: pip install pandas"):
        run().to_frame()


def test_the_plot_shows_loss_and_accuracy():
    import matplotlib.pyplot as plt

    result = run(test=make_clients()[0])
    axes = result.plot()
    loss, accuracy = axes.figure.axes
    assert loss is axes
    assert loss.get_xlabel() == "round"
    for drawn, name, colour in ((loss, "loss", COLOURS[1]), (accuracy, "accuracy", COLOURS[0])):
        (line,) = drawn.get_lines()
        assert drawn.get_ylabel() == {"loss": "test loss"}.get(name, name)
        assert line.get_xdata().tolist() == [1, 2, 3]
        assert line.get_ydata().tolist() == [getattr(record, name) for record in result.history]
        assert line.get_color() == colour
    plt.close(axes.figure)


def test_without_a_test_set_the_plot_shows_the_loss_on_held_out_samples_or_that_of_training():
    import matplotlib.pyplot as plt

    held_out, trained = run(holdout=0.2, evaluate_every=2), run()
    means = [record.per_client["loss"].mean for record in held_out.history if record.per_client]
    losses = [record.train_loss for record in trained.history]
    for result, name, points in ((held_out, "held-out loss", means), (trained, "training loss", losses)):
        axes = result.plot()
        (line,) = axes.get_lines()
        assert (axes.get_ylabel(), line.get_ydata().tolist()) == (name, points)
        plt.close(axes.figure)


def test_the_plot_uses_given_axes_and_leaves_out_a_missing_accuracy():
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    assert run().plot(axes) is axes
    assert figure.axes == [axes]
    plt.close(figure)
