"""Where a data set is searched, in which order, and the messages to the user."""

import dataclasses
import multiprocessing
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedlalr.data import sources
from fedlalr.data.fetch import DataCorrupt, DataNotFound, Progress, RouteFailed
from fedlalr.data.sources import cache, huggingface
from fedlalr.data.sources.rawdata import Arrays, Images
from fedlalr.data.sources.registry import SOURCES
from fedlalr.data.sources.source import Route, Source, fetch, obtain, whereabouts

IMAGES = Images("small", (1, 2, 2), (2, 2), (1, 1))


def arrays(value: int = 0) -> Arrays:
    return {
        "inputs": np.full((4, 1, 2, 2), value, np.uint8),
        "targets": np.array([0, 1, 0, 1], np.uint8),
        "test_inputs": np.full((2, 1, 2, 2), value, np.uint8),
        "test_targets": np.array([1, 0], np.uint8),
    }


@pytest.fixture(autouse=True)
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDLALR_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def route(title: str, get: Callable[[], Arrays]) -> Route:
    def fetched(_: Path, progress: Progress | None) -> Arrays:
        if progress is not None:
            progress(title, 1, 1)
        return get()

    return Route(title, fetched, "small")


def failing(reason: str) -> Route:
    def get() -> Arrays:
        raise RouteFailed(reason)

    return route(f"the host of {reason}", get)


def source(*routes: Route) -> Source:
    """Reads a folder that has a file `value`."""
    return Source(
        name="small",
        description="small",
        classes=2,
        train=4,
        test=2,
        formats="a file named value",
        holds=lambda folder: (folder / "value").is_file(),
        read=lambda folder: arrays(int((folder / "value").read_text())),
        check=IMAGES.check,
        build=IMAGES.build,
        routes=routes,
        subfolders=("small",),
    )


def value(data: Arrays) -> int:
    return int(data["inputs"][0, 0, 0, 0])


def test_the_order_is_folder_cache_routes(data_folder: Path, tmp_path: Path) -> None:
    whole = source(failing("one"), route("two", lambda: arrays(2)), route("three", lambda: arrays(3)))
    found = obtain(whole)
    assert (value(found.arrays), found.where) == (2, f"{data_folder / 'small.safetensors'} (from two)")
    found = obtain(source(route("four", lambda: arrays(4))))
    assert (value(found.arrays), found.where) == (2, f"{data_folder / 'small.safetensors'} (from two)")
    (data_folder / "small").mkdir()
    (data_folder / "small" / "value").write_text("5")
    found = obtain(whole)
    assert (value(found.arrays), found.where) == (5, str(data_folder / "small"))
    (tmp_path / "value").write_text("6")
    found = obtain(whole, folder=tmp_path)
    assert (value(found.arrays), found.where) == (6, str(tmp_path))


def test_with_nothing_found_everything_tried_is_listed(data_folder: Path) -> None:
    wrong = {**arrays(), "targets": np.zeros(4, np.uint8)}
    with pytest.raises(DataNotFound) as caught:
        obtain(source(failing("a dead wire"), route("a liar", lambda: wrong)))
    message = str(caught.value)
    for part in (
        f"folder {data_folder / 'small'}: small not found",
        f"cache {data_folder / 'small.safetensors'}: not found",
        "the host of a dead wire: a dead wire",
        "a liar: the labels of the training part of small from a liar are wrong",
        "fedlalr data fetch small",
        "put a file named value into a folder",
        "set FEDLALR_DATA",
    ):
        assert part in message
    assert message.index("cache") < message.index("a dead wire") < message.index("a liar")
    assert not (data_folder / "small.safetensors").exists()


def test_without_permission_nothing_is_downloaded() -> None:
    calls: list[int] = []
    with pytest.raises(DataNotFound, match="download: disabled"):
        obtain(source(route("one", lambda: calls.append(1) or arrays())), download=False)
    assert not calls


def test_a_damaged_cache_is_refused_by_name_and_fetch_renews_it(data_folder: Path) -> None:
    whole = source(route("one", lambda: arrays(1)))
    fetch(whole)
    file = data_folder / "small.safetensors"
    content = file.read_bytes()
    for damaged in (content[:-3], content[:-1] + b"\xff", b"", b"noise" * 10):
        file.write_bytes(damaged)
        with pytest.raises(DataCorrupt, match=f"cached file {file} .*fedlalr data fetch small"):
            obtain(whole)
        fetch(whole)
        assert value(obtain(whole).arrays) == 1


def test_a_cached_file_of_another_data_set_is_refused(data_folder: Path) -> None:
    data_folder.mkdir()
    cache.save(data_folder / "small.safetensors", "other", arrays(), "a host")
    with pytest.raises(DataCorrupt, match="does not contain small"):
        obtain(source(route("one", arrays)))


def test_fetch_downloads_once_unless_forced() -> None:
    calls: list[int] = []
    seen: list[str] = []
    whole = source(route("one", lambda: calls.append(1) or arrays(len(calls))))
    assert [value(fetch(whole, lambda title, *_: seen.append(title)).arrays) for _ in range(2)] == [1, 1]
    assert value(fetch(whole, force=True).arrays) == 2
    assert seen == ["one"]


def test_arrays_come_back_from_the_cache_as_they_were(tmp_path: Path) -> None:
    kept = {"a": np.arange(6, dtype=np.int64).reshape(2, 3), "b": np.arange(8, dtype=np.uint8)[::2]}
    cache.save(tmp_path / "x.safetensors", "x", kept, "a host")
    found, origin = cache.load(tmp_path / "x.safetensors", "x")
    assert origin == "a host"
    assert found.keys() == kept.keys()
    for name, array in kept.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)


def fetch_on_a_full_disk(reasons: "multiprocessing.Queue[str]") -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))  # the coverage of this process fits
    big = {**arrays(), "inputs": np.zeros((1_000_000, 1, 2, 2), np.uint8)}
    try:
        fetch(dataclasses.replace(source(route("a host", lambda: big)), check=lambda *_: None))
    except OSError as error:
        reasons.put(str(error))


def test_a_full_disk_is_said_so_and_leaves_no_half_file(data_folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    reasons = context.Queue()
    process = context.Process(target=fetch_on_a_full_disk, args=(reasons,))
    process.start()
    reason = reasons.get(timeout=60)
    process.join()
    assert f"small cannot be stored in {data_folder}" in reason
    assert "set FEDLALR_DATA to another folder" in reason
    assert [path.name for path in data_folder.iterdir()] == [".small.lock"]


def test_whereabouts_follow_the_order_of_reading(data_folder: Path) -> None:
    whole = source(route("one", arrays))
    assert whereabouts(whole) is None
    fetch(whole)
    assert whereabouts(whole) == str(data_folder / "small.safetensors")
    (data_folder / "small").mkdir()
    (data_folder / "small" / "value").write_text("5")
    assert whereabouts(whole) == str(data_folder / "small")


def test_every_data_set_is_listed() -> None:
    listed = {entry.name: entry for entry in sources.available()}
    assert list(listed) == ["digits", "mnist", "fashion", "cifar10", "cifar100", "shakespeare"]
    assert listed["digits"].where == "in scikit-learn"
    assert listed["cifar100"].where is None
    assert (listed["cifar100"].train, listed["cifar100"].test, listed["cifar100"].classes) == (50_000, 10_000, 100)


def test_digits_need_no_download() -> None:
    data = sources.raw("digits", download=False)
    assert isinstance(data.inputs, torch.Tensor)
    assert data.inputs.shape == (1442, 1, 8, 8)
    assert data.test_targets.shape == (355,)
    assert data.inputs.dtype == torch.uint8
    assert (int(data.inputs.min()), int(data.inputs.max())) == (0, 255)
    assert data.targets.bincount().tolist() == list(SOURCES["digits"].build.__self__.train_counts)
    assert sources.fetch("digits") == data.source == "scikit-learn"
    assert ("training samples", "1,442") in sources.describe("digits").facts


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no data set 'imagenet'; choose one of digits, mnist, fashion, cifar10"):
        sources.raw("imagenet")


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="digits has no option 'roles'; it takes none"):
        sources.raw("digits", roles=3)
    with pytest.raises(TypeError, match="'role'; it takes roles, train, test, iid, seed, train_fraction"):
        sources.raw("shakespeare", role=3)
    with pytest.raises(ValueError, match="edition must be 'any', 'leaf' or 'gutenberg'"):
        sources.raw("shakespeare", edition="folio")


def test_images_of_hugging_face_become_the_same_arrays() -> None:
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    rng = np.random.default_rng(0)
    for shape in ((5, 32, 32, 3), (5, 28, 28)):
        pixels = rng.integers(0, 256, shape, dtype=np.uint8)
        features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)})
        table = datasets.Dataset.from_dict(
            {"img": [Image.fromarray(picture) for picture in pixels], "label": [3, 1, 4, 1, 5]}, features=features
        )
        found, labels = huggingface.images(table, "img", "label")
        assert np.array_equal(found, pixels.transpose(0, 3, 1, 2) if pixels.ndim == 4 else pixels[:, None])
        assert labels.tolist() == [3, 1, 4, 1, 5]


def test_hugging_face_out_of_reach_is_a_reason_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RouteFailed, match=r"http://127.0.0.1:9 cannot be reached"):
        huggingface.load("uoft-cs/cifar10", None)
