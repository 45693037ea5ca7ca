"""Data sets from Hugging Face, read through the `datasets` package (the extra `data`)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlalr.data.fetch import Progress, RouteFailed, reachable

_BATCH = 1000


def load(repository: str, progress: Progress | None) -> Any:
    """The splits of a repository, as `datasets` gives them."""
    if importlib.util.find_spec("datasets") is None:
        raise RouteFailed("the package datasets is not installed (pip install 'fedlalr[data]')")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    offline = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("HF_DATASETS_OFFLINE")
    if not offline and not reachable(endpoint):
        raise RouteFailed(f"{endpoint} cannot be reached")
    if progress is not None:
        progress(f"loading {repository}", 0, None)
    import datasets

    try:
        return datasets.load_dataset(repository)
    except Exception as error:
        # The package raises errors of its many dependencies; the reason is shown and the next route is tried.
        raise RouteFailed(f"{repository} cannot be loaded ({type(error).__name__}: {error})") from error


def images(split: Any, image: str, label: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The images `[n, channels, height, width]` and labels of a split with an image and a label column."""
    pictures: list[NDArray[np.uint8]] = []
    labels: list[NDArray[np.uint8]] = []
    for batch in split.iter(batch_size=_BATCH):
        stack = np.stack([np.asarray(picture, dtype=np.uint8) for picture in batch[image]])
        pictures.append(stack[:, None] if stack.ndim == 3 else stack.transpose(0, 3, 1, 2))
        labels.append(np.asarray(batch[label], dtype=np.uint8))
    return np.ascontiguousarray(np.concatenate(pictures)), np.concatenate(labels)


def rows(split: Any) -> Iterator[tuple[list[str], list[str], list[str]]]:
    """Batches of (character_id, x, y) in the layout of flwrlabs/shakespeare."""
    for batch in split.iter(batch_size=_BATCH):
        yield batch["character_id"], batch["x"], batch["y"]
