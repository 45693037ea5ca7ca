"""Private runs: what is allowed, what they compute, what they spend."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedlalr as fl
from conftest import make_clients, make_model
from federation.privacy.test_mechanism import METHODS, units_of, with_statistics
from fedlalr.cli.run import outcome
from fedlalr.config import RunDirectory, execute, load
from fedlalr.config.build import build_options
from fedlalr.federation.privacy.accounting import epsilon
from fedlalr.federation.privacy.mechanism import BudgetSpent, Mechanism, seeded_noise
from fedlalr.federation.privacy.second_moment import LEAST, derived, scales
from fedlalr.federation.sampling import poisson
from fedlalr.training.engines.reference import ReferenceEngine
from fedlalr.training.layout import Layout

CPU = torch.device("cpu")
BEST = fl.FedLALR(lr=0.05, betas=(0.9, 0.9), eps=0.01, momentum="restart")


def run(algorithm: fl.Algorithm, privacy: Any, **options: Any) -> fl.Result:
    given = {"rounds": 3, "local": fl.Steps(3), "batch_size": 4, "device": "cpu", "engine": "reference"} | options
    return fl.run(make_model(), make_clients(), algorithm, privacy=privacy, **given)


def flat(result: fl.Result, slot: str = "x") -> torch.Tensor:
    return torch.cat([value.flatten() for value in result.state[slot].values()])


@pytest.mark.parametrize("name", METHODS)
def test_with_hardly_any_noise_and_a_long_clip_a_run_is_the_plain_one(name):
    """Every client takes part, so only the order of roundings differs."""
    method = METHODS[name]
    private = run(method, fl.Privacy(clip=1e6, noise_multiplier=1e-25, units=units_of(method)))
    plain = run(method, None)
    for slot in plain.state:
        torch.testing.assert_close(flat(private, slot), flat(plain, slot), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"clip": 0.0, "noise_multiplier": 1.0}, "clip must be a finite number above 0"),
        ({"clip": 1.0}, "either noise_multiplier or epsilon, but neither is given"),
        ({"clip": 1.0, "noise_multiplier": 1.0, "epsilon": 1.0}, "but both are given"),
        ({"clip": 1.0, "epsilon": 1.0}, "privacy with epsilon needs delta"),
        ({"clip": 1.0, "noise_multiplier": -1.0}, "noise_multiplier must be a finite number above 0"),
        ({"clip": 1.0, "noise_multiplier": 1.0, "delta": 1.0}, "delta must lie between 0 and 1"),
        ({"clip": 1.0, "noise_multiplier": 1.0, "units": 3}, "units must be a dict"),
        ({"clip": 1.0, "noise_multiplier": 1.0, "units": {"x": 0}}, "the unit of x must be a finite number above 0"),
        ({"clip": 1.0, "noise_multiplier": 1.0, "second_moment": "node"}, "second_moment must be one of"),
        ({"clip": 1.0, "noise_multiplier": 1.0, "scaled": 1}, "scaled must be True or False"),
        ({"clip": 1.0, "noise": 1.0}, "privacy has no option 'noise'; it takes clip"),
        ({"noise_multiplier": 1.0}, "privacy needs clip"),
        (3, r"privacy must be fl.Privacy\(…\), a dict of its arguments, or None, not 3"),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_settings_are_rejected(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        run(fl.FedAvg(), given)


@pytest.mark.parametrize(
    ("algorithm", "given", "options", "message"),
    [
        (fl.FedLALR(), {}, {}, "FedLALR also sends m, which is clipped together with x; give units"),
        (fl.FedAvg(), {"units": {"v": 1.0}}, {}, "units names 'v', but FedAvg sends x"),
        (fl.FedLALR(), {"second_moment": "server"}, {}, "needs a method that broadcasts x and v_hat alone"),
        (fl.FedNova(), {}, {"local": fl.Epochs(1)}, "FedNova needs the number of local steps on the server"),
        (fl.FedAvg(), {"scaled": True}, {}, "needs a method whose server has a second moment"),
        (BEST, {"second_moment": "server", "scaled": True}, {}, "scaled=True changes nothing here"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_the_method_is_rejected(algorithm, given, options, message):
    with pytest.raises(ValueError, match=message):
        run(algorithm, fl.Privacy(clip=1.0, noise_multiplier=1.0, **given), **options)


def test_buffers_must_be_local_or_noised():
    privacy = {"clip": 1.0, "noise_multiplier": 1.0}
    given = {"rounds": 2, "batch_size": 4, "device": "cpu"}
    with pytest.raises(ValueError, match=r"buffers, such as 1\.running_mean, which would be sent without noise"):
        fl.run(with_statistics(), make_clients(), fl.FedAvg(), privacy=privacy, **given)
    local = fl.run(with_statistics(), make_clients(), fl.FedAvg(), privacy=privacy, buffers="local", **given)
    noised = fl.run(
        with_statistics(), make_clients(), fl.FedAvg(), privacy=privacy | {"units": {"buffers": 1.0}}, **given
    )
    start = with_statistics().state_dict()["1.running_mean"]
    assert torch.equal(local.model.state_dict()["1.running_mean"], start)
    assert not torch.equal(noised.model.state_dict()["1.running_mean"], start)


def test_clients_take_part_independently_and_an_empty_round_is_valid():
    """Cohorts vary in size around the expected one; in an empty round the server adds noise alone."""
    result = run(fl.FedAvg(lr=0.1), fl.Privacy(clip=1.0, noise_multiplier=1.0), clients_per_round=1, rounds=20)
    sizes = [record.clients for record in result.history]
    assert sizes == [len(poisson(5, 1, 0, t)) for t in range(1, 21)]
    assert 0 in sizes
    assert max(sizes) > 1
    several = [len(poisson(1000, 50, 0, t)) for t in range(1, 201)]
    assert abs(np.mean(several) - 50) < 5 * np.sqrt(50 * 0.95 / 200)
    assert abs(np.var(several) - 50 * 0.95) < 5 * 50 * 0.95 * np.sqrt(2 / 200)


class Empty(ReferenceEngine):
    """Loses every reply."""

    def train(self, work: fl.Work) -> fl.Replies:
        replies = super().train(work)
        return replace(replies.rows(replies.clients[:0]), failures={int(one): "lost" for one in replies.clients})


def test_lost_replies_change_neither_the_divisor_nor_the_noise():
    privacy = fl.Privacy(clip=1.0, noise_multiplier=0.3)
    result = run(fl.FedAvg(), privacy, rounds=1, engine=Empty)
    start = torch.cat([p.detach().flatten() for p in make_model().parameters()])
    noise = seeded_noise(0, 1)("x", len(start), CPU)
    torch.testing.assert_close(flat(result), start + 0.3 * noise / 5, rtol=1e-12, atol=1e-14)
    assert result.history[0].clients == 0


def test_the_update_gets_the_public_number_of_steps():
    """FedNova multiplies by the mean of K, which is 3 even if no reply says so."""
    result = run(fl.FedNova(), fl.Privacy(clip=1.0, noise_multiplier=0.3), rounds=1, engine=Empty)
    start = torch.cat([p.detach().flatten() for p in make_model().parameters()])
    noise = seeded_noise(0, 1)("direction", len(start), CPU)
    torch.testing.assert_close(flat(result), start + 3 * 0.3 * noise / 5, rtol=1e-12, atol=1e-14)


class Falling(ReferenceEngine):
    """Client 2 sends a v̂ below the broadcast."""

    def train(self, work: fl.Work) -> fl.Replies:
        replies = super().train(work)
        replies.slots.v_hat[replies.clients == 2] = 0.5 * work.broadcast.v_hat
        return replies


def test_a_second_moment_below_its_broadcast_is_not_rejected():
    """Noise may have raised the broadcast. Without privacy no honest client can send it."""
    private = run(BEST, fl.Privacy(clip=1.0, noise_multiplier=1.0, units={"v_hat": 1e-2}), rounds=1, engine=Falling)
    assert private.history[0].rejected == ()
    with pytest.warns(fl.RepliesRejected, match="v_hat fell below the broadcast"):
        run(BEST, None, rounds=1, engine=Falling)


class Broken(ReferenceEngine):
    """Client 2 sends NaN."""

    def train(self, work: fl.Work) -> fl.Replies:
        replies = super().train(work)
        replies.slots.x[replies.clients == 2] = torch.nan
        return replies


def test_a_reply_that_is_not_finite_counts_as_zero():
    privacy = fl.Privacy(clip=1e6, noise_multiplier=1e-25)
    with pytest.warns(fl.RepliesRejected, match="x is not finite"):
        found = run(fl.FedAvg(), privacy, rounds=1, engine=Broken)
    start = torch.cat([p.detach().flatten() for p in make_model().parameters()])
    four = run(fl.FedAvg(), None, rounds=1, sampling=lambda *_: [0, 1, 3, 4], clients_per_round=4)
    torch.testing.assert_close(flat(found) - start, (flat(four) - start) * 4 / 5, rtol=1e-9, atol=1e-12)


def test_a_round_of_dp_fedavg_is_its_formula():
    """x + Σ clip(x_i − x) / n + σ C z / n, from the clients' models, trained one by one."""
    clip, sigma = 0.02, 0.5
    found = run(fl.FedAvg(lr=0.1), fl.Privacy(clip=clip, noise_multiplier=sigma), rounds=1)
    start = torch.cat([p.detach().flatten() for p in make_model().parameters()])
    total = torch.zeros_like(start)
    for client in range(5):
        alone = run(fl.FedAvg(lr=0.1), None, rounds=1, sampling=lambda *_, c=client: [c], clients_per_round=1)
        change = flat(alone) - start
        assert change.norm() > clip
        total += change * clip / change.norm()
    expected = start + (total + sigma * clip * seeded_noise(0, 1)("x", len(start), CPU)) / 5
    torch.testing.assert_close(flat(found), expected, rtol=1e-12, atol=1e-14)


def test_the_server_derives_v_hat_as_in_the_formula():
    """In NumPy, from the states before and after each round: clients send x alone."""
    clip, sigma, rounds = 0.5, 0.4, 4
    privacy = fl.Privacy(clip=clip, noise_multiplier=sigma, second_moment="server")
    results = [run(BEST, privacy, rounds=t) for t in range(1, rounds + 1)]
    sizes = [p.numel() for p in make_model().parameters()]
    x = torch.cat([p.detach().flatten() for p in make_model().parameters()]).numpy()
    v_hat = np.full(len(sizes), 0.01**2)
    for result in results:
        after, tau = flat(result).numpy(), sigma * clip / 5
        power = (after - x) ** 2 - tau**2
        ratio = np.array([part.mean() for part in np.split(power, np.cumsum(sizes)[:-1])]) / power.mean()
        v_hat = np.maximum(0.01**2, 0.9 * v_hat + 0.1 * v_hat * np.clip(ratio, 0, 10))
        np.testing.assert_allclose(flat(result, "v_hat").numpy(), np.repeat(v_hat, sizes), rtol=1e-10)
        x = after
    assert (v_hat > 0.01**2).any()
    sent = [record.bytes_up for record in results[-1].history]
    assert sent == [8 * len(x) * record.clients for record in results[-1].history]


def test_the_derived_v_hat_follows_the_change_under_the_noise():
    """Of four equal parts one moves, under noise of 1.5 times its change: r is 4, or 1.3 with the noise in it."""
    layout = Layout(("a", "b"), (torch.Size([100_000]), torch.Size([300_000])), torch.float64)
    v_hat = torch.full((layout.size,), 4.0, dtype=torch.float64)
    change = 0.03 * seeded_noise(0, 1)("x", layout.size, CPU)
    change[:100_000] += 0.02
    found = derived(v_hat, change, 0.03**2, layout, beta2=0.9, eps=1e-6)
    deviation = 0.03**2 * np.sqrt(2 / 100_000) / 0.01**2  # of the mean of (Δ² − τ²) over a, in units of that over all
    assert abs(float(found[0]) - (0.9 * 4 + 0.1 * 4 * 4)) < 5 * 0.1 * 4 * 4 * deviation
    quiet = derived(v_hat, torch.zeros_like(change), 1.0, layout, beta2=0.9, eps=1e-6)
    torch.testing.assert_close(quiet, v_hat, rtol=1e-15, atol=0)


def test_scales_are_powers_of_the_root_of_the_second_moment():
    v_hat = torch.tensor([1.0, 4.0, 0.0], dtype=torch.float64)
    found = scales(fl.Slots(x=v_hat, v_hat=v_hat), {"x": "mean", "m": "mean", "v_hat": "mean"})
    root = np.maximum(np.sqrt([1.0, 4.0, 0.0]) / np.sqrt(5 / 3), LEAST)
    assert found.keys() == {"m", "v_hat"}
    np.testing.assert_allclose(found["m"], root, rtol=1e-14)
    np.testing.assert_allclose(found["v_hat"], root**2, rtol=1e-14)
    flat_start = torch.full((3,), 1e-16, dtype=torch.float64)
    np.testing.assert_allclose(scales(fl.Slots(v_hat=flat_start), {"m": "mean"})["m"], 1.0, rtol=1e-14)
    nothing = torch.zeros(3, dtype=torch.float64)
    np.testing.assert_allclose(scales(fl.Slots(v=nothing), {"delta": "mean"})["delta"], 1.0, rtol=1e-14)


def test_a_scaled_round_of_fedadam_is_its_formula():
    """Δ is clipped and noised divided by s = √v / √mean(v), and multiplied by s again."""
    method, clip, sigma = fl.FedAdam(lr=0.1, server_lr=0.05, betas=(0.9, 0.5)), 0.05, 0.5
    privacy = fl.Privacy(clip=clip, noise_multiplier=sigma, scaled=True)
    first, second = (run(method, privacy, rounds=t) for t in (1, 2))
    x, m, v = (flat(first, slot) for slot in ("x", "m", "v"))
    s = (v.sqrt() / v.mean().sqrt()).clamp(min=LEAST)
    assert s.std() > 0.01, "the scale is no longer flat in the second round"
    deltas = flat_deltas(method, first)
    scaled = deltas / s
    total = (scaled * (clip / scaled.norm(dim=1, keepdim=True)).clamp(max=1.0)).sum(0)
    delta = s * (total + sigma * clip * seeded_noise(0, 2)("delta", len(x), CPU)) / 5
    m, v = 0.9 * m + 0.1 * delta, 0.5 * v + 0.5 * delta**2
    torch.testing.assert_close(flat(second), x + 0.05 * m / (v.sqrt() + 0.01), rtol=1e-10, atol=1e-13)


def flat_deltas(method: fl.FedAdam, before: fl.Result) -> torch.Tensor:
    """What each client would send in round 2, from runs of plain FedAvg that start with round 1's model."""
    deltas = []
    for client in range(5):
        chosen = {"sampling": lambda *_, c=client: [c], "clients_per_round": 1, "rounds": 2, "local": SecondRound()}
        given = {"batch_size": 4, "device": "cpu", "engine": "reference"} | chosen
        alone = fl.run(before.model, make_clients(), fl.FedAvg(lr=method.lr), **given)
        deltas.append(flat(alone) - flat(before))
    return torch.stack(deltas)


class SecondRound:
    """No local step in round 1, three in round 2: with the batches of round 2."""

    def steps(self, round: int, batches_per_pass: torch.Tensor) -> torch.Tensor:
        return torch.full_like(batches_per_pass, 3 if round == 2 else 0)


def test_a_scaled_second_moment_keeps_the_ratios_of_small_numbers():
    """Noise on v̂ is proportional to v̂: after a round it hits small and large coordinates alike."""
    method = fl.FedLALR(lr=0.02, eps=0.05)
    units = {"m": 0.1, "v_hat": 1e-3}
    scaled = run(method, fl.Privacy(clip=0.5, noise_multiplier=0.2, units=units, scaled=True))
    plain = run(method, fl.Privacy(clip=0.5, noise_multiplier=0.2, units=units))
    assert (flat(scaled, "v_hat") >= 0.05**2).all()
    assert not torch.equal(flat(scaled, "v_hat"), flat(plain, "v_hat"))


def test_v_hat_may_fall_but_not_below_its_start():
    method = fl.FedLALR(lr=0.02, eps=0.01)
    privacy = fl.Privacy(clip=1.0, noise_multiplier=1.0, units={"m": 0.1, "v_hat": 0.01})
    first, second = (flat(run(method, privacy, rounds=t), "v_hat") for t in (1, 2))
    assert (second >= 1e-4).all()
    assert (second < first).any(), "a floor at the broadcast would turn noise into growth"


def test_epsilon_is_recorded_in_every_round():
    result = run(fl.FedAvg(), fl.Privacy(clip=1.0, noise_multiplier=1.3, delta=1e-3), clients_per_round=2)
    assert [record.epsilon for record in result.history] == [epsilon(1.3, 2 / 5, t, 1e-3) for t in (1, 2, 3)]
    assert "epsilon" in repr(result)
    assert result.history[-1].numbers()["epsilon"] == result.history[-1].epsilon
    assert fl.Record.from_json(result.history[-1].to_json()) == result.history[-1]
    assert run(fl.FedAvg(), fl.Privacy(clip=1.0, noise_multiplier=1.3)).history[-1].epsilon is None


def test_a_budget_is_kept_and_more_rounds_than_it_was_computed_for_are_rejected(tmp_path):
    privacy = {"clip": 1.0, "epsilon": 3.0, "delta": 1e-3}
    whole = run(fl.FedAvg(), privacy, rounds=4, clients_per_round=2)
    assert 2.9 < whole.history[-1].epsilon <= 3.0
    run(fl.FedAvg(), privacy, rounds=4, clients_per_round=2, run_dir=tmp_path, observers=[StopAfter(2)])
    with pytest.raises(fl.RunDirectoryError, match="rounds was 4 and is now 5"):
        run(fl.FedAvg(), privacy, rounds=5, clients_per_round=2, run_dir=tmp_path, resume=True)
    resumed = run(fl.FedAvg(), privacy, rounds=4, clients_per_round=2, run_dir=tmp_path, resume=True)
    assert [record.epsilon for record in resumed.history] == [record.epsilon for record in whole.history]
    assert torch.equal(flat(resumed), flat(whole))
    with pytest.raises(fl.RunDirectoryError, match="privacy"):
        run(fl.FedAvg(), privacy | {"clip": 2.0}, rounds=4, clients_per_round=2, run_dir=tmp_path, resume=True)


class StopAfter(fl.Observer):
    def __init__(self, round: int) -> None:
        self.last = round

    def on_round(self, record: fl.Record) -> None:
        if record.round == self.last:
            raise fl.Stop


def test_a_mechanism_stops_before_its_budget_is_exceeded():
    mechanism = Mechanism.of(fl.Privacy(clip=1.0, epsilon=3.0, delta=1e-3), cohort=2, population=5, rounds=4)
    assert mechanism.spend(4) <= 3.0
    with pytest.raises(BudgetSpent, match="round 5 would spend more than epsilon=3"):
        mechanism.spend(5)


def test_an_observer_cannot_choose_clients():
    with pytest.raises(ValueError, match=r"requires the clients \[1\] in round 1, but with privacy"):
        run(fl.FedAvg(), fl.Privacy(clip=1.0, noise_multiplier=1.0), observers=[Includes()])


class Includes(fl.Observer):
    def include(self, round: int) -> list[int]:
        return [1]


def test_the_stacked_engine_gives_the_same_private_run():
    """Also in rounds without clients, which keep personal parameters."""
    privacy = fl.Privacy(clip=0.1, noise_multiplier=0.5, units={"m": 0.1, "v_hat": 1e-2})
    method = fl.FedLALR(lr=0.02, eps=0.05)
    options = {"clients_per_round": 1, "rounds": 4, "personal": "2.*"}
    found, wanted = (run(method, privacy, engine=each, **options) for each in ("stacked", "reference"))
    torch.testing.assert_close(flat(found), flat(wanted), rtol=1e-9, atol=1e-12)
    assert [record.clients for record in found.history] == [record.clients for record in wanted.history]
    assert 0 in [record.clients for record in found.history]


def test_a_configuration_has_privacy_as_a_mapping():
    config = load("quickstart", ["privacy.clip=0.5", "privacy.noise_multiplier=1.1", "privacy.units.x=2.0"])
    assert build_options(config)["privacy"] == {"clip": 0.5, "noise_multiplier": 1.1, "units": {"x": 2.0}}


def test_a_configured_run_tells_what_it_spent(tmp_path):
    chosen = ["algorithm=fedavg", "rounds=1", "partition.clients=12", "clients_per_round=4", "local.steps=1"]
    config = load("quickstart", [*chosen, "privacy={clip: 1.0, noise_multiplier: 1.0, delta: 1e-3}"])
    execute(config, tmp_path / "run")
    directory = RunDirectory(tmp_path / "run")
    summary = directory.summary()
    assert summary["epsilon"] == epsilon(1.0, 4 / 12, 1, 1e-3)
    assert f", epsilon {summary['epsilon']:.3g} after 1 round" in outcome(summary, directory.records())


def test_noise_does_not_depend_on_the_model_but_on_the_seed():
    """Two runs with the same seed add the same noise: repeatable, and no guarantee to those who know the seed."""
    privacy = fl.Privacy(clip=1.0, noise_multiplier=1.0)
    assert torch.equal(flat(run(fl.FedAvg(), privacy)), flat(run(fl.FedAvg(), privacy)))
    assert not torch.equal(flat(run(fl.FedAvg(), privacy)), flat(run(fl.FedAvg(), privacy, seed=1)))


@pytest.mark.parametrize("given", [{"noise_multiplier": 1.0}, {"epsilon": 1.0}])
def test_a_delta_of_one_client_or_more_gets_a_warning_at_the_call(given):
    clients = make_clients()
    delta = 1 / len(clients)
    with pytest.warns(UserWarning, match=rf"delta=\S+ is not below 1 / {len(clients)} clients") as warned:
        fl.run(make_model(), clients, fl.FedAvg(), privacy=fl.Privacy(clip=1.0, delta=delta, **given), rounds=1)
    assert warned[0].filename == __file__


def test_without_a_delta_nothing_is_accounted(monkeypatch):
    """Then dp-accounting is not needed: GPU machines may lack it."""
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    result = fl.run(
        nn.Linear(4, 3).double(), make_clients(), fl.FedAvg(), rounds=1, privacy={"clip": 1.0, "noise_multiplier": 1.0}
    )
    assert result.history[0].epsilon is None


def test_a_virtual_clock_leaves_no_sampled_client_out() -> None:
    privacy = fl.Privacy(clip=1.0, noise_multiplier=1.0, delta=1e-3)
    options = {"clients_per_round": 1, "rounds": 12}
    plain, timed = run(fl.FedAvg(lr=0.1), privacy, **options), run(fl.FedAvg(lr=0.1), privacy, speeds=1.0, **options)
    assert {record.clients for record in timed.history} >= {0, 1, 2}
    assert [record.clients for record in timed.history] == [record.clients for record in plain.history]
    assert torch.equal(flat(timed), flat(plain))
