"""How a data set is found: a local folder, the cache, then one route after another, each verified before use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fedlalr.common.reading import at_home
from fedlalr.data.fetch import DataCorrupt, DataNotFound, Progress, RouteFailed, data_folder, locked, workspace
from fedlalr.data.sources import cache
from fedlalr.data.sources.rawdata import Arrays, RawData


class Route(NamedTuple):
    """A way to get a data set that is not on this machine: `get` fetches it into an empty folder and reads it."""

    title: str
    get: Callable[[Path, Progress | None], Arrays]
    cached_as: str


@dataclass(frozen=True)
class Source:
    """A data set: how to read it in its original formats, the routes to it, and how to check and build it."""

    name: str
    description: str
    classes: int
    train: int
    test: int
    formats: str
    holds: Callable[[Path], bool]
    read: Callable[[Path], Arrays]
    check: Callable[[Arrays, str], None]
    build: Callable[..., RawData]
    routes: Sequence[Route] = ()
    subfolders: Sequence[str] = ()
    system_folders: Sequence[Path] = ()
    embedded: Callable[[], Arrays] | None = None

    @property
    def cache_names(self) -> list[str]:
        return list(dict.fromkeys(route.cached_as for route in self.routes))


class Found(NamedTuple):
    """Arrays that passed their checks, and their origin."""

    arrays: Arrays
    where: str


def obtain(
    source: Source, folder: Path | str | None = None, download: bool = True, progress: Progress | None = None
) -> Found:
    """Find a data set in the documented order, or raise an error that lists everything that was tried."""
    if folder is not None:
        return _from_given(source, at_home(folder))
    if source.embedded is not None:
        return _checked(source, source.embedded(), "scikit-learn")
    tried: list[str] = []
    for place in _places(source):
        if source.holds(place):
            return _checked(source, source.read(place), str(place))
        tried.append(f"folder {place}: {source.name} not found")
    if cached := _from_cache(source, tried):
        return cached
    if not download:
        raise _not_found(source, [*tried, "download: disabled in this call"])
    return _from_routes(source, tried, progress)


def fetch(source: Source, progress: Progress | None = None, force: bool = False) -> Found:
    """Make sure that the cache has a data set: download it if it is missing, damaged or to be replaced."""
    if source.embedded is not None:
        return obtain(source)
    tried: list[str] = []
    try:
        if not force and (cached := _from_cache(source, tried)):
            return cached
    except DataCorrupt as error:
        tried.append(f"cache: {error}")
        force = True
    return _from_routes(source, tried, progress, force)


def whereabouts(source: Source) -> str | None:
    """Where a data set would be read from on this machine, without reading it; None if it would have to be fetched."""
    if source.embedded is not None:
        return "in scikit-learn"
    files = [cache.path(data_folder(), name) for name in source.cache_names]
    places = [place for place in _places(source) if source.holds(place)]
    return next((str(place) for place in (*places, *files) if place.exists()), None)


def _places(source: Source) -> list[Path]:
    return [*(data_folder() / sub for sub in source.subfolders), *source.system_folders]


def _from_given(source: Source, folder: Path) -> Found:
    """If the user names a folder, look only there."""
    if not folder.exists():
        holder = f"give a folder with {source.formats}"
        embedded = f"{source.name} comes with scikit-learn, so leave the folder out"
        raise DataNotFound(f"{folder} does not exist; {holder if source.embedded is None else embedded}")
    for place in (folder, *(folder / sub for sub in source.subfolders if sub)):
        if source.holds(place):
            return _checked(source, source.read(place), str(place))
    raise DataNotFound(f"{folder} does not contain {source.name}; it must contain {source.formats}")


def _checked(source: Source, arrays: Arrays, where: str) -> Found:
    source.check(arrays, where)
    return Found(arrays, where)


def _from_cache(source: Source, tried: list[str]) -> Found | None:
    for name in source.cache_names:
        file = cache.path(data_folder(), name)
        if file.is_file():
            arrays, origin = cache.load(file, name)
            return Found(arrays, f"{file} (from {origin})")
        tried.append(f"cache {file}: not found")
    return None


def _from_routes(source: Source, tried: list[str], progress: Progress | None, force: bool = False) -> Found:
    with locked(data_folder(), source.name, progress):
        if not force and (cached := _from_cache(source, [])):  # another process has fetched it in the meantime
            return cached
        for route in source.routes:
            try:
                return _by_route(source, route, progress)
            except (RouteFailed, DataCorrupt) as error:
                tried.append(f"{route.title}: {error}")
            except OSError as error:
                reason = f"{source.name} cannot be stored in {data_folder()}: {error.strerror or error}"
                advice = "free some space, or set FEDLALR_DATA to another folder"
                raise OSError(error.errno, f"{reason}; {advice}") from error
    raise _not_found(source, tried)


def _by_route(source: Source, route: Route, progress: Progress | None) -> Found:
    """Fetch, check, and only then cache."""
    with workspace(data_folder(), source.name) as place:
        arrays = route.get(place, progress)
        source.check(arrays, route.title)
    file = cache.path(data_folder(), route.cached_as)
    cache.save(file, route.cached_as, arrays, route.title)
    return Found(arrays, f"{file} (from {route.title})")


def _not_found(source: Source, tried: list[str]) -> DataNotFound:
    attempts = "\n".join(f"  - {attempt}" for attempt in tried)
    file = f"{(source.cache_names or [source.name])[0]}.safetensors"
    return DataNotFound(
        f"{source.name} was not found. Tried, in this order:\n{attempts}\nWhat you can do:\n"
        f"  - connect to the internet and run: fedlalr data fetch {source.name}\n"
        f"  - put {source.formats} into a folder and pass it as folder=…\n"
        f"  - copy {file} from the data folder of another machine to {data_folder()}\n"
        f"  - set FEDLALR_DATA to a folder with one of these"
    )
