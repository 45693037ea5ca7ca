"""Learning-rate schedules: their values, their checks, and what they mean for a run and its resumption."""

import math
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr.config import load
from fedlalr.config.build import build_algorithm, build_options
from fedlalr.config.run_dir import RunDirectory
from fedlalr.federation.schedules import LEAST_MULTIPLIER, SCHEDULES, check_schedule, rates
from fedlalr.federation.storage.journal import RunDirectoryError

SETTINGS = {"local": fl.Steps(2), "batch_size": 4, "engine": "reference", "device": "cpu"}
RESULTS = Path(__file__).parents[2] / "docs" / "results"
FALLING = st.sampled_from([fl.schedules.Cosine, fl.schedules.Linear])


def rates_of(schedule, rounds, **options):
    result = fl.run(
        make_model(), make_clients(), fl.FedAvg(0.5), rounds=rounds, schedule=schedule, **SETTINGS, **options
    )
    return [record.lr for record in result.history]


@settings(deadline=None)
@given(FALLING, st.integers(0, 50), st.integers(1, 200), st.floats(0, 0.99))
def test_warm_up_rises_to_one_and_the_rest_falls_to_the_final_value(kind, warmup, longer, final):
    schedule, rounds = kind(warmup, final), warmup + longer
    values = [schedule(t, rounds) for t in range(1, rounds + 1)]
    rise, fall = values[:warmup], values[warmup:]
    assert rise == [t / (warmup + 1) for t in range(1, warmup + 1)]
    assert fall[0] == 1
    assert all(later <= earlier for earlier, later in pairwise(fall))
    assert all(final <= value <= 1 for value in fall)
    if longer > 1:
        assert fall[-1] == pytest.approx(final, abs=1e-15)


def test_half_of_a_cosine_is_half_of_the_way_down():
    assert fl.schedules.Cosine(final=0.2)(6, 11) == pytest.approx(0.6)
    assert fl.schedules.Cosine(final=0.0)(2, 5) == pytest.approx((1 + math.sqrt(0.5)) / 2)
    assert fl.schedules.Linear(final=0.2)(6, 11) == pytest.approx(0.6)


@settings(deadline=None)
@given(st.floats(1e-3, 1), st.integers(1, 9), st.integers(1, 500), st.floats(1e-6, 10))
def test_exponential_decay_has_the_bits_of_a_power(factor, every, t, lr):
    """Published runs were computed with this expression."""
    decayed = rates(fl.schedules.Exponential(factor, every), lr, rounds=1000)(t)
    assert decayed == lr * max(factor ** ((t - 1) // every), LEAST_MULTIPLIER)


@given(st.floats(1e-3, 1), st.integers(1, 9), st.integers(0, 20), st.integers(1, 500))
def test_exponential_decay_starts_after_its_warm_up(factor, every, warmup, t):
    schedule, plain = fl.schedules.Exponential(factor, every, warmup), fl.schedules.Exponential(factor, every)
    assert schedule(t) == (t / (warmup + 1) if t <= warmup else plain(t - warmup))


@given(st.integers(0, 20), st.integers(1, 500))
def test_the_constant_schedule_is_constant_after_its_warm_up(warmup, t):
    assert fl.schedules.Constant(warmup)(t) == (t / (warmup + 1) if t <= warmup else 1)


def test_published_runs_have_the_rates_of_their_configurations():
    folders = sorted(file.parent for file in RESULTS.rglob("seed-*/config.yaml"))[::20]
    assert len(folders) > 5
    for folder in folders:
        directory = RunDirectory(folder)
        config, records = directory.config(), directory.records()
        rate = rates(build_options(config)["schedule"], build_algorithm(config).lr, config.rounds)
        assert [record.lr for record in records] == [rate(record.round) for record in records]


def test_a_run_records_the_rate_of_every_round():
    assert rates_of(fl.schedules.Constant(), 3) == [0.5, 0.5, 0.5]
    assert rates_of(fl.schedules.Linear(warmup=1, final=0.2), 3) == [0.25, 0.5, 0.1]
    assert rates_of(lambda round: 1 / round, 3) == [0.5, 0.25, 0.5 / 3]
    assert rates_of(lambda round, rounds: round / rounds, 2) == [0.25, 0.5]
    assert rates_of(lambda round: round - 1, 2) == [0.5 * LEAST_MULTIPLIER, 0.5]


@pytest.mark.parametrize("schedule", [fl.schedules.Cosine, 0.9, lambda a, b, c: 1.0, "cosine"])
def test_what_is_no_schedule_is_rejected(schedule):
    with pytest.raises(
        TypeError, match=r"schedule (is the class Cosine; pass an instance|must be one of fl\.schedules)"
    ):
        check_schedule(schedule)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fl.schedules.Exponential(0.0), r"Exponential's factor must lie in \(0, 1\], not 0\.0"),
        (lambda: fl.schedules.Exponential(0.9, every=0), "Exponential's every must be a whole number of at least 1"),
        (lambda: fl.schedules.Constant(warmup=0.5), "Constant's warmup must be a whole number of at least 0, not 0.5"),
        (lambda: fl.schedules.Cosine(warmup=-1), "Cosine's warmup must be a whole number of at least 0, not -1"),
        (lambda: fl.schedules.Linear(final=1.5), r"Linear's final must lie in \[0, 1\), not 1\.5"),
        (lambda: fl.schedules.create("cosin"), "there is no schedule 'cosin'; .* Did you mean 'cosine'"),
        (lambda: fl.schedules.create("constant", factor=2), "constant has no option 'factor'; it takes warmup"),
    ],
)
def test_options_of_schedules_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_schedule_that_later_becomes_invalid_is_rejected_before_the_first_round(tmp_path):
    with pytest.raises(ValueError, match="the schedule returned -1 in round 12, and the learning rate would be"):
        rates_of(lambda round: 11 - round, 20, run_dir=tmp_path)
    assert not any(tmp_path.iterdir())


def test_an_interrupted_run_resumes_with_the_same_rates_and_bits(tmp_path):
    class Interrupt(fl.Observer):
        def on_round(self, record):
            if record.round == 2:
                raise KeyboardInterrupt

    settings = {**SETTINGS, "rounds": 4, "schedule": fl.schedules.Cosine(warmup=1)}
    whole = fl.run(make_model(), make_clients(), fl.FedLALR(), **settings)
    with pytest.raises(KeyboardInterrupt):
        fl.run(make_model(), make_clients(), fl.FedLALR(), **settings, run_dir=tmp_path, observers=[Interrupt()])
    again = fl.run(make_model(), make_clients(), fl.FedLALR(), **settings, run_dir=tmp_path, resume=True)
    assert [record.lr for record in again.history] == [record.lr for record in whole.history]
    assert again.history[-1].loss == whole.history[-1].loss


def test_a_run_whose_schedule_depends_on_its_length_cannot_be_extended(tmp_path):
    rates_of(fl.schedules.Cosine(), 2, run_dir=tmp_path / "cosine")
    with pytest.raises(RunDirectoryError, match="rounds was 2 and is now 3, on which its schedule or"):
        rates_of(fl.schedules.Cosine(), 3, run_dir=tmp_path / "cosine", resume=True)
    rates_of(fl.schedules.Exponential(0.5), 2, run_dir=tmp_path / "power")
    assert rates_of(fl.schedules.Exponential(0.5), 3, run_dir=tmp_path / "power", resume=True) == [0.5, 0.25, 0.125]


@pytest.mark.parametrize("kind", [fl.schedules.Constant, fl.schedules.Exponential])
def test_a_warm_up_that_takes_the_whole_run_gets_a_warning(kind):
    with pytest.warns(
        UserWarning, match=rf"{kind.__name__}'s warmup takes 2 rounds, but the run has only 2, so"
    ) as told:
        rates_of(kind(warmup=2), 2)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rates_of(kind(warmup=1), 2)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_configuration_names_a_schedule_and_completes_it(name):
    loaded = load("quickstart", [f"schedule={name}"])
    assert loaded.model_dump()["schedule"] == {"name": name, **fl.schedules.options(name)}
    assert fl.schedules.create(name, **loaded.schedule.options) == SCHEDULES[name]()
