"""A run resumes after Flower's superlink was killed: `make test-flower`."""

import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

from flower.deployed import assert_same_bits, run_to_end, simulate, submit, wait_until

pytestmark = [pytest.mark.flower, pytest.mark.timeout(1500)]


@pytest.mark.parametrize("algorithm", ["fedlalr", "scaffold"])
def test_a_run_resumes_to_the_same_bits_after_the_superlink_was_killed(federation, tmp_path, algorithm):
    options = {"algorithm": algorithm, "rounds": 3}
    run_dir = tmp_path / "run"
    progress = submit(federation, run_dir, **options)
    wait_until(lambda: progress() >= 1)
    federation.processes.kill("superlink")
    done = progress()
    assert done < 3
    federation.start_superlink()
    federation.processes.kill("run")
    records = run_to_end(federation, run_dir, **options)
    assert [record.round for record in records] == [1, 2, 3]
    assert_same_bits(run_dir, simulate(**options))
