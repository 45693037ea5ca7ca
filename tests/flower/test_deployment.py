"""The deployment files are valid for Flower's programs and the service manager."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("flwr", reason="Flower is not installed")

from flwr.common.config import parse_config_args
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

DEPLOY = Path(__file__).parents[2] / "examples" / "flower" / "deploy"
PARSERS = {"flower-superlink": _parse_args_run_superlink, "flower-supernode": _parse_args_run_supernode}


def parse(command):
    """Parse a command line with the program's own parser; an unknown option raises."""
    program, *arguments = command
    return PARSERS[Path(program).name]().parse_args(arguments)


def exec_start(unit):
    joined = (DEPLOY / unit).read_text().replace("\\\n", " ")
    line = next(line for line in joined.splitlines() if line.startswith("ExecStart="))
    for name, value in (("%i", "2"), ("${PORT}", "9094"), ("${SUPERLINK}", "superlink.example.org:8000")):
        line = line.replace(name, value)
    return shlex.split(line.removeprefix("ExecStart="))


def test_compose_services_use_existing_options():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    superlink = parse(services["superlink"]["command"])
    assert superlink.enable_supernode_auth
    for node in range(3):
        service = services[f"supernode-{node}"]
        found = parse(service["command"])
        config = parse_config_args([found.node_config])
        assert config == {"partition-id": node, "state-dir": "/state/kept"}
        assert found.superlink == f"superlink:{superlink.port}"
        assert service["depends_on"] == ["superlink"]


def test_compose_uses_only_declared_secrets_and_volumes():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert compose.keys() <= {"services", "secrets", "volumes", "x-node"}
    for service in compose["services"].values():
        assert service.keys() <= {
            "build", "image", "restart", "depends_on", "command", "ports", "secrets", "volumes",
        }  # fmt: skip
        assert set(service["secrets"]) <= compose["secrets"].keys()
        assert {volume.split(":")[0] for volume in service["volumes"]} <= compose["volumes"].keys()
        mounted = {f"/run/secrets/{name}" for name in service["secrets"]}
        used = {word.split("=", 1)[1] for word in service["command"] if "=/run/secrets/" in word}
        assert used == mounted, "every secret is used, and none is missing"
    assert all(list(secret) == ["file"] for secret in compose["secrets"].values())


def test_service_units_use_existing_options():
    assert parse(exec_start("superlink.service")).enable_supernode_auth
    node = parse(exec_start("supernode@.service"))
    assert parse_config_args([node.node_config]) == {"partition-id": 2, "state-dir": "/var/lib/flower/kept"}
    assert node.auth_supernode_private_key == "/etc/flower/node-2"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_service_manager_accepts_the_units(tmp_path):
    units, programs = [], tmp_path / "bin"
    programs.symlink_to(Path(sys.executable).parent)  # whose own path may have spaces
    for source, name in (("superlink.service", "superlink.service"), ("supernode@.service", "supernode@0.service")):
        unit = tmp_path / name
        unit.write_text((DEPLOY / source).read_text().replace("/opt/fedlalr/bin", str(programs)))
        units.append(str(unit))
    done = subprocess.run(
        ["systemd-analyze", "verify", *units], capture_output=True, text=True, timeout=60, check=False
    )
    ours = [line for line in done.stderr.splitlines() if "superlink" in line or "supernode" in line]
    assert ours == []
