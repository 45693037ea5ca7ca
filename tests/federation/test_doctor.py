"""The report on the machine."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from typer.testing import CliRunner

import fedlalr as fl
from fedlalr.cli import app
from fedlalr.federation import doctor, options
from fedlalr.federation.doctor import GIB, Finding, examine
from fedlalr.training import machine


@pytest.fixture(scope="module")
def health():
    return examine(".")


def test_the_report_names_versions_devices_threads_data_and_disk(health):
    assert health.versions["torch"] == torch.__version__
    assert health.versions["fedlalr"] is not None
    assert health.devices[0].startswith("cpu")
    assert health.threads == torch.get_num_threads()
    assert health.data["digits"] == "in scikit-learn"
    assert set(health.disk) == {"data", "runs"}
    assert health.cores >= 1
    assert health.checkpoint_seconds > 0


def test_a_healthy_machine_fails_nothing(health):
    assert [finding for finding in health.findings if finding.grade == "fails"] == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"threads": 64, "cores": 2}, "torch computes with 64 threads on 2 cores"),
        ({"load": 9.0, "cores": 2}, "9.0 processes want 2 cores"),
        ({"devices": ("cpu: x",)}, "no GPU"),
        ({"memory": GIB}, "1.0 GiB of memory left"),
        ({"disk": {"runs": GIB // 2}}, "0.5 GiB of disk left for runs"),
        ({"checkpoint_seconds": 7.0}, "a checkpoint of a million parameters takes 7.0 s"),
    ],
)
def test_what_would_be_slow_or_fail_is_found(changes, expected, health):
    fine = replace(health, threads=1, load=0.0, memory=8 * GIB, disk={"runs": 80 * GIB}, checkpoint_seconds=0.1)
    (advice,) = [found.advice for found in doctor._find(replace(fine, **changes), None) if found.what == expected]
    assert re.search(r"export [A-Z_]+=\w+|fedlalr (run|reproduce) .*\w+", advice)  # a command to copy


@pytest.fixture
def deadly_half_precision(monkeypatch):
    """A CPU on which the trial dies by an illegal instruction, unless the setting CURED=yes is given."""
    deadly = "import os, signal; 'CURED' in os.environ or os.kill(os.getpid(), signal.SIGILL)"
    monkeypatch.setattr(machine, "TRIAL", deadly)
    another = cache(machine.half_precision_fault.__wrapped__)  # the first remembers how this machine's trial ended
    for module in (machine, doctor, options):
        monkeypatch.setattr(module, "half_precision_fault", another)


def test_a_cpu_on_which_bfloat16_kills_is_found_and_runs_in_it_are_rejected(deadly_half_precision, model, clients):
    (finding,) = doctor._half_precision_test()
    assert finding.grade == "limited"
    assert finding.what.startswith("bfloat16 kills a process on this CPU (exit code -4)")
    assert finding.advice == "compute in float32"
    with pytest.raises(
        ValueError, match=r"^bfloat16 kills a process on this CPU \(exit code -4\); compute in float32$"
    ):
        fl.run(model, clients, fl.FedAvg(), rounds=1, device="cpu", dtype=torch.bfloat16)
    fl.run(model, clients, fl.FedAvg(), rounds=1, device="cpu")


def test_a_setting_with_which_bfloat16_works_is_named(deadly_half_precision, monkeypatch):
    monkeypatch.setattr(machine, "FEWER_INSTRUCTIONS", ("OTHER=yes", "CURED=yes"))
    (finding,) = doctor._half_precision_test()
    assert finding.advice == "set CURED=yes, which makes it work, or compute in float32"


def test_an_exception_in_the_trial_is_left_to_the_run(monkeypatch):
    monkeypatch.setattr(machine, "TRIAL", "raise RuntimeError")
    assert machine.half_precision_fault.__wrapped__(torch.float16) is None


def test_the_trial_itself_runs():
    # AVX2: some CPUs announce bfloat16 units that they lack
    assert machine._end_of_trial("bfloat16", "ONEDNN_MAX_CPU_ISA=AVX2") == 0


def test_a_healthy_machine_with_a_gpu_has_no_findings(health):
    fine = replace(
        health, threads=1, load=0.0, memory=8 * GIB, disk={"runs": 80 * GIB}, checkpoint_seconds=0.1,
        devices=("cpu: x", "cuda:0: y"),
    )  # fmt: skip
    assert list(doctor._find(fine, None)) == []


def test_a_folder_that_cannot_be_written_is_found(tmp_path):
    (tmp_path / "file").touch()
    seconds, failure = doctor._time_checkpoint(tmp_path)
    assert failure is None
    assert seconds > 0
    assert os.listdir(tmp_path) == ["file"]
    seconds, failure = doctor._time_checkpoint(doctor.Path("/proc/nowhere"))
    assert seconds is None
    assert "/proc/nowhere" in failure


def test_flushed_denormals_are_found():
    assert list(doctor._self_test()) == []
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        assert [finding.what for finding in doctor._self_test()] == ["very small numbers are flushed to zero"]
    finally:
        torch.set_flush_denormal(False)


def test_the_command_prints_the_report_and_its_json(tmp_path):
    result = CliRunner().invoke(app, ["doctor", "--run-dir", str(tmp_path)])
    assert result.exit_code == 0
    assert f"torch {torch.__version__}" in result.output.replace("\n", " ")
    as_json = json.loads(CliRunner().invoke(app, ["doctor", "--json", "--run-dir", str(tmp_path)]).stdout)
    assert as_json["data"]["digits"] == "in scikit-learn"
    assert all(Finding(**finding).grade != "fails" for finding in as_json["findings"])


def test_the_command_fails_where_something_would():
    result = CliRunner().invoke(app, ["doctor", "--run-dir", "/proc/nowhere"])
    assert result.exit_code == 1
    assert "fails: no checkpoint can be written" in result.output.replace("\n", " ")
