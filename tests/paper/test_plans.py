from functools import cache
from pathlib import Path

import pytest

from fedlalr.algorithms.registry import PAPER_METHODS
from fedlalr.config import ConfigError, load
from fedlalr.paper import plans
from fedlalr.paper.figure_options import check_beside
from fedlalr.paper.plans import Beside, Request, described
from fedlalr.paper.settings import find_setting

EVERYTHING = frozenset({"digits", "cifar10", "cifar100", "shakespeare"})
PAPER = Request("paper", EVERYTHING)
SMOKE = Request("smoke", EVERYTHING)
BARE = Request("smoke", frozenset({"digits"}))
TRAINED = ("cifar", "shakespeare", "scalability", "interval", "trajectory")


@cache
def plan_of(figure, request):
    return getattr(plans, figure)(request)


def jobs(figure, request=PAPER, seeds=1, **options):
    return plan_of(figure, request).jobs(Path("runs"), seeds, **options)


@pytest.mark.parametrize(
    ("figure", "runs"), [("cifar", 24), ("shakespeare", 12), ("scalability", 26), ("interval", 12), ("trajectory", 1)]
)
def test_figures_have_the_papers_numbers_of_runs(figure, runs):
    """Scalability also wants FedLALR with the usual cohort, which the cifar figure runs."""
    assert len(jobs(figure)) == runs
    assert len({job.folder for job in jobs(figure)}) == runs


def test_on_the_papers_scale_a_run_is_the_preset_itself():
    for job in jobs("cifar"):
        data, alpha = job.config.data.name, job.config.partition.alpha
        wanted = load(data, [f"partition.alpha={alpha:g}", f"algorithm={job.config.algorithm.name}"])
        assert job.config == wanted
    assert {(job.config.data.name, job.config.partition.alpha) for job in jobs("cifar")} == {
        (data, alpha) for data in ("cifar10", "cifar100") for alpha in (0.6, 0.3)
    }
    assert {job.config.algorithm.name for job in jobs("cifar")} == set(PAPER_METHODS)


def test_the_papers_setting_of_cifar10_is_as_printed():
    config = next(job.config for job in jobs("cifar") if job.config.algorithm.name == "fedlalr")
    assert (config.partition.clients, config.clients_per_round, config.rounds) == (100, 50, 100)
    assert (config.local.epochs, config.batch_size, config.schedule.options["factor"], config.weight_decay) == (
        5,
        50,
        0.998,
        1e-3,
    )
    assert config.algorithm.options["lr"] == 2e-3
    assert config.model.name == "convmixer"


def test_scalability_has_the_papers_cohorts_and_rounds():
    cohorts = {(job.config.clients_per_round, job.config.rounds) for job in jobs("scalability")}
    assert cohorts == {(25, 200), (75, 80), (50, 100)}
    assert {job.config.partition.alpha for job in jobs("scalability")} == {0.6}


def test_the_usual_cohort_is_the_run_of_the_cifar_figure():
    shared = {job.folder: job for job in jobs("cifar")}
    usual = [job for job in jobs("scalability") if job.config.clients_per_round == 50]
    assert [job.config.algorithm.name for job in usual] == ["fedlalr", "fedlalr"]
    assert all(shared[job.folder] == job for job in usual)


def test_intervals_are_the_papers():
    local = [job.config.local.model_dump(exclude_none=True) for job in jobs("interval")[:6]]
    steps = [{"steps": 10}, {"start": 3, "base": 4.0}, {"start": 4, "base": 2.0}]
    epochs = [{"epochs": 10}, *({**one, "unit": "epochs"} for one in steps[1:])]
    assert local == [*epochs, *steps]
    assert [panel.short for panel in plans.interval(PAPER).panels[:2]] == ["in epochs", "in steps"]
    assert {panel.short for panel in plans.interval(SMOKE).panels} == {"in steps"}


def test_two_clients_are_followed_in_the_papers_rounds():
    (job,) = jobs("trajectory")
    assert job.config.trajectory is not None
    assert job.config.trajectory.clients == [0, 1]
    assert job.config.trajectory.rounds == [1, 31, 61, 91]
    assert (job.config.clients_per_round, job.config.local.epochs) == (50, 5)


def test_shakespeare_is_run_by_roles_and_pooled():
    panels = plans.shakespeare(PAPER).panels
    schemes = [{line.config.partition.scheme for line in panel.lines} for panel in panels]
    assert schemes == [{"natural"}, {"iid"}]
    assert {job.config.clients_per_round for job in jobs("shakespeare")} == {10}


def test_smoke_keeps_the_papers_rates_and_shrinks_the_rest():
    for small, paper in zip(jobs("cifar", SMOKE), jobs("cifar"), strict=True):
        assert small.config.algorithm == paper.config.algorithm
        assert (small.config.schedule.options["factor"], small.config.weight_decay) == (0.998, 1e-3)
        assert small.config.rounds < paper.config.rounds
        assert small.config.partition.clients == 20


def test_digits_stand_in_for_what_is_not_here_and_the_figure_says_so():
    plan = plans.cifar(Request("smoke", frozenset({"digits", "cifar10"})))
    assert [panel.title for panel in plan.panels] == [
        "CIFAR-10, Dirichlet 0.6",
        "CIFAR-10, Dirichlet 0.3",
        "Digits, Dirichlet 0.6",
        "Digits, Dirichlet 0.3",
    ]
    assert "Digits stand in for CIFAR-100, which is not on this machine." in plan.notes


def test_without_any_data_set_the_panels_are_not_doubled():
    assert len(jobs("cifar", BARE)) == 12
    assert [panel.short for panel in plans.shakespeare(BARE).panels] == ["non-IID", "IID"]
    assert {
        job.config.data.name
        for figure in ("cifar", "shakespeare", "scalability", "interval", "trajectory")
        for job in jobs(figure, BARE)
    } == {"digits"}


def test_the_papers_scale_goes_without_data_that_is_not_here():
    plan = plans.cifar(Request("paper", frozenset({"cifar10"})))
    assert [panel.title for panel in plan.panels] == ["CIFAR-10, Dirichlet 0.6", "CIFAR-10, Dirichlet 0.3"]
    assert "CIFAR-100 is not on this machine and was left out." in plan.notes
    assert plans.shakespeare(Request("paper", frozenset())).panels == ()


def test_changed_settings_reach_every_run_but_not_what_the_figure_varies():
    request = Request("paper", EVERYTHING, ("buffers=recalibrate", "methods.fedavg.lr=0.5", "partition.alpha=9"))
    configs = [job.config for job in jobs("cifar", request)]
    assert {config.buffers for config in configs} == {"recalibrate"}
    assert {c.algorithm.options["lr"] for c in configs if c.algorithm.name == "fedavg"} == {0.5}
    assert {config.partition.alpha for config in configs} == {0.6, 0.3}
    notes = " ".join(plans.cifar(request).notes)
    assert "recalibrated" in notes
    assert notes.startswith("The paper's setting with buffers=recalibrate, methods.fedavg.lr=0.5, ")


def test_a_setting_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match="There is no setting 'bufers'"):
        plans.cifar(Request("paper", EVERYTHING, ("bufers=average",)))


def test_seeds_are_run_one_after_the_other_so_that_a_broken_grid_has_whole_ones():
    seeds = [job.config.seed for job in jobs("interval", seeds=3)]
    assert seeds == [0] * 12 + [1] * 12 + [2] * 12
    assert {job.folder.name for job in jobs("interval", seeds=2)} == {"seed-0", "seed-1"}


def test_some_methods_alone_can_be_run():
    chosen = jobs("cifar", methods=("fedlalr", "fedavg"))
    assert {job.config.algorithm.name for job in chosen} == {"fedlalr", "fedavg"}


def test_notes_tell_the_size_of_the_problem_and_what_becomes_of_statistics():
    notes = " ".join(plans.cifar(PAPER).notes)
    assert notes.startswith("The paper's setting; where it is silent, our choices.")
    assert "say little about the paper's setting" in " ".join(SMOKE.verdict_scope)
    assert PAPER.verdict_scope == ["The paper's setting; where it is silent, our choices."]
    assert "stand in" not in " ".join(SMOKE.verdict_scope)
    assert "Digits stand in for CIFAR-100, not" in " ".join(Request("smoke", EVERYTHING - {"cifar100"}).verdict_scope)
    assert plans.cifar(SMOKE).notes[0] == "Small runs, not the paper's setting."
    assert (
        plans.cifar(Request("paper", EVERYTHING, ("device=cuda", "engine=stacked"))).notes[0]
        == "The paper's setting; where it is silent, our choices."
    )
    assert "CIFAR-10: 50 of 100 clients per round, 100 rounds, 5 local epochs, batches of 50" in notes
    assert "BatchNorm statistics averaged" in notes
    assert "held out" not in notes
    assert "tested on 2 % of the training images, held out" in " ".join(plans.cifar(SMOKE).notes)
    assert "local" not in " ".join(plans.interval(PAPER).notes)
    assert "tested" not in " ".join(plans.trajectory(SMOKE).notes)


def test_statistics_of_batchnorm_are_told_where_there_is_batchnorm_and_one_round_is_no_rounds():
    notes = " ".join(plans.cifar(Request("paper", EVERYTHING, ("model.norm=group", "rounds=1"))).notes)
    assert "BatchNorm" not in notes
    assert "per round, 1 round, 5 local epochs" in notes


@pytest.mark.parametrize("text", ["lr=0.03,betas=[0.8,0.98]", "lr=0.03,betas=[0.8, 0.98],", "betas=[0.8,0.98],lr=0.03"])
def test_a_list_may_be_among_the_settings_beside(text):
    plan = plans.cifar(Request("paper", EVERYTHING, beside=check_beside([f"fedadam:{text}"], ["cifar"])))
    options = plan.panels[0].lines[6].config.algorithm.options
    assert (options["lr"], list(options["betas"])) == (0.03, [0.8, 0.98])


def test_a_method_with_other_settings_is_run_beside_the_one_as_printed():
    tuned = Beside("fedadam", (("server_lr", 0.1), ("lr", 0.03)))
    panel = plans.cifar(Request("paper", EVERYTHING, beside=(tuned,))).panels[0]
    assert panel.compares
    assert [line.key for line in panel.lines] == [*PAPER_METHODS, "fedadam+server_lr=0.1,lr=0.03"]
    printed, beside = panel.lines[2].config.algorithm.options, panel.lines[6].config.algorithm.options
    assert (printed["server_lr"], printed["lr"]) == (1.0, 0.1)
    assert beside == {**printed, "server_lr": 0.1, "lr": 0.03}
    assert panel.lines[6].label == "FedAdam, server_lr 0.1, lr 0.03"
    assert plans.interval(Request("paper", EVERYTHING, beside=(tuned,))) == plans.interval(PAPER)


@pytest.mark.parametrize(
    ("local", "told"),
    [
        (("local={start: 3, base: 4}",), "3 + ⌊log_4 t⌋ local steps"),
        (("local={start: 3, base: 4, unit: epochs}",), "3 + ⌊log_4 t⌋ local epochs"),
        (("local={steps: 1}",), "1 local step"),
    ],
)
def test_the_length_of_a_round_is_told_in_words(local, told):
    setting = find_setting("cifar10", "paper", ["cifar10"], local)
    assert f", {told}, " in described([setting])[0]


def test_a_figure_of_an_unknown_number_of_clients_is_refused():
    setting = find_setting("cifar10", "paper", ["cifar10"], ["partition.clients=null"])
    with pytest.raises(ConfigError, match=r"partition.clients: .*; give a number"):
        described([setting])
