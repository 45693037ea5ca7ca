"""Real Flower processes give the simulator's bits, and a faulty client is excluded: `make test-flower`."""

import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

from flower.deployed import assert_same_bits, run_to_end, simulate

pytestmark = [pytest.mark.flower, pytest.mark.timeout(1500)]


# The other two variants are those of the next two tests.
@pytest.mark.parametrize(
    ("momentum", "second_moment", "layout"), [("average", "max", "records"), ("restart", "mean", "packed")]
)
def test_fedlalr_gives_the_simulators_bits(federation, tmp_path, momentum, second_moment, layout):
    variant = {"momentum": momentum, "second_moment": second_moment}
    run_to_end(federation, tmp_path / "run", layout=layout, **variant)
    assert_same_bits(tmp_path / "run", simulate(**variant))


def test_a_compressed_run_gives_the_simulators_bits_and_flower_counts_the_recorded_bytes(federation, tmp_path):
    variant = {"momentum": "restart", "second_moment": "max", "compression": "balanced", "hidden": 50_000}
    run_to_end(federation, tmp_path / "run", **variant)
    wanted = simulate(**variant)
    assert_same_bits(tmp_path / "run", wanted)
    traffic = federation.status()[0]["network-traffic"]
    assert traffic["inbound-bytes"] == pytest.approx(wanted.bytes_up, rel=0.01)
    assert traffic["outbound-bytes"] == pytest.approx(wanted.bytes_down, rel=0.01)


def test_a_faulty_client_is_excluded_only_from_its_faulty_rounds(federation, tmp_path):
    expected = {
        2: ("raise", "its client app raised"),
        3: ("nan", "m is not finite"),
        4: ("shape", "has shape (1,)"),
        5: ("v_hat", "v_hat fell below the broadcast"),
        6: ("stale", "belongs to round 5"),
        7: ("die", "its client app's process died"),
    }
    options = {"rounds": 8, "min_clients": 2}
    records = run_to_end(federation, tmp_path / "run", faults=",".join(f for f, _ in expected.values()), **options)
    for record in records:
        _, reason = expected.get(record.round, ("", ""))
        assert [(r.client, reason in r.reason) for r in record.rejected] == ([(1, True)] if reason else []), record
    assert_same_bits(tmp_path / "run", simulate(broken=expected, **options))
