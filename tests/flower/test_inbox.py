"""Uploads on disk are reduced to the same bits as uploads in memory."""

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedlalr as fl
from fedlalr.algorithms.slots import Slots
from fedlalr.federation.replies.payload import Expected, Reply
from fedlalr.federation.replies.reducing import reduce_slots, weights
from fedlalr.federation.replies.reductions import Bounded, Max, Mean, Median, Trimmed
from fedlalr.flower.server import inbox as inbox_module
from fedlalr.flower.server.inbox import SpooledInbox
from fedlalr.flower.server.spool import Spool
from fedlalr.training.layout import Layout
from inbox_in_memory import Inbox

TABLE = fl.FedLALR().slots


def make_expected(size, clients=(0, 1, 2, 3), dtype=torch.float32):
    layout = Layout(("w",), (torch.Size([size]),), dtype)
    generator = torch.Generator().manual_seed(size)
    broadcast = Slots(**{name: torch.rand(size, generator=generator, dtype=dtype) for name in TABLE.down})
    return Expected("ab", 3, frozenset(clients), "contract", layout, TABLE, broadcast, {"b": torch.zeros(2)})


def make_reply(expected, client, scale=1.0):
    generator = torch.Generator().manual_seed(client)
    slots = {
        name: {"w": value + scale * torch.rand(len(value), generator=generator, dtype=value.dtype)}
        for name, value in expected.broadcast.items()
    }
    return Reply(
        client, "ab", 3, "contract", 10 + client, 4, slots, {"b": torch.full((2,), float(client))}, {"loss": 1}
    )


@settings(deadline=None, max_examples=25)
@given(
    size=st.one_of(st.integers(1, 9_000), st.sampled_from([1025, 2049, 4097])),
    count=st.one_of(st.integers(1, 12), st.sampled_from([17, 40])),
    at_a_time=st.sampled_from([1, 1024, 5_000, 20_000, 1 << 24]),
    how=st.sampled_from([None, Mean(), Max(), Median(), Trimmed(0.2), Bounded(1.0)]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_a_spooled_reduction_equals_one_in_memory_bit_for_bit(size, count, at_a_time, how, dtype):
    expected = make_expected(size, range(count), dtype)
    spooled, plain = SpooledInbox(expected), Inbox(expected)
    for client in range(count):
        assert spooled.receive(make_reply(expected, client)) is None
        assert plain.receive(make_reply(expected, client)) is None
    chosen = {} if how is None else {"x": how, "v_hat": how}
    before, inbox_module.NUMBERS_AT_A_TIME = inbox_module.NUMBERS_AT_A_TIME, at_a_time
    try:
        closed = spooled.close(1000.0)
        share = weights(closed.accepted.samples, "samples", dtype, torch.device("cpu"))
        found = spooled.reduce(closed, share, chosen)
    finally:
        inbox_module.NUMBERS_AT_A_TIME = before
        spooled.dispose()
    accepted = plain.close(1000.0).accepted
    wanted = reduce_slots(accepted.slots, expected.broadcast, share, TABLE, chosen)
    assert all(torch.equal(found[name], wanted[name]) for name in TABLE.up)
    assert torch.equal(closed.accepted.buffers["b"], accepted.buffers["b"])


@settings(deadline=None, max_examples=20)
@given(st.permutations([0, 1, 2, 3]))
def test_the_order_of_arrival_does_not_matter(order):
    expected = make_expected(50)
    inbox = SpooledInbox(expected)
    for client in order:
        inbox.receive(make_reply(expected, client))
    closed = inbox.close(None)
    assert closed.accepted.clients.tolist() == [0, 1, 2, 3]
    assert closed.accepted.samples.tolist() == [10, 11, 12, 13]
    assert closed.accepted.buffers["b"][:, 0].tolist() == [0, 1, 2, 3]
    reduced = inbox.reduce(closed, torch.full((4,), 0.25), {})
    replies = torch.stack([make_reply(expected, client).slots["x"]["w"] for client in range(4)])
    wanted = reduce_slots(
        Slots(x=replies), expected.broadcast, torch.full((4,), 0.25), replace(TABLE, up={"x": "mean"}, grows=())
    )
    assert torch.equal(reduced.x, wanted.x)
    inbox.dispose()


def test_long_changes_are_clipped_like_in_memory():
    expected = make_expected(3000)
    spooled, plain = SpooledInbox(expected), Inbox(expected)
    for client in (3, 1, 0, 2):
        reply = make_reply(expected, client, scale=1e6 if client == 2 else 1.0)
        reply = replace(reply, buffers={"b": torch.full((2,), 1e30 if client == 2 else 1.0)})
        assert spooled.receive(reply) is None
        assert plain.receive(reply) is None
    closed, wanted = spooled.close(10.0), plain.close(10.0)
    assert closed.clipped == wanted.clipped == (2,)
    assert closed.rejected == ()
    share = torch.full((4,), 0.25)
    found = spooled.reduce(closed, share, {})
    reduced = reduce_slots(wanted.accepted.slots, expected.broadcast, share, TABLE)
    for name in TABLE.up:
        torch.testing.assert_close(found[name], reduced[name], rtol=1e-6, atol=0)  # norms of one row and of four
        assert (found[name] - expected.broadcast[name]).norm() < 4 * 3000**0.5
    assert closed.accepted.buffers["b"].tolist() == wanted.accepted.buffers["b"].tolist()
    assert closed.accepted.buffers["b"].amax() == 10.0
    assert spooled.close(None).clipped == ()


def test_rejections_are_recorded_with_client_and_reason():
    expected = make_expected(5)
    inbox = SpooledInbox(expected)
    assert inbox.expected.clients - inbox.expected.answered == {0, 1, 2, 3}
    inbox.receive(make_reply(expected, 0))
    assert inbox.receive(make_reply(expected, 0)).reason == "the client has already replied"
    assert inbox.receive(replace(make_reply(expected, 1), round=2)).client == 1
    inbox.reject(3, "its node is gone")
    closed = inbox.close(None)
    assert closed.accepted.clients.tolist() == [0]
    assert [r.client for r in closed.rejected] == [0, 1, 3]
    assert inbox.expected.clients - inbox.expected.answered == {1, 2, 3}


def test_a_round_without_replies_closes_empty():
    closed = SpooledInbox(make_expected(5)).close(1000.0)
    assert closed.accepted.clients.tolist() == []
    assert closed.rejected == ()


def test_a_spool_leaves_no_file_and_reads_what_was_written(tmp_path):
    spool = Spool(("x",), 7, torch.float64, tmp_path / "new")
    rows = [torch.arange(7, dtype=torch.float64) + 10 * row for row in range(3)]
    assert [spool.append(Slots(x=row)) for row in rows] == [0, 1, 2]
    assert torch.equal(spool.read("x", [2, 0], 3, 6), torch.stack([rows[2][3:6], rows[0][3:6]]))
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(OSError, match="is truncated"):
        spool.read("x", [3], 0, 7)
    spool.close()


@pytest.mark.skipif(os.name != "posix", reason="limits as POSIX has them")
def test_a_full_disk_is_named(tmp_path):
    import resource

    expected, limits = make_expected(1000), resource.getrlimit(resource.RLIMIT_FSIZE)
    inbox = SpooledInbox(expected, tmp_path / "here")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"uploads cannot be stored in .*here until .*File too large.*spool_dir"):
            inbox.receive(make_reply(expected, 0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        inbox.dispose()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match=r"uploads cannot be stored in .*file until"):
        SpooledInbox(expected, tmp_path / "file")
