"""Each attack does harm without a defence, and a defence stops it."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr import reductions
from fedlalr.training.engines.registry import ENGINES


@pytest.fixture(scope="module")
def attacked(attacks):
    """How a run under an attack ends, with a defence that is named; each is run once."""
    defences = {each.name: each for each in attacks.DEFENCES}

    @cache
    def run(attack, share, defence, cohort):
        settings = ["rounds=12", f"clients_per_round={cohort}"]
        return attacks.run(attacks.ATTACKS[attack], share, defences[defence], settings)

    return run


@pytest.mark.parametrize(
    ("attack", "share", "defence", "cohort"),
    [
        ("v̂ inflation", 0.3, "bound 5", 10),
        ("v̂ inflation", 0.3, "bounded", 10),
        ("v̂ deflation", 0.3, "default", 10),
        ("m reversed", 0.1, "median", 10),
        ("x sign flip", 0.3, "median", 20),
        ("x reversed", 0.1, "bounded", 10),
    ],
)
def test_a_defence_saves_what_an_attack_destroys(attack, share, defence, cohort, attacked):
    harmed, saved = (attacked(attack, share, name, cohort) for name in ("none", defence))
    assert saved.accuracy > (harmed.accuracy or 0) + 0.2
    assert saved.accuracy > 0.6


def test_attackers_who_know_the_cohorts_ruin_a_run_in_one_round_and_others_do_not(attacks):
    """A secret draw hides from them when they are the majority. The defence is the median on every slot."""
    median = next(each for each in attacks.DEFENCES if each.name == "median")
    known, secret = (
        attacks.run(attacks.reverse_x, 0.3, median, ["rounds=12"], timing).accuracy
        for timing in ("cohorts known", "cohorts secret")
    )
    assert known < 0.3
    assert secret > 0.6


def test_the_attackers_are_those_that_are_named(attacks):
    model, clients = make_model(), make_clients()

    def engine(training):
        return attacks.AttackedEngine(ENGINES["reference"](training), attacks.reverse_x, torch.tensor([1, 3]))

    result = fl.run(
        model, clients, fl.FedLALR(), rounds=1, local=fl.Steps(3), engine=engine, max_norm_ratio=5.0, batch_size=4
    )
    assert result.history[0].clipped == (1, 3)
    assert result.info.engine == "attacked reference"


def test_an_undetected_fall_of_v_hat_is_possible_only_without_the_rule(attacks):
    defences = {each.name: each for each in attacks.DEFENCES}
    assert attacks.run(attacks.deflate, 0.3, defences["none"], ["rounds=2"]).rejected == 0
    assert attacks.run(attacks.deflate, 0.3, defences["default"], ["rounds=2"]).rejected > 0


@pytest.mark.parametrize(
    ("how", "least", "most"),
    [
        ("max", 300, 1000),
        ("mean", 100, 300),
        ("median", 0.5, 2),
        (reductions.Trimmed(0.2), 0.5, 2),
        (reductions.Bounded(1.0), 0.5, 2),
    ],
    ids=str,
)
def test_one_client_alone_raises_v_hat_for_all_unless_the_reduction_is_robust(how, least, most, attacks):
    """With the maximum by everything it sends; with the mean by its share."""

    def engine(training):
        return attacks.AttackedEngine(ENGINES["reference"](training), attacks.inflate, torch.tensor([2]))

    def v_hat(engine):
        result = fl.run(
            make_model(), make_clients(), fl.FedLALR(), rounds=1, local=fl.Steps(3), batch_size=4, engine=engine,
            reduce={"v_hat": how}, max_norm_ratio=None,
        )  # fmt: skip
        return torch.cat([value.reshape(-1) for value in result.state["v_hat"].values()])

    factor = v_hat(engine).norm() / v_hat("reference").norm()
    assert factor > least
    assert factor < most
