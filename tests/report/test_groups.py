from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedlalr as fl
from fedlalr import config
from fedlalr.federation.record import Distribution
from fedlalr.report.groups import MOST_POINTS, curves_of, group_runs
from fedlalr.report.html import page
from fedlalr.report.rerun_command import description_of
from fedlalr.report.runs import ReportedRun, read_run
from fedlalr.report.sections import runs_table
from report.curves import curve


def reported(*overrides: str, accuracies: tuple[float | None, ...] = (0.1, 0.5)) -> ReportedRun:
    settings = config.load("quickstart", overrides)
    return ReportedRun(Path("-".join(overrides) or "plain"), curve(accuracies).records, settings)


def test_runs_that_differ_in_the_seed_alone_are_one_group() -> None:
    groups = group_runs([reported("algorithm=fedavg"), reported("seed=1"), reported("seed=0")])
    assert [group.label for group in groups] == ["FedLALR", "FedAvg"]
    assert [run.seed for run in groups[0].runs] == [0, 1]


def test_a_seed_that_was_run_again_is_no_further_seed() -> None:
    runs = [replace(reported(f"seed={seed}"), path=Path(f"{place}-{seed}")) for place in "ab" for seed in (1, 0)]
    groups = group_runs([*runs, replace(reported("seed=1"), path=Path("c-1"))])
    assert [[str(run.path) for run in group.runs] for group in groups] == [["a-0", "a-1"], ["b-0", "b-1"], ["c-1"]]
    assert [group.label for group in groups] == [
        "FedLALR in a-0 and 1 more",
        "FedLALR in b-0 and 1 more",
        "FedLALR in c-1",
    ]


def test_groups_of_one_method_are_told_apart_by_what_differs() -> None:
    some = reported("algorithm.lr=0.1"), reported("algorithm.lr=0.2")
    assert [group.label for group in group_runs(some)] == ["FedLALR, lr 0.1", "FedLALR, lr 0.2"]
    more = reported("partition.alpha=0.1"), reported("partition.alpha=1.0", "algorithm.lr=0.1")
    assert [group.label for group in group_runs(more)] == [
        "FedLALR, partition.alpha 0.1",
        "FedLALR, partition.alpha 1.0",
    ]


def test_a_short_form_of_compression_is_part_of_the_methods_name() -> None:
    some = reported("compression=balanced"), reported()
    assert [group.label for group in group_runs(some)] == ["FedLALR", "FedLALR (balanced)"]
    assert "compression" not in description_of([run.config for run in some if run.config])
    own = reported("compression={up: {x: bfloat16}}")
    assert own.config is not None
    assert "compression" in description_of([own.config])


def test_different_problems_go_by_their_names() -> None:
    others = [ReportedRun(Path(name), curve([0.5]).records, config.load(name)) for name in ("cifar10", "shakespeare")]
    assert [group.label for group in group_runs(others)] == ["FedLALR, cifar10", "FedLALR, shakespeare"]


def test_runs_without_a_configuration_stand_alone_under_their_folders() -> None:
    runs = [ReportedRun(Path(name), curve([0.5]).records, facts={"algorithm": "FedAvg"}) for name in ("a", "b")]
    assert [group.label for group in group_runs(runs)] == ["FedAvg in a", "FedAvg in b"]


def from_python(folder: str, **facts: object) -> ReportedRun:
    return ReportedRun(Path(folder), curve([0.5]).records, facts={"algorithm": "fedlalr.algorithms.FedAvg", **facts})


def test_runs_from_python_that_differ_in_the_seed_alone_are_one_group() -> None:
    runs = [from_python(f"{lr}-{seed}", seed=seed, **{"algorithm.lr": lr}) for lr in (0.1, 0.3) for seed in (2, 1, 0)]
    groups = group_runs(runs)
    assert [group.label for group in groups] == ["FedAvg, lr 0.1", "FedAvg, lr 0.3"]
    assert [[run.seed for run in group.runs] for group in groups] == [[0, 1, 2]] * 2


def test_runs_from_python_with_the_same_seed_stand_alone() -> None:
    runs = [from_python("a", seed=0), from_python("b", seed=0)]
    assert [group.label for group in group_runs(runs)] == ["FedAvg in a", "FedAvg in b"]


def test_a_private_run_shows_its_settings_in_the_users_words(tmp_path: Path) -> None:
    """The server derives v̂, which is recorded as a kind of compression."""
    clients = [(torch.ones(2, 3), torch.tensor([0, 1]))] * 2
    private = fl.Privacy(clip=1.0, noise_multiplier=1.0, second_moment="server")
    method = fl.FedLALR(momentum="restart")
    fl.run(torch.nn.Linear(3, 2), clients, method, rounds=1, local=fl.Steps(1), run_dir=tmp_path, privacy=private)
    shown = page([read_run(tmp_path)])
    assert "Withholding" not in shown
    assert "compression.withheld" not in shown
    settings = group_runs([read_run(tmp_path)])[0].settings
    assert (settings["compression"], settings["privacy.second_moment"]) == (None, "server")


def test_a_digest_names_no_group() -> None:
    runs = [from_python(f"{i}-{seed}", seed=seed, model=f"Net {i:016x}") for i in (1, 2) for seed in (0, 1)]
    assert [group.label for group in group_runs(runs)] == ["FedAvg in 1-0 and 1 more", "FedAvg in 2-0 and 1 more"]


def test_a_curve_is_the_mean_with_the_range_over_the_seeds() -> None:
    (group,) = group_runs([reported(accuracies=(0.1, 0.5)), reported("seed=1", accuracies=(0.3, 0.7, 0.9))])
    curves = curves_of(group)
    assert curves is not None
    assert curves["x"]["round"] == [1, 2]
    assert curves["x"]["megabytes"] == [2.5, 5.0]
    assert curves["x"]["seconds"] == [2.0, 4.0]
    assert curves["x"]["virtual"] is None
    assert curves["y"]["accuracy"] == {"mean": [0.2, 0.6], "low": [0.1, 0.5], "high": [0.3, 0.7]}


def test_virtual_time_is_an_axis_if_all_runs_of_a_group_have_it() -> None:
    runs = [reported(), reported("seed=1")]
    timed = [
        replace(run, records=[replace(record, virtual_seconds=each) for record in run.records])
        for run, each in zip(runs, (3.0, 4.0), strict=True)
    ]
    assert curves_of(group_runs(timed)[0])["x"]["virtual"] == [3.5, 7.0]
    assert curves_of(group_runs([timed[0], runs[1]])[0])["x"]["virtual"] is None


def test_measures_of_the_caller_are_curves_and_columns() -> None:
    first = reported()
    records = [replace(record, metrics={"auc": record.round / 4}) for record in first.records]
    groups = group_runs([replace(first, records=records), reported("algorithm=fedavg")])
    curves, others = map(curves_of, groups)
    assert curves is not None
    assert curves["y"]["metrics/auc"] == {"mean": [0.25, 0.5]}
    assert others is not None
    assert "metrics/auc" not in others["y"]
    table = runs_table(groups)
    column = table.heading.index("auc")
    assert [row[column] for row in table.rows] == ["0.5", "–"]


def test_private_runs_have_a_column_for_what_they_spent() -> None:
    first = reported()
    private = replace(first, records=[replace(record, epsilon=record.round / 3) for record in first.records])
    table = runs_table(group_runs([private, reported("algorithm=fedavg")]))
    assert [row[table.heading.index("epsilon")] for row in table.rows] == ["0.667", "–"]
    assert "epsilon" not in runs_table(group_runs([first])).heading


def test_losses_of_any_size_are_told_in_digits_that_count() -> None:
    run = reported()
    losses = [1.234567, 0.00012345, 1.5e30]
    runs = [replace(run, records=[replace(run.records[0], loss=loss)]) for loss in losses]
    table = runs_table(group_runs(runs))
    assert [row[table.heading.index("test loss")] for row in table.rows] == ["1.235", "0.0001234", "1.5e+30"]


def test_losses_are_in_columns_and_curves_of_what_they_were_measured_on() -> None:
    tested = reported("algorithm=fedavg")
    trained = replace(tested, records=[replace(record, loss=record.train_loss) for record in tested.records])
    first, last = trained.records
    over = {"loss": Distribution(0.7, 0.1, 0.9, 4)}
    evaluated = replace(trained, records=[replace(first, per_client=over), last])  # a run that is not over
    groups = group_runs([tested, evaluated, trained])
    table = runs_table(groups)
    shown = [row[table.heading.index("test loss") :][:3] for row in table.rows]
    assert table.heading[5:8] == ("test loss", "held-out loss", "training loss")
    assert shown == [("1", "–", "–"), ("–", "0.7", "–"), ("–", "–", "2")]
    curves = [curves_of(group)["y"] for group in groups]
    assert [each.get("loss") for each in curves] == [{"mean": [1.0, 1.0]}, None, None]
    assert [each["held_out_loss"] for each in curves] == [None, {"mean": [0.7, None]}, None]
    assert [each["train_loss"] for each in curves] == [{"mean": [2.0, 2.0]}] * 3


def test_what_was_not_measured_is_no_curve() -> None:
    (group,) = group_runs([reported(accuracies=(None, None))])
    curves = curves_of(group)
    assert curves is not None
    assert curves["y"]["accuracy"] is None
    assert curves["y"]["loss"] == {"mean": [1.0, 1.0]}


def test_a_group_without_a_round_is_not_drawn() -> None:
    (group,) = group_runs([reported(accuracies=())])
    assert curves_of(group) is None


def test_a_long_curve_keeps_its_first_and_last_point() -> None:
    run = reported(accuracies=(0.5,) * (3 * MOST_POINTS))
    curves = curves_of(group_runs([run])[0])
    assert curves is not None
    assert len(curves["x"]["round"]) == MOST_POINTS
    assert (curves["x"]["round"][0], curves["x"]["round"][-1]) == (1, 3 * MOST_POINTS)


def test_a_value_that_is_not_finite_is_left_out() -> None:
    plain = reported()
    broken = replace(plain, records=[replace(plain.records[0], loss=float("inf")), plain.records[1]])
    curves = curves_of(group_runs([broken])[0])
    assert curves is not None
    assert curves["y"]["loss"]["mean"] == [None, pytest.approx(1.0)]
