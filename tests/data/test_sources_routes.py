"""Routes end to end on small data: a web server on this machine, and a Hugging Face repository in a folder."""

import gzip
import http.server
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from data.small_sets import small_cifar, small_idx
from fedlalr.data.fetch import DataNotFound
from fedlalr.data.sources import routes
from fedlalr.data.sources.idx import FILES
from fedlalr.data.sources.registry import image_files
from fedlalr.data.sources.source import fetch


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A web server and the folder that it serves."""
    folder = tmp_path / "site"
    folder.mkdir()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()


@pytest.fixture(autouse=True)
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDLALR_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def test_idx_files_come_from_the_first_host_that_has_them(site: tuple[str, Path], data_folder: Path) -> None:
    url, folder = site
    data, files = small_idx()
    for name, content in files.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    seen: list[str] = []
    way = routes.idx_host(data, [f"{url}/nothing", url])
    found = fetch(image_files(data, "", [way]), lambda title, *_: seen.append(title))
    assert found.arrays["inputs"].tobytes() == files["train-images-idx3-ubyte"][16:]
    assert seen == [f"downloading {name}.gz" for name in FILES.values()]
    assert sorted(path.name for path in data_folder.iterdir()) == [".mnist.lock", "mnist.safetensors"]


def test_a_host_with_a_damaged_file_is_not_believed(site: tuple[str, Path], data_folder: Path) -> None:
    url, folder = site
    data, files = small_idx()
    for name, content in files.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content[:-1] + b"\x07"))
    with pytest.raises(DataNotFound, match=r"train-images-idx3-ubyte.gz is wrong: its sha256 checksum"):
        fetch(image_files(data, "", [routes.idx_host(data, [url])]))
    assert not (data_folder / "mnist.safetensors").exists()


def test_cifar_comes_from_its_host(site: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    url, folder = site
    data, parts, archive = small_cifar()
    (folder / data.layouts[0].archive).write_bytes(archive)
    monkeypatch.setattr(routes, "_CIFAR_HOSTS", (f"{url}/nothing", url))
    found = fetch(image_files(data, "", [routes.cifar_host(data)]))
    assert np.array_equal(found.arrays["test_inputs"], parts[-1].images)
    (folder / data.layouts[0].archive).write_bytes(archive[:-10])
    with pytest.raises(DataNotFound, match=r"gives [\d,]* bytes, but [\d,]* are expected"):
        fetch(image_files(data, "", [routes.cifar_host(data)]), force=True)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository in a folder, which the real `datasets` reads without a network."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "repository"


def store(hub: Path, image: str, parts: dict[str, tuple[np.ndarray, np.ndarray]]) -> str:
    import datasets
    from PIL import Image

    (hub / "data").mkdir(parents=True, exist_ok=True)
    features = datasets.Features({image: datasets.Image(), "label": datasets.ClassLabel(num_classes=10)})
    for split, (pixels, labels) in parts.items():
        pictures = [Image.fromarray(picture) for picture in pixels]
        table = datasets.Dataset.from_dict({image: pictures, "label": labels.tolist()}, features=features)
        table.to_parquet(str(hub / "data" / f"{split}-00000-of-00001.parquet"))
    return str(hub)


def test_cifar_from_hugging_face_is_compared_with_the_original_files(hub: Path, data_folder: Path) -> None:
    data, parts, _ = small_cifar()
    train = np.concatenate([part.images for part in parts[:-1]]).transpose(0, 2, 3, 1)
    labels = np.concatenate([part.labels for part in parts[:-1]])
    test = (parts[-1].images.transpose(0, 2, 3, 1), parts[-1].labels)
    way = routes.images_huggingface(data, store(hub, "img", {"train": (train, labels), "test": test}), "img", "label")
    found = fetch(image_files(data, "", [way]))
    assert np.array_equal(found.arrays["inputs"], train.transpose(0, 3, 1, 2))

    labels[[0, 1]] = labels[[1, 0]]
    store(hub, "img", {"train": (train, labels)})
    with pytest.raises(DataNotFound, match=r"data_batch_1 of .* is wrong: its md5 checksum"):
        fetch(image_files(data, "", [way]), force=True)


def test_an_idx_set_comes_from_hugging_face(hub: Path) -> None:
    data, files = small_idx()
    parts = {}
    for split, part in (("train", ""), ("test", "test_")):
        pixels = np.frombuffer(files[FILES[f"{part}inputs"]], np.uint8, offset=16).reshape(-1, 28, 28)
        parts[split] = (pixels, np.frombuffer(files[FILES[f"{part}targets"]], np.uint8, offset=8))
    found = fetch(
        image_files(data, "", [routes.images_huggingface(data, store(hub, "image", parts), "image", "label")])
    )
    assert found.arrays["inputs"].tobytes() == files["train-images-idx3-ubyte"][16:]
    assert found.arrays["test_targets"].tolist() == list(range(10))
    pixels, labels = parts["train"]
    repository = store(hub, "image", {"train": (pixels, labels[::-1])})
    with pytest.raises(DataNotFound, match=r"train-labels-idx1-ubyte of .*, as an idx file, is wrong"):
        fetch(image_files(data, "", [routes.images_huggingface(data, repository, "image", "label")]), force=True)


def test_a_repository_that_is_not_there_is_a_reason_not_a_crash(hub: Path) -> None:
    data, _ = small_idx()
    with pytest.raises(DataNotFound, match="cannot be loaded"):
        fetch(image_files(data, "", [routes.images_huggingface(data, str(hub), "image", "label")]))
