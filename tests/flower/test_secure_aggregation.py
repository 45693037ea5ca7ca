"""Secure aggregation only sums, so it cannot compute v̂'s maximum or robust reductions. Its replies are rejected."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr")

from flwr.client.mod import secaggplus_mod

import fedlalr as fl
from flower.federation import nodes, strategy
from flower.in_process import InProcessGrid


@pytest.mark.parametrize("second_moment", ["mean", "max"])
def test_clients_with_secure_aggregation_are_rejected_and_the_state_is_kept(second_moment, tmp_path):
    algorithm = fl.FedLALR(second_moment=second_moment)
    server = strategy(algorithm, settings={"rounds": 1})
    with pytest.raises(
        fl.RoundFailed, match=r"0 usable replies, but min_clients is 1.*5 clients .*: its client app raised"
    ):
        server.start(InProcessGrid(nodes(algorithm, tmp_path, mods=[secaggplus_mod])))
    assert server.result is None
