"""Reading named files out of a folder or an archive, into memory, never onto the disk."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import IO

from fedlalr.common.reading import read_file
from fedlalr.data.fetch import LARGEST, DataCorrupt


def from_folder(folder: Path, names: Collection[str]) -> dict[str, bytes]:
    """The content of every named file of a folder; all must exist."""
    _reject_missing(folder, [name for name in names if not (folder / name).is_file()])
    return {name: read_file(folder / name, LARGEST) for name in names}


def from_tar(archive: Path, names: Collection[str]) -> dict[str, bytes]:
    """The content of every named file of a .tar.gz archive whose checksum was verified, in whatever folder of it."""
    with tarfile.open(archive, "r:gz") as tar:
        return _members(tar, names, str(archive))


def from_tar_stream(stream: IO[bytes], names: Collection[str], where: str) -> dict[str, bytes]:
    """The same for any uncompressed archive that is piped in; all files must exist."""
    try:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            found = _members(tar, names, where)
    except (tarfile.TarError, EOFError) as error:
        raise DataCorrupt(f"{where} is not a complete archive ({error})") from error
    _reject_missing(where, [name for name in names if name not in found])
    return found


def gunzip(content: bytes, where: str, limit: int) -> bytes:
    """Decompress, but never to more than `limit` bytes."""
    unpack = zlib.decompressobj(wbits=31)
    try:
        plain = unpack.decompress(content, limit + 1)
    except zlib.error as error:
        raise DataCorrupt(f"{where} is not a complete gzip file ({error})") from error
    if len(plain) > limit:
        raise DataCorrupt(f"{where} unpacks to more than the expected {limit:,} bytes")
    if not unpack.eof:
        raise DataCorrupt(f"{where} is truncated: the gzip stream does not end")
    return plain


def _members(tar: tarfile.TarFile, names: Collection[str], where: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for member in tar:
        name = member.name.rsplit("/", 1)[-1]
        if name not in names or not member.isfile():
            continue
        if member.size > LARGEST:
            raise DataCorrupt(f"{where} contains a {name} of {member.size:,} bytes, more than any file of the data set")
        file = tar.extractfile(member)
        found[name] = file.read() if file is not None else b""
    return found


def _reject_missing(where: Path | str, missing: list[str]) -> None:
    if missing:
        raise DataCorrupt(f"{where} is incomplete: missing {', '.join(missing)}")
