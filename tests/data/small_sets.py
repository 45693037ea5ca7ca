"""Data sets of a few images in the original formats, with the facts that are checked of them."""

import dataclasses
import hashlib
import io
import struct
import tarfile

import numpy as np

from fedlalr.data.fetch import Fact
from fedlalr.data.sources.cifar import CIFAR10, Cifar, LabelledImages
from fedlalr.data.sources.idx import FILES, IdxSet
from fedlalr.data.sources.rawdata import Images


def small_idx() -> tuple[IdxSet, dict[str, bytes]]:
    rng = np.random.default_rng(0)
    files: dict[str, bytes] = {}
    for part, count in (("", 20), ("test_", 10)):
        for key, values in (
            ("inputs", rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)),
            ("targets", np.arange(count, dtype=np.uint8) % 10),
        ):
            header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
            files[FILES[part + key]] = header + values.tobytes()
    facts = {name: Fact(len(content), "sha256", hashlib.sha256(content).hexdigest()) for name, content in files.items()}
    return IdxSet(Images("mnist", (1, 28, 28), (2,) * 10, (1,) * 10), facts), files


def small_cifar() -> tuple[Cifar, list[LabelledImages], bytes]:
    """CIFAR-10 with four images per file, and its binary archive, which replaces the python one here."""
    rng = np.random.default_rng(0)
    labels = [*np.split(np.arange(20, dtype=np.uint8) % 10, 5), np.arange(10, dtype=np.uint8)]
    parts = [LabelledImages(rng.integers(0, 256, (len(part), 3, 32, 32), dtype=np.uint8), part) for part in labels]
    layout = CIFAR10.layouts[1]
    packed = io.BytesIO()
    facts: dict[str, Fact] = {}
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, part in zip(layout.files, parts, strict=True):
            content = part.records()
            facts[name] = Fact(len(content), "md5", hashlib.md5(content).hexdigest())
            member = tarfile.TarInfo(f"{layout.folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    archive = packed.getvalue()
    facts[layout.archive] = Fact(len(archive), "md5", hashlib.md5(archive).hexdigest())
    layout = dataclasses.replace(layout, facts=facts)
    images = Images("cifar10", (3, 32, 32), (2,) * 10, (1,) * 10)
    return Cifar(images, (layout, layout)), parts, archive
