"""Every payload that a server must survive: rejected with client and reason, and the server's state is unchanged."""

from __future__ import annotations

import io
import math
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr.algorithms.slots import Slots
from fedlalr.data.population import as_clients
from fedlalr.federation.replies.payload import Expected, Rejected, Reply, array_from_npy, clean_metrics
from fedlalr.federation.replies.reducing import reduce_slots, weights
from fedlalr.federation.replies.reductions import SHARE
from fedlalr.federation.replies.screening import MAX_NORM_RATIO, Rejection, screen
from fedlalr.federation.round import RoundFailed, Rules, ServerState, run_round
from fedlalr.federation.session import initial_state
from fedlalr.federation.storage.fingerprint import contract
from fedlalr.training.engines.reference import ReferenceEngine
from fedlalr.training.interfaces import Replies, Training, Work
from fedlalr.training.layout import Layout
from inbox_in_memory import Inbox, screen_reply

ALGORITHM = fl.FedLALR(eps=1e-4)
EPS_SQUARED = 1e-8


def build(algorithm=ALGORITHM, model: nn.Module | None = None) -> Training:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    return Training(
        model=model, layout=Layout.of(model), clients=as_clients(make_clients()), algorithm=algorithm,
        loss=nn.functional.cross_entropy, local=fl.Steps(3), batch_size=None, device=torch.device("cpu"),
    )  # fmt: skip


def expected(training: Training, state: ServerState) -> Expected:
    return Expected(
        run="a run",
        round=1,
        clients=frozenset(range(5)),
        contract=contract(training),
        layout=training.layout,
        table=training.algorithm.slots,
        broadcast=state.slots.only(*training.algorithm.slots.down),
        buffers=state.buffers,
    )


class Spy(ReferenceEngine):
    """The reference engine with manipulated replies."""

    def __init__(self, training, tamper=lambda replies: replies):
        super().__init__(training)
        self.tamper = tamper

    def train(self, work):
        return self.tamper(super().train(work))


def honest(training: Training) -> list[Reply]:
    """The five clients' replies, as they would send them over a network."""
    found = []
    run_round(STATE, torch.arange(5), 0.01, Spy(training, lambda r: found.append(r) or r), training, Rules())
    [replies] = found
    return [
        Reply(
            client=client,
            run="a run",
            round=1,
            contract=contract(training),
            samples=int(replies.samples[row]),
            steps=int(replies.steps[row]),
            slots={
                slot: {name: view.numpy().copy() for name, view in training.layout.views(values[row]).items()}
                for slot, values in replies.slots.items()
            },
            buffers={name: values[row].numpy().copy() for name, values in replies.buffers.items()},
            metrics={"loss": float(replies.losses[row])},
        )
        for row, client in enumerate(replies.clients.tolist())
    ]


TRAINING = build()
STATE = initial_state(TRAINING)
EXPECTED = expected(TRAINING, STATE)
HONEST = honest(TRAINING)


def changed(slot: str, name: str, change, client: int = 2) -> Reply:
    """An honest reply with one array replaced."""
    reply = HONEST[client]
    slots = {s: dict(values) for s, values in reply.slots.items()}
    slots[slot][name] = change(slots[slot][name].copy())
    return replace(reply, slots=slots)


def put(value: float):
    def change(array):
        array.reshape(-1)[0] = value
        return array

    return change


# One reply at a time


def test_honest_replies_pass_one_by_one():
    for reply in HONEST:
        outcome = screen_reply(reply, EXPECTED)
        assert not isinstance(outcome, Rejection), outcome
        assert outcome.clients.tolist() == [reply.client]


def test_tensors_are_taken_like_arrays():
    reply = HONEST[0]
    as_tensors = replace(
        reply, slots={s: {n: torch.from_numpy(a) for n, a in v.items()} for s, v in reply.slots.items()}
    )
    one, other = screen_reply(reply, EXPECTED), screen_reply(as_tensors, EXPECTED)
    assert all(torch.equal(one.slots[slot], other.slots[slot]) for slot in one.slots)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (changed("x", "0.weight", put(math.nan)), "x is not finite"),
        (changed("m", "0.bias", put(math.inf)), "m is not finite"),
        (changed("v_hat", "2.weight", put(-math.inf)), "v_hat is not finite"),
        (changed("v_hat", "2.weight", put(math.nan)), "v_hat is not finite"),
        (changed("v_hat", "0.weight", put(EPS_SQUARED / 2)), "v_hat fell below the broadcast v_hat"),
        (changed("v_hat", "0.weight", put(0.0)), "v_hat fell below the broadcast v_hat"),
        (changed("v_hat", "0.weight", put(-1.0)), "v_hat fell below the broadcast v_hat"),
        (changed("x", "0.bias", lambda a: a[:1]), r"x/0.bias has shape \(1,\), but \(6,\) is expected"),
        (changed("x", "0.bias", lambda a: a[:0]), r"x/0.bias has shape \(0,\)"),
        (changed("x", "0.weight", lambda a: a.T), r"x/0.weight has shape \(4, 6\)"),
        (changed("x", "0.bias", lambda a: a[None]), r"x/0.bias has shape \(1, 6\)"),
        (changed("x", "0.bias", lambda a: a.astype("float32")), "x/0.bias is float32, but torch.float64 is expected"),
        (changed("x", "0.bias", lambda a: a.astype("int64")), "x/0.bias is int64"),
        (changed("x", "0.bias", lambda a: a.astype("complex128")), "x/0.bias is complex128"),
        (changed("x", "0.bias", lambda a: a.astype(object)), "x/0.bias is object"),
        (changed("x", "0.bias", lambda a: a.astype(">f8")), "x/0.bias has swapped bytes"),
        (changed("x", "0.weight", np.asfortranarray), "x/0.weight is not contiguous"),
        (changed("x", "0.bias", lambda a: np.repeat(a, 2)[::2]), "x/0.bias is not contiguous"),
        (changed("x", "0.bias", lambda a: torch.from_numpy(a).to_sparse()), "x/0.bias is not a plain tensor"),
        (changed("x", "0.bias", lambda a: torch.from_numpy(a).float()), "x/0.bias is torch.float32"),
        (changed("x", "0.bias", lambda a: a.tolist()), "x/0.bias is a list and not an array"),
        (replace(HONEST[2], slots={"x": HONEST[2].slots["x"]}), "slots: 'm', 'v_hat' are missing"),
        (replace(HONEST[2], slots=HONEST[2].slots | {"v": {}}), "slots: 'v' is not expected"),
        (replace(HONEST[2], slots=HONEST[2].slots | {"x": {}}), r"the parameters of x: .* and 3 more are missing"),
        (replace(HONEST[2], slots=HONEST[2].slots | {"x": [1, 2]}), "the parameters of x must be a mapping of names"),
        (replace(HONEST[2], slots=None), "slots must be a mapping of names, not a NoneType"),
        (replace(HONEST[2], buffers={}), r"buffers: .*are missing"),
        (
            replace(HONEST[2], buffers=HONEST[2].buffers | {"1.running_mean": np.full(6, np.nan)}),
            "buffer 1.running_mean is not finite",
        ),
        (
            replace(HONEST[2], buffers=HONEST[2].buffers | {"1.running_var": np.full(6, -1.0)}),
            "running_var is below zero",
        ),
        (
            replace(HONEST[2], buffers=HONEST[2].buffers | {"1.num_batches_tracked": np.array(1.5)}),
            "buffer 1.num_batches_tracked is float64",
        ),
        (replace(HONEST[2], samples=0), "samples is 0, but a whole number from 1"),
        (replace(HONEST[2], samples=-5), "samples is -5"),
        (replace(HONEST[2], samples=math.nan), "samples is nan"),
        (replace(HONEST[2], samples=1e30), r"samples is 1e\+30"),
        (replace(HONEST[2], samples=10**5000), "samples is a huge number"),
        (replace(HONEST[2], samples=2.5), "samples is 2.5"),
        (replace(HONEST[2], samples=True), "samples is True"),
        (replace(HONEST[2], samples="12"), "samples is '12'"),
        (replace(HONEST[2], steps=0), "steps is 0"),
        (replace(HONEST[2], contract=contract(build(fl.FedLALR(eps=1e-5)))), "different hyper-parameters"),
        (replace(HONEST[2], contract=contract(build(fl.FedLALR(betas=(0.8, 0.9))))), "different hyper-parameters"),
        (replace(HONEST[2], contract=contract(replace(build(), local=fl.Steps(4)))), "different hyper-parameters"),
        (replace(HONEST[2], run="another"), "the reply belongs to run 'another', but this is 'a run'"),
        (replace(HONEST[2], round=7), "the reply belongs to round 7, but this is round 1"),
        (replace(HONEST[2], run=np.zeros(3)), r"the reply belongs to run array\(\[0., 0., 0.\]\)"),
        (replace(HONEST[2], round=torch.ones(2, 3).to_sparse()), "the reply belongs to round tensor"),
        (replace(HONEST[2], contract=np.zeros(3, "V8")), "different hyper-parameters"),
        (replace(HONEST[2], client=77), "the client is not in this round's cohort"),
    ],
)  # fmt: skip
def test_a_bad_reply_is_rejected_by_name(bad, reason):
    outcome = screen_reply(bad, EXPECTED)
    assert isinstance(outcome, Rejection)
    assert outcome.client == bad.client
    assert re.search(reason, outcome.reason)


@pytest.mark.parametrize(
    "client",
    ["2", [2], None, 2.0, True, math.nan, -3, 10**5000, {"a": 1}, np.zeros(2)],
    ids=lambda client: type(client).__name__,
)
def test_a_reply_that_names_no_client_is_rejected_and_the_round_closes(client):
    inbox = Inbox(EXPECTED)
    inbox.fail(1, "gone")
    inbox.receive(HONEST[0])
    rejected = inbox.receive(replace(HONEST[2], client=client))
    assert rejected.client == -1
    assert "a whole number from 0 on is expected" in rejected.reason
    accepted, rejected, _ = inbox.close()
    assert accepted.clients.tolist() == [0]
    assert [rejection.client for rejection in rejected] == [-1, 1]


def test_the_contract_is_the_same_for_the_same_settings_and_another_for_others():
    assert contract(build()) == contract(build())
    assert contract(build()) != contract(replace(build(), weight_decay=0.1))
    assert contract(build()) != contract(build(model=make_model()))


def test_a_metric_that_cannot_be_recorded_is_dropped_and_the_reply_is_kept():
    bad = {
        "loss": math.nan,
        "accuracy": math.inf,
        "note": "x" * 10_000,
        "y" * 1000: 1.0,
        "list": [1],
        3: 4,
        "big": 10**400,
    }
    outcome = screen_reply(replace(HONEST[0], metrics=bad | {"time": 2, "share": np.float32(0.5)}), EXPECTED)
    assert not isinstance(outcome, Rejection)
    assert math.isnan(float(outcome.losses[0]))
    assert clean_metrics(bad | {"time": 2, "share": np.float32(0.5)}) == {"time": 2, "share": 0.5}
    assert not isinstance(screen_reply(replace(HONEST[0], metrics=[1, 2]), EXPECTED), Rejection)


def test_an_inbox_rejects_duplicates_and_stacks_in_client_order():
    inbox = Inbox(EXPECTED)
    for reply in reversed(HONEST):
        assert inbox.receive(reply) is None
    assert inbox.receive(HONEST[3]) == Rejection(3, "the client has already replied")
    assert inbox.waiting == frozenset()
    accepted, rejected, _ = inbox.close()
    assert accepted.clients.tolist() == [0, 1, 2, 3, 4]
    assert [r.client for r in rejected] == [3]


def test_a_rejected_client_may_try_again_in_the_same_round():
    inbox = Inbox(EXPECTED)
    assert inbox.receive(changed("x", "0.weight", put(math.nan), client=1)) == Rejection(1, "x is not finite")
    assert inbox.waiting == frozenset(range(5))
    assert inbox.receive(HONEST[1]) is None
    assert inbox.waiting == frozenset({0, 2, 3, 4})


def test_an_inbox_that_got_nothing_closes_empty():
    inbox = Inbox(EXPECTED)
    inbox.fail(4, "TimeoutError: no answer before the deadline")
    accepted, rejected, _ = inbox.close()
    assert len(accepted.clients) == 0
    assert rejected == (Rejection(4, "TimeoutError: no answer before the deadline"),)


def test_replies_over_a_network_reduce_to_the_bits_of_the_simulator():
    inbox = Inbox(EXPECTED)
    for client in (4, 0, 3, 1, 2):
        inbox.receive(HONEST[client])
    accepted = inbox.close().accepted
    share = weights(accepted.samples, "uniform", torch.float64, torch.device("cpu"))
    remote = reduce_slots(accepted.slots, EXPECTED.broadcast, share, EXPECTED.table)
    simulated = run_round(STATE, torch.arange(5), 0.01, ReferenceEngine(TRAINING), TRAINING, Rules()).state
    assert all(torch.equal(remote[slot], simulated.slots[slot]) for slot in remote)


# Bytes


def npy(array, **options) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def test_an_npy_array_of_the_expected_form_is_read():
    array = np.arange(12.0).reshape(3, 4)
    assert np.array_equal(array_from_npy("x", npy(array), (3, 4), torch.float64), array)


BOMB = npy(np.zeros(3)).replace(b"(3,)", b"(9**9,)") + b"\0" * 8


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a readable npy array"),
        (b"\x93NUMPY", "not a readable npy array"),
        (pickle.dumps([1.0, 2.0, 3.0]), "not a readable npy array"),
        (npy(np.array([1, "a", None], dtype=object), allow_pickle=True), "holds Python objects, which are never read"),
        (npy(np.zeros(3))[:-1], "has 23 bytes of numbers, but 24 are expected"),
        (npy(np.zeros(3)) + b"\0", "has 25 bytes of numbers"),
        (npy(np.zeros(10_000)), "has 80,128 bytes, more than an array of shape"),
        (npy(np.zeros(2)), r"has shape \(2,\)"),
        (npy(np.zeros(3, dtype="float32")), "is <f4, but <f8 is expected"),
        (npy(np.zeros(3, dtype=">f8")), "is >f8, but <f8 is expected"),
        (BOMB, "not a readable npy array"),
        (npy(np.zeros(3)).replace(b"(3,)", b"(8000000000,)"), r"not a readable|has shape"),
        (b"\x93NUMPY\x09\x00" + npy(np.zeros(3))[8:], r"npy format|not a readable"),
    ],
)
def test_bytes_that_are_not_the_expected_array_are_rejected_before_memory_is_taken(content, reason):
    with pytest.raises(Rejected, match=reason):
        array_from_npy("x", content, (3,), torch.float64)


# A whole cohort


def tampered(change, **rules):
    """A round in which client 2's reply was changed, and the server's state before and after."""

    def tamper(replies):
        slots = {name: values.clone() for name, values in replies.slots.items()}
        buffers = {name: values.clone() for name, values in replies.buffers.items()}
        change(slots, buffers)
        return replace(replies, slots=Slots(**slots), buffers=buffers)

    engine = Spy(TRAINING, tamper)
    return run_round(STATE, torch.arange(5), 0.01, engine, TRAINING, Rules(**rules))


def setting(where: str, name: str, value: float):
    def change(slots, buffers):
        ({"slots": slots, "buffers": buffers}[where])[name][2].view(-1)[0] = value

    return change


def scaling(name: str, factor: float):
    def change(slots, buffers):
        base = EXPECTED.broadcast[name]
        slots[name][2] = base + factor * (slots[name][2] - base)

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (setting("slots", "x", math.nan), "x is not finite"),
        (setting("slots", "m", math.inf), "m is not finite"),
        (setting("slots", "v_hat", math.nan), "v_hat is not finite"),
        (setting("buffers", "1.running_var", math.nan), "buffer 1.running_var is not finite"),
        (setting("buffers", "1.running_var", -1e-6), "running_var is below zero"),
        (setting("buffers", "1.num_batches_tracked", -1), "num_batches_tracked fell below the broadcast"),
        (setting("slots", "v_hat", EPS_SQUARED * 0.999), "v_hat fell below the broadcast v_hat"),
        (setting("slots", "v_hat", 0.0), "v_hat fell below the broadcast v_hat"),
    ],
)
def test_a_bad_reply_in_a_cohort_is_left_out_and_named(change, reason):
    outcome = tampered(change)
    [rejection] = outcome.rejected
    assert rejection.client == 2
    assert rejection.reason.startswith(reason)
    assert outcome.accepted == 4
    alone = run_round(STATE, torch.tensor([0, 1, 3, 4]), 0.01, ReferenceEngine(TRAINING), TRAINING, Rules())
    assert all(torch.equal(value, alone.state.slots[name]) for name, value in outcome.state.slots.items())


def raising(where: str, name: str, value: float):
    def change(slots, buffers):
        ({"slots": slots, "buffers": buffers}[where])[name][2] += value

    return change


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (setting("slots", "x", 1e100), "x"),
        (setting("slots", "v_hat", 1.7e308), "v_hat"),
        (scaling("x", 1e5), "x"),
        (scaling("m", -1e5), "m"),
        (scaling("v_hat", 1e5), "v_hat"),
        (setting("buffers", "1.running_mean", 1e9), "1.running_mean"),
        (raising("buffers", "1.running_var", 1e300), "1.running_var"),
    ],
)
def test_a_change_that_is_too_long_keeps_its_direction_and_is_shortened_to_the_bound(change, name):
    """Honest outliers count, and a hostile client changes at most the ratio times an ordinary change."""
    found = []
    tampered(lambda slots, buffers: (change(slots, buffers), found.append({**slots, **buffers})))
    sent, broadcast = found[0][name], {**EXPECTED.broadcast, **EXPECTED.buffers}
    ids, change_of = torch.arange(5), sent - broadcast[name]
    slots = Slots(**{slot: found[0][slot] for slot in EXPECTED.table.up})
    buffers = {buffer: found[0][buffer] for buffer in EXPECTED.buffers}
    screened = screen(
        Replies(ids, ids + 1, ids + 1, torch.ones(5), slots, buffers, Slots()),
        EXPECTED.broadcast, EXPECTED.table, buffers=EXPECTED.buffers,
    )  # fmt: skip
    assert screened.clipped == (2,)
    assert screened.rejected == ()
    kept = {**screened.accepted.slots, **screened.accepted.buffers}
    for each in kept:
        others = [0, 1, 3, 4] if each == name else ids
        assert torch.equal(kept[each][others], found[0][each][others])
    honest = torch.linalg.vector_norm(change_of[[0, 1, 3, 4]], dim=1)
    after = kept[name][2] - broadcast[name]
    assert after.norm() <= MAX_NORM_RATIO * max(honest.max(), SHARE * broadcast[name].norm()) * (1 + 1e-9)
    longest = change_of[2].abs().max()  # of a change that is longer than float64 can say nothing is left
    direction = torch.nn.functional.cosine_similarity(after, change_of[2] / longest, dim=0)
    assert direction > 1 - 1e-6 or after.norm() == 0


def test_too_few_good_replies_keep_the_state_and_name_the_bad_one():
    before = {name: value.clone() for name, value in STATE.slots.items()}
    with pytest.raises(
        RoundFailed, match=r"4 usable replies, but min_clients is 5. Rejected: client 2: m is not finite"
    ):
        tampered(setting("slots", "m", math.nan), min_clients=5)
    assert all(torch.equal(value, before[name]) for name, value in STATE.slots.items())


def test_the_bound_is_the_users_to_choose():
    assert tampered(scaling("x", 30.0)).clipped == (2,)
    assert tampered(scaling("x", 30.0), max_norm_ratio=100.0).clipped == ()
    assert tampered(scaling("x", 1e6), max_norm_ratio=None).clipped == ()


def test_one_large_coordinate_is_not_a_reason_where_the_norm_is_ordinary():
    """Honest non-IID clients differ by orders of magnitude in single coordinates."""

    def spike(slots, buffers):
        base = EXPECTED.broadcast["x"]
        spiked = torch.zeros_like(base)
        spiked[0] = torch.linalg.vector_norm(slots["x"] - base, dim=1).median()
        slots["x"][2] = base + spiked

    assert tampered(spike).clipped == ()


def test_a_second_moment_that_stands_still_for_most_is_free_to_grow_for_one():
    """Late in training AMSGrad's maximum does not move for most clients: their median change is zero."""
    training = TRAINING
    broadcast = EXPECTED.broadcast.replace(v_hat=torch.full_like(EXPECTED.broadcast.x, 0.5))

    def replies_with(v_hat_of_last):
        found = []
        Spy(training, lambda r: found.append(r) or r).train(work(broadcast))
        slots = found[0].slots
        v_hat = broadcast.v_hat.expand(5, -1).clone()
        v_hat[4] += v_hat_of_last
        return replace(found[0], slots=slots.replace(v_hat=v_hat))

    table = training.algorithm.slots
    allowed = MAX_NORM_RATIO * SHARE * 0.5
    assert screen(replies_with(0.99 * allowed), broadcast, table).clipped == ()
    clipped = screen(replies_with(1e6), broadcast, table)
    assert clipped.clipped == (4,)
    torch.testing.assert_close(clipped.accepted.slots.v_hat[4], broadcast.v_hat + allowed)


def work(broadcast):
    return Work(
        round=1, lr=0.01, clients=torch.arange(5), broadcast=broadcast, buffers=EXPECTED.buffers, kept=Slots(),
        cohort=5, population=5,
    )  # fmt: skip


def test_two_hostile_clients_of_five_do_not_hide_behind_each_other():
    def change(slots, buffers):
        slots["x"][1:3] = 1.7e308

    outcome = tampered(change)
    assert outcome.clipped == (1, 2)
    assert torch.isfinite(outcome.state.slots.x).all()


@pytest.mark.parametrize("clients", [1, 2])
def test_a_cohort_of_one_or_two_honest_clients_passes(clients):
    outcome = run_round(STATE, torch.arange(clients), 0.01, ReferenceEngine(TRAINING), TRAINING, Rules())
    assert outcome.rejected == ()


def test_a_training_loss_that_is_not_finite_is_left_out_of_the_mean():
    engine = Spy(TRAINING, lambda r: replace(r, losses=torch.tensor([1.0, math.nan, 3.0, 1.0, 3.0])))
    outcome = run_round(STATE, torch.arange(5), 0.01, engine, TRAINING, Rules())
    assert outcome.train_loss == 2.0
    assert outcome.accepted == 5
