"""The handwritten digits that come with scikit-learn: 1,797 images of 8×8, no download."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np

from fedlalr.data.sources.rawdata import Arrays, Images, images_and_labels

IMAGES: Final = Images(
    name="digits",
    shape=(1, 8, 8),
    train_counts=(143, 146, 142, 147, 145, 146, 145, 144, 140, 144),
    test_counts=(35, 36, 35, 36, 36, 36, 36, 35, 34, 36),
    class_names=tuple("0123456789"),
)
_EVERY: Final = 5


def read() -> Arrays:
    """All digits. Every fifth image of a class, in order, is for testing; the 17 grey levels are scaled to 0…255."""
    table = _table()
    labels = table[:, -1].astype(np.uint8)
    images = np.rint(table[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, *IMAGES.shape)
    rank = np.zeros(len(labels), dtype=np.int64)
    for label in range(IMAGES.classes):
        members = labels == label
        rank[members] = np.arange(members.sum())
    test = rank % _EVERY == _EVERY - 1
    return images_and_labels(images[~test], labels[~test], images[test], labels[test])


def _table() -> np.ndarray:
    """A row of 64 grey levels and the label for each image, from the file that scikit-learn reads.

    Read directly, because importing scikit-learn takes over a second; if the file is elsewhere, scikit-learn is used.
    """
    package = find_spec("sklearn")
    if package is not None and package.origin is not None:
        file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    found = load_digits()
    return np.column_stack([found.data, found.target])
