"""A data set after reading: plain arrays, and the facts that they are checked against."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlalr.data.fetch import DataCorrupt, Fact
from fedlalr.data.windows import Windows

Arrays = Mapping[str, NDArray[Any]]
"""A data set as named plain arrays, the form in which it is checked and cached."""

Bytes = NDArray[np.uint8]


def images_and_labels(inputs: Bytes, targets: Bytes, test_inputs: Bytes, test_targets: Bytes) -> Arrays:
    """The arrays of a data set of images under their names."""
    return {"inputs": inputs, "targets": targets, "test_inputs": test_inputs, "test_targets": test_targets}


_CHECKSUMS = tomllib.loads((resources.files("fedlalr.data.sources") / "checksums.toml").read_text(encoding="utf-8"))


def facts(group: str) -> dict[str, Fact]:
    """File name → expected content, from `checksums.toml`."""
    return {name: Fact(size or None, kind, digest) for name, (size, kind, digest) in _CHECKSUMS[group].items()}


@dataclass(frozen=True)
class RawData:
    """A data set as it was published: images as uint8 `[n, channels, height, width]`, text as `Windows`.

    `groups` is the owner of each training sample, if the data records it (the role that speaks); `source` says where
    it was found.
    """

    name: str
    inputs: Tensor | Windows
    targets: Tensor
    test_inputs: Tensor | Windows
    test_targets: Tensor
    classes: int
    groups: Tensor | None = None
    test_groups: Tensor | None = None
    source: str = ""
    class_names: tuple[str, ...] = ()
    group_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Images:
    """The expected shape of an image data set: that of an image, and the number of images of every class."""

    name: str
    shape: tuple[int, int, int]
    train_counts: tuple[int, ...]
    test_counts: tuple[int, ...]
    class_names: tuple[str, ...] = ()

    @property
    def classes(self) -> int:
        return len(self.train_counts)

    def check(self, arrays: Arrays, where: str) -> None:
        """Reject arrays of another shape, or with other class counts."""
        for part, counts in (("", self.train_counts), ("test_", self.test_counts)):
            inputs, targets = arrays[f"{part}inputs"], arrays[f"{part}targets"]
            title = f"the {'test' if part else 'training'} part of {self.name} from {where}"
            expected = (sum(counts), *self.shape)
            if inputs.dtype != np.uint8 or inputs.shape != expected or targets.shape != expected[:1]:
                raise DataCorrupt(
                    f"{title} has {len(targets):,} labels and images of shape {list(inputs.shape)}; "
                    f"{list(expected)} is expected"
                )
            found = np.bincount(targets, minlength=self.classes)
            for label, (have, wanted) in enumerate(zip_longest(found, counts, fillvalue=0)):
                if have != wanted:
                    raise DataCorrupt(
                        f"the labels of {title} are wrong: {have:,} images are of class {label}, but {wanted:,} are "
                        f"expected"
                    )

    def build(self, arrays: Arrays, source: str) -> RawData:
        """The arrays as tensors that share their memory, or copies if that is read-only."""
        inputs, targets, test_inputs, test_targets = (
            torch.from_numpy(np.require(arrays[name], requirements=["C", "W"]))
            for name in ("inputs", "targets", "test_inputs", "test_targets")
        )
        parts = inputs, targets.long(), test_inputs, test_targets.long()
        return RawData(self.name, *parts, self.classes, source=source, class_names=self.class_names)
