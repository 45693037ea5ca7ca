"""The checksums of the CIFAR archives and of the files in them, as published with them or computed from them."""

from __future__ import annotations

from typing import Final

from fedlalr.data.fetch import Fact
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
            facts={
                "cifar-10-python.tar.gz": Fact(170_498_071, "md5", "c58f30108f718f92721af3b95e74349a"),
                "data_batch_1": Fact(None, "md5", "c99cafc152244af753f735de768cd75f"),
                "data_batch_2": Fact(None, "md5", "d4bba439e000b95fd0a9bffe97cbabec"),
                "data_batch_3": Fact(None, "md5", "54ebc095f3ab1f0389bbae665268c751"),
                "data_batch_4": Fact(None, "md5", "634d18415352ddfa80567beed471001a"),
                "data_batch_5": Fact(None, "md5", "482c414d41f54cd18b22e5b47cb7c3cb"),
                "test_batch": Fact(None, "md5", "40351d587109b95175f43aff81a1287e"),
            },
            decode=read_python,
        ),
        RecordLayout(
            archive="cifar-10-binary.tar.gz",
            folder="cifar-10-batches-bin",
            train=tuple(f"{name}.bin" for name in _BATCHES),
            test="test_batch.bin",
            facts={
                "cifar-10-binary.tar.gz": Fact(170_052_171, "md5", "c32a1d4ab5d03f1284b67883e8d87530"),
                "data_batch_1.bin": Fact(30_730_000, "md5", "5dd7e06a14cb22eb9f671a540d1b7c25"),
                "data_batch_2.bin": Fact(30_730_000, "md5", "5ea93a67294ea407fff1d09f752e9692"),
                "data_batch_3.bin": Fact(30_730_000, "md5", "942cd6a4bcdd0dd3c604fbe906cb4421"),
                "data_batch_4.bin": Fact(30_730_000, "md5", "ae636b3ba5c66a11e91e8cb52e771fcb"),
                "data_batch_5.bin": Fact(30_730_000, "md5", "53f37980c15c3d472c316c40844f3f0d"),
                "test_batch.bin": Fact(30_730_000, "md5", "803d5f7f4d78ea53de84dbe85f74fb6d"),
            },
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
            facts={
                "cifar-100-python.tar.gz": Fact(169_001_437, "md5", "eb9058c3a382ffc7106e4002c42a8d85"),
                "train": Fact(None, "md5", "16019d7e3df5f24257cddd939b257f8d"),
                "test": Fact(None, "md5", "f0ef6b0ae62326f3e7ffdfab6717acfc"),
            },
            decode=read_python,
        ),
        RecordLayout(
            archive="cifar-100-binary.tar.gz",
            folder="cifar-100-binary",
            train=("train.bin",),
            test="test.bin",
            facts={
                "cifar-100-binary.tar.gz": Fact(168_513_733, "md5", "03b5dce01913d631647c71ecec9e9cb8"),
                "train.bin": Fact(153_700_000, "md5", "6172c7755cfe09b2fe270c85cebc1b15"),
                "test.bin": Fact(30_740_000, "md5", "4499cfba6c016c1be1438163640a0898"),
            },
            decode=read_binary,
        ),
    ),
)
