"""The handwritten digits that come with scikit-learn: 1,797 images of 8×8, no download."""

from __future__ import annotations

from typing import Final

import numpy as np

from fedlalr.data.sources.rawdata import Arrays, Images

IMAGES: Final = Images(
    name="digits",
    shape=(1, 8, 8),
    train_counts=(143, 146, 142, 147, 145, 146, 145, 144, 140, 144),
    test_counts=(35, 36, 35, 36, 36, 36, 36, 35, 34, 36),
    class_names=tuple("0123456789"),
)
_EVERY: Final = 5


def read() -> Arrays:
    """All digits. Each fifth image of a class, in order, is for testing; the 17 grey levels are spread over 0…255."""
    from sklearn.datasets import load_digits  # here, because it takes a second to import

    found = load_digits()
    labels = found.target.astype(np.uint8)
    images = np.rint(found.images * (255 / 16)).astype(np.uint8)[:, None]
    rank = np.zeros(len(labels), dtype=np.int64)
    for label in range(IMAGES.classes):
        members = labels == label
        rank[members] = np.arange(members.sum())
    test = rank % _EVERY == _EVERY - 1
    return {
        "inputs": images[~test],
        "targets": labels[~test],
        "test_inputs": images[test],
        "test_targets": labels[test],
    }
