"""The original formats of the two CIFAR data sets."""

from __future__ import annotations

from typing import Final

from fedlalr.data.sources.checksums import facts
from fedlalr.data.sources.cifar import Cifar, RecordLayout, read_binary, read_python
from fedlalr.data.sources.rawdata import Images

_BATCHES: Final = tuple(f"data_batch_{i}" for i in range(1, 6))

CIFAR10: Final = Cifar(
    Images(
        name="cifar10",
        shape=(3, 32, 32),
        train_counts=(5000,) * 10,
        test_counts=(1000,) * 10,
        class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    ),
    coarse_classes=0,
    layouts=(
        RecordLayout(
            archive="cifar-10-python.tar.gz",
            folder="cifar-10-batches-py",
            train=_BATCHES,
            test="test_batch",
            facts=facts("cifar-10-python"),
            decode=read_python,
        ),
        RecordLayout(
            archive="cifar-10-binary.tar.gz",
            folder="cifar-10-batches-bin",
            train=tuple(f"{name}.bin" for name in _BATCHES),
            test="test_batch.bin",
            facts=facts("cifar-10-binary"),
            decode=read_binary,
        ),
    ),
)

CIFAR100: Final = Cifar(
    Images(name="cifar100", shape=(3, 32, 32), train_counts=(500,) * 100, test_counts=(100,) * 100),
    coarse_classes=20,
    layouts=(
        RecordLayout(
            archive="cifar-100-python.tar.gz",
            folder="cifar-100-python",
            train=("train",),
            test="test",
            facts=facts("cifar-100-python"),
            decode=read_python,
        ),
        RecordLayout(
            archive="cifar-100-binary.tar.gz",
            folder="cifar-100-binary",
            train=("train.bin",),
            test="test.bin",
            facts=facts("cifar-100-binary"),
            decode=read_binary,
        ),
    ),
)
