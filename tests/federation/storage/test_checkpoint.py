"""Checkpoints: an interrupted run resumes to the same bits, and no good checkpoint is ever lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr.federation.storage import tensor_files
from fedlalr.federation.storage.checkpoint import sealed
from fedlalr.federation.storage.journal import RunDirectoryError, clear_run, versions
from fedlalr.training.stacked.engine import StackedEngine
from variants import VARIANTS

SETTINGS = {
    "local": fl.Steps(2),
    "batch_size": 4,
    "clients_per_round": 3,
    "schedule": fl.schedules.Exponential(0.9),
    "engine": "reference",
}


def run(algorithm=None, **options):
    model, clients = options.pop("model", None) or make_model(), options.pop("clients", None) or make_clients()
    return fl.run(model, clients, algorithm or fl.FedLALR(), **{**SETTINGS, "rounds": 6, **options})


def same(first: fl.Result, second: fl.Result) -> bool:
    return all(torch.equal(value, second.state[s][n]) for s, slot in first.state.items() for n, value in slot.items())


def numbers(result: fl.Result) -> list[tuple[object, ...]]:
    """The metrics that do not depend on the clock."""
    return [
        (r.round, r.loss, r.accuracy, r.train_loss, r.lr, r.clients, r.bytes_up, r.rejected) for r in result.history
    ]


class StopAt(fl.Observer):
    """Interrupts a run after some round, as an error in a progress display would."""

    def __init__(self, round: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.round, self.error = round, error

    def on_round(self, record):
        if record.round == self.round:
            raise self.error("stop")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.bfloat16, torch.uint16])
def test_buffers_of_unusual_kinds_are_kept(dtype, tmp_path):
    model = make_model()
    model.register_buffer("turns", torch.arange(6).to(dtype).view(2, 3) * (1j if dtype.is_complex else 1))
    run(model=model, run_dir=tmp_path, rounds=2)
    again = run(model=model, run_dir=tmp_path, rounds=4, resume=True)
    assert torch.equal(again.model.turns, model.turns)
    assert again.model.turns.dtype == dtype


@pytest.mark.parametrize("name", VARIANTS)
def test_every_algorithm_resumes_to_the_same_bits(name, tmp_path):
    whole = run(VARIANTS[name], rounds=4)
    with pytest.raises(KeyboardInterrupt):
        run(VARIANTS[name], rounds=4, run_dir=tmp_path, observers=[StopAt(2)])
    resumed = run(VARIANTS[name], rounds=4, run_dir=tmp_path, resume=True)
    assert resumed.info.first_round == 3
    assert same(whole, resumed)
    assert numbers(whole) == numbers(resumed)


@pytest.mark.parametrize("every", [1, 2, 4, 100])
def test_ctrl_c_saves_the_last_finished_round_however_seldom_checkpoints_are(every, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(run_dir=tmp_path, checkpoint_every=every, observers=[StopAt(3)])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3]
    resumed = run(run_dir=tmp_path, resume=True, checkpoint_every=every)
    assert resumed.info.first_round == 4
    assert same(run(), resumed)


def test_the_metrics_file_has_every_round_once_after_any_number_of_breaks(tmp_path):
    for stop in (1, 2, 5):
        with pytest.raises(KeyboardInterrupt):
            run(run_dir=tmp_path, resume=True, checkpoint_every=2, observers=[StopAt(stop)])
    result = run(run_dir=tmp_path, resume=True)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [fl.Record.from_json(line).round for line in lines] == [1, 2, 3, 4, 5, 6]
    assert numbers(result) == numbers(run())


def test_the_last_two_checkpoints_are_kept_and_nothing_lies_about(tmp_path):
    run(run_dir=tmp_path)
    assert sorted(os.listdir(tmp_path / "checkpoint")) == ["round-000005", "round-000006"]
    assert sorted(os.listdir(tmp_path / "checkpoint/round-000006")) == ["checkpoint.json", "state.safetensors"]


def test_what_a_killed_process_left_half_done_goes_and_a_copy_that_somebody_made_stays(tmp_path):
    run(run_dir=tmp_path, rounds=4)
    folder = tmp_path / "checkpoint"
    shutil.copytree(folder / "round-000004", folder / "round-000004.good")
    (folder / "round-000002 of mine").write_text("a note")
    for left in (".writing-round-000017", ".stale-round-000002"):
        shutil.copytree(folder / "round-000003", folder / left)
    (folder / ".writing-kept-000017.safetensors").write_bytes(b"half")
    run(run_dir=tmp_path, resume=True)
    assert sorted(os.listdir(folder)) == ["round-000002 of mine", "round-000004.good", "round-000005", "round-000006"]


def test_the_millionth_checkpoint_is_the_newest(tmp_path):
    run(run_dir=tmp_path, rounds=3)
    newest = tmp_path / "checkpoint/round-000003"
    newest.rename(newest.with_name("round-1000000"))
    newest.with_name("round-000002").rename(newest.with_name("round-999999"))
    assert run(run_dir=tmp_path, resume=True).info.first_round == 4


class StopAtOnce(fl.Observer):
    """Interrupts a run before its first round."""

    def on_start(self, info):
        raise KeyboardInterrupt


class StopTraining(fl.Observer):
    """Interrupts a run in its first round."""

    def probe(self, round):
        raise KeyboardInterrupt


def test_the_state_before_the_first_round_is_written_once(tmp_path):
    written = tmp_path / "checkpoint/round-000000/checkpoint.json"
    with pytest.raises(KeyboardInterrupt):
        run(run_dir=tmp_path, resume=True, observers=[StopTraining()])
    first = written.stat().st_ino
    for stop in (StopAtOnce(), StopTraining()):
        with pytest.raises(KeyboardInterrupt):
            run(run_dir=tmp_path, resume=True, observers=[stop])
        assert written.stat().st_ino == first
    assert same(run(), run(run_dir=tmp_path, resume=True))


def test_a_checkpoint_is_never_half_removed_under_its_name(tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        run(run_dir=tmp_path, observers=[StopAt(4)])
    shutil.copytree(tmp_path / "checkpoint/round-000004", tmp_path / "checkpoint/round-000005")
    (tmp_path / "checkpoint/round-000004/state.safetensors").write_bytes(b"")  # so that round 3 is the newest good one
    (tmp_path / "checkpoint/round-000005/state.safetensors").write_bytes(b"")
    removed, remove = [], shutil.rmtree

    def watched(path, *arguments, **options):
        newest = max(int(place.name[-6:]) for place in (tmp_path / "checkpoint").glob("round-*"))
        if Path(path).name.startswith("round-") and (Path(path) / "state.safetensors").stat().st_size:
            removed.append(newest - int(Path(path).name[-6:]))
        remove(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", watched)
    with pytest.warns(RuntimeWarning, match="resuming from round 3"):
        resumed = run(run_dir=tmp_path, resume=True)
    assert removed
    assert min(removed) >= 2  # a good one is removed only if there are two newer ones
    assert same(run(), resumed)
    assert sorted(os.listdir(tmp_path / "checkpoint")) == ["round-000005", "round-000006"]


def test_what_clients_keep_is_written_as_far_as_it_changed_and_goes_when_nothing_refers_to_it(tmp_path):
    kept = tmp_path / "checkpoint"
    sizes = []

    class Watch(fl.Observer):
        def on_round(self, record):
            sizes.append({file.name: file.stat().st_size for file in kept.glob("kept-*")})

    options = {"rounds": 12, "clients_per_round": 2}
    whole = run(fl.SCAFFOLD(0.1), **options)
    assert same(whole, run(fl.SCAFFOLD(0.1), **options, run_dir=tmp_path, observers=[Watch()]))
    row = 51 * 8
    assert sizes[0] == {"kept-000001.safetensors": pytest.approx(2 * row, abs=400)}
    assert all(size < 6 * row for files in sizes for size in files.values())
    assert max(sum(files.values()) for files in sizes) < 20 * row  # five clients, twice over, and what two rounds add
    assert any("kept-000001.safetensors" not in files for files in sizes)
    newest = json.loads((kept / "round-000012/checkpoint.json").read_text())["content"]["kept"]
    assert sorted(client for entry in newest for client in entry["clients"]) == [0, 1, 2, 3, 4]
    assert same(
        run(fl.SCAFFOLD(0.1), **options | {"rounds": 15}),
        run(fl.SCAFFOLD(0.1), **options | {"rounds": 15}, run_dir=tmp_path, resume=True),
    )


def test_cohorts_of_one_leave_few_files_of_what_clients_keep(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "FILES", 16)
    counts = []

    class Watch(fl.Observer):
        def on_round(self, record):
            counts.append(len(list((tmp_path / "checkpoint").glob("kept-*"))))

    clients = [make_clients()[0]] * 400
    options = {"clients": clients, "clients_per_round": 1, "rounds": 25}
    whole = run(fl.SCAFFOLD(0.1), **options)
    with pytest.raises(KeyboardInterrupt):
        run(fl.SCAFFOLD(0.1), **options, run_dir=tmp_path, observers=[Watch(), StopAt(20)])
    resumed = run(fl.SCAFFOLD(0.1), **options, run_dir=tmp_path, resume=True, observers=[Watch()])
    # Two checkpoints are kept, and a merge adds one file to those that the previous one refers to.
    assert 16 // 2 < max(counts) <= 16 + 1
    assert same(whole, resumed)


def test_damage_to_what_clients_keep_is_passed_over_like_any_other(tmp_path):
    run(fl.SCAFFOLD(0.1), run_dir=tmp_path, rounds=4)
    newest = json.loads((tmp_path / "checkpoint/round-000004/checkpoint.json").read_text())["content"]["kept"]
    damage(tmp_path / "checkpoint" / newest[-1]["file"], "flipped")
    with pytest.warns(RuntimeWarning, match=r"round-000004.*kept-000004.safetensors is damaged.*resuming from round 3"):
        assert same(run(fl.SCAFFOLD(0.1)), run(fl.SCAFFOLD(0.1), run_dir=tmp_path, resume=True))


def test_the_cost_of_checkpoints_is_in_the_records(tmp_path):
    record = run(run_dir=tmp_path).history[-1]
    assert 0 < record.timing["checkpoint"] < record.seconds
    assert "checkpoint" not in run().history[-1].timing


def test_buffers_and_dropout_are_resumed_too(tmp_path):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3)).double()

    options = {"batch_size": None}
    whole = run(model=build(), **options)
    with pytest.raises(KeyboardInterrupt):
        run(model=build(), run_dir=tmp_path, observers=[StopAt(3)], **options)
    torch.manual_seed(99)
    resumed = run(model=build(), run_dir=tmp_path, resume=True, **options)
    assert same(whole, resumed)
    assert all(torch.equal(value, resumed.model.state_dict()[n]) for n, value in whole.model.state_dict().items())


def test_the_callers_generator_is_not_disturbed():
    model, clients = make_model(), make_clients()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run(model=model, clients=clients, rounds=1)
    assert torch.equal(before, torch.get_rng_state())


def test_more_rounds_than_before_are_a_legal_change(tmp_path):
    run(run_dir=tmp_path, rounds=3)
    assert same(run(rounds=6), run(run_dir=tmp_path, resume=True, rounds=6))
    assert len(run(run_dir=tmp_path, resume=True, rounds=6).history) == 6  # a finished run is returned as it is
    with pytest.raises(ValueError, match="rounds is 4, but 6 rounds of the run are done"):
        run(run_dir=tmp_path, resume=True, rounds=4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"algorithm": fl.FedLALR(lr=0.5)}, r"algorithm\.lr was 0\.002 and is now 0\.5"),
        ({"algorithm": fl.FedAvg(0.1)}, r"algorithm was FedLALR\(lr=0\.002, .*\) and is now FedAvg\(lr=0\.1"),
        ({"seed": 7}, "seed was 0 and is now 7"),
        ({"local": fl.Steps(3)}, r"local\.count was 2 and is now 3"),
        ({"local": fl.Epochs(3)}, r"different settings: local was Steps\(count=2\) and is now Epochs\(count=3\)\. Use"),
        ({"batch_size": 5}, "batch_size was 4 and is now 5"),
        ({"schedule": fl.schedules.Exponential(0.8)}, r"schedule\.factor was 0\.9 and is now 0\.8"),
        ({"weight_decay": 0.1}, "weight_decay was 0.0 and is now 0.1"),
        ({"clip_norm": 1.0}, "clip_norm was None and is now 1.0"),
        ({"clients_per_round": 2}, "clients_per_round was 3 and is now 2"),
        ({"weighting": "samples"}, r"weighting was 'uniform' and is now 'samples'"),
        ({"reduce": {"x": "median"}}, r"reduce\.x was 'not set' and is now"),
        ({"max_norm_ratio": 5.0}, r"max_norm_ratio was 10\.0 and is now 5\.0"),
        ({"min_clients": 2}, r"min_clients was 1 and is now 2"),
        ({"clients": make_clients(seed=1)}, r"data\.inputs was"),
        ({"clients": make_clients(sizes=(7, 12, 5, 10, 9))}, r"data\.sizes was"),
        ({"test": make_clients()[0]}, r"test was None and is now 'not set'|test\.inputs was"),
        ({"loss": nn.functional.nll_loss}, "loss was"),
        ({"dtype": torch.float32, "clients": [(x.float(), y) for x, y in make_clients()]}, r"model\.dtype was"),
        ({"model": nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()}, "model was"),
        ({"engine": "stacked"}, "was started with engine 'reference' and cannot be resumed with 'stacked'"),
    ],
)
def test_another_run_is_rejected_and_says_what_differs(change, said, tmp_path):
    run(run_dir=tmp_path, rounds=2)
    before = contents(tmp_path)
    with pytest.raises(RunDirectoryError, match=said):
        run(change.pop("algorithm", None), run_dir=tmp_path, resume=True, **change)
    assert contents(tmp_path) == before


def test_another_lambda_is_another_loss(tmp_path):
    run(loss=lambda o, t: nn.functional.cross_entropy(o, t), run_dir=tmp_path, rounds=2)
    with pytest.raises(RunDirectoryError, match=r"loss\.<names>.* was"):
        run(loss=lambda o, t: nn.functional.multi_margin_loss(o, t), run_dir=tmp_path, resume=True)
    assert len(run(loss=lambda o, t: nn.functional.cross_entropy(o, t), run_dir=tmp_path, resume=True).history) > 2


def test_a_setting_that_a_module_does_not_print_is_another_run_if_it_changes(tmp_path):
    run(loss=nn.CrossEntropyLoss(label_smoothing=0.1), run_dir=tmp_path, rounds=2)
    with pytest.raises(RunDirectoryError, match="loss was"):
        run(loss=nn.CrossEntropyLoss(label_smoothing=0.2), run_dir=tmp_path, resume=True)
    assert len(run(loss=nn.CrossEntropyLoss(label_smoothing=0.1), run_dir=tmp_path, resume=True).history) > 2


class Smoothed:
    def __init__(self, share):
        self.share = share

    def __call__(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, label_smoothing=float(self.share))


def around(share, log=()):
    def loss(outputs, targets):
        log and log.append(float(outputs.detach().sum()))
        return Smoothed(share)(outputs, targets)

    return loss


def doubled(share):
    once = around(share)
    return lambda outputs, targets: 2 * once(outputs, targets)


def wrapped(share):
    module = nn.CrossEntropyLoss(label_smoothing=share)
    return lambda outputs, targets: module(outputs, targets)


@pytest.mark.parametrize(
    "make",
    [
        around,
        doubled,
        wrapped,
        lambda share: lambda outputs, targets, share=share: Smoothed(share)(outputs, targets),
        lambda share: Smoothed(np.float32(share)),
        lambda share: partial(around(share)),
    ],
    ids=[
        "closure",
        "closure in a closure",
        "module in a closure",
        "default",
        "number of NumPy",
        "closure in a partial",
    ],
)
def test_a_loss_that_was_made_with_another_number_is_another_run(make, tmp_path):
    run(loss=make(0.125), run_dir=tmp_path, rounds=2)
    with pytest.raises(RunDirectoryError, match=r"loss\.\w+(\.share)? was .* and is now"):
        run(loss=make(0.5), run_dir=tmp_path, resume=True)
    assert len(run(loss=make(0.125), run_dir=tmp_path, resume=True).history) > 2


def test_a_loss_that_keeps_a_log_can_be_resumed(tmp_path):
    log = [0.0]
    run(loss=around(0.125, log), run_dir=tmp_path, rounds=2)
    assert len(log) > 1
    assert len(run(loss=around(0.125, log), run_dir=tmp_path, resume=True).history) > 2


def unusual_losses():
    """Losses that capture more than numbers."""
    if flag := False:
        scale = 2.0
    names, kind, few = np.array(["a", "b"]), "smooth", np.longdouble(1)

    def with_an_empty_cell(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets) * (scale if flag else 1)

    def with_names(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets) * float(few) * len(names) * len(kind)

    def with_itself(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets) * len(both)

    both = (with_itself, partial(with_itself, 1))
    return [with_an_empty_cell, with_names, with_itself]


@pytest.mark.parametrize("which", range(3))
def test_a_run_resumes_with_whatever_its_loss_captures(which, tmp_path):
    loss = unusual_losses()[which]
    run(loss=loss, run_dir=tmp_path, rounds=2)
    assert len(run(loss=loss, run_dir=tmp_path, resume=True).history) > 2


def counting_loss():
    calls = 0

    def loss(outputs, targets):
        nonlocal calls
        calls += 1
        return nn.functional.cross_entropy(outputs, targets)

    return loss


def test_a_number_around_a_loss_counts_as_it_is_when_the_run_starts_or_resumes(tmp_path):
    loss = counting_loss()
    run(loss=loss, run_dir=tmp_path, rounds=2)
    with pytest.raises(RunDirectoryError, match=r"loss\.calls was 1 and is now \d+"):
        run(loss=loss, run_dir=tmp_path, resume=True)
    assert len(run(loss=counting_loss(), run_dir=tmp_path, resume=True).history) > 2, "as in a new process"


def test_other_values_of_frozen_parameters_are_another_run(tmp_path):
    def partly(seed):
        model = make_model(seed)
        model[0].requires_grad_(False)
        return model

    run(model=partly(0), run_dir=tmp_path, rounds=2)
    with pytest.raises(RunDirectoryError, match=r"model\.frozen was"):
        run(model=partly(1), run_dir=tmp_path, resume=True)


def test_the_home_directory_is_known_by_its_short_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run(run_dir="~/runs/mine", rounds=1)
    assert (tmp_path / "runs" / "mine" / "metrics.jsonl").exists()
    assert not (tmp_path / "~").exists()
    assert len(run(run_dir=Path("~/runs/mine"), rounds=2, resume=True).history) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names of files are Unicode")
def test_a_run_in_a_folder_whose_name_is_not_unicode_resumes(tmp_path):
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    run(run_dir=os.fsdecode(folder), rounds=3)
    assert same(run(), run(run_dir=os.fsdecode(folder), resume=True))


def test_a_directory_that_holds_a_run_is_not_overwritten(tmp_path):
    run(run_dir=tmp_path, rounds=2)
    before = contents(tmp_path)
    with pytest.raises(RunDirectoryError, match="already contains a run; pass resume=True"):
        run(run_dir=tmp_path)
    assert contents(tmp_path) == before


def test_records_without_a_checkpoint_are_not_overwritten(tmp_path):
    run(run_dir=tmp_path, rounds=2)
    shutil.rmtree(tmp_path / "checkpoint")
    with pytest.raises(RunDirectoryError, match="has records but there is no checkpoint"):
        run(run_dir=tmp_path, resume=True)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def rewrite(folder: Path, **changes: object) -> None:
    """Change the descriptions of all checkpoints, with hashes that match."""
    for path in folder.glob("checkpoint/*/checkpoint.json"):
        content = json.loads(path.read_text())["content"] | changes
        path.write_text(json.dumps(sealed(content)))


def damage(path: Path, kind: str) -> None:
    content = path.read_bytes()
    match kind:
        case "truncated":
            path.write_bytes(content[: len(content) // 2])
        case "empty":
            path.write_bytes(b"")
        case "missing":
            path.unlink()
        case "flipped":
            middle = len(content) // 2
            path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        case "longer":
            path.write_bytes(content + b"\0")
        case "foreign":
            path.write_bytes(b'{"hello": "world"}')


@pytest.mark.parametrize("kind", ["truncated", "empty", "missing", "flipped", "longer", "foreign"])
@pytest.mark.parametrize("file", ["checkpoint.json", "state.safetensors"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning_and_two_are_an_error(file, kind, tmp_path):
    run(run_dir=tmp_path, rounds=4)
    damage(tmp_path / "checkpoint/round-000004" / file, kind)
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path, copy, ignore=shutil.ignore_patterns("copy"))
    with pytest.warns(RuntimeWarning, match=r"round-000004.*resuming from round 3 instead"):
        resumed = run(run_dir=tmp_path, resume=True)
    assert same(run(), resumed)
    assert [record.round for record in resumed.history] == [1, 2, 3, 4, 5, 6]
    damage(copy / "checkpoint/round-000003" / file, kind)
    before = contents(copy)
    with pytest.raises(RunDirectoryError, match=r"no checkpoint in .* can be used: .*round-000004.*round-000003"):
        run(run_dir=copy, resume=True)
    assert contents(copy) == before


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_two_good_checkpoints_stay_after_damaged_ones_were_passed_over(kind, tmp_path):
    """Even if the run stops before it reaches the damaged checkpoint's round again."""
    with pytest.raises(KeyboardInterrupt):
        run(run_dir=tmp_path, checkpoint_every=2, observers=[StopAt(4)])
    damaged = tmp_path / "checkpoint/round-000004"
    if kind == "folder":
        damage(damaged / "state.safetensors", "truncated")
    else:
        shutil.rmtree(damaged)
        damaged.write_text("a file")
    with pytest.warns(RuntimeWarning, match="resuming from round 2"), pytest.raises(KeyboardInterrupt):
        run(run_dir=tmp_path, resume=True, checkpoint_every=2, observers=[StopAt(3)])
    assert sorted(os.listdir(tmp_path / "checkpoint")) == ["round-000002", "round-000003"]
    assert same(run(), run(run_dir=tmp_path, resume=True))


@pytest.mark.parametrize(("version", "writer"), [(2, "a development version of fedlalr 0.2"), (99, "another version")])
def test_another_format_is_rejected_by_its_number(tmp_path, version, writer):
    run(run_dir=tmp_path, rounds=1)
    rewrite(tmp_path, format=version)
    with pytest.raises(
        RunDirectoryError, match=f"has format {version}, written by {writer}, and this version of fedlalr reads format"
    ):
        run(run_dir=tmp_path, resume=True)


def test_a_metrics_file_that_lost_lines_is_an_error(tmp_path):
    run(run_dir=tmp_path, rounds=3)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(RunDirectoryError, match=r"metrics.jsonl has 0 bytes, but at round 3 it had"):
        run(run_dir=tmp_path, resume=True)


def test_two_processes_in_one_directory_are_rejected(tmp_path):
    class Again(fl.Observer):
        def on_round(self, record):
            with pytest.raises(RunDirectoryError, match="another process is working in"):
                run(run_dir=tmp_path, resume=True)
            Again.tried = True

    run(run_dir=tmp_path, rounds=1, observers=[Again()])
    assert Again.tried
    run(run_dir=tmp_path, rounds=2, resume=True)


def test_a_run_that_is_under_way_is_not_cleared(tmp_path):
    class Clear(fl.Observer):
        def on_round(self, record):
            with pytest.raises(RunDirectoryError, match="another process is working in"):
                clear_run(tmp_path)

    run(run_dir=tmp_path, rounds=1, observers=[Clear()])
    assert (tmp_path / "metrics.jsonl").exists()
    (tmp_path / "notes.txt").touch()
    clear_run(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".lock", "notes.txt"]
    clear_run(tmp_path / "nowhere")
    run(run_dir=tmp_path, rounds=1)


def test_a_run_is_cleared_with_its_settings_last_and_before_another_can_take_its_place(tmp_path, monkeypatch):
    run(run_dir=tmp_path, rounds=1)
    (tmp_path / "config.yaml").touch()
    unlink, left = Path.unlink, []

    def watched(path, missing_ok=False):
        if path.name == "config.yaml":
            left.extend(sorted(os.listdir(tmp_path)))
            with pytest.raises(RunDirectoryError, match="another process is working in"):
                run(run_dir=tmp_path)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", watched)
    clear_run(tmp_path, also=["config.yaml", "summary.json"])
    assert left == [".lock", "config.yaml"]
    assert not (tmp_path / "config.yaml").exists()


@contextmanager
def ordinary_user():
    """Root may write anywhere, so switch to the user nobody."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.skipif(os.name != "posix", reason="permissions as POSIX has them")
def test_a_read_only_directory_is_a_clear_error(tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir()
    tmp_path.chmod(0o755)
    folder.chmod(0o555)
    with ordinary_user(), pytest.raises(RunDirectoryError, match="run cannot be written: Permission denied"):
        run(run_dir=folder / "run")
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="cannot be written: Not a directory"):
        run(run_dir=tmp_path / "file" / "run")
    with pytest.raises(RunDirectoryError, match="file is a file, but run_dir must be a directory"):
        run(run_dir=tmp_path / "file")


def test_threads_and_engine_are_those_the_run_began_with(tmp_path):
    assert torch.get_num_threads() == 1
    run(run_dir=tmp_path, rounds=2, engine="reference")
    seen = []

    class Look(fl.Observer):
        def on_start(self, info):
            seen.append((torch.get_num_threads(), info.engine, info.reason))

    torch.set_num_threads(2)
    try:
        run(run_dir=tmp_path, resume=True, engine="auto", rounds=3, observers=[Look()])
        assert seen == [(1, "reference", "the run was started with it")]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_the_number_of_clients_trained_at_once_is_the_one_the_run_began_with(tmp_path):
    engines = []

    def stacked(training):
        engines.append(StackedEngine(training))
        return engines[-1]

    whole = run(engine="stacked")
    run(run_dir=tmp_path, rounds=2, engine=stacked)
    chosen = engines[0].chunk
    assert chosen is not None
    assert json.loads((tmp_path / "checkpoint/round-000002/checkpoint.json").read_text())["content"]["choices"] == {
        "engine": "stacked",
        "threads": 1,
        "chunk": chosen,
    }
    assert same(whole, run(run_dir=tmp_path, resume=True, engine=stacked))
    assert engines[1].chunk == chosen
    rewrite(tmp_path, choices={"engine": "stacked", "threads": 1, "chunk": 2})
    run(run_dir=tmp_path, resume=True, engine=stacked, rounds=7)
    assert engines[2].chunk == 2


def test_another_version_of_a_library_is_a_warning(tmp_path):
    run(run_dir=tmp_path, rounds=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(run_dir=tmp_path, resume=True, rounds=3)
    rewrite(tmp_path, versions=versions() | {"torch": "1.0"})
    with pytest.warns(RuntimeWarning, match=r"torch was '1.0' and is now .*; the last bits may differ"):
        run(run_dir=tmp_path, resume=True, rounds=4)


OTHER_INSTRUCTIONS = """
import sys, warnings
import torch
from test_checkpoint import run
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    run(run_dir=sys.argv[1], resume=True, rounds=3)
print(torch.backends.cpu.get_cpu_capability(), *(str(one.message) for one in caught), sep="|")
"""


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="there are no others to switch off")
def test_other_instructions_of_the_processor_are_a_warning(tmp_path):
    """An environment variable of torch disables the newer ones, as on an older processor."""
    run(run_dir=tmp_path, rounds=2)
    here = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", OTHER_INSTRUCTIONS, str(tmp_path)],
        env=os.environ | {"ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": here},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    now, *warned = done.stdout.strip().split("|")
    before = torch.backends.cpu.get_cpu_capability()
    assert now in ("DEFAULT", "NO AVX")  # the second is torch 2.7's name
    assert [text for text in warned if f"instructions was '{before}' and is now '{now}'; the last bits" in text]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}
