"""Downloads that arrive as a whole or not at all: the data folder, its locks, and the download itself."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from fedlalr.common.files import sync_folder, written_aside
from fedlalr.common.reading import at_home, open_file

Progress = Callable[[str, int, int | None], None]
"""Called with the current action, the bytes done and the total bytes (None: unknown)."""

CONNECT_SECONDS = 5.0
"""A host that does not answer within this time counts as unreachable."""
LOCK_SECONDS = 3600.0
LARGEST = 256 << 20
"""No file of a data set is larger; what claims otherwise is rejected before it takes memory or disk."""
_CHUNK = 1 << 20


class DataNotFound(FileNotFoundError):
    """A data set was not found anywhere. The message lists what was tried and what to do."""


class DataCorrupt(ValueError):
    """A file does not have the expected content. The message names it."""


class RouteFailed(Exception):
    """One route to a data set failed; others may work."""


@dataclass(frozen=True)
class Fact:
    """The expected content of a file: its size (None: unknown) and its checksum, `Fact(60_008, "md5", "a25b…")`."""

    size: int | None
    algorithm: str
    digest: str

    def check(self, content: bytes, where: str) -> None:
        """Reject content that is not the expected one."""
        self._compare(len(content), lambda: hashlib.new(self.algorithm, content, usedforsecurity=False), where)

    def check_file(self, path: Path) -> None:
        """Reject a file without the expected content, without reading it into memory."""
        with open_file(path) as file:
            self._compare(path.stat().st_size, lambda: hashlib.file_digest(file, self.algorithm), str(path))

    def _compare(self, size: int, hashed: Callable[[], Any], where: str) -> None:
        if self.size is not None and size != self.size:
            raise DataCorrupt(
                f"{where} has {size:,} bytes, but {self.size:,} are expected; it is truncated or another file: "
                f"delete it and fetch it again"
            )
        if (found := hashed().hexdigest()) != self.digest:
            raise DataCorrupt(
                f"{where} is wrong: its {self.algorithm} checksum is {found}, not {self.digest}; "
                f"delete it and fetch it again"
            )


def data_folder() -> Path:
    """Where data sets are kept: `FEDLALR_DATA`, the platform's cache folder or, without a home, .fedlalr/data here."""
    chosen = os.environ.get("FEDLALR_DATA")
    return at_home(chosen) if chosen else _cache_folder() or Path.cwd() / ".fedlalr" / "data"


def _cache_folder() -> Path | None:
    """The platform's cache folder; None for a user without a home, as in a container with a user id of its own."""
    try:
        folder = user_cache_path("fedlalr") / "data"
    except RuntimeError:
        return None
    return folder if folder.is_absolute() else None  # older platformdirs leave ~ as it is


def make_folder(folder: Path) -> Path:
    """Create a folder to write in, or say why that is impossible."""
    verb = "made"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        verb = "written"
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise type(error)(
            f"the data folder {folder} cannot be {verb} ({error.strerror}); "
            "set FEDLALR_DATA to a folder you may write to"
        ) from error
    return folder


@contextmanager
def locked(folder: Path, name: str, progress: Progress | None = None) -> Iterator[None]:
    """Lock one data set of a folder for writing, across processes. The lock of a killed process is released."""
    if progress is not None and not os.environ.get("FEDLALR_DATA") and _cache_folder() is None:
        progress(f"there is no home folder: {name} is kept in {folder}; FEDLALR_DATA names another place", 0, None)
    lock = FileLock(make_folder(folder) / f".{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if progress is not None:
            progress(f"waiting for another process that is fetching {name}", 0, None)
        try:
            lock.acquire(timeout=LOCK_SECONDS)
        except Timeout as error:
            raise TimeoutError(
                f"another process has held {lock.lock_file} for {LOCK_SECONDS / 3600:.0f} hour; end it, then try again"
            ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def workspace(folder: Path, name: str) -> Iterator[Path]:
    """An empty folder for a download, deleted afterwards. The caller holds the lock, so older ones are left over from a
    crash."""
    for leftover in folder.glob(f".{name}-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    place = Path(tempfile.mkdtemp(dir=folder, prefix=f".{name}-", suffix=".tmp"))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def download(url: str, path: Path, fact: Fact | None = None, progress: Progress | None = None) -> Path:
    """Fetch a URL to `path` and verify it. An interrupted download leaves nothing behind and is not resumed."""
    description = f"downloading {url.rsplit('/', 1)[-1]}"
    request = urllib.request.Request(url, headers={"User-Agent": "fedlalr"})
    try:
        with written_aside(path) as temporary:
            with urllib.request.urlopen(request, timeout=CONNECT_SECONDS) as answer, temporary.open("wb") as file:
                total = _stated_size(url, answer.headers.get("Content-Length"), fact.size if fact else None)
                done, most = 0, total or LARGEST
                while done <= most and (chunk := answer.read(_CHUNK)):
                    file.write(chunk)
                    done += len(chunk)
                    if progress is not None:
                        progress(description, done, total)
            if done > most:
                raise RouteFailed(f"{url} gives more than the {most:,} bytes that are expected")
            if total is not None and done < total:
                raise RouteFailed(f"{url} ended after {done:,} of {total:,} bytes")
            if fact is not None:
                fact.check_file(temporary)
        sync_folder(path.parent)
    except DataCorrupt as error:
        raise RouteFailed(f"{url} gave a wrong file: {error}") from error
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise RouteFailed(f"{url} cannot be read ({getattr(error, 'reason', None) or error})") from error
    return path


def reachable(url: str) -> bool:
    """Whether a web server answers at all, through the proxies of the environment, within a few seconds."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=CONNECT_SECONDS):
            return True
    except urllib.error.HTTPError:
        return True
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError):
        return False


def _stated_size(url: str, stated: str | None, known: int | None) -> int | None:
    """The size to expect, before anything is read; None if neither the server nor the library knows it."""
    if stated is None or not (stated.isascii() and stated.isdigit()):
        return known
    size = int(stated[:20])  # more digits are no size, and take long to read
    if size > LARGEST or size != (known or size):
        expected = f"{known:,}" if known else f"at most {LARGEST:,}"
        raise RouteFailed(f"{url} gives {size:,} bytes, but {expected} are expected")
    return size
