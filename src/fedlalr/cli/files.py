"""Files that a command is asked to write: what cannot be written is said in a line, and early where it can be known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FIGURES = (".png", ".svg", ".pdf")
"""How the name of a figure may end."""


def check_figure(path: Path, option: str) -> None:
    """Refuse a figure that cannot be written, before anything is computed for it."""
    from fedlalr.config import ConfigError

    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; name the figure in it, such as {path / 'figure.png'}")
    if path.suffix.lower() not in FIGURES:
        raise ConfigError(
            f"{option} {path}: a figure can be written as png, svg, pdf; end its name in one of {', '.join(FIGURES)}"
        )
    with writing(path, option):
        path.parent.mkdir(parents=True, exist_ok=True)


def check_page(path: Path, option: str) -> None:
    """Refuse a page of HTML where there is a folder of its name."""
    from fedlalr.config import ConfigError

    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; name the page in it, such as {path / 'report.html'}")


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Say what prevents a file from being written, and by which option it goes elsewhere."""
    from fedlalr.config import ConfigError

    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{path} cannot be written: {reason}; name another place by {option}") from error


@contextmanager
def data_folder_told() -> Iterator[None]:
    """Say which folder prevents a data set from being fetched or read, and how another is chosen."""
    from fedlalr.config import ConfigError
    from fedlalr.data.fetch import data_folder
    from fedlalr.data.sources import DataNotFound

    try:
        yield
    except DataNotFound:
        raise
    except OSError as error:
        said = str(error.strerror or error)
        if "FEDLALR_DATA" in said or error.errno is None:  # the library's own words
            raise ConfigError(said) from error
        raise ConfigError(
            f"{error.filename or data_folder()} cannot be used: {said}; data sets are kept in "
            f"{data_folder()} unless FEDLALR_DATA names another folder"
        ) from error
