"""Client sampling in a deployment: from the server's secret, which no node learns and a resumed run keeps."""

from __future__ import annotations

import io
import shutil
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

from flwr.cli.build import build_fab_from_disk
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

import fedlalr as fl
from fedlalr.federation.sampling import sample
from fedlalr.federation.storage.journal import RunDirectoryError
from fedlalr.flower.server.cohort_secret import FILE
from flower.federation import SETTINGS, InProcessGrid, cohorts, nodes, strategy

LALR = fl.FedLALR(lr=0.05)
EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"
LARGE = {"population": 1000}


def opened(server, rounds=range(1, 4)):
    """Cohorts that a server samples, and its instructions to them, except for the name of the run."""
    drawn, sent = [], []
    for t in rounds:
        server.server.state = replace(server.server.state, round=t - 1)
        work = server.server.open()
        work.inbox.dispose()
        drawn.append(work.cohort)
        sent.append(
            [asdict(server.server.instruction(client, work.offer.work)) | {"run": ""} for client in work.cohort]
        )
    return drawn, sent


def test_no_instruction_determines_the_cohort_of_a_round():
    """Two servers whose instructions differ only in the run's name and the clients sample different cohorts."""
    (first, sent), (second, also_sent) = (
        opened(strategy(LALR, settings={"clients_per_round": 10}, **LARGE)) for _ in range(2)
    )
    for one, other in zip(sent, also_sent, strict=True):
        assert {**one[0], "client": 0} == {**other[0], "client": 0}
    public = [sample(1000, 10, SETTINGS["seed"], t).tolist() for t in (1, 2, 3)]
    for t in range(3):
        # Equal with probability 1 / C(1000, 10) < 1e-23.
        assert first[t] != second[t]
        assert first[t] != public[t]


def test_cohorts_do_not_depend_on_the_name_of_the_run():
    one, other = (strategy(LALR, settings={"clients_per_round": 10}, **LARGE) for _ in range(2))
    other.server.run = one.server.run
    assert opened(one)[0] != opened(other)[0]


def test_a_deployment_samples_clients_uniformly():
    drawn = opened(strategy(LALR, settings={"clients_per_round": 2}), range(1, 1001))[0]
    counts = [sum(client in cohort for cohort in drawn) for client in range(5)]
    # Binomial(1000, 0.4): mean 400, deviation 15.5; beyond 100 off with probability < 1e-9.
    assert all(abs(count - 400) < 100 for count in counts)
    assert all(cohort == sorted(set(cohort)) and len(cohort) == 2 for cohort in drawn)


def test_other_samplings_draw_from_the_secret_too():
    def chosen(round, population, count, generator):
        return generator.choice(population, count, replace=False)

    for sampling in ("round-robin", chosen):
        settings = {"clients_per_round": 10, "sampling": sampling}
        first, second = (opened(strategy(LALR, settings=settings, **LARGE))[0] for _ in range(2))
        assert first != second
    with pytest.raises(ValueError, match="the server does not know"):
        strategy(LALR, settings={"sampling": "size"})


def test_no_message_contains_the_secret(tmp_path):
    grid = InProcessGrid(nodes(LALR, tmp_path))
    settings = {"clients_per_round": 3, "rounds": 3, "run_dir": tmp_path / "run"}
    strategy(LALR, settings=settings).start(grid)
    secret = (tmp_path / "run" / FILE).read_text()
    assert len(bytes.fromhex(secret)) == 32
    sent = [part.deflate() for message in grid.sent for part in get_all_nested_objects(message).values()]
    assert any(b"contract" in part for part in sent), "the instruction is among what is searched"
    forms = [secret.encode(), bytes.fromhex(secret), str(int(secret, 16)).encode(), bytes.fromhex(secret)[::-1]]
    assert not [form for form in forms for part in sent if form in part]


def test_a_resumed_deployment_samples_the_cohorts_of_an_uninterrupted_one(tmp_path):
    class CopyAfterTwo(fl.Observer):
        def on_round(self, record):
            if record.round == 2:
                shutil.copytree(tmp_path / "run", tmp_path / "copy")

    settings = {"clients_per_round": 2, "rounds": 12, "resume": True}
    whole, resumed = (InProcessGrid(nodes(LALR, tmp_path / "state")) for _ in range(2))
    strategy(LALR, settings=settings | {"run_dir": tmp_path / "run"}, observers=[CopyAfterTwo()]).start(whole)
    strategy(LALR, settings=settings | {"run_dir": tmp_path / "copy"}).start(resumed)
    assert list(cohorts(resumed)) == list(range(3, 13))
    # Other cohorts of 2 of 5 would be the same in all ten rounds with probability 1e-10.
    assert {t: cohorts(whole)[t] for t in cohorts(resumed)} == cohorts(resumed)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda file: file.unlink(), "cohort-secret cannot be read"),
        (lambda file: file.write_text("zz" * 32), "cohort-secret cannot be read"),
        (lambda file: file.write_bytes(b"\xff" * 64), "cohort-secret cannot be read"),
        (lambda file: file.write_text(file.read_text()[:-2]), "is not the secret with which the run"),
        (lambda file: file.write_text("00" * 32), "is not the secret with which the run"),
    ],
    ids=["missing", "no digits", "no text", "cut", "another"],
)
def test_a_run_whose_secret_is_lost_is_not_resumed_with_other_cohorts(damage, reason, tmp_path):
    settings = {"run_dir": tmp_path / "run", "resume": True}
    strategy(LALR, settings=settings).start(InProcessGrid(nodes(LALR, tmp_path)))
    damage(tmp_path / "run" / FILE)
    with pytest.raises(RunDirectoryError, match=rf"{reason}.*restore the file"):
        strategy(LALR, settings=settings | {"rounds": 3}).start(InProcessGrid(nodes(LALR, tmp_path)))


def test_a_run_directory_in_the_apps_folder_does_not_send_the_secret_to_the_nodes(tmp_path):
    """Flower sends every node the app as an archive, with the JSON files in its folder."""
    app = shutil.copytree(EXAMPLE, tmp_path / "app")
    strategy(LALR, settings={"run_dir": app / "run"}).start(InProcessGrid(nodes(LALR, tmp_path)))
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))) as archive:
        shipped = {name: archive.read(name) for name in archive.namelist()}
    assert any(name.endswith("checkpoint.json") for name in shipped)
    secret = (app / "run" / FILE).read_bytes()
    assert len(secret) == 64
    assert not [name for name, content in shipped.items() if secret in content]
