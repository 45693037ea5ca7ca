"""Asynchronous updates: their arithmetic against NumPy, synchronous rounds as a special case, what they reject."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedlalr as fl
from algorithms.numpy_federation import Network
from closeness import assert_close
from conftest import make_clients, make_model
from fedlalr.federation.storage.checkpoint import read_description
from fedlalr.training.engines.reference import ReferenceEngine

SIZES = (7, 12, 5, 9, 10)
SPEEDS = [1.0, 2.3, 0.4, 1.7, 0.9]
STEPS, LR = 3, 0.05


def numpy_run(method: str, buffer: int, updates: int, weighting: str, exponent: float, threshold: int | None):
    """FedBuff over virtual time, with all clients' data in each local step; nothing of the library but its inputs.

    Everyone may train at once: a free client starts from every version once, after the replies of an instant.
    """
    data = [(inputs.numpy(), targets.numpy()) for inputs, targets in make_clients(SIZES)]
    network = Network(4, 6, 3)
    x = np.concatenate([p.detach().numpy().ravel() for p in make_model().parameters()])
    server = {"x": x, "m": np.zeros_like(x), "v_hat": np.full_like(x, 1e-16)}
    now, version, flying, last, ages = 0.0, 0, [], {}, []
    buffered = []
    while version < updates:
        flying.sort(key=lambda each: each[:3])
        if not flying or flying[0][0] > now:
            for client in range(len(data)):
                if all(client != each[2] for each in flying) and last.get(client) != version:
                    last[client] = version
                    end = train(method, network, server, data[client])
                    flying.append((now + STEPS / SPEEDS[client], version, client, server, end))
            flying.sort(key=lambda each: each[:3])
            now = flying[0][0]
        buffered.append(flying.pop(0))
        if len(buffered) == buffer:
            server = reduce(server, buffered, version, weighting, exponent, threshold)
            ages.append([version - each[1] for each in buffered])
            buffered, version = [], version + 1
    return server, ages, now


def train(method, network, server, batch):
    x, m, v, v_hat = server["x"], server["m"], server["v_hat"], server["v_hat"]
    for _ in range(STEPS):
        g = network.gradient(x, batch)
        if method == "fedavg":
            x = x - LR * g
        else:
            m = 0.9 * m + 0.1 * g
            v = 0.995 * v + 0.005 * g**2
            v_hat = np.maximum(v_hat, v)
            x = x - LR * m / np.sqrt(v_hat)
    return {"x": x, "m": m, "v_hat": v_hat}


def reduce(server, buffered, version, weighting, exponent, threshold):
    counts = [SIZES[client] if weighting == "samples" else 1 for _, _, client, _, _ in buffered]
    after = {name: value.copy() for name, value in server.items()}
    step = np.zeros_like(server["x"])
    for count, (_, started, _, base, end) in zip(counts, buffered, strict=True):
        weight = count / sum(counts) * (1 + version - started) ** -exponent
        step += weight * (end["x"] - base["x"])
        after["m"] += weight * (end["m"] - server["m"])
        after["v_hat"] += weight * np.maximum(end["v_hat"] - server["v_hat"], 0)
    oldest = max(version - started for _, started, *_ in buffered)
    slower = 1 / oldest if threshold is not None and oldest > threshold else 1.0
    return after | {"x": server["x"] + slower * step}


def run(algorithm, rounds, clients=None, **options):
    settings = {"local": fl.Steps(STEPS), "batch_size": None, "max_norm_ratio": None, "engine": "reference"}
    return fl.run(make_model(), clients or make_clients(SIZES), algorithm, rounds=rounds, **(settings | options))


def flat(result, slot):
    return torch.cat([value.flatten() for value in result.state[slot].values()])


@pytest.mark.parametrize(
    ("method", "buffer", "weighting", "exponent", "threshold"),
    [
        ("fedavg", 2, "uniform", 0.5, None),
        ("fedavg", 1, "samples", 1.0, None),
        ("fedavg", 1, "uniform", 0.0, 2),
        ("fedlalr", 2, "samples", 0.5, None),
        ("fedlalr", 1, "uniform", 0.5, 3),
        ("fedlalr", 3, "uniform", 0.0, None),
    ],
)
def test_updates_are_those_of_an_independent_derivation(method, buffer, weighting, exponent, threshold):
    rounds = 12
    algorithm = fl.FedAvg(LR) if method == "fedavg" else fl.FedLALR(lr=LR)
    how = fl.Async(buffer, len(SIZES), exponent, threshold)
    result = run(algorithm, rounds, asynchronous=how, speeds=SPEEDS, weighting=weighting)
    wanted, ages, now = numpy_run(method, buffer, rounds, weighting, exponent, threshold)
    assert max(map(max, ages)) > 2  # stale enough to matter
    for slot in result.state:
        assert_close(flat(result, slot), wanted[slot], 1e-10)
    assert [record.staleness for record in result.history] == [np.mean(each) for each in ages]
    assert sum(record.virtual_seconds for record in result.history) == pytest.approx(now)
    assert [record.clients for record in result.history] == [buffer] * rounds


ALGORITHMS = [fl.FedAvg(0.1), fl.FedLALR(lr=0.01), fl.FedAMS(), fl.FedNova(0.1), fl.FedCM(), fl.FedAdamW(0.01)]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda each: type(each).__name__)
def test_a_buffer_for_all_clients_of_equal_speed_gives_synchronous_rounds(algorithm):
    options = {"batch_size": 4, "seed": 3, "engine": "stacked"}
    apart = run(algorithm, 6, asynchronous=fl.Async(3, 3), **options)
    together = run(algorithm, 6, clients_per_round=3, **options)
    for slot in together.state:
        assert_close(flat(apart, slot), flat(together, slot))
    for one, other in zip(apart.history, together.history, strict=True):
        assert one.staleness == 0.0
        assert (one.bytes_up, one.bytes_down, one.clients) == (other.bytes_up, other.bytes_down, other.clients)
        assert one.train_loss == pytest.approx(other.train_loss)


def with_norm():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)).double()


KEPT = [{"personal": "2.*"}, {"buffers": "local"}, {"compression": "balanced"}, {}]


@pytest.mark.parametrize("options", KEPT, ids=str)
def test_what_clients_keep_and_codecs_work_as_in_synchronous_rounds(options):
    settings = {"rounds": 5, "local": fl.Steps(2), "batch_size": 4, **options}
    clients = make_clients((8, 8, 8, 8))
    apart = fl.run(with_norm(), clients, fl.FedLALR(lr=0.01), asynchronous=fl.Async(4, 4), **settings)
    together = fl.run(with_norm(), clients, fl.FedLALR(lr=0.01), **settings)
    for slot in together.state:
        assert_close(flat(apart, slot), flat(together, slot), 1e-9)
    for client in range(4 if "compression" not in options and options else 0):
        for name, value in together.client_model(client).state_dict().items():
            assert_close(apart.client_model(client).state_dict()[name], value, 1e-9)
    for name, value in together.model.named_buffers():
        assert_close(dict(apart.model.named_buffers())[name], value)


@pytest.mark.parametrize(("options", "engine"), list(zip(KEPT, ["stacked", "reference"] * 2, strict=True)), ids=str)
def test_a_resumed_run_gives_the_same_bits(options, engine, tmp_path):
    """With clients in flight, some of them for many updates."""
    settings = {
        "asynchronous": fl.Async(2, 5), "speeds": 1.0, "local": fl.Steps(2), "batch_size": 4, "engine": engine,
        "test": None if {"personal", "buffers"} & options.keys() else make_clients((20,))[0], **options,
    }  # fmt: skip
    clients = make_clients((8, 9, 7, 8, 6, 8))
    whole = fl.run(with_norm(), clients, fl.FedLALR(lr=0.01), rounds=9, **settings)
    for rounds in (1, 4, 9):
        cut = fl.run(
            with_norm(), clients, fl.FedLALR(lr=0.01), rounds=rounds, run_dir=tmp_path, resume=True, **settings
        )
    for slot, values in whole.state.items():
        assert all(torch.equal(value, cut.state[slot][name]) for name, value in values.items())
    assert [r.train_loss for r in cut.history] == [r.train_loss for r in whole.history]
    assert [r.virtual_seconds for r in cut.history] == [r.virtual_seconds for r in whole.history]
    assert max(r.staleness for r in cut.history) > 1


def test_a_checkpoint_holds_the_replies_of_the_clients_that_train_and_no_others(tmp_path):
    settings = {"local": fl.Steps(2), "batch_size": 4, "asynchronous": fl.Async(2, 5), "speeds": 1.0}
    fl.run(make_model(), make_clients((8,) * 40), fl.FedAvg(), rounds=30, run_dir=tmp_path, **settings)
    last = read_description(tmp_path / "checkpoint" / "round-000030")
    assert sum(len(entry["clients"]) for entry in last["kept"]) == 4  # one place is free at an update
    assert len(list((tmp_path / "checkpoint").glob("kept-*"))) <= 10


def test_v_hat_never_shrinks_and_m_stays_bounded_with_many_stale_replies():
    clients = make_clients((8,) * 24)
    options = {"asynchronous": fl.Async(1, 24), "batch_size": 4, "max_norm_ratio": 10.0, "local": fl.Steps(20)}
    before, after = (run(fl.FedLALR(lr=0.01), rounds, clients, **options) for rounds in (10, 60))
    assert bool((flat(after, "v_hat") >= flat(before, "v_hat")).all())
    assert float(flat(after, "m").abs().max()) < 1.0  # were changes of m added, it would be 33


def test_the_oldest_reply_limits_the_rate_of_a_server_optimiser():
    """FADAS: the first update has no stale reply and the full rate."""
    how = {"speeds": SPEEDS, "batch_size": None}
    plain = run(fl.FedAMS(server_lr=0.5), 1, asynchronous=fl.Async(1, 5, 0.0), **how)
    bound = run(fl.FedAMS(server_lr=0.5), 1, asynchronous=fl.Async(1, 5, 0.0, delay_threshold=1), **how)
    assert torch.equal(flat(plain, "x"), flat(bound, "x"))
    plain = run(fl.FedAMS(server_lr=0.5), 4, asynchronous=fl.Async(1, 5, 0.0), **how)
    bound = run(fl.FedAMS(server_lr=0.5), 4, asynchronous=fl.Async(1, 5, 0.0, delay_threshold=2), **how)
    assert plain.history[-1].staleness == 3.0
    before = run(fl.FedAMS(server_lr=0.5), 3, asynchronous=fl.Async(1, 5, 0.0), **how)
    ratio = (flat(bound, "x") - flat(before, "x")) / (flat(plain, "x") - flat(before, "x"))
    assert_close(ratio, torch.full_like(ratio, (1 / 3) / 0.5), 1e-9)


def test_a_reply_that_cannot_be_used_takes_no_place_in_the_buffer(capsys):
    """It is rejected when it arrives, and the update waits for another one."""
    clients = make_clients((8,) * 6)
    clients[2][0][:] = math.nan
    options = {"asynchronous": fl.Async(3, 6), "speeds": 1.0, "batch_size": 4}
    with pytest.warns(fl.RepliesRejected, match="client 2"):
        result = run(fl.FedAvg(0.1), 8, clients, debug=True, **options)
    assert "client 2, round 1: x is not finite" in capsys.readouterr().err
    assert {rejection.client for record in result.history for rejection in record.rejected} == {2}
    assert [record.clients for record in result.history] == [3] * 8
    assert all(torch.isfinite(value).all() for value in result.state["x"].values())


@pytest.mark.filterwarnings("ignore::fedlalr.RepliesRejected")
def test_without_a_broken_client_updates_take_the_same_replies():
    """All five train at once; the fifth replies first with nothing of use, or never."""
    clients, healthy = make_clients((8,) * 5), make_clients((8,) * 5)
    clients[4][0][:] = math.nan
    speeds, others = [3.0, 2.9, 2.8, 2.7, 10.0], [3.0, 2.9, 2.8, 2.7, 1e-9]
    options = {"asynchronous": fl.Async(2, 5), "batch_size": 4}
    broken = run(fl.FedLALR(0.01), 6, clients, speeds=speeds, **options)
    silent = run(fl.FedLALR(0.01), 6, healthy, speeds=others, **options)
    assert len([record for record in broken.history if record.rejected]) >= 2
    for slot in ("x", "m", "v_hat"):
        assert torch.equal(flat(broken, slot), flat(silent, slot))
    assert [r.virtual_seconds for r in broken.history] == [r.virtual_seconds for r in silent.history]


@pytest.mark.filterwarnings("ignore::fedlalr.RepliesRejected")
def test_a_resumed_run_has_the_same_rejected_replies(tmp_path):
    """Client 2 is slow: its broken reply is in flight when the run stops. Client 5 delays updates before that."""
    clients = make_clients((8,) * 6)
    for broken in (2, 5):
        clients[broken][0][:] = math.nan
    options = {"asynchronous": fl.Async(2, 5), "batch_size": 4, "speeds": [1.0, 1.3, 0.3, 1.1, 0.9, 4.0]}
    whole = run(fl.FedAvg(0.1), 9, clients, **options)
    for rounds in (1, 3, 4, 9):
        cut = run(fl.FedAvg(0.1), rounds, clients, run_dir=tmp_path, resume=True, **options)
    assert torch.equal(flat(whole, "x"), flat(cut, "x"))
    assert [r.rejected for r in cut.history] == [r.rejected for r in whole.history]
    assert [r.virtual_seconds for r in cut.history] == [r.virtual_seconds for r in whole.history]
    rounds = {client: [r.round for r in cut.history for c, _ in r.rejected if c == client] for client in (2, 5)}
    assert min(rounds[2]) > 4
    assert min(rounds[5]) == 1


@pytest.mark.filterwarnings("ignore::fedlalr.RepliesRejected")
@pytest.mark.parametrize("interrupted", range(2, 10))
def test_a_run_interrupted_while_it_evaluates_resumes_to_the_same_bits(interrupted, tmp_path):
    """The update is done but not recorded, and the state before it has no checkpoint yet."""
    clients = make_clients((8,) * 6)
    for broken in (2, 5):
        clients[broken][0][:] = math.nan
    evaluations = []

    def interrupt(outputs, targets):
        evaluations.append(None)
        if len(evaluations) == interrupted:
            raise KeyboardInterrupt
        return 0.0

    options = {"asynchronous": fl.Async(2, 5), "batch_size": 4, "speeds": [1.0, 1.3, 0.3, 1.1, 0.9, 4.0]}
    whole = run(fl.FedAvg(0.1), 9, clients, **options)
    saved = {"run_dir": tmp_path, "resume": True, "checkpoint_every": 4, "test": clients[0], **options}
    with pytest.raises(KeyboardInterrupt):
        run(fl.FedAvg(0.1), 9, clients, metrics={"mine": interrupt}, **saved)
    resumed = run(fl.FedAvg(0.1), 9, clients, metrics={"mine": interrupt}, **saved)
    assert torch.equal(flat(whole, "x"), flat(resumed, "x"))
    assert [r.rejected for r in resumed.history] == [r.rejected for r in whole.history]


def test_an_update_without_enough_usable_replies_fails():
    clients = [(torch.full_like(inputs, math.nan), targets) for inputs, targets in make_clients((8,) * 4)]
    with pytest.raises(fl.RoundFailed, match="round 1: 0 usable replies, but min_clients is 1"):
        run(fl.FedAvg(0.1), 3, clients, asynchronous=fl.Async(2, 4))


@pytest.mark.parametrize(
    ("algorithm", "options", "said"),
    [
        (fl.FedLALR(second_moment="max"), {}, "FedLALR reduces v_hat by the maximum"),
        (fl.SCAFFOLD(), {}, "clients of SCAFFOLD keep c_i between their rounds"),
        (fl.FedLALR(), {"compression": "smallest"}, "compression sends v_hat, m only in some rounds"),
        (fl.FedAvg(), {"reduce": {"x": "median"}}, "asynchronous rounds and reduce cannot be combined"),
        (fl.FedAvg(), {"buffers": "recalibrate"}, "recalibrate"),
        (fl.FedAvg(), {"stragglers": fl.Stragglers(0.2)}, "asynchronous rounds and stragglers cannot be combined"),
        (fl.FedAvg(), {"clients_per_round": 3}, "clients_per_round is 3, but in an asynchronous run concurrency"),
        (fl.FedAvg(), {"asynchronous": fl.Async(2, 6)}, "concurrency is 6, but there are only 5 clients"),
        (fl.FedAvg(), {"min_clients": 3}, "min_clients is 3, but an update takes 2 replies"),
        (fl.FedLALR(), {"observers": [fl.Trajectory([0])]}, "Trajectory chooses or probes clients"),
        (fl.FedAvg(), {"asynchronous": {"bufer": 2}}, "asynchronous has no option 'bufer'; it takes buffer"),
        (fl.FedAvg(), {"asynchronous": 3}, r"asynchronous must be fl\.Async"),
    ],
)
def test_what_asynchronous_rounds_do_not_support_is_rejected_with_the_reason(algorithm, options, said):
    with pytest.raises((ValueError, TypeError), match=said):
        run(algorithm, 2, **({"asynchronous": fl.Async(2, 4)} | options))


def test_steps_are_not_weighted_by_staleness():
    """With the same K everywhere, FedNova is FedAvg."""
    options = {"asynchronous": fl.Async(2, 5), "speeds": SPEEDS, "batch_size": 4}
    nova, plain = (run(algorithm, 8, **options) for algorithm in (fl.FedNova(0.1), fl.FedAvg(0.1)))
    assert max(record.staleness for record in plain.history) > 1
    assert_close(flat(nova, "x"), flat(plain, "x"))


@pytest.mark.filterwarnings("ignore::fedlalr.RepliesRejected")
def test_a_reply_that_has_arrived_is_not_used_again_if_its_client_fails_later():
    """Its personal parameters stay, beside which the reply was stored."""

    class Failing(ReferenceEngine):
        def train(self, work):
            replies = super().train(work)
            if work.round < 4:
                return replies
            others = replies.rows((replies.clients != 1).nonzero()[:, 0])
            return replace(others, failures={1: "its battery is empty"} if 1 in work.clients else {})

    options = {"asynchronous": fl.Async(2, 5), "speeds": [1.0, 0.8, 1.2, 0.9, 1.1], "personal": "2.*"}
    result = run(fl.FedAvg(0.1), 12, engine=Failing, batch_size=4, **options)
    assert len([record.round for record in result.history if record.rejected]) >= 2
    assert [record.clients for record in result.history] == [2] * 12
