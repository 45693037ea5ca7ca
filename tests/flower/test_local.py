"""A federation on this machine: keys and certificates, marked processes, an environment without network access."""

import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.common.config import parse_config_args
from typer.testing import CliRunner

from fedlalr.cli import app
from fedlalr.config import RunDirectory
from fedlalr.federation import Record
from fedlalr.flower.local.certificates import ServerFiles, make_node_keys, make_server_files
from fedlalr.flower.local.demonstration import _Watched
from fedlalr.flower.local.launch import FederationError, LocalFederation, as_toml, environment, free_port
from fedlalr.flower.local.processes import Processes
from flower.killing import kill


def handshake(files, authority, name):
    """Whether a client that trusts an authority accepts our server under that name."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.certificate, files.key)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection, suppress(ssl.SSLError, OSError), server.wrap_socket(connection, server_side=True) as tls:
                tls.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            client = ssl.create_default_context(cafile=authority)
            with (
                socket.create_connection(listener.getsockname()) as plain,
                client.wrap_socket(plain, server_hostname=name),
            ):
                return True
        except ssl.SSLCertVerificationError:
            return False
        finally:
            thread.join()


def test_a_certificate_is_valid_only_for_its_hosts_and_its_authority(tmp_path):
    files = make_server_files(tmp_path / "one", ["127.0.0.1", "superlink.example.org"])
    other = make_server_files(tmp_path / "two", ["127.0.0.1"])
    assert handshake(files, files.authority, "127.0.0.1")
    assert handshake(files, files.authority, "superlink.example.org")
    assert not handshake(files, files.authority, "elsewhere.example.org")
    assert not handshake(files, other.authority, "127.0.0.1")


@pytest.mark.skipif(not all(map(shutil.which, ("openssl", "ssh-keygen"))), reason="openssl or ssh-keygen is missing")
def test_the_script_of_the_example_makes_the_same_kinds_of_files(tmp_path):
    script = Path(__file__).parents[2] / "examples" / "flower" / "deploy" / "certificates.sh"
    command = ["sh", str(script), str(tmp_path / "made"), "2", "127.0.0.1", "superlink.example.org"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    made = tmp_path / "made"
    files = ServerFiles(made / "ca.crt", made / "server.pem", made / "server.key")
    other = make_server_files(tmp_path / "other", ["127.0.0.1"])
    assert handshake(files, files.authority, "127.0.0.1")
    assert handshake(files, files.authority, "superlink.example.org")
    assert not handshake(files, other.authority, "127.0.0.1")
    assert isinstance(load_ssh_private_key((made / "node-1").read_bytes(), None).curve, ec.SECP384R1)
    assert (made / "server.key").stat().st_mode & 0o077 == 0


def test_only_the_owner_can_read_secrets(tmp_path):
    files, keys = make_server_files(tmp_path, ["localhost"]), make_node_keys(tmp_path, "node-0")
    for secret in (files.key, tmp_path / "ca.key", keys.private):
        assert secret.stat().st_mode & 0o077 == 0
    private = load_ssh_private_key(keys.private.read_bytes(), password=None)
    assert isinstance(private.curve, ec.SECP384R1)
    assert load_ssh_public_key(keys.public.read_bytes()) == private.public_key()


CHILD = "import subprocess, sys, time; subprocess.Popen(['sleep', '600'], start_new_session=True); time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_stopping_a_family_stops_children_that_left_the_group_or_ignore_signals(tmp_path):
    family = Processes(dict(os.environ))
    family.start("child", [sys.executable, "-S", "-c", CHILD], tmp_path / "log")
    family.start("stubborn", [sys.executable, "-S", "-c", STUBBORN], tmp_path / "log")
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        wait_for(lambda: len(family.members()) == 3)
        family.stop(patience=0.5)
        assert family.members() == []
        assert bystander.poll() is None, "only what carries the mark is ended"
    finally:
        bystander.send_signal(signal.SIGKILL)
        bystander.wait()


def test_killing_one_process_kills_its_children_and_no_other(tmp_path):
    family = Processes(dict(os.environ))
    family.start("child", [sys.executable, "-S", "-c", CHILD], tmp_path / "log")
    family.start("other", ["sleep", "600"], tmp_path / "log")
    wait_for(lambda: len(family.members()) == 3)
    kill(family, "child")
    wait_for(lambda: len(family.members()) == 1)
    assert family.alive("other")
    assert not family.alive("child")
    family.stop(patience=5)


def test_the_environment_has_no_telemetry_and_no_proxy(tmp_path, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.org")
    found = environment(tmp_path, tmp_path / "bin")
    assert "HTTPS_PROXY" not in found
    assert found["FLWR_TELEMETRY_ENABLED"] == "0"
    assert found["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert found["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert found["PATH"].startswith(str(tmp_path / "bin"))


def test_settings_are_written_in_flowers_format():
    values = {"partition-id": 3, "state-dir": '/a b/"c"', "deadline": 1.5, "overrides": "rounds=3 algorithm.lr=0.01"}
    assert parse_config_args([as_toml(values)]) == values
    apostrophe = {"state-dir": "/it's/here", "partition-id": 3}
    assert parse_config_args([as_toml(apostrophe)]) == apostrophe
    with pytest.raises(ValueError, match="apostrophe"):
        as_toml({"state-dir": """/it's/"here\""""})


def test_a_process_that_does_not_start_or_make_progress_is_reported(tmp_path):
    with LocalFederation(tmp_path, secure=False) as federation:
        federation.scripts = tmp_path
        (tmp_path / "flower-superlink").write_text("#!/bin/sh\necho it is broken")
        (tmp_path / "flower-superlink").chmod(0o700)
        with pytest.raises(FederationError, match=r"(?s)superlink did not start.*it is broken"):
            federation.start_superlink()
        federation.processes.start("slow", ["sleep", "600"], federation.log("slow"))
        with pytest.raises(FederationError, match="slow made no progress for"):
            federation.wait_for("slow", 0.3, lambda: 1)
        assert federation.certificates is None
    assert federation.processes.members() == []
    assert free_port() != federation.port


def test_records_are_shown_as_they_are_written(tmp_path):
    seen = []
    watched = _Watched(RunDirectory(tmp_path), seen.append)
    assert watched.look() == 0
    record = Record(1, 0.5, None, 0.5, 0.1, 1.0, 8, 8, 3)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.write(record.to_json() + "\n" + record.to_json()[:20])
    assert watched.look() == 1
    assert watched.look() == 1
    assert [r.round for r in seen] == [1]


def test_earlier_rounds_are_not_shown_again(tmp_path):
    seen = []
    first, second = (Record(t, 0.5, None, 0.5, 0.1, 1.0, 8, 8, 3).to_json() + "\n" for t in (1, 2))
    (tmp_path / "metrics.jsonl").write_text(first)
    watched = _Watched(RunDirectory(tmp_path), seen.append)
    assert watched.look() == 1
    (tmp_path / "metrics.jsonl").write_text(first + second)
    assert watched.look() == 2
    assert [r.round for r in seen] == [2]


def test_the_command_line_exports_a_preset(tmp_path):
    result = CliRunner().invoke(
        app, ["flower", "export", "quickstart", str(tmp_path / "app"), "rounds=3", "--nodes", "2"]
    )
    assert result.exit_code == 0, result.output
    assert "2 clients" in result.output
    assert (tmp_path / "app" / "pyproject.toml").exists()
    again = CliRunner().invoke(app, ["flower", "export", "quickstart", str(tmp_path / "app")])
    assert again.exit_code == 2
