"""Over-selection, deadlines with partial work, and the virtual time of synchronous rounds."""

import pytest
import torch

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr.federation.stragglers import TOO_SLOW, Stragglers, client_speeds, first_arrivals

SPEEDS = [1.0, 4.0, 0.5, 2.0, 0.25, 8.0]


def run(rounds=3, speeds=SPEEDS, algorithm=None, **options):
    settings = {"local": fl.Steps(4), "batch_size": 4, "engine": "reference"}
    return fl.run(
        make_model(), make_clients((8,) * 6), algorithm or fl.FedAvg(0.1), rounds=rounds, speeds=speeds,
        **(settings | options),
    )  # fmt: skip


def seconds(result):
    return [record.virtual_seconds for record in result.history]


def equal(one, other):
    return all(torch.equal(value, other.state["x"][name]) for name, value in one.state["x"].items())


def test_a_round_takes_as_long_as_its_slowest_client():
    assert seconds(run()) == [16.0] * 3
    assert seconds(run(speeds=None)) == [None] * 3
    assert seconds(run(clients_per_round=1, sampling="round-robin", rounds=6)) != [16.0] * 6


def test_the_first_replies_of_more_clients_are_taken():
    """The round is that of the fastest four, and ends with the fourth; all six were sent the model."""
    result = run(clients_per_round=4, stragglers=fl.Stragglers(oversample=0.5))
    fastest = run(clients_per_round=4, sampling=lambda *_: [0, 1, 3, 5])
    assert equal(result, fastest)
    assert seconds(result) == [4.0] * 3
    for record, same in zip(result.history, fastest.history, strict=True):
        assert (record.clients, record.rejected, record.bytes_up) == (4, (), same.bytes_up)
        assert record.bytes_down == same.bytes_down * 6 // 4


@pytest.mark.parametrize("engine", ["reference", "stacked"])
@pytest.mark.filterwarnings("ignore::fedlalr.RepliesRejected")
def test_a_client_that_runs_out_of_time_sends_what_it_has(engine):
    """At the deadline of 2 seconds client 0 has done 2 of 4 steps, client 2 one, and client 4 none."""
    result = run(rounds=1, stragglers=fl.Stragglers(deadline=2.0), engine=engine)
    assert seconds(result) == [2.0]
    assert result.history[0].rejected == (fl.Rejection(4, TOO_SLOW),)
    assert result.history[0].clients == 5
    changes = []
    start = make_model().state_dict()
    for client, steps in {0: 2, 1: 4, 2: 1, 3: 4, 5: 4}.items():
        alone = run(
            rounds=1, speeds=None, clients_per_round=1, sampling=lambda *_, c=client: [c], local=fl.Steps(steps)
        )
        changes.append({name: value - start[name] for name, value in alone.state["x"].items()})
    for name, value in result.state["x"].items():
        mean = torch.stack([change[name] for change in changes]).mean(0)
        torch.testing.assert_close(value, start[name] + mean, rtol=1e-12, atol=1e-12)


def test_a_round_in_which_nobody_finishes_a_step_fails():
    with pytest.raises(fl.RoundFailed, match=r"0 usable replies.*6 clients .*no local step .*; raise the deadline"):
        run(stragglers=fl.Stragglers(deadline=0.1))


def test_clients_that_are_only_slow_are_not_debugged():
    with pytest.warns(fl.RepliesRejected, match="does not learn from its data; raise the deadline of stragglers$"):
        run(stragglers=fl.Stragglers(deadline=2.0))


def test_a_run_with_stragglers_resumes_to_the_same_bits(tmp_path):
    options = {"stragglers": fl.Stragglers(0.2, deadline=3.0), "clients_per_round": 4, "speeds": 0.5}
    whole = run(rounds=5, **options)
    run(rounds=2, run_dir=tmp_path, **options)
    resumed = run(rounds=5, run_dir=tmp_path, resume=True, **options)
    assert equal(whole, resumed)
    assert seconds(whole) == seconds(resumed)
    with pytest.raises(fl.RunDirectoryError, match=r"stragglers.deadline was 3.0 and is now 4.0"):
        run(rounds=6, run_dir=tmp_path, resume=True, **options | {"stragglers": fl.Stragglers(0.2, deadline=4.0)})
    with pytest.raises(fl.RunDirectoryError, match="speeds was"):
        run(rounds=6, run_dir=tmp_path, resume=True, **options | {"speeds": 0.6})


def test_ties_go_to_the_lower_ids_and_a_round_with_too_few_lasts_until_the_deadline():
    ids, steps = torch.tensor([3, 5, 8, 9]), torch.full((4,), 6)
    same = torch.ones(4, dtype=torch.float64)
    assert first_arrivals(ids, 2, steps, same, Stragglers(1.0)).clients.tolist() == [3, 5]
    slow = torch.tensor([1.0, 0.1, 0.1, 0.1], dtype=torch.float64)
    found = first_arrivals(ids, 2, steps, slow, Stragglers(1.0, deadline=7.0))
    assert (found.clients.tolist(), found.seconds, found.too_slow) == ([3], 7.0, (5, 8, 9))


def test_an_array_of_speeds_is_rejected_with_the_way_to_a_list():
    with pytest.raises(
        ValueError,
        match=r"a list with a number for every client \(array.tolist\(\)\), or the name of a file, not array",
    ):
        run(speeds=torch.ones(6).numpy() * 2)


def test_log_normal_speeds_have_median_one_and_the_spread_that_was_given():
    logs = client_speeds(0.7, 20_000, seed=5).log()
    assert abs(float(logs.median())) < 0.03  # ten standard errors are 0.06
    assert abs(float(logs.std()) - 0.7) < 0.03
    assert torch.equal(client_speeds(0.7, 20_000, seed=5).log(), logs)
    assert not torch.equal(client_speeds(0.7, 20_000, seed=6).log(), logs)


def test_speeds_are_read_from_a_file(tmp_path):
    file = tmp_path / "speeds.txt"
    file.write_text("\n".join(map(str, SPEEDS)) + "\n\n")
    assert seconds(run(speeds=str(file))) == seconds(run(speeds=file)) == [16.0] * 3
    file.write_text("1\nfast\n")
    with pytest.raises(ValueError, match=r"line 2 of .*speeds.txt is 'fast', not a number"):
        run(speeds=file)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"speeds": [1.0]}, "speeds has 1 numbers, but there are 6 clients"),
        ({"speeds": [1.0] * 5 + [0.0]}, "speeds gives client 5 the speed 0.0; a speed is a finite number above 0"),
        ({"speeds": ["1"] * 6}, "speeds contains '1'; give a number for every client"),
        ({"speeds": -1.0}, "speeds must be a finite number of at least 0, a list"),
        ({"stragglers": {"oversample": -1}}, "oversample must be a finite number of at least 0"),
        ({"stragglers": {"deadline": 0}}, "deadline must be a finite number above 0 or None"),
        ({"stragglers": {"dedline": 1}}, "stragglers has no option 'dedline'; it takes oversample, deadline"),
        ({"stragglers": True}, r"stragglers must be fl\.Stragglers"),
        ({"stragglers": {"oversample": 0.2}}, "so 8 clients would be sampled for 6 replies, but there are only 6"),
    ],
)
def test_invalid_settings_are_rejected(options, said):
    with pytest.raises((ValueError, TypeError), match=said):
        run(**options)
