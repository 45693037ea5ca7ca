"""Real Flower processes give the simulator's bits, and faulty clients are excluded: `make test-flower`."""

import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

from flower.deployed import assert_same_bits, run_to_end, simulate

pytestmark = [pytest.mark.flower, pytest.mark.timeout(1500)]


def test_a_compressed_run_gives_the_simulators_bits_and_flower_counts_the_recorded_bytes(federation, tmp_path):
    variant = {"momentum": "restart", "second_moment": "max", "compression": "balanced", "hidden": 50_000}
    run_to_end(federation, tmp_path / "run", **variant)
    wanted = simulate(**variant)
    assert_same_bits(tmp_path / "run", wanted)
    traffic = federation.status()[0]["network-traffic"]
    assert traffic["inbound-bytes"] == pytest.approx(wanted.bytes_up, rel=0.01)
    assert traffic["outbound-bytes"] == pytest.approx(wanted.bytes_down, rel=0.01)


def test_faulty_and_slow_clients_are_excluded_only_from_their_faulty_rounds(federation, tmp_path):
    """In round 4 client 0 runs out of time in its first local step, and sends it."""
    expected = {
        2: {1: ("raise", "its client app raised"), 2: ("nan", "m is not finite")},
        3: {1: ("shape", "has shape (1,)"), 2: ("v_hat", "v_hat fell below the broadcast")},
        4: {1: ("die", "its client app's process died"), 2: ("stale", "belongs to round 3")},
    }
    options = {"rounds": 5, "min_clients": 1, "momentum": "average", "second_moment": "max", "partial": 20.0}
    faults = ["+".join(f"{client}:{fault}" for client, (fault, _) in here.items()) for here in expected.values()]
    faults[-1] += "+0:slow"
    marker = str(tmp_path / "marker")
    records = run_to_end(federation, tmp_path / "run", faults=",".join(faults), marker=marker, **options)
    for record in records:
        reasons = {client: reason for client, (_, reason) in expected.get(record.round, {}).items()}
        assert [client for client, _ in record.rejected] == list(reasons), record
        assert all(reasons[client] in said for client, said in record.rejected), record
    assert_same_bits(tmp_path / "run", simulate(broken=expected, cut=[(4, 0)], **options))
