"""The default defences do not shut out honest clients, cover buffers, and stop a single attacker."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr import reductions
from fedlalr.algorithms.slots import Slots, SlotTable
from fedlalr.federation.replies.reductions import SHARE
from fedlalr.federation.replies.screening import MAX_NORM_RATIO, screen
from fedlalr.training.engines.reference import ReferenceEngine
from fedlalr.training.engines.registry import ENGINES
from fedlalr.training.interfaces import Replies


@pytest.fixture(scope="module")
def defences(attacks):
    return {each.name: each for each in attacks.DEFENCES}


def test_clients_with_a_rare_class_are_heard_after_the_majority_has_converged(attacks, defences):
    """Three honest clients of a hundred: their changes are hundreds of times as long as the median."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", fl.RepliesRejected)
        rare, others, result = attacks.run_rare(defences["default"], fl.FedLALR(lr=0.1), rounds=40)
    assert rare == 1.0
    assert others == 1.0
    clipped = {client for record in result.history for client in record.clipped}
    assert clipped >= set(range(attacks.RARE))  # it is the share of the broadcast that lets them through


class Constant(nn.Module):
    """Predicts one number: the mean of all clients' targets is best."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs):
        return inputs * self.w


@pytest.mark.parametrize("options", [{}, {"engine": "reference"}, {"compression": "balanced"}], ids=repr)
def test_control_variates_that_were_clipped_still_lead_to_the_optimum(options):
    """The change of an outlier's c_i is clipped in the first rounds, after which c is still the mean of all c_i."""
    ones = torch.ones(1, 1, dtype=torch.float64)
    clients = [(ones, target * ones) for target in (0.0, 1.0, -1.0, 100.0)]
    options = {"rounds": 250, "batch_size": None, "local": fl.Steps(2), "loss": nn.functional.mse_loss, **options}
    result = fl.run(Constant(), clients, fl.SCAFFOLD(lr=0.05), **options)
    assert result.history[0].clipped == (3,)
    assert result.model.w.item() == pytest.approx(25.0, abs=1e-9 if "compression" not in options else 0.1)


def test_an_ordinary_run_keeps_its_bits():
    common = {"rounds": 3, "local": fl.Steps(3), "batch_size": 4, "engine": "reference"}
    screened, plain = (
        fl.run(make_model(), make_clients(), fl.FedLALR(), **common, **options).state
        for options in ({}, {"max_norm_ratio": None})
    )
    for slot, values in screened.items():
        assert all(torch.equal(value, plain[slot][name]) for name, value in values.items())


FIFTY = ["rounds=12", "partition.clients=50", "clients_per_round=50"]


@pytest.fixture(scope="module")
def honest(attacks, defences):
    return attacks.run(None, 0.0, defences["default"], FIFTY).accuracy


@pytest.mark.parametrize(
    "attack", ["x reversed", pytest.param("m reversed", marks=pytest.mark.slow), "v̂ inflation", "buffers"]
)
def test_one_attacker_of_fifty_is_stopped_by_default(attack, attacks, defences, honest):
    attacked = attacks.run(attacks.ATTACKS[attack], 0.02, defences["default"], FIFTY).accuracy
    assert attacked > honest - 0.05


def test_one_attacker_of_fifty_is_stopped_by_default_when_statistics_are_recalibrated(attacks, defences):
    overrides = ["rounds=12", "partition.clients=50", "clients_per_round=50", "buffers=recalibrate"]
    honest, attacked = (
        attacks.run(attack, 0.02, defences["default"], overrides).accuracy for attack in (None, attacks.shift_buffers)
    )
    assert attacked > honest - 0.05


def with_recalibrated_statistics(change, **options) -> fl.Result:
    """A run in which `change` is applied to the statistics that client 2 of ten measures with the new model."""

    class Changed(ReferenceEngine):
        def recalibrate(self, *arguments):
            found = super().recalibrate(*arguments)
            for name in ("1.running_mean", "1.running_var"):
                found[name][2] = change(found[name][2])
            return found

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    return fl.run(
        model, make_clients(sizes=(9,) * 10), fl.FedLALR(), rounds=2, local=fl.Steps(3), batch_size=None,
        engine=Changed, buffers="recalibrate", **options,
    )  # fmt: skip


def test_recalibrated_statistics_are_clipped_like_buffers_that_are_averaged():
    def statistics(result: fl.Result) -> torch.Tensor:
        return torch.cat([result.model[1].running_mean, result.model[1].running_var])

    honest = with_recalibrated_statistics(lambda values: values)
    attacked = with_recalibrated_statistics(lambda values: values + 1e6)
    assert [record.clipped for record in honest.history] == [(), ()]
    assert [record.clipped for record in attacked.history] == [(2,), (2,)]
    assert (statistics(attacked) - statistics(honest)).norm() < statistics(honest).norm()
    unbounded = with_recalibrated_statistics(lambda values: values, max_norm_ratio=None)
    assert torch.equal(statistics(honest), statistics(unbounded))


@pytest.mark.parametrize(("value", "reason"), [(torch.nan, "mean is not finite"), (-1e3, "var is below zero")])
def test_a_client_with_impossible_statistics_is_left_out_and_named(value, reason, capsys):
    result = with_recalibrated_statistics(lambda values: torch.full_like(values, value), debug=True)
    assert "client 2, round 1: recalibrated " in capsys.readouterr().err
    for record in result.history:
        [(client, given)] = record.rejected
        assert client == 2
        assert given.startswith("recalibrated ")
        assert given.endswith(reason)
    assert result.model[1].running_mean.isfinite().all()


def test_a_module_whose_buffers_are_integers_can_be_recalibrated():
    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(4, 3, dtype=torch.float64)
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, inputs):
            self.calls += self.training
            return super().forward(inputs)

    options = {"local": fl.Steps(3), "batch_size": None, "engine": "reference", "buffers": "recalibrate"}
    result = fl.run(Counting(), make_clients(), fl.FedLALR(), rounds=1, **options)
    assert result.model.calls == 4
    assert result.history[0].rejected == ()


@pytest.mark.parametrize("how", [reductions.Median(), reductions.Trimmed(0.2), reductions.Bounded(1.0)], ids=repr)
def test_a_robust_reduction_of_x_covers_the_buffers(how, attacks):
    """One of ten clients sends statistics that are far off. There is no bound, so only the reduction protects."""

    def statistics(engine, how):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
        result = fl.run(
            model, make_clients(sizes=(9,) * 10), fl.FedLALR(), rounds=2, local=fl.Steps(3), batch_size=None,
            engine=engine, reduce={"x": how, "m": how, "v_hat": how}, max_norm_ratio=None,
        )  # fmt: skip
        buffers = result.model[1]
        return torch.cat([buffers.running_mean, buffers.running_var])

    def attacked(training):
        return attacks.AttackedEngine(ENGINES["reference"](training), attacks.shift_buffers, torch.tensor([2]))

    honest = statistics("reference", how)
    assert (statistics(attacked, how) - honest).norm() < honest.norm()
    assert (statistics(attacked, reductions.Mean()) - honest).norm() > 10 * honest.norm()


def cohort(count: int = 5, size: int = 8) -> tuple[Replies, Slots, SlotTable]:
    generator = torch.Generator().manual_seed(0)
    broadcast = Slots(x=torch.randn(size, generator=generator))
    ids = torch.arange(count)
    uploads = Slots(x=broadcast.x + torch.randn(count, size, generator=generator))
    table = SlotTable(down=("x",), up={"x": "mean"})
    return Replies(ids, ids + 1, ids + 1, torch.ones(count), uploads, {}, Slots()), broadcast, table


@pytest.mark.parametrize("value", [1e30, 1.0, -1e-3])
def test_a_buffer_that_honest_clients_do_not_change_stays_as_it_is(value):
    replies, broadcast, table = cohort()
    before = {"places": torch.arange(4.0), "statistics": torch.zeros(3), "mask": torch.tensor([0.0, -torch.inf])}
    moved = torch.arange(15.0).view(5, 3) + 1
    buffers = {"places": before["places"].repeat(5, 1), "statistics": moved, "mask": before["mask"].repeat(5, 1)}
    buffers["places"][2, 1] += value
    buffers["mask"][2, 0] += value
    screened = screen(replace(replies, buffers=buffers), broadcast, table, buffers=before)
    assert screened.clipped == (2,)
    assert screened.rejected == ()
    for name in ("places", "mask"):
        assert torch.equal(screened.accepted.buffers[name], before[name].repeat(5, 1))
    assert torch.equal(screened.accepted.buffers["statistics"], moved)


def test_a_complex_buffer_is_clipped_like_any_other():
    replies, broadcast, table = cohort()
    turns = torch.ones(5, 2, dtype=torch.complex64)
    turns[4] = 1e6j
    screened = screen(replace(replies, buffers={"turns": turns}), broadcast, table, buffers={"turns": 0 * turns[0]})
    assert screened.clipped == (4,)
    expected = torch.full((2,), MAX_NORM_RATIO * 1j, dtype=torch.complex64)
    torch.testing.assert_close(screened.accepted.buffers["turns"][4], expected)
    assert torch.equal(screened.accepted.buffers["turns"][:4], turns[:4])


def test_a_slot_that_is_not_broadcast_is_compared_with_x():
    """A change of x that is sent as a change, when most clients have nothing more to learn."""
    replies, broadcast, _ = cohort()
    table = SlotTable(down=("x",), up={"delta": "mean"})
    delta = torch.zeros(5, 8)
    delta[0, 0] = 1000.0
    screened = screen(replace(replies, slots=Slots(delta=delta)), broadcast, table)
    assert screened.clipped == (0,)
    allowed = MAX_NORM_RATIO * SHARE * broadcast.x.norm()
    torch.testing.assert_close(screened.accepted.slots.delta[0].norm(), allowed)


def test_replies_are_clipped_by_what_the_accepted_ones_say():
    """Rejected replies do not count in the median."""
    replies, broadcast, table = cohort(count=5)
    x = replies.slots.x.clone()
    x[:2] = torch.nan
    x[2] = broadcast.x + 1e9
    screened = screen(replace(replies, slots=Slots(x=x)), broadcast, table)
    assert [rejection.client for rejection in screened.rejected] == [0, 1]
    assert screened.clipped == (2,)
    assert screened.accepted.clients.tolist() == [2, 3, 4]
    assert torch.equal(screened.accepted.slots.x[1:], x[3:])


def test_a_client_that_is_rejected_in_several_rounds_running_is_named(tmp_path):
    from fedlalr.report.groups import group_runs
    from fedlalr.report.runs import read_run
    from fedlalr.report.sections import rejections_table

    clients = make_clients()
    clients[2] = (torch.full_like(clients[2][0], torch.nan), clients[2][1])
    common = {"local": fl.Steps(2), "batch_size": 4, "engine": "reference"}
    with pytest.warns(fl.RepliesRejected) as told:
        result = fl.run(make_model(), clients, fl.FedLALR(), rounds=5, run_dir=tmp_path, **common)
    named = [
        str(warning.message)
        for warning in told
        if "client 2 has been rejected in each of its last 3" in str(warning.message)
    ]
    assert len(named) == 1
    assert [record.repeatedly for record in result.history] == [(), (), (2,), (2,), (2,)]
    table = rejections_table(group_runs([read_run(tmp_path)]))
    assert table is not None
    assert any("3 or more of their rounds running" in note and "client 2 " in note for note in table.notes)


def test_a_client_that_is_accepted_in_between_is_not_named():
    from fedlalr.federation.replies.screening import Rejection, Streaks

    streaks, bad = Streaks(), [Rejection(1, "x is not finite")]
    assert [streaks.update([0, 1], bad) for _ in range(2)] == [(), ()]
    assert streaks.update([0, 2], []) == ()  # it was not drawn
    assert streaks.update([0, 1], []) == ()
    assert [streaks.update([1, 2], bad) for _ in range(3)] == [(), (), (1,)]
