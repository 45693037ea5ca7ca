"""A client's state changes only if its reply was accepted, and is stored on the node's disk."""

import json

import pytest
import torch

from fedlalr.algorithms.slots import Slots
from fedlalr.flower.client.state import KeptStore
from fedlalr.flower.server.state import AcceptedRounds

FIRST = Slots(c_i=torch.zeros(3))


def kept(value):
    return Slots(c_i=torch.full((3,), float(value)))


def test_a_client_starts_from_zero_and_loads_any_stored_round(tmp_path):
    store = KeptStore(tmp_path, "ab12", 2)
    assert torch.equal(store.load(0, FIRST).c_i, FIRST.c_i)
    store.save(1, kept(1))
    store.save(2, kept(2))
    again = KeptStore(tmp_path, "ab12", 2)
    assert again.load(1, FIRST).c_i.tolist() == [1, 1, 1]
    assert again.load(2, FIRST).c_i.tolist() == [2, 2, 2]
    assert again.rounds() == [1, 2]
    again.forget(before=2)
    assert again.rounds() == [2]


def test_runs_and_clients_do_not_share_state(tmp_path):
    KeptStore(tmp_path, "ab", 0).save(1, kept(5))
    for run, client in (("ab", 1), ("cd", 0)):
        with pytest.raises(FileNotFoundError, match=f"client {client} should continue from its state after round 1"):
            KeptStore(tmp_path, run, client).load(1, FIRST)


def test_a_corrupt_or_foreign_file_is_rejected(tmp_path):
    store = KeptStore(tmp_path, "ab", 0)
    store.save(1, kept(5))
    with pytest.raises(ValueError, match="does not contain c_i with 4"):
        store.load(1, Slots(c_i=torch.zeros(4)))
    with pytest.raises(ValueError, match="does not contain other"):
        store.load(1, Slots(other=torch.zeros(3)))
    place = next(store.folder.iterdir())
    place.write_bytes(place.read_bytes()[:10])
    with pytest.raises(ValueError, match="cannot be read"):
        store.load(1, FIRST)


def test_the_name_of_a_run_cannot_escape_the_folder(tmp_path):
    with pytest.raises(ValueError, match="hexadecimal"):
        KeptStore(tmp_path, "../../etc", 0)


def test_the_last_accepted_round_of_each_client_and_what_it_took_are_known():
    accepted_rounds = AcceptedRounds()
    accepted_rounds.note(1, [0, 2], [1.0, 0.5])
    accepted_rounds.note(3, [2, 4])
    wanted = [(1, 1.0), (0, 1.0), (3, 1.0), (3, 1.0)]
    assert [accepted_rounds.valid(client) for client in (0, 1, 2, 4)] == wanted
    accepted_rounds.note(4, [4], [0.25])
    again = AcceptedRounds(json.loads(json.dumps(accepted_rounds.as_dict())))
    assert [again.valid(client) for client in (0, 1, 2, 4)] == [*wanted[:3], (4, 0.25)]


def test_rounds_that_a_checkpoint_may_resume_from_are_not_settled():
    accepted_rounds = AcceptedRounds()
    accepted_rounds.saved()
    settled = []
    for round in range(1, 6):
        accepted_rounds.note(round, [0])
        accepted_rounds.saved()
        settled.append(accepted_rounds.settled(0))
    assert settled == [0, 1, 2, 3, 4]
    resumed = AcceptedRounds(accepted_rounds.as_dict())
    assert resumed.settled(0) == 0, "which checkpoints are left is not known after a resume"
